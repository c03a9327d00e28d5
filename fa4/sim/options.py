"""From named settings to a request the simulator can run: problem, pipeline, machine, simulation.

`FIELDS` names every setting with its parser, default and help; commands make their options from it
and sweeps their axes. `build` starts from what FlashAttention-4 would choose
(`fa4.designs`) and replaces what is given. Importing this module loads nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4.base.files import read_text
from fa4.config import (
    FRAGMENT_COLS,
    WARPGROUP_ROWS,
    ForwardConfig,
    Problem,
)
from fa4.designs import design_of, designs, find_design
from fa4.designs.design import WGMMA_ARCH
from fa4.hardware import Gpu, Source
from fa4.sim.fields import FIELDS, parse_count, parse_number

if TYPE_CHECKING:
    from fa4.designs.tiles import Lengths
    from fa4.sim.machine import Machine
    from fa4.sim.predict import AnyPipeline, Prediction, Simulation

DEFAULT_MACHINE = "b200"
CLOCK_GHZ = (0.1, 10.0)  # of any GPU there is
DEFAULT_SEQLEN, DEFAULT_HEADS, DEFAULT_HEAD_DIM = 32768, 16, 128  # the paper's headline

# Settings whose name in the config classes is another.
_CONFIG_NAMES = {
    "tau": "rescale_threshold_log2",
    "exp2_frequency": "frequency",
    "exp2_residue": "residue",
    "exp2_start": "start_fragment",
    "exp2_degree": "degree",
}
# Where a pipeline may hold what it is made of, outermost first.
_PARTS: tuple[tuple[str, ...], ...] = ((), ("exp2",), ("numerics",), ("numerics", "exp2"))


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """What to simulate; `given` holds the settings that were named, typed."""

    problem: Problem
    pipeline: AnyPipeline
    machine: Machine
    simulation: Simulation
    given: Mapping[str, object]

    def predict(self) -> Prediction:
        """Simulate it."""
        from fa4.sim.predict import predict

        return predict(self.problem, self.pipeline, self.machine, self.simulation)


def build(settings: Mapping[str, object]) -> SimulationRequest:
    """The request of some settings, the rest as FlashAttention-4 would choose it.

    Keys are those of FIELDS, or gpu.X and costs.X for any figure of a machine; values are text or
    typed; None means "not given". Raises ValueError for unknown names, bad values and settings that
    the pass does not have.
    """
    from fa4.sim.machine import Machine, find_machine

    given = read_settings(settings)
    machine = given.get("machine", DEFAULT_MACHINE)
    machine = machine if isinstance(machine, Machine) else find_machine(str(machine))
    machine = _change_machine(machine, given)
    lengths = _read_lengths(given)
    problem = _build_problem(given, lengths)
    pipeline = _build_pipeline(problem, machine, given)
    simulation = _build_simulation(problem, pipeline, given, lengths)
    return SimulationRequest(
        problem=problem, pipeline=pipeline, machine=machine, simulation=simulation, given=given
    )


@dataclass(frozen=True, kw_only=True)
class GradientRequest:
    """A backward pass of Hopper's kernels, whose tiles are their own."""

    problem: Problem
    machine: Machine
    lengths: tuple[Lengths, ...] | None
    deterministic: bool


def build_hopper_backward(settings: Mapping[str, object]) -> GradientRequest | None:
    """The request of some settings; None where they are of another pass or machine.

    Raises ValueError as `build` does, and for settings of a kernel's tiles.
    """
    from fa4.sim.machine import Machine, find_machine

    given = read_settings(settings)
    machine = given.get("machine", DEFAULT_MACHINE)
    machine = machine if isinstance(machine, Machine) else find_machine(str(machine))
    if given.get("pass") != "bwd" or machine.gpu.arch != WGMMA_ARCH:
        return None
    if given.get("kernel") not in (None, *{one.kernel for one in designs() if one.mains}):
        return None
    for name in given:
        known = FIELDS[name].target if name in FIELDS else "gpu"
        if known in ("pipeline", "numerics", "exp2") and name != "deterministic":
            raise ValueError(
                f"{name} is no setting of Hopper's backward kernels; got {given[name]}"
            )
    lengths = _read_lengths(given)
    return GradientRequest(
        problem=_build_problem(given, lengths), machine=_change_machine(machine, given),
        lengths=lengths, deterministic=bool(given.get("deterministic")),
    )  # fmt: skip


def read_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Typed values of the settings that are given; ValueError for an unknown name."""
    given: dict[str, object] = {}
    refuse_old_names(settings)
    for name, value in settings.items():
        if value is None:
            continue
        if name.startswith(("gpu.", "costs.")):
            given[name] = value if not isinstance(value, str) else _figure(name, value)
        elif name not in FIELDS:
            raise ValueError(
                f"unknown field {name!r}; allowed: {', '.join(FIELDS)}, gpu.FIGURE, costs.FIGURE"
            )
        else:
            given[name] = value if name == "machine" else FIELDS[name].read(value)
    return given


def refuse_old_names(settings: Mapping[str, object]) -> None:
    """Raises ValueError, with the new name, for what kernels were called until version 0.2."""
    if settings.get("design") is not None:
        raise ValueError("design is kernel now: kernel=published for flash-attn-4's; "
                         f"got {settings['design']!r}")  # fmt: skip
    new = {"fa4": "blackwell", "fa3": "hopper"}.get(str(settings.get("kernel")))
    if new:
        raise ValueError(f"kernel {settings['kernel']} is called {new} now")


def _figure(name: str, text: str) -> float:
    """A figure of a machine: whole numbers stay integers."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return parse_number(text)
    except ValueError as error:
        raise ValueError(f"{name} {error}; got {text!r}") from error


def _change_machine(machine: Machine, given: Mapping[str, object]) -> Machine:
    """The machine with other figures, each marked as given by the caller."""
    changes: dict[str, dict[str, Any]] = {"gpu": {}, "costs": {}}
    for name, value in given.items():
        table, _, figure = name.partition(".")
        if figure:
            require_figure(name)
            changes[table][figure] = value
    if "clock_ghz" in given:
        ghz, (least, most) = float(str(given["clock_ghz"])), CLOCK_GHZ
        if not least <= ghz <= most:
            raise ValueError(f"clock_ghz must be between {least} and {most}; got {ghz:g}")
        changes["gpu"]["clock_hz"] = ghz * 1e9
        changes["costs"].setdefault("sustained_clock", 1.0)
        changes["costs"].setdefault("throttle_slope", 0.0)
    gpu, costs = machine.gpu, machine.costs
    if "clock_hz" in changes["gpu"]:
        most = max(gpu.max_clock_hz, changes["gpu"]["clock_hz"])
        changes["gpu"].setdefault("max_clock_hz", most)
    if "smem_bytes_per_cta" in changes["gpu"]:
        beside = gpu.smem_bytes_per_sm - gpu.smem_bytes_per_cta
        least = max(gpu.smem_bytes_per_sm, changes["gpu"]["smem_bytes_per_cta"] + beside)
        changes["gpu"].setdefault("smem_bytes_per_sm", least)
    sources = dict(gpu.sources) | {name: Source("given", "low") for name in changes["gpu"]}
    if changes["gpu"]:
        gpu = replace(gpu, sources=sources, **changes["gpu"])
    return replace(machine, gpu=gpu, costs=replace(costs, **changes["costs"]))


def require_figure(name: str) -> None:
    """Raises ValueError unless `name` is gpu.X or costs.X of a figure that machines have."""
    from fa4.sim.cost_table import CostTable

    table, _, figure = name.partition(".")
    kind = Gpu if table == "gpu" else CostTable
    known = {item.name for item in fields(kind)} - {"sources", "name", "arch"}
    if figure not in known:
        raise ValueError(f"unknown field {name}; allowed: {', '.join(sorted(known))}")


def _read_lengths(given: Mapping[str, object]) -> tuple[Lengths, ...] | None:
    """Lengths from a file, or as given."""
    from fa4.designs.tiles import Lengths

    source = given.get("lengths")
    if source is None:
        return None
    taken = sorted({"batch", "seqlen", "seqlen_q", "seqlen_k"}.intersection(given))
    if taken:
        raise ValueError(f"lengths replaces {taken[0]}; give one of them")
    if isinstance(source, tuple):
        return tuple(Lengths(*pair) for pair in source)
    return read_lengths(Path(str(source)))


def read_lengths(path: Path) -> tuple[Lengths, ...]:
    """Sequence lengths from a text file: "Q K" or one number per line, # starts a comment."""
    from fa4.designs.tiles import Lengths

    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            values = [parse_count(word) for word in words]
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}; got {line.strip()!r}") from error
        if len(values) > 2:
            raise ValueError(f"{path} line {number}: expected Q K; got {line.strip()!r}")
        found.append(Lengths(values[0], values[-1]))
    if not found:
        raise ValueError(f"{path}: no sequence lengths in it")
    return tuple(found)


def _build_problem(given: Mapping[str, Any], lengths: tuple[Lengths, ...] | None) -> Problem:
    """The problem; lengths, if any, make a batch as long as their longest."""
    if "heads" in given and "heads_q" in given:
        raise ValueError(
            f"heads and heads_q are the same; got {given['heads']} and {given['heads_q']}"
        )
    heads = given.get("heads_q", given.get("heads", DEFAULT_HEADS))
    seqlen = given.get("seqlen", DEFAULT_SEQLEN)
    sizes = (given.get("batch", 1), given.get("seqlen_q", seqlen), given.get("seqlen_k", seqlen))
    if lengths is not None:
        sizes = (len(lengths), max(x.q for x in lengths), max(x.k for x in lengths))
    head_dim = given.get("head_dim", DEFAULT_HEAD_DIM)
    return Problem(
        batch=sizes[0],
        seqlen_q=sizes[1],
        seqlen_k=sizes[2],
        heads_q=heads,
        heads_k=given.get("heads_k", heads),
        head_dim=head_dim,
        head_dim_v=given.get("head_dim_v", head_dim),
        dtype=given.get("dtype", "bf16"),
        causal=given.get("causal", False),
        window_size=given.get("window", (None, None)),
    )


def _build_pipeline(problem: Problem, machine: Machine, given: Mapping[str, Any]) -> AnyPipeline:
    """FlashAttention-4's choice for the problem, with what is given replaced."""
    from fa4.designs.amounts import element_bytes

    direction = given.get("pass", "fwd")
    _check_q_tiles(problem, machine.gpu, given)
    pipeline = default_pipeline(
        problem,
        machine,
        backward=direction == "bwd",
        deterministic=bool(given.get("deterministic")),
        kernel=given.get("kernel"),
    )
    # Tiles first: they put back what was tuned beside another one.
    for name, value in sorted(given.items(), key=lambda one: not one[0].startswith("tile_")):
        field = FIELDS.get(name)
        if field is not None and field.target in ("pipeline", "numerics"):
            pipeline = replaced(pipeline, {name: value}, direction)
    split = {
        name: x for name, x in given.items() if name in FIELDS and FIELDS[name].target == "exp2"
    }
    if split:
        pipeline = replaced(pipeline, split, direction)
        _check_split(getattr(pipeline, "numerics", pipeline), split)
    if getattr(pipeline, "element_bytes", 0) != element_bytes(problem.dtype):
        raise ValueError(f"dtype {problem.dtype} has no kernel for pass {direction}")
    numerics = getattr(pipeline, "numerics", None)
    if isinstance(numerics, ForwardConfig):
        try:
            numerics.check_dtype(problem.dtype)
        except ValueError as error:
            raise ValueError(_in_settings(str(error))) from error
    return pipeline


def default_pipeline(
    problem: Problem,
    machine: Machine,
    *,
    backward: bool = False,
    deterministic: bool = False,
    kernel: str | None = None,
) -> AnyPipeline:
    """What a kernel chooses for a problem: that of a name, or this package's on the machine."""
    choose = find_design(machine.gpu, backward=backward, kernel=kernel).choose
    assert choose is not None  # it is modelled
    return choose(problem, machine.gpu, deterministic)


def _check_q_tiles(problem: Problem, gpu: Gpu, given: Mapping[str, Any]) -> None:
    """Refuse more Q tiles than kernels have, with what they would ask of tensor memory."""
    count, keys = given.get("q_tiles", 0), given.get("tile_n", 128)
    if count <= 2 or not gpu.tmem_cols:
        return
    columns = count * (keys + problem.head_dim_v)
    needed = f"{count} x (S {keys} + O {problem.head_dim_v}) = {columns} columns of tensor memory"
    has = f"{gpu.name} has {gpu.tmem_cols}"
    if columns <= gpu.tmem_cols:
        has += ", but no kernel has warps for more than 2"
    raise ValueError(f"q_tiles must be 1 or 2; {count} need {needed}, and {has}")


def _check_split(numerics: Any, given: Mapping[str, object]) -> None:
    """Refuse a start beyond the fragments of a tile, of which nothing would be emulated."""
    keys = getattr(numerics, "piece", numerics.tile_n)
    fragments = -(-keys // FRAGMENT_COLS)
    if given.get("exp2_start") and numerics.exp2.start_fragment >= fragments:
        raise ValueError(
            f"exp2_start must be below {fragments}, the fragments of {keys} keys; "
            f"got {numerics.exp2.start_fragment}"
        )


def replaced(pipeline: Any, changes: Mapping[str, object], direction: str) -> Any:
    """`pipeline` with settings of one of its parts replaced together, wherever it holds them."""
    parts = _PARTS
    if hasattr(pipeline, "consumers") and changes.keys() & {"tile_m", "tile_n"}:
        pipeline = _without_what_suits_the_tile(pipeline)
    if "tile_m" in changes:
        if hasattr(pipeline, "consumers"):
            changes = {"consumers": warpgroups(changes["tile_m"])}
        parts = ((),)  # of the warpgroups alone: the other kernels' tiles have 128 rows
    for path in parts:
        holders = [pipeline]
        for part in path:
            holders.append(getattr(holders[-1], part, None))
        called = {name: _field_of(holders[-1], name) for name in changes}
        named = {own: changes[name] for name, own in called.items() if own is not None}
        if len(named) == len(changes):
            try:
                changed = replace(holders[-1], **named)
            except (ValueError, TypeError) as error:
                raise type(error)(_in_settings(str(error))) from error
            for part, holder in zip(reversed(path), reversed(holders[:-1]), strict=True):
                changed = replace(holder, **{part: changed})
            return changed
    kernel = design_of(pipeline).kernel
    raise ValueError(f"{next(iter(changes))} does not apply to pass {direction} of kernel {kernel}")


def _without_what_suits_the_tile(pipeline: Any) -> Any:
    """As the kernel of a forced tile: what was tuned beside another says nothing of it."""
    tuned = ("kv_stages", "ahead", "columns", "direct")
    plain = {item.name: item.default for item in fields(pipeline) if item.name in tuned}
    if getattr(pipeline, "ping_pong", None):
        plain["ping_pong"] = False
    return replace(pipeline, **plain)


def read_choice(pipeline: Any, name: str) -> tuple[bool, Any]:
    """Whether a pipeline has a setting of FIELDS, and its value."""
    if name == "tile_m":
        holds = hasattr(pipeline, "consumers")
        return holds, WARPGROUP_ROWS * pipeline.consumers if holds else None
    for path in _PARTS:
        holder = pipeline
        for part in path:
            holder = getattr(holder, part, None)
        named = _field_of(holder, name)
        if named is not None:
            return True, getattr(holder, named)
    return False, None


def _field_of(holder: Any, name: str) -> str | None:
    """What a part of a pipeline calls a setting; None if it has it not."""
    known = {item.name for item in fields(holder)} if is_dataclass(holder) else set()
    return next((x for x in (_CONFIG_NAMES.get(name, name), name) if x in known), None)


def warpgroups(tile_m: object) -> int:
    """Warpgroups of 64 rows that make a tile."""
    tiles = [rows * WARPGROUP_ROWS for rows in (1, 2, 3)]
    if tile_m not in tiles:
        raise ValueError(f"tile_m must be one of {', '.join(map(str, tiles))}; got {tile_m}")
    return tiles.index(tile_m) + 1


def _in_settings(message: str) -> str:
    """A message of a config class in the words of the settings: "tau must be ..."."""
    for name, of_config in _CONFIG_NAMES.items():
        message = re.sub(rf"\b{of_config}\b", name, message)
    return message


def _build_simulation(
    problem: Problem,
    pipeline: AnyPipeline,
    given: Mapping[str, Any],
    lengths: tuple[Lengths, ...] | None,
) -> Simulation:
    """Run-time shares: as given, or as random inputs have them."""
    from fa4.sim.predict import Simulation, with_rescale_rate

    rate = given.get("rescale_rate")
    if rate is not None and not 0.0 <= rate <= 1.0:
        raise ValueError(f"rescale_rate must be between 0 and 1; got {rate!r}")
    return with_rescale_rate(
        Simulation(lengths=lengths, rescale_rate=rate, exact=given.get("exact", False)),
        problem, pipeline,
    )  # fmt: skip


__all__ = ["FIELDS", "SimulationRequest", "build", "default_pipeline", "read_choice",
           "read_lengths", "read_settings", "warpgroups"]  # fmt: skip
