"""Which sources the compiled code of the emulator is made of, and who looks after what is kept.

numba keeps what it compiles, and looks at the file of each function only: not at those whose
constants and record layouts it was compiled with. The emulator imports nothing of what surrounds
it, so whoever does look at them all is given in from outside: `keep_with`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

Keeper: TypeAlias = Callable[[Sequence[Path]], None]

_ROOT = Path(__file__).parent
_keepers: list[Keeper] = []


def sources() -> list[Path]:
    """The files that compiled functions of `checks` and `machine` take code and constants from."""
    shared = [_ROOT / "warp_lanes.py", _ROOT / "translate" / "layout.py"]
    return [*shared, *_ROOT.glob("checks/*.py"), *_ROOT.glob("machine/*.py")]


def keep_with(keeper: Keeper) -> None:
    """From now on `keeper` is told the sources before anything of them is compiled."""
    _keepers[:] = [keeper]


def prepare() -> None:
    """Tells the keeper, if there is one; to be called before the first function is declared."""
    for keeper in _keepers:
        keeper(sources())
