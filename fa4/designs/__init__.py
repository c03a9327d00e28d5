"""One record for each kernel that is predicted, explained or compiled: a file here, and its name.

A record (`Design`) says what a kernel is to the rest of the package. Nobody else asks of which kind
a pipeline or a spec is; that is what `design_of` and `design_of_spec` are for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fa4.designs.design import Design, named
from fa4.hardware import Gpu

# Of several that run, or that a pipeline could be of, the first is taken.
NAMES = (
    "forward", "backward", "hopper_forward", "hopper_backward", "hopper_wide",
    "halves", "published_forward", "published_backward", "fa2", "published_hopper", "pieces",
)  # fmt: skip


@cache
def designs() -> tuple[Design, ...]:
    """All records."""
    return tuple(named(f"{__name__}.{name}:DESIGN") for name in NAMES)


def kernels() -> tuple[str, ...]:
    """What `--kernel` may be, of those that are predicted."""
    return tuple(dict.fromkeys(one.kernel for one in designs() if one.choose is not None))


def design_of(pipeline: object) -> Design:
    """The record of a pipeline's kernel. Raises TypeError for what is no pipeline."""
    for one in designs():
        if one.describes(pipeline):
            return one
    raise TypeError(f"no design has a pipeline such as {pipeline!r}")


def design_of_spec(spec: object) -> Design:
    """The record of a spec's kernel. Raises TypeError for what is no spec."""
    kind = f"{type(spec).__module__}:{type(spec).__qualname__}"
    for one in designs():
        if one.compiled is not None and one.compiled.spec == kind:
            return one
    raise TypeError(f"no design is compiled from {kind}")


def find_design(gpu: Gpu, *, backward: bool = False, kernel: str | None = None) -> Design:
    """The record of a kernel that is predicted: that of a name, else this package's on `gpu`.

    Raises ValueError, with what is missing, if there is none.
    """
    one_pass = [one for one in designs() if one.backward == backward]
    found = [one for one in one_pass
             if (one.kernel == kernel if kernel else one.compiled is not None)]  # fmt: skip
    fitting = [one for one in found if not one.missing(gpu)]
    if fitting and fitting[0].choose is not None:
        return fitting[0]
    if found and not fitting:
        raise ValueError(f"kernel {found[-1].kernel} needs {found[-1].missing(gpu)}")
    direction, name = ("forward", "backward")[backward], kernel or fitting[0].kernel
    raise ValueError(f"no {direction} of {name} is modelled; machine {gpu.name}")


def plan_of(pipeline: Any, gpu: Gpu) -> Any:
    """The plan of any pipeline. Raises ValueError if it does not fit the machine."""
    return design_of(pipeline).plan(pipeline, gpu)
