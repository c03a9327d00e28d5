"""The compiled forward kernel as a function of a `Case`, run by the emulator.

`specs()` names the code that the tests compile: few kernels, each with several features at once, so
that every pair of features meets in one of them. Sizes, values and schedules are drawn at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fa4.compiled.build import build as build_cached
from fa4.compiled.forward import compile_forward
from fa4.config import Exp2Split, ForwardConfig, normalize_window
from fa4.dtypes import numpy_dtype
from fa4.emulator.host.session import Session
from fa4.emulator.machine.options import Options
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import Case
from fa4.testing.budget import Outputs
from fa4.testing.case import MASK_MODS, SCORE_MODS
from fa4.testing.inputs import Inputs, visible_pairs
from fa4.testing.layouts import build_inputs

KERNELS = Path(__file__).parents[2] / ".pytest_cache" / "fa4-kernels"
UNBOUNDED = 1 << 30
SLACK = 3  # unused rows behind a sequence of which only a part is used
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOTHING = 7.0  # what the output holds before the call, and still holds where no row is


def biased(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """A bias per head and key, read from an auxiliary tensor."""
    return score + aux[0][h, j]


def listed(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Keys of the row's own document; documents are numbered in an auxiliary tensor."""
    return (aux[-1][i] == aux[-1][j]) | (j == b)


def identity(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """The score: makes any softmax_scale possible, 0 and negative ones too."""
    return score


FLAGS = (
    "causal", "window_left", "window_right", "packed_q", "packed_k", "used_q", "used_k", "sink",
    "softcap", "deterministic",
)  # fmt: skip
_ALIBI, _TEMPER = SCORE_MODS["alibi"][0], SCORE_MODS["temper"][0]
_STRIPES, _EMPTY = MASK_MODS["stripes"], MASK_MODS["odd_rows_empty"]
_BIAS, _DOCUMENTS = ("fp32", 2), ("int32", 1)
_ONE_TILE = ForwardConfig(q_tiles=1, exp2=Exp2Split(frequency=16, start_fragment=1))

SPECS: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 128},
    "causal": {"head_dim": 64, "dtype": "fp16", "causal": True},
    "window": {"head_dim": 72, "head_dim_v": 16, "window_left": True, "window_right": True,
               "group": 4, "sink": True, "score_mod": _ALIBI},
    "decode": {"head_dim": 128, "head_dim_v": 64, "dtype": "fp16", "causal": True, "group": 8,
               "window_left": True, "numerics": _ONE_TILE, "used_k": True, "sink": True,
               "lse": False},
    "packed": {"head_dim": 64, "causal": True, "window_left": True, "packed_q": True,
               "packed_k": True, "used_q": True, "used_k": True, "group": 2, "softcap": True,
               "sink": True},
    "packed_window": {"head_dim": 8, "head_dim_v": 120, "dtype": "fp16", "window_left": True,
                      "window_right": True, "packed_q": True, "packed_k": True,
                      "score_mod": biased, "aux": (_BIAS,), "lse": False, "numerics": _ONE_TILE},
    "padded": {"head_dim": 40, "head_dim_v": 24, "dtype": "fp16", "window_right": True,
               "used_q": True, "used_k": True, "softcap": True, "lse": False,
               "numerics": _ONE_TILE},
    "masked": {"head_dim": 32, "packed_q": True, "packed_k": True, "mask_mod": listed,
               "score_mod": biased, "aux": (_BIAS, _DOCUMENTS), "sink": True, "group": 4,
               "used_q": True, "used_k": True, "dtype": "fp16", "numerics": _ONE_TILE,
               "lse": False},
    "masked_softcap": {"head_dim": 16, "head_dim_v": 88, "mask_mod": _STRIPES, "softcap": True,
                       "packed_q": True, "group": 2, "aux": (_BIAS,)},
    "causal_mod": {"head_dim": 104, "head_dim_v": 128, "causal": True, "window_left": True,
                   "used_q": True, "packed_k": True, "score_mod": biased, "aux": (_BIAS,),
                   "group": 2},
}  # fmt: skip


def spec_of(name: str) -> ForwardSpec:
    """One of `SPECS`; head_dim_v is head_dim where it is not named."""
    fields = {"head_dim_v": SPECS[name]["head_dim"], **SPECS[name]}
    right = fields.get("causal", False) or fields.get("window_right", False)
    tuned = ForwardConfig.tuned("bf16", fields["head_dim"], right)
    return ForwardSpec(**{"numerics": tuned, **fields})


def features(spec: Any) -> set[str]:
    """What is special about a spec, forward or backward, by name."""
    flags = {name for name in FLAGS if getattr(spec, name, False)}
    return flags | {
        name
        for name, has in {
            "fp16": spec.dtype == "fp16",
            "no lse": not getattr(spec, "lse", True),
            "group": getattr(spec, "group", 1) > 1,
            "score_mod": spec.score_mod is not None,
            "mask_mod": spec.mask_mod is not None,
            "mask": spec.mask is not None,
            "aux": bool(spec.aux),
            "one Q tile": getattr(getattr(spec, "numerics", None), "q_tiles", 2) == 1,
            "d != dv": spec.head_dim != spec.head_dim_v,
        }.items()
        if has
    }


def impossible(pair: frozenset[str]) -> bool:
    """Do two features exclude each other?"""
    masks = "causal", "window_left", "window_right"
    return pair in map(
        frozenset,
        [("causal", "window_right"), ("softcap", "score_mod"), ("mask_mod", "mask"),
         *((other, one) for other in ("mask_mod", "mask") for one in masks)],
    )  # fmt: skip


def pairs_met(found: list[set[str]]) -> tuple[set[frozenset[str]], set[frozenset[str]]]:
    """(pairs that are in one of these sets of features, all possible pairs)."""
    met = {frozenset(pair) for names in found for pair in combinations(sorted(names), 2)}
    everything = combinations(sorted(set().union(*found)), 2)
    return met, {frozenset(pair) for pair in everything if not impossible(frozenset(pair))}


@dataclass(frozen=True)
class Kernel:
    """A compiled spec, with its host code loaded."""

    spec: ForwardSpec
    compiled: Any
    session: Session

    def __call__(self, inputs: Inputs, *, num_sms: int = 2, **options: Any) -> tuple[Outputs, Any]:
        """(outputs, report of the emulator); findings raise unless collect=True."""
        call = arguments(self.spec, inputs, num_sms)
        self.session._options = Options(**options)
        self.session.reports.clear()
        self.session.call(self.compiled, call, {})
        (report,) = self.session.reports
        out, lse = call[3], call[4]
        check_untouched(inputs, as_numpy(out), None if lse is None else lse.numpy())
        return Outputs(as_numpy(out), None if lse is None else lse.numpy()), report


@cache
def kernel(name: str) -> Kernel:
    """One of `SPECS`, compiled once on this machine as long as no source changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4_CACHE", "1")
        patch.setenv("FA4_CACHE_DIR", str(KERNELS))
        return Kernel(spec_of(name), build_cached(spec_of(name)), Session(None, (), {}))


def build(spec: ForwardSpec) -> Kernel:
    """A kernel that is not kept."""
    return Kernel(spec, compile_forward(spec), Session(None, (), {}))


def as_torch(x: np.ndarray) -> torch.Tensor:
    """A torch tensor on the same memory."""
    if x.dtype == numpy_dtype("bf16"):
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """A NumPy array on the same memory."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(numpy_dtype("bf16"))
    return x.numpy()


def arguments(spec: ForwardSpec, inputs: Inputs, num_sms: int) -> tuple[Any, ...]:
    """What the compiled function is called with, in its order; outputs hold `NOTHING`."""
    options, heads = inputs.options, inputs.q.shape[-2]
    q, k, v = (as_torch(aligned_copy(x)) for x in (inputs.q, inputs.k, inputs.v))
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    out = as_torch(aligned_copy(np.full(shape, NOTHING, inputs.q.dtype)))
    lse = torch.full((*shape[:-3], heads, shape[-3]), NOTHING) if spec.lse else None
    left, right = normalize_window(options.get("window_size", (None, None)), spec.causal)
    scale = options.get("softmax_scale")
    sink, aux = options.get("learnable_sink"), options.get("aux_tensors")

    def optional(given: bool, value: Any) -> Any:
        return value if given else None

    def vector(name: str) -> torch.Tensor | None:
        values = options.get(name)
        return None if values is None else torch.tensor(np.asarray(values), dtype=torch.int32)

    return (
        q,
        k,
        v,
        out,
        lse,
        spec.head_dim**-0.5 if scale is None else scale,
        optional(spec.softcap, options.get("softcap")),
        optional(spec.window_left, UNBOUNDED if left is None else left),
        optional(spec.window_right, UNBOUNDED if right is None else right),
        max(seq.q.shape[0] for seq in inputs.sequences),
        optional(spec.sink, None if sink is None else torch.from_numpy(sink)),
        *map(vector, ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
        optional(bool(spec.aux), tuple(map(torch.from_numpy, aux)) if aux else None),
        num_sms,
        *([torch.zeros(1, dtype=torch.int32)] if getattr(spec, "draws_work", False) else []),
    )


def aligned_copy(x: np.ndarray) -> np.ndarray:
    """A copy that shares wider rows and one more head with NaN, at an address of 16 bytes.

    In front of it is as much that belongs to no tensor: there a moved view begins.
    """
    *rows, heads, dim = x.shape
    wide = np.full((*rows, heads + 1, dim + 8), np.nan, x.dtype)
    base = np.zeros(2 * wide.nbytes + 16, np.uint8)
    start = wide.nbytes + -(base.ctypes.data + wide.nbytes) % 16
    wide = base[start : start + wide.nbytes].view(x.dtype).reshape(wide.shape)
    wide[:] = np.nan
    wide[..., :heads, :dim] = x
    return wide[..., :heads, :dim]


def check_untouched(inputs: Inputs, out: np.ndarray, lse: np.ndarray | None) -> None:
    """AssertionError if the kernel wrote a row that no sequence has."""
    mine = np.zeros(out.shape[:-2], bool)
    for index in inputs.q_index:
        mine[index] = True
    assert (out[~mine] == NOTHING).all(), "a row beyond its sequence was written"
    if lse is not None:
        assert (np.moveaxis(lse, -2, -1)[~mine] == NOTHING).all(), "an LSE beyond its sequence"


def make_inputs(spec: Any, case: Case) -> Inputs:
    """The arrays of a case in the layout of a spec, what is unused filled with NaN.

    The case is of layout "packed", whatever the spec, forward or backward: its lengths are what
    counts.
    """
    inputs = build_inputs(case)
    options = {
        name: value for name, value in inputs.options.items() if not name.startswith("cu_seqlens")
    }
    if spec.mask_mod is not None:
        options["mask_mod"] = spec.mask_mod
    if spec.mask is not None:
        options["mask_mod"] = spec.mask
    if spec.score_mod is not None:
        options["score_mod"] = spec.score_mod
    if getattr(spec, "score_mod_bwd", None) is not None:
        options["score_mod_bwd"] = spec.score_mod_bwd
    if spec.aux:
        options["aux_tensors"] = auxiliary(spec, case)
    sequences = tuple(
        seq._replace(visible=visible_pairs(options, b, case.heads_q, case.sequences[b]))
        for b, seq in enumerate(inputs.sequences)
    )
    q, q_index, rows = _lay_out([seq.q for seq in sequences], spec.packed_q, spec.used_q)
    dout, _, _ = _lay_out([seq.dout for seq in sequences], spec.packed_q, spec.used_q)
    k, kv_index, keys = _lay_out([seq.k for seq in sequences], spec.packed_k, spec.used_k)
    v, _, _ = _lay_out([seq.v for seq in sequences], spec.packed_k, spec.used_k)
    for side, packed, used, offsets, parts in (
        ("q", spec.packed_q, spec.used_q, rows, [seq.q for seq in sequences]),
        ("k", spec.packed_k, spec.used_k, keys, [seq.k for seq in sequences]),
    ):
        if packed:
            options[f"cu_seqlens_{side}"] = offsets
        if used:
            options[f"seqused_{side}"] = np.array([len(part) for part in parts], np.int32)
    return replace(
        inputs, q=q, k=k, v=v, dout=dout, sequences=sequences, q_index=q_index, kv_index=kv_index,
        options=options,
    )  # fmt: skip


def _lay_out(
    parts: list[np.ndarray], packed: bool, used: bool
) -> tuple[np.ndarray, tuple[Any, ...], np.ndarray]:
    """(array, index of each sequence, cu_seqlens); with `used`, `SLACK` rows of NaN follow each."""
    lengths = [len(part) for part in parts]
    slack = SLACK if used else 0
    tail, dtype = parts[0].shape[1:], parts[0].dtype
    offsets = np.concatenate([[0], np.cumsum([n + slack for n in lengths])]).astype(np.int32)
    if packed:
        array = np.full((offsets[-1], *tail), np.nan, dtype)
        index = tuple(
            (slice(int(a), int(a) + n),) for a, n in zip(offsets[:-1], lengths, strict=True)
        )
    else:
        assert used or len(set(lengths)) == 1, "sequences of a dense call have one length"
        array = np.full((len(parts), max(lengths) + slack, *tail), np.nan, dtype)
        index = tuple((b, slice(0, n)) for b, n in enumerate(lengths))
    for where, part in zip(index, parts, strict=True):
        array[where] = part
    return array, index, offsets


def auxiliary(spec: Any, case: Case) -> tuple[np.ndarray, ...]:
    """Tensors for `biased` and `listed`, exactly as long as the longest sequence needs."""
    rng = np.random.default_rng([case.seed, 5])
    longest = max(1, *(max(lengths) for lengths in case.lengths))
    made = {
        _BIAS: rng.integers(-8, 9, (case.heads_q, longest)).astype(np.float32) / 8,
        _DOCUMENTS: np.sort(rng.integers(0, 4, longest)).astype(np.int32),
    }
    return tuple(made[described] for described in spec.aux)
