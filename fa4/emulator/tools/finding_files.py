"""The files that are written of findings: a baseline, SARIF, what of each source line ran."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fa4.emulator.accepted import write_baseline
from fa4.emulator.errors import KernelFinding
from fa4.emulator.machine.coverage import KernelCoverage
from fa4.emulator.tools.line_coverage import as_html, as_text, by_file
from fa4.emulator.tools.sarif import sarif_log


@dataclass(frozen=True, kw_only=True)
class FindingTexts:
    """What of launches is written. ptx_file: of their kernels, if they come from one. root: folder
    that paths are relative to (None: the working directory)."""

    findings: Sequence[KernelFinding]
    accepted: Sequence[tuple[KernelFinding, str]]
    coverage: Sequence[KernelCoverage]
    ptx_file: Path | None = None
    root: Path | None = None

    def of(self, baseline: Path | None, sarif: Path | None, lines: Path | None) -> dict[Path, str]:
        """The text of each file that is not None. lines: coverage, HTML if it is called so."""
        texts: dict[Path, str] = {}
        if baseline is not None:
            texts[baseline] = write_baseline(self.findings)
        if sarif is not None:
            log = sarif_log(self.findings, self.accepted, ptx_file=self.ptx_file, root=self.root)
            texts[sarif] = json.dumps(log, indent=2) + "\n"
        if lines is not None:
            make = as_html if lines.suffix == ".html" else as_text
            texts[lines] = make(by_file(self.coverage))
        return texts
