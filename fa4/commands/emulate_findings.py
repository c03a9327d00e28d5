"""What `fa4 emulate` accepts of findings, and the files it writes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa4.base.files import check_folder, write_whole

if TYPE_CHECKING:
    from fa4.emulator.accepted import Accepted
    from fa4.emulator.tools.finding_files import FindingTexts

IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND[:FILE[:LINE]]", help="Accept such findings; may be repeated."),
]
SuppressionsOption = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Rules of --ignore, one on a line.")
]
BaselineOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Accept the findings that it lists.")
]
WriteOption = Annotated[
    bool, typer.Option("--write-baseline", help="Write the findings to the --baseline instead.")
]
SarifOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the findings as SARIF 2.1.0.")
]
CoverageOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html|.txt", help="Write what of each source line ran."),
]


@dataclass(frozen=True, kw_only=True)
class FindingFiles:
    """The options on findings. Raises ValueError for files that cannot be."""

    ignore: Sequence[str]
    suppressions: Sequence[Path]
    baseline: Path | None
    write_baseline: bool
    sarif: Path | None
    coverage: Path | None

    def __post_init__(self) -> None:
        if self.write_baseline and self.baseline is None:
            raise ValueError("--write-baseline needs --baseline FILE, the file to write")
        if self.coverage is not None and self.coverage.suffix not in (".html", ".txt"):
            raise ValueError(f"--coverage {self.coverage}: expected FILE.html or FILE.txt")
        for path in (self.sarif, self.coverage, self.baseline if self.write_baseline else None):
            if path is not None:
                check_folder(path.parent)
                if path.is_dir():
                    raise ValueError(f"{path} is a directory, not a file")

    @property
    def accepted(self) -> Accepted | None:
        """What the run accepts. Raises ValueError for what is no rule or baseline."""
        from fa4.emulator.accepted import Accepted
        from fa4.emulator.errors import LaunchError

        known = None if self.write_baseline else self.baseline
        if not self.ignore and not self.suppressions and known is None:
            return None
        try:
            return Accepted.of(self.ignore, self.suppressions, known)
        except LaunchError as error:
            raise ValueError(str(error)) from None

    def write(self, texts: FindingTexts) -> list[Path]:
        """Writes the files that were asked for; which."""
        written = texts.of(
            self.baseline if self.write_baseline else None, self.sarif, self.coverage
        )
        for path, text in written.items():
            write_whole(path, text.encode())
        return list(written)
