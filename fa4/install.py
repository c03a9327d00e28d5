"""How this copy of fa4 was installed: hints that work here, and whether its files are its own.

The distribution is `fa4-lab`. The name `fa4` belongs to somebody else: an early release of
flash-attn-4, which `pip install fa4` would bring.
"""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "fa4-lab"
PACKAGE = Path(__file__).resolve().parent


def clone_folder(package: Path = PACKAGE) -> Path | None:
    """The clone that `package` is imported from; None where it was installed as a wheel."""
    root = package.parent
    try:
        declared = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return root if f'\nname = "{DISTRIBUTION}"\n' in declared else None


def install_command(extra: str, package: Path = PACKAGE) -> str:
    """The command that adds what `extra` of pyproject.toml needs, from whatever folder it is run.

    It installs nothing a second time: neither over a clone nor over a wheel.
    """
    root = clone_folder(package)
    if root is None:
        return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}]')}"
    return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"


def refuse_mixed_files(package: Path = PACKAGE) -> None:
    """ImportError if a distribution called `fa4` has put files among those of this package.

    The release of flash-attn-4 with that name brings `flash_attn` only and does no harm. Another
    one may bring `fa4`, as copies of this package made before it was renamed do: then some modules
    are theirs, and removing either distribution takes files of the other.
    """
    for record in sorted(package.parent.glob("fa4-*.dist-info/RECORD")):
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(line.startswith(f"{package.name}/") for line in lines):
            version = record.parent.name.removesuffix(".dist-info").partition("-")[2]
            raise ImportError(
                f"the distribution fa4 {version}, which is not {DISTRIBUTION}, has files in "
                f"{package}: pip uninstall -y fa4 && "
                f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
