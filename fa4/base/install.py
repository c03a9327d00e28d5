"""How this copy of fa4 was installed: whether its files are its own, and how to install it anew.

The distribution is `fa4-lab`, and no index has it: it comes from a checkout or a wheel, and hints
on what is missing name the packages themselves. The name `fa4` belongs to somebody else: an early
release of flash-attn-4, which `pip install fa4` would bring.
"""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "fa4-lab"
PACKAGE = Path(__file__).resolve().parents[1]
REINSTALL = "pip install --force-reinstall --no-deps PATH, of your checkout or wheel of fa4-lab"


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
                f"{package}: pip uninstall -y fa4, then {REINSTALL}"
            )
