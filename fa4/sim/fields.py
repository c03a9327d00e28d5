"""Every setting of a simulation by name: how its text is read, what it means, what its default is.

Commands make their options from `FIELDS`, sweeps their axes. Loads nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from fa4.config import require_finite
from fa4.designs import kernels

MOST_COUNT = 2**63 - 1  # of the arrays that counts end up in
SUFFIXES = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_count(text: str) -> int:
    """A whole number, with k for 1024 and m for 1024 k: 8k is 8192, 1.5k is 1536."""
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)([km]?)", text.strip().lower(), re.ASCII)
    value = Fraction(match[1]) * SUFFIXES[match[2]] if match else Fraction(1, 2)
    if value.denominator != 1 or value > MOST_COUNT:
        raise ValueError(f"must be a whole number such as 4096 or 4k, at most {MOST_COUNT}")
    return int(value)


def parse_number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
        require_finite("it", value)
    except ValueError as error:
        raise ValueError("must be a finite number") from error
    return value


def parse_flag(text: str) -> bool:
    """yes/no, on/off, true/false, 1/0."""
    known = {"yes": True, "on": True, "true": True, "1": True}
    known |= {"no": False, "off": False, "false": False, "0": False}
    if text.strip().lower() not in known:
        raise ValueError("must be yes or no")
    return known[text.strip().lower()]


def parse_window(text: str) -> tuple[int | None, int | None]:
    """left,right; "none" (or -1) for an open side."""
    sides = [side.strip().lower() for side in text.strip(" ()").split(",")]
    if len(sides) != 2 or not all(re.fullmatch(r"none|-?\d+k?", side) for side in sides):
        raise ValueError("must be LEFT,RIGHT, each a whole number or none")
    values = [None if side == "none" else _signed(side) for side in sides]
    return values[0], values[1]


def _signed(text: str) -> int:
    return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)


def parse_word(text: str) -> str:
    """The text as it stands."""
    return text.strip()


@dataclass(frozen=True, kw_only=True)
class Field:
    """One setting: how its text is read, what it means, what holds if it is not given.

    `target` says what it changes: request, problem, pipeline, numerics, exp2 or gpu.
    """

    name: str
    parse: Callable[[str], object]
    help: str
    default: str
    target: str
    metavar: str
    choices: tuple[str, ...] = ()

    @property
    def is_flag(self) -> bool:
        """Is it a yes-or-no setting?"""
        return self.parse is parse_flag

    def read(self, value: object) -> object:
        """The typed value of a text (or of a value that is typed already)."""
        if isinstance(value, (tuple, list)):
            return tuple(value)
        text = str(value)
        try:
            parsed = self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name} {error}; got {text!r}") from error
        if self.choices and parsed not in self.choices:
            raise ValueError(f"{self.name} must be one of {', '.join(self.choices)}; got {text!r}")
        return parsed


def _fields(target: str, kind: Callable[[str], object], metavar: str, **texts: str) -> list[Field]:
    """Settings of one kind; each text is "help | default" or "help | default | choice choice"."""
    made = []
    for name, text in texts.items():
        parts = [part.strip() for part in text.split("|")]
        choices = tuple(parts[2].split()) if len(parts) > 2 else ()
        made.append(
            Field(name=name, parse=kind, help=parts[0], default=parts[1], target=target,
                  metavar=metavar, choices=choices)
        )  # fmt: skip
    return made


_OURS = "FA4's choice"
_ALL = [
    *_fields("request", parse_word, "NAME",
        **{"machine": "Machine of `fa4 machines`, or a TOML file. | b200",
           "pass": "Forward or backward. | fwd | fwd bwd",
           "kernel": "This package's, the published one, or one like FlashAttention-2. "
                     f"| blackwell (hopper on Hopper) | {' '.join(kernels())}"}),
    *_fields("request", parse_word, "FILE",
        lengths="Sequence lengths, a line each: Q K, or one number for both. | all alike"),
    *_fields("problem", parse_count, "N",
        batch="Sequences. | 1",
        seqlen="Queries and keys of a sequence (32k works). | 32k",
        seqlen_q="Queries, if not as many as keys. | seqlen",
        seqlen_k="Keys, if not as many as queries. | seqlen",
        heads="Query heads, and KV heads unless given. | 16",
        heads_q="The same as heads. | heads",
        heads_k="KV heads. | heads",
        head_dim="Elements of a query and a key. | 128",
        head_dim_v="Elements of a value. | head_dim"),
    *_fields("problem", parse_word, "TYPE", dtype="Element type. | bf16 | bf16 fp16 e4m3 e5m2"),
    *_fields("problem", parse_flag, "", causal="Hide later keys: right side 0. | no"),
    *_fields("problem", parse_window, "L,R",
        window="Sliding window, none for an open side. | none,none"),
    *_fields("pipeline", parse_count, "N",
        cta_group=f"CTAs that share operands, 1 or 2. | {_OURS}",
        kv_stages="K or V tiles in flight. | what fits"),
    *_fields("numerics", parse_count, "N",
        tile_n="Keys per tile. | FlashAttention's choice",
        q_tiles="Query tiles per CTA, 1 or 2. | 2",
        num_splits="Parts of the KV sequence computed apart and combined. | 1"),
    *_fields("pipeline", parse_count, "N",
        tile_m="Hopper: query rows per tile, 64 for each warpgroup. | FlashAttention's choice"),
    *_fields("pipeline", parse_flag, "",
        ping_pong="Query tiles take turns at the tensor core. | yes (Hopper: the tuned)",
        overlap="Hopper: start the next S before this tile's P V. | yes",
        deterministic="Backward: add to dQ in a fixed order. | no"),
    *_fields("pipeline", parse_word, "NAME",
        correction="Who rescales O. | warpgroup | warpgroup inline",
        p_space="Where P waits. | tmem | tmem smem",
        p_source="Hopper: from where P enters P V. "
                 "| registers (72 <= d <= 96: smem) | registers smem",
        scheduler=f"Order of work tiles. | {_OURS} | static lpt clc naive spt"),
    *_fields("pipeline", parse_number, "X",
        split_p="Part of P after which its product may start. | 0.75"),
    *_fields("exp2", parse_count, "N",
        exp2_frequency=f"Emulate exponentials in each run of N columns, 0 = none. | {_OURS}",
        exp2_residue=f"Columns emulated of each run. | {_OURS}",
        exp2_start=f"First fragment of 32 columns emulated. | {_OURS}",
        exp2_degree="Degree of the polynomial. | 3"),
    *_fields("numerics", parse_number, "X",
        tau="Rescale O only if the row maximum rose by more, in powers of 2. | 8 (FP8: 0)"),
    *_fields("request", parse_number, "X",
        rescale_rate="Share of steps that rescale O. | 0, as random inputs (1 with tau 0)"),
    *_fields("gpu", parse_number, "X", clock_ghz="SM clock that kernels run at. | the machine's"),
    *_fields("request", parse_flag, "", exact="Simulate every step, no periodic shortcut. | no"),
]  # fmt: skip

FIELDS: dict[str, Field] = {item.name: item for item in _ALL}
