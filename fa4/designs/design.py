"""What is said of a kernel once, and read by whatever predicts, explains, compiles or shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from fa4.designs.ideas import Idea
from fa4.hardware import Gpu

WGMMA_ARCH = "sm_90a"  # PTX ISA: wgmma is of this target alone


def named(path: str) -> Any:
    """What "module:name" stands for, imported now."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def late(path: str) -> Callable[..., Any]:
    """The function that "module:name" stands for, imported when it is called.

    For what needs NumPy, and for what stands above the designs: specs and compilers.
    """

    def call(*values: Any, **options: Any) -> Any:
        return named(path)(*values, **options)

    return call


def tensor_memory(gpu: Gpu) -> str:
    """Why a kernel that needs tensor memory does not run on a machine; "" if it does."""
    return "" if gpu.tmem_cols else f"tensor memory; {gpu.name} has none"


def warpgroup_products(gpu: Gpu) -> str:
    """Likewise for one that needs wgmma."""
    needed = f"wgmma, which only {WGMMA_ARCH} has; machine {gpu.name} is {gpu.arch}"
    return "" if gpu.arch == WGMMA_ARCH else needed


def anything(gpu: Gpu) -> str:
    """Likewise for one that is modelled on every machine."""
    return ""


@dataclass(frozen=True, kw_only=True)
class CallWork:
    """What a call is for a kernel.

    tiles: (problem, pipeline, lengths or None) -> `fa4.designs.tiles.WorkTiles`. count: (problem,
    pipeline, rows, keys) -> work tiles of a sequence. order: (tiles, problem, pipeline) -> in the
    order of their launch. traffic: (problem, pipeline) -> bytes across HBM before, in and after the
    main kernel. plain_scheduler: stands for all those that change no step; None: they do.
    last_first: (problem, pipeline) -> do the last keys come first in a fixed order of
    sums? rescale_tau: pipeline -> powers of two by which a maximum may rise before O is rescaled;
    None for a kernel that has no such thing. beside: (problem, pipeline) -> seconds of kernels
    beside the main one, by name, where they are more than what their bytes take.
    """

    tiles: Callable[..., Any]
    count: Callable[..., int]
    order: Callable[..., Any]
    traffic: Callable[..., tuple[int, int, int]]
    plain_scheduler: str | None = None
    last_first: Callable[..., bool] = lambda problem, pipeline: False
    rescale_tau: Callable[[Any], float] | None = None
    beside: Callable[..., Mapping[str, float]] = lambda problem, pipeline: {}


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How the kernel that runs is made, by names of what is imported when it is needed.

    spec: class of what selects its code. tuned: (head_dim, head_dim_v, gpu, **features) -> such a
    spec. compiler: (spec, arch) -> the compiled kernel. support: rows of what it can do, the column
    `column` of `fa4 doctor --matrix`. launches: what its kernels do, in the order of their
    launches, if they are several.
    """

    family: str
    spec: str
    tuned: str
    compiler: str
    support: str
    column: str
    launches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Explored:
    """Its name and its controls in the explorer; and what of them it chooses itself, by name."""

    label: str
    controls: tuple[str, ...]
    chosen: Callable[[Any], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Design:
    """One kernel, or the kernels of one backward pass.

    name: unique. kernel: what users call it, alike for both passes and the machines of a family.
    about: in a few words. missing: what a machine lacks for it, or "". pipeline: the class of its
    pipelines, "module:name", and `traits` the values that tell them from another design's. choose:
    (problem, gpu, deterministic) -> the tuned pipeline; None if no name asks for it. plan: of a
    pipeline on a machine, or ValueError. work: what a call is for it; mains: for a
    pass of several main kernels, (problem, pipeline, gpu, lengths) ->
    `fa4.designs.gradients.Pass`. ideas: what `fa4 ablate` switches off. measured_as: whose
    measurements `fa4 predict` quotes: "" for those of its pass, None for a kernel that was never
    measured.
    """

    name: str
    kernel: str
    about: str
    backward: bool = False
    missing: Callable[[Gpu], str]
    pipeline: str
    traits: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    choose: Callable[[Any, Gpu, bool], Any] | None = None
    plan: Callable[[Any, Gpu], Any]
    work: CallWork | None = None
    mains: Callable[..., Any] | None = None
    ideas: tuple[Idea, ...] = ()
    compiled: Compilation | None = None
    explored: Explored | None = None
    measured_as: str | None = ""

    @property
    def direction(self) -> str:
        """ "fwd" or "bwd"."""
        return "bwd" if self.backward else "fwd"

    def describes(self, pipeline: object) -> bool:
        """Is it a pipeline of this kernel?"""
        kind = f"{type(pipeline).__module__}:{type(pipeline).__qualname__}"
        return kind == self.pipeline and all(
            getattr(pipeline, name) == value for name, value in self.traits.items()
        )
