"""The explorer's controls: what can be chosen, and which settings of `fa4 predict` that means.

A control belongs to a level. "context": machine, pass, kernel, head dim and mask, which decide what
there is to choose. "shape": how the kernel is built, which decides the timeline. "length": the
sequence's, which changes how many steps there are and not what one of them looks like.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from fa4.designs import Design, designs

TOKENS = 32 * 1024  # of a call, as in the FlashAttention papers: the batch is TOKENS / seqlen
HEADS = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One position of a control: its label, what it says on hovering, and its settings."""

    key: str
    label: str
    settings: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control of the page; `about` is one sentence for people who do not know the word."""

    key: str
    label: str
    level: str
    about: str
    choices: tuple[Choice, ...]

    def choice(self, key: str) -> Choice:
        """The choice with a key; KeyError otherwise."""
        for choice in self.choices:
            if choice.key == key:
                return choice
        raise KeyError(f"{self.key} has no choice {key!r}")

    def only(self, *keys: str) -> Control:
        """The control with some of its choices."""
        return replace(self, choices=tuple(self.choice(key) for key in keys))


def _control(key: str, label: str, level: str, about: str, *choices: Choice) -> Control:
    return Control(key=key, label=label, level=level, about=about, choices=choices)


def _choice(key: str, label: str, about: str = "", **settings: str) -> Choice:
    named = {name.rstrip("_"): value for name, value in settings.items()}
    return Choice(key=key, label=label, settings=named, about=about)


def _explored() -> list[Design]:
    """The kernels that are on the page."""
    return [one for one in designs() if one.explored is not None]


def _kernels() -> Iterator[Choice]:
    """One for each kernel that is on the page, whatever its pass."""
    first: dict[str, Design] = {}
    for one in _explored():
        first.setdefault(one.kernel, one)
    for name, one in first.items():
        label = one.explored.label if one.explored is not None else ""
        yield _choice(name, label, one.about, kernel=name)


def _lengths(*kilos: int) -> Iterator[Choice]:
    for kilo in kilos:
        batch = str(TOKENS // (1024 * kilo))
        yield _choice(f"{kilo}k", f"{kilo}k", f"{batch} x {kilo}k tokens", seqlen=f"{kilo}k",
                      batch=batch)  # fmt: skip


CONTROLS = (
    _control(
        "machine", "Machine", "context", "The GPU whose rates and latencies the simulator uses.",
        _choice("b200", "B200", machine="b200"), _choice("b300", "B300", machine="b300"),
        _choice("h200", "H200", machine="h200"), _choice("h100", "H100", machine="h100"),
    ),
    _control(
        "pass", "Pass", "context", "Forward computes O; backward the gradients dQ, dK and dV.",
        _choice("fwd", "forward", pass_="fwd"), _choice("bwd", "backward", pass_="bwd"),
    ),
    _control(
        "kernel", "Kernel", "context", "Whose kernel: this package's, or another one.",
        *_kernels(),
    ),
    _control(
        "head_dim", "Head dim", "context", "Elements of a query, a key and a value of one head.",
        _choice("64", "64", head_dim="64"), _choice("128", "128", head_dim="128"),
        _choice("192", "192 / 128", "keys of 192, values of 128 elements", head_dim="192",
                head_dim_v="128"),
        _choice("256", "256", head_dim="256"),
    ),
    _control(
        "mask", "Mask", "context", "Causal: no query sees later keys, so work tiles differ.",
        _choice("none", "none"), _choice("causal", "causal", causal="yes"),
    ),
    _control(
        "seqlen", "Length", "length",
        "Tokens of a sequence; 32k tokens in all. Changes how many steps there are, not a step.",
        *_lengths(1, 4, 8, 32),
    ),
    _control(
        "warpgroups", "Warpgroups", "shape",
        "Each has 64 query rows; in turns: one multiplies while the other exponentiates.",
        _choice("2", "2", tile_m="128", ping_pong="no"),
        _choice("2-turns", "2 in turns", "ping-pong", tile_m="128", ping_pong="yes"),
        _choice("3", "3", tile_m="192", ping_pong="no"),
    ),
    _control(
        "tile_n", "Keys per tile", "shape", "Keys of one step: columns of a tile of scores S.",
        *(_choice(n, n, tile_n=n) for n in ("64", "80", "112", "128", "256")),
    ),
    _control(
        "q_tiles", "Q tiles", "shape", "Query tiles of 128 rows that a CTA works on in turns.",
        _choice("1", "1", q_tiles="1"), _choice("2", "2", "ping-pong", q_tiles="2"),
    ),
    _control(
        "kv_stages", "K/V stages", "shape", "K or V tiles that are in flight at a time.",
        _choice("fit", "what fits"), _choice("2", "2", kv_stages="2"),
    ),
    _control(
        "kv_pairs", "K and V stages", "shape", "Tiles of K, and as many of V, in flight at a time.",
        _choice("2", "2", kv_stages="2"), _choice("3", "3", kv_stages="3"),
        _choice("4", "4", kv_stages="4"),
    ),
    _control(
        "cta_group", "CTA pair", "shape", "Two CTAs on two SMs share operands of a product.",
        _choice("1", "1 CTA", cta_group="1"), _choice("2", "2 CTAs", cta_group="2"),
    ),
    _control(
        "exp2", "Emulated exp", "shape",
        "Share of the exponentials that run as a polynomial on FMA units instead of on MUFU.",
        _choice("off", "none", exp2_frequency="0"),
        _choice("tuned", "tuned", "FlashAttention-4's choice for head dim, mask and machine"),
        _choice("most", "most", "every second column but the last 32", exp2_frequency="8",
                exp2_start="0"),
    ),
    _control(
        "rescale_rate", "Rescale rate", "shape",
        "Share of steps in which O is rescaled, which depends on the data.",
        _choice("0", "0", "random inputs", rescale_rate="0"),
        _choice("0.08", "8 %", "a real model", rescale_rate="0.08"),
        _choice("1", "all", "no threshold", rescale_rate="1"),
    ),
    _control(
        "scheduler", "Scheduler", "shape", "Which CTA gets which work tile, and when.",
        _choice("static", "static", "persistent CTAs, fixed shares", scheduler="static"),
        _choice("lpt", "longest first", "a CTA per work tile", scheduler="lpt"),
        _choice("naive", "in order", "a CTA per work tile", scheduler="naive"),
        _choice("clc", "stealing", "persistent CTAs ask for work (CLC)", scheduler="clc"),
    ),
    _control(
        "order", "Sums of dQ", "shape", "Added as CTAs finish, or in a fixed order every time.",
        _choice("any", "any order"), _choice("fixed", "fixed order", deterministic="yes"),
    ),
)  # fmt: skip

BY_KEY = {control.key: control for control in CONTROLS}

# A small grid that takes seconds: every control has a choice, every kind of point is there.
QUICK = {
    "machine": ("b200", "h200"), "kernel": ("blackwell", "hopper"), "head_dim": ("128", "256"),
    "seqlen": ("1k", "8k"), "tile_n": ("64", "80", "128", "256"), "exp2": ("off", "tuned"),
    "rescale_rate": ("0", "1"), "scheduler": ("static", "lpt"),
}  # fmt: skip


def controls(quick: bool = False) -> tuple[Control, ...]:
    """The controls with the choices of the whole grid, or of the small one."""
    if not quick:
        return CONTROLS
    return tuple(c.only(*QUICK.get(c.key, tuple(x.key for x in c.choices))) for c in CONTROLS)


def with_machines(given: tuple[Control, ...], names: tuple[str, ...]) -> tuple[Control, ...]:
    """The controls with other machines: names, or TOML files as `fa4 machines --toml` writes."""
    choices = tuple(
        _choice(name, Path(name).stem if name.endswith(".toml") else name.upper(), machine=name)
        for name in names
    )
    return tuple(replace(c, choices=choices) if c.key == "machine" else c for c in given)


def shape_keys(direction: str, kernel: str) -> tuple[str, ...]:
    """The controls of level "shape" that a kernel has; of its other pass, if it has one only."""
    of_name = [one for one in _explored() if one.kernel == kernel]
    found = [one for one in of_name if one.direction == direction] or of_name
    explored = found[0].explored
    return explored.controls if explored is not None else ()


def combinations(given: tuple[Control, ...], keys: tuple[str, ...]) -> Iterator[dict[str, Choice]]:
    """Every combination of some controls' choices; the last key runs fastest."""
    named = {control.key: control for control in given}
    for chosen in product(*(named[key].choices for key in keys)):
        yield dict(zip(keys, chosen, strict=True))


def settings_of(chosen: Mapping[str, Choice]) -> dict[str, str]:
    """The settings of `fa4 predict` that choices stand for."""
    settings = {"heads": str(HEADS)}
    for choice in chosen.values():
        settings.update(choice.settings)
    return settings
