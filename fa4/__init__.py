"""FlashAttention-4 made checkable, predictable and runnable.

Importing this package loads nothing heavy, not even NumPy; what a part needs is loaded when it is
used. So the `fa4` command answers Ctrl-C from its first moment.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4.base.install import refuse_mixed_files
from fa4.emulator import kept_code
from fa4.version import __version__

if TYPE_CHECKING:
    from fa4.api import (
        flash_attn_backward,
        flash_attn_func,
        flash_attn_varlen_backward,
        flash_attn_varlen_func,
    )
    from fa4.backends import AttentionGradients
    from fa4.call.compute import AttentionOutput
    from fa4.config import BackwardConfig, Exp2Split, ForwardConfig, Problem
    from fa4.dropin.replace import replace_sdpa
    from fa4.dropin.sdpa import sdpa

__all__ = [
    "AttentionGradients",
    "AttentionOutput",
    "BackwardConfig",
    "Exp2Split",
    "ForwardConfig",
    "Problem",
    "__version__",
    "flash_attn_backward",
    "flash_attn_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "replace_sdpa",
    "sdpa",
]
refuse_mixed_files()  # before any of them is imported


def _prepare(sources: Sequence[Path]) -> None:
    """Looks after the emulator's compiled code, which knows nothing of the rest of fa4."""
    from fa4.base.compiled_code import prepare

    prepare(sources)


kept_code.keep_with(_prepare)

# Its documented parts: `fa4.dtypes` needs no import of its own.
_MODULES = (
    "api", "config", "distributed", "dtypes", "flash_attn", "hardware", "masks", "oracle", "plan",
    "reference", "sim", "testing", "transformers",
)  # fmt: skip
_HOMES = dict.fromkeys(("BackwardConfig", "Exp2Split", "ForwardConfig", "Problem"), "fa4.config")
_HOMES |= {"AttentionGradients": "fa4.backends", "AttentionOutput": "fa4.call.compute"}
_HOMES |= {"replace_sdpa": "fa4.dropin.replace", "sdpa": "fa4.dropin.sdpa"}


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first asked for."""
    if name in _MODULES:
        return importlib.import_module(f"fa4.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES.get(name, "fa4.api"))
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    """What `dir(fa4)` and completion show: the names that are loaded on demand, too."""
    return sorted({*globals(), *__all__, *_MODULES})
