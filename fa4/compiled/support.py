"""What the kernels can do, a table for each: it is printed, and every call is checked against it.

A call that a row refuses raises `NotSupported` before anything is compiled. The tables need neither
CuTe-DSL nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fa4.call.options import OPTIONS, Option
from fa4.config import BackwardConfig, ForwardConfig, Window
from fa4.designs import designs
from fa4.designs.design import named
from fa4.kit.units import AUX_DTYPES, TILE_ROWS
from fa4.masks import MASKS, IntervalMask

MOST_ROWS = 2**31 - 1  # positions are 32-bit, offsets 64-bit
FAMILIES = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}  # of kernels, by arch


class NotSupported(NotImplementedError):
    """The kernel does not do what a call asks for; `feature` names the table's row."""

    def __init__(self, feature: str, message: str) -> None:
        super().__init__(message)
        self.feature = feature


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """What a call asks of the forward kernel: sizes and options, no tensors.

    rows_q, rows_k: sequence lengths, or all rows of a packed tensor, whose longest sequence has
    max_seqlen_q rows or less (None: not known). batch: sequences. packed_q, packed_k: cu_seqlens
    are given; used_q, used_k: seqused are. aux: element type and rank of each auxiliary tensor.
    numerics: None for the tuned ones. descale: letters of those of q, k and v that have factors.
    The fields from `dropout_p` on are options that some kernel here does not have. others: names of
    given options that no table has a row of.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    heads_q: int
    heads_k: int
    batch: int
    rows_q: int
    rows_k: int
    max_seqlen_q: int | None = None
    softmax_scale: float = 1.0
    window: Window = (None, None)
    lse: bool = True
    sink: bool = False
    softcap: float = 0.0
    packed_q: bool = False
    packed_k: bool = False
    used_q: bool = False
    used_k: bool = False
    pack_gqa: bool | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux: tuple[tuple[str, int], ...] = ()
    numerics: ForwardConfig | None = None
    dropout_p: float = 0.0
    num_splits: int = 1
    paged: bool = False
    block_sparse: bool = False
    descale: str = ""
    others: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_k

    @property
    def longest_q(self) -> int:
        """Rows of the longest sequence of queries, or more."""
        if not self.packed_q or self.max_seqlen_q is None:
            return self.rows_q
        return min(self.rows_q, self.max_seqlen_q)

    @property
    def varlen(self) -> str:
        """Which lengths are given by tensors; empty if none are."""
        given = {"cu_seqlens_q": self.packed_q, "cu_seqlens_k": self.packed_k,
                 "seqused_q": self.used_q, "seqused_k": self.used_k}  # fmt: skip
        return ", ".join(name for name, is_given in given.items() if is_given)

    @property
    def is_empty(self) -> bool:
        """Is there no query, or no key at all: nothing to launch?"""
        return not (self.batch and self.rows_q and self.rows_k)


@dataclass(frozen=True, kw_only=True)
class BackwardCall(ForwardCall):
    """What a call asks of the backward kernels: that, and what only they look at.

    lse_gradient: is there a gradient of the LSE? out_residual: is O's rounding error given? order:
    None for the kernel's own.
    """

    max_seqlen_k: int | None = None
    lse_gradient: bool = False
    out_residual: bool = False
    deterministic: bool = True
    score_mod_bwd: Callable[..., Any] | None = None
    order: BackwardConfig | None = None

    @property
    def longest_k(self) -> int:
        """Rows of the longest sequence of keys, or more."""
        if not self.packed_k or self.max_seqlen_k is None:
            return self.rows_k
        return min(self.rows_k, self.max_seqlen_k)


@dataclass(frozen=True)
class Feature:
    """One row. detail: limits, or why it is refused. refused: what of a call it refuses, or None.

    supported False: the row is there to refuse.
    """

    name: str
    supported: bool
    detail: str
    refused: Callable[[Any], object] = lambda call: None


def _when(condition: object, value: object) -> object:
    return value if condition else None


def _dims_beyond(call: ForwardCall, most: int, *others: tuple[int, int]) -> object:
    """Head dims that are neither multiples of 8 up to `most` nor one of `others`."""
    dims = (call.head_dim, call.head_dim_v)
    fits = dims in others or all(8 <= dim <= most and dim % 8 == 0 for dim in dims)
    return _when(not fits, f"(d, dv) = {dims}")


def _wrong_gradient_of_mod(call: BackwardCall) -> object:
    """score_mod comes with its derivative, and both are functions of a kernel."""
    if (call.score_mod is None) != (call.score_mod_bwd is None):
        return "score_mod without score_mod_bwd" if call.score_mod else "score_mod_bwd alone"
    return _python_only(call.score_mod) or _python_only(call.score_mod_bwd)


def _wrong_order(call: BackwardCall) -> object:
    """A BackwardConfig has nothing that the kernel leaves open."""
    config, own = call.order, BackwardConfig()
    names = ("tile_m", "tile_n", "cta_group", "dq_order", "seed")
    wrong = [f"{name} = {getattr(config, name)}" for name in names
             if config is not None and getattr(config, name) != getattr(own, name)]  # fmt: skip
    return wrong[0] if wrong else None


def _python_only(function: Callable[..., Any] | None) -> object:
    wrong = function is not None and not is_device_function(function)
    return _when(wrong, getattr(function, "__name__", ""))


def _python_mask(mask: Callable[..., Any] | None) -> object:
    return None if isinstance(mask, IntervalMask) else _python_only(mask)


def _wrong_aux(call: ForwardCall) -> object:
    wrong = [aux for aux in call.aux if aux[0] not in AUX_DTYPES or not 1 <= aux[1] <= 5]
    return _when(wrong, f"{wrong[0][0]} of rank {wrong[0][1]}" if wrong else "")


def _kernels_of(family: str) -> tuple[str, ...]:
    """Names of the forward kernels of a family that run."""
    found = [one for one in designs() if not one.backward and one.compiled is not None]
    return tuple(one.kernel for one in found if one.compiled and one.compiled.family == family)


def _wrong_tiles(call: ForwardCall, family: str = "sm100", **own: float) -> object:
    """The parts of a ForwardConfig that the kernel has no freedom in; own: more of them."""
    config = call.numerics
    if config is None:
        return None
    fixed = {"tile_m": TILE_ROWS, "tile_n": TILE_ROWS, "rescale_rows": 1, "p_offset_log2": 0.0}
    fixed |= own
    kernels = ("", *_kernels_of(family))
    if config.kernel not in kernels:
        return f"kernel = {config.kernel!r}, of {', '.join(kernels[1:])}"
    wrong = [f"{name} = {getattr(config, name)}" for name, value in fixed.items()
             if getattr(config, name) != value]  # fmt: skip
    return wrong[0] if wrong else None


FORWARD: tuple[Feature, ...] = (
    Feature("bf16, fp16", True, "O in the same type, LSE in float32"),
    Feature(
        "fp8", False, "products of 16-bit types only",
        lambda c: _when(c.dtype in ("e4m3", "e5m2") or c.descale, c.dtype),
    ),
    Feature(
        "fp32, fp64", False, "the tensor core has no such product: convert to bf16 or fp16",
        lambda c: _when(c.dtype in ("fp32", "fp64"), c.dtype),
    ),
    Feature(
        "head dimensions", True, "d and dv each a multiple of 8 up to 128, or d 192 with dv 128",
        lambda c: _dims_beyond(c, 128, (192, 128)),
    ),
    Feature(
        "sequence lengths", True, "any, empty ones too; a tensor has less than 2^31 rows",
        lambda c: _when(max(c.rows_q, c.rows_k) > MOST_ROWS, max(c.rows_q, c.rows_k)),
    ),
    Feature("softmax_scale", True, "positive",
            lambda c: _when(not c.softmax_scale > 0, c.softmax_scale)),
    Feature("causal", True, "bottom-right aligned; makes the window's right side 0"),
    Feature("window_size", True, "each side at run time"),
    Feature("grouped-query heads", True, "heads_q a multiple of heads_k"),
    Feature(
        "pack_gqa", True, "if heads_q / heads_k divides 128; by default wherever it does",
        lambda c: _when(c.pack_gqa and TILE_ROWS % c.group, f"{c.heads_q} on {c.heads_k} heads"),
    ),
    Feature("varlen", True, "cu_seqlens and seqused, of queries and keys independently"),
    Feature("learnable_sink", True, "one logit per query head"),
    Feature("return_lse", True, "natural logarithm"),
    Feature("softcap", True, "any positive number at run time"),
    Feature("score_mod", True, "a CuTe-DSL function (@cute.jit)",
            lambda c: _python_only(c.score_mod)),
    Feature("mask_mod", True, "a CuTe-DSL function (@cute.jit), or a mask of `fa4.masks`: "
            + ", ".join(kind.__name__ for kind in MASKS),
            lambda c: _python_mask(c.mask_mod)),
    Feature("aux_tensors", True, "fp32, bf16, fp16 or int32, of rank 1 to 5", _wrong_aux),
    Feature("NaN, inf in hidden K", True, "keys that no row sees may hold anything"),
    Feature("NaN, inf in hidden V", False,
            "0 * NaN: what a mask or window hides in a loaded tile reaches every row of the tile"),
    Feature("strides", True, "last dimension contiguous, the others multiples of 16 bytes"),
    Feature(
        "config", True,
        "q_tiles, threshold, emulated exponentials and the kernel; 128 x 128 tiles, by row",
        _wrong_tiles,
    ),
    Feature("CTA pairs", True, "chosen for long unmasked sequences with d 128 or 192"),
    Feature("dropout_p", False, "no random numbers in the kernel",
            lambda c: _when(c.dropout_p, c.dropout_p)),
    Feature("num_splits", False, "one CTA computes all keys of a query",
            lambda c: _when(c.num_splits > 1, c.num_splits)),
    Feature("page_table", False, "keys and values in one tensor, not in pages",
            lambda c: _when(c.paged, "a page_table")),
    Feature("block_sparse_tensors", False, "every KV tile that the mask shows is computed",
            lambda c: _when(c.block_sparse, "block_sparse_tensors")),
)  # fmt: skip


# With halves the kernel does the same calls.
HALVES: tuple[Feature, ...] = FORWARD

_FORWARD_ONLY = ("pack_gqa", "CTA pairs", "return_lse", "num_splits")
_BACKWARD_OWN = (
    Feature("bf16, fp16", True, "gradients in the types of their inputs"),
    Feature("learnable_sink", True, "dsink in its type"),
    Feature("score_mod", True, "with its score_mod_bwd, both CuTe-DSL functions (@cute.jit)",
            _wrong_gradient_of_mod),
    Feature("NaN, inf in hidden K", False, "0 * NaN: it reaches dQ of every row of a loaded tile"),
    Feature("config", True, "128 x 128 tiles; `deterministic` says the order of sums",
            _wrong_order),
    Feature("gradients", True, "of q, k, v and learnable_sink"),
    Feature("gradient of the LSE", True, "float32"),
    Feature("out_residual", True, "what rounding took from O, in its type"),
    Feature("CTA pairs", True, "(d, dv) = (128, 128), from two KV tiles on, and (192, 128)"),
    Feature("deterministic", True, "the same bits in every launch; False is faster"),
    Feature("strides of dO", True, "any: what TMA cannot address is copied"),
)  # fmt: skip


def _backward_rows() -> Iterator[Feature]:
    """The forward kernel's rows that hold for the backward kernels too, and their own."""
    own = {row.name: row for row in _BACKWARD_OWN}
    for row in FORWARD:
        if row.name not in _FORWARD_ONLY:
            yield own.pop(row.name, row)
    yield from own.values()


BACKWARD: tuple[Feature, ...] = tuple(_backward_rows())

NARROW = ("e4m3", "e5m2")


def _own_offset(call: ForwardCall) -> dict[str, float]:
    """The power of two that P bears is free with 8-bit types."""
    free = call.numerics is not None and call.dtype in NARROW
    return {"p_offset_log2": call.numerics.p_offset_log2} if free and call.numerics else {}


def _wrong_narrow(call: ForwardCall) -> object:
    """What the kernel of 16-bit types does and that of 8-bit types does not."""
    if call.dtype not in NARROW:
        return _when(call.descale, f"factors of {call.descale} in {call.dtype}")
    dims = call.head_dim, call.head_dim_v
    splits = _when(call.num_splits > 1, f"num_splits = {call.num_splits}")
    return _when(any(dim % 16 for dim in dims), f"(d, dv) = {dims}") or splits


_SM90_OWN = (
    Feature(
        "fp8", True,
        "e4m3 or e5m2, O in bf16, factors (B, Hk) of each of q, k and v; d and dv multiples of 16; "
        "no num_splits",
        _wrong_narrow,
    ),
    Feature("num_splits", True, "1 to 256 parts of the keys, 0 for as many as pay; a second kernel "
            "adds them in order"),
    Feature("head dimensions", True, "d and dv each a multiple of 8 up to 256",
            lambda c: _dims_beyond(c, 256)),
    Feature("pack_gqa", True, "any heads_q / heads_k, above 64 in several tiles or in parts; by "
            "default as takes least time"),
    Feature(
        "config", True, "threshold and emulated exponentials, by row; tiles are the kernel's own",
        lambda c: _wrong_tiles(c, "sm90", q_tiles=ForwardConfig().q_tiles, **_own_offset(c)),
    ),
)  # fmt: skip


def _sm90_rows() -> Iterator[Feature]:
    """The SM100 forward kernel's rows that hold for Hopper's too, and its own."""
    own = {row.name: row for row in _SM90_OWN}
    for row in FORWARD:
        if row.name != "CTA pairs":
            yield own.get(row.name, row)


SM90: tuple[Feature, ...] = tuple(_sm90_rows())

_SM90_BACKWARD_OWN = (
    Feature("head dimensions", True, "d and dv each a multiple of 8 up to 256",
            lambda c: _dims_beyond(c, 256)),
    Feature("config", True, "tiles are the kernel's own; `deterministic` says the order of sums",
            _wrong_order),
)  # fmt: skip


def _sm90_backward_rows() -> Iterator[Feature]:
    """The SM100 backward kernels' rows that hold for Hopper's too, and its own."""
    own = {row.name: row for row in _SM90_BACKWARD_OWN}
    for row in BACKWARD:
        if row.name != "CTA pairs":
            yield own.get(row.name, row)


SM90_BACKWARD: tuple[Feature, ...] = tuple(_sm90_backward_rows())


def options_without_row(*tables: Iterable[Feature]) -> tuple[Option, ...]:
    """The options of a call that have a row in none of some tables."""
    rows = {row.name for table in tables for row in table}
    return tuple(option for option in OPTIONS if option.support_row not in rows)


# What no kernel knows of yet is refused by all of them.
UNKNOWN = options_without_row(FORWARD, BACKWARD)


def _refusal(option: Option) -> Feature:
    return Feature(option.name, False, "no kernel has it",
                   lambda call: _when(option.name in call.others, option.name))  # fmt: skip


_REFUSED = tuple(_refusal(option) for option in UNKNOWN)

# By family and pass.
TABLES = {
    "sm100": FORWARD + _REFUSED,
    "sm100 backward": BACKWARD + _REFUSED,
    "sm90": SM90 + _REFUSED,
    "sm90 backward": SM90_BACKWARD + _REFUSED,
}


def is_device_function(function: Callable[..., Any]) -> bool:
    """Is it a CuTe-DSL function, which a kernel can call? Those of cute.jit wrap the user's."""
    wrapped = getattr(function, "__wrapped__", None)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return wrapped is not None and module.partition(".")[0] == "cutlass"


def check(call: ForwardCall, family: str = "sm100") -> None:
    """Raises NotSupported, with the row's reason, if the kernels of a family do not do a call."""
    name = family + " backward" * isinstance(call, BackwardCall)
    for feature in TABLES[name]:
        value = feature.refused(call)
        if value is not None:
            title = f"{name.replace('sm', 'SM')} kernel"
            raise NotSupported(
                feature.name, f"{title}, {feature.name}: {feature.detail}; got {value}"
            )


def columns() -> dict[str, tuple[Feature, ...]]:
    """The columns of the matrix: title -> rows, as the kernels' records name them."""
    compiled = [one.compiled for one in designs() if one.compiled is not None]
    return {one.column: named(one.support) + _REFUSED for one in compiled}


def describe_support() -> list[dict[str, Any]]:
    """The tables as plain data, one row per feature; None where a kernel has no such row.

    detail: what is said of the first kernel that has the row, and where the others differ.
    """
    tables = {column: {row.name: row for row in rows} for column, rows in columns().items()}
    names = dict.fromkeys(name for rows in tables.values() for name in rows)
    return [
        {
            "feature": name,
            **{
                column: rows[name].supported if name in rows else None
                for column, rows in tables.items()
            },
            "detail": _details(
                {c: rows[name].detail for c, rows in tables.items() if name in rows}
            ),
        }
        for name in names
    ]


def _details(found: dict[str, str]) -> str:
    first, *others = dict.fromkeys(found.values())
    named = (f"{', '.join(c for c in found if found[c] == text)}: {text}" for text in others)
    return "; ".join([first, *named])
