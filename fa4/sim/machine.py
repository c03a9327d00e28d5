"""The machines the simulator knows, and machines from a user's TOML file.

A machine is a `Gpu` (rates, sizes) and a `CostTable` (latencies, fitted constants). The constants
were fitted to measured throughput (docs/simulator.md).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fa4.base.files import read_text
from fa4.hardware import Gpu, Source, find_gpu
from fa4.sim.cost_table import CostTable, H100Costs, HopperCosts
from fa4.sim.power import POWER, PowerFigures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and the cost table that goes with it."""

    gpu: Gpu
    costs: CostTable
    power: PowerFigures | None = None  # None: nobody has measured what its operations take

    @property
    def name(self) -> str:
        """The GPU's name."""
        return self.gpu.name

    @property
    def clock_hz(self) -> float:
        """SM clock under a load that power does not limit."""
        return self.gpu.clock_hz * self.costs.sustained_clock

    def clock_under(self, tensor_share: float) -> float:
        """Sustained SM clock with the tensor core at work for a share of the time.

        Power limits the clock, and most of what changes it between attention kernels is the tensor
        core: beyond a share the clock falls in proportion.
        """
        over = max(0.0, tensor_share - self.costs.throttle_from)
        return self.clock_hz * max(0.1, 1.0 - self.costs.throttle_slope * over)


# Fitted with `fa4 calibrate` to the published B200 figures (docs/simulator.md).
BLACKWELL_COSTS = CostTable(
    vector_efficiency=0.6651,
    math_latency_cycles=43.2,
)
HOPPER_COSTS = HopperCosts()
H100_COSTS = H100Costs()

COSTS: Mapping[str, CostTable] = {
    "b200": BLACKWELL_COSTS,
    "b300": BLACKWELL_COSTS,
    "gb300": BLACKWELL_COSTS,
    "rubin": BLACKWELL_COSTS,
    "h100": H100_COSTS,
    "h200": HOPPER_COSTS,
}


def find_machine(name: str) -> Machine:
    """The machine called `name`, or described by the TOML file of that name.

    Raises ValueError naming the machines there are, FileNotFoundError for a missing file.
    """
    if name.lower().endswith(".toml"):
        return read_machine(Path(name))
    if name.lower() not in COSTS:
        raise ValueError(f"machine must be a .toml file or one of {', '.join(COSTS)}; got {name!r}")
    return _known(name)


def _known(name: str) -> Machine:
    """One of those in the tables, in any case. ValueError lists them."""
    gpu = find_gpu(name)
    return Machine(gpu=gpu, costs=COSTS[gpu.name.lower()], power=POWER.get(gpu.name.lower()))


def read_machine(path: Path) -> Machine:
    """A machine from a TOML file with tables [gpu] and [costs].

    With `base = "b200"` the tables hold what differs from it; without, [gpu] must hold every figure
    of `Gpu` (and [costs] what differs from B200's). [sources] may say where the [gpu] figures come
    from. Raises ValueError naming file and field.
    """
    try:
        content = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    unknown = sorted(set(content) - {"base", "gpu", "costs", "sources"})
    if unknown:
        raise ValueError(
            f"{path}: unknown entry {unknown[0]!r}; allowed: base, gpu, costs, sources"
        )
    base = None
    if "base" in content:
        try:
            base = _known(str(content["base"]))
        except ValueError:
            raise ValueError(
                f"{path}: base must be one of {', '.join(COSTS)}; got {content['base']!r}"
            ) from None
    gpu_figures, cost_figures, sources = (
        _table(path, content, name) for name in ("gpu", "costs", "sources")
    )
    gpu_fields = {item.name for item in fields(Gpu)} - {"sources"}
    _check_fields(path, gpu_figures, gpu_fields, "gpu")
    _check_fields(path, cost_figures, {item.name for item in fields(CostTable)}, "costs")
    _check_fields(path, sources, set(gpu_figures), "sources")
    for table, entries in (("gpu", gpu_figures), ("sources", sources)):
        for name, value in entries.items():
            if (table == "sources" or name in ("name", "arch")) and not isinstance(value, str):
                raise ValueError(f"{path}: {table}.{name} must be a string; got {value!r}")
    if base is None:
        missing = sorted(gpu_fields - set(gpu_figures))
        if missing:
            raise ValueError(f"{path}: gpu.{missing[0]} is missing (or name a base)")
    try:
        costs = replace(base.costs if base else BLACKWELL_COSTS, **cost_figures)
        gpu = _build_gpu(base.gpu if base else None, gpu_figures, sources, path)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from error
    return Machine(gpu=gpu, costs=costs, power=base.power if base else None)


def _build_gpu(
    base: Gpu | None, figures: Mapping[str, Any], named: Mapping[str, str], path: Path
) -> Gpu:
    """`base` with other figures; each gets the source that the file names, or the file itself."""
    origins = {
        name: Source(named.get(name, f"given in {path.name}"), "low")
        for name in figures
        if name not in ("name", "arch")
    }
    if base is None:
        return Gpu(sources=origins, **figures)
    renamed = {"name": f"{base.name} ({path.stem})"} | dict(figures)
    return replace(base, sources=dict(base.sources) | origins, **renamed)


def _table(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{path}: [{name}] must be a table; got {table!r}")
    return table


def _check_fields(path: Path, table: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise ValueError(
                f"{path}: unknown field {where}.{name}; allowed: {', '.join(sorted(known))}"
            )
