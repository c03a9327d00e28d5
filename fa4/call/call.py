"""One attention call: its tensors and options as one record, in the framework of the tensors.

The fields of `Call`, their order and their types are said here and nowhere else: the torch
operators' schemas are made from them (`operator_schema`), as are their fake results and what the
kernels are launched with. `fa4.call.checked.make_call` makes one of the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fa4.call.arrays import element_type
from fa4.config import BackwardConfig, ForwardConfig, Window

Tensor = Any  # of NumPy or torch


class Extras(NamedTuple):
    """What is neither tensor nor number; operators are given a number that stands for it."""

    score_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    forward_config: ForwardConfig | None = None
    backward_config: BackwardConfig | None = None


class Form:
    """Everything about a call but what lies in its tensors. Calls of one form share the object.

    memo: what was found out about the form, by whoever found it out.
    """

    __slots__ = ("memo",)

    def __init__(self) -> None:
        self.memo: dict[Any, Any] = {}


class Call(NamedTuple):
    """What is computed, and how.

    q is (B, Sq, Hq, d), k (B, Sk, Hk, d), v (B, Sk, Hk, dv); with cu_seqlens (total, heads, dim);
    with a page_table k and v are (pages, page_size, Hk, dim). window_*: None is unbounded, a right
    side of 0 causal. sparse_block: rows and keys of a block, or nothing. dropout_seed: None where
    nothing is dropped or none was given yet. varlen: by the varlen function? form: None while
    traced, and for callables without a hash.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    learnable_sink: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    mask_block_cnt: Tensor | None
    mask_block_idx: Tensor | None
    full_block_cnt: Tensor | None
    full_block_idx: Tensor | None
    aux_tensors: list[Tensor]
    sparse_block: list[int]
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    dropout_p: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    varlen: bool
    extras: Extras
    dropout_seed: int | None
    form: Form | None = None

    @property
    def dtype(self) -> str:
        """ "bf16", "fp16", ... of q, k and v."""
        return element_type(self.q)

    @property
    def window(self) -> Window:
        """(left, right), None for an open side."""
        return self.window_left, self.window_right

    @property
    def batch(self) -> int:
        """Number of sequences."""
        offsets = self.cu_seqlens_q
        return int(self.q.shape[0] if offsets is None else offsets.shape[0] - 1)

    @property
    def batch_k(self) -> int:
        """Number of sequences by what is given of the keys."""
        if self.page_table is not None:
            return int(self.page_table.shape[0])
        offsets = self.cu_seqlens_k
        return int(self.k.shape[0] if offsets is None else offsets.shape[0] - 1)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[-2] // self.k.shape[-2])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of O: as q, with v's head dimension."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq), or (Hq, total) of packed queries."""
        *batch, rows, heads, _ = self.q.shape
        return (*batch, heads, rows)

    @property
    def sparse_lists(self) -> tuple[Tensor | None, ...]:
        """Counts and indices of partial, then of full blocks."""
        return self.mask_block_cnt, self.mask_block_idx, self.full_block_cnt, self.full_block_idx


FIRST_OPTION = Call._fields.index("aux_tensors")
INPUTS = Call._fields[:FIRST_OPTION]  # single tensors
ARGUMENTS = Call._fields[:-1]  # of the operators

_SCHEMA_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "list[Tensor]": "Tensor[]",
    "list[int]": "SymInt[]", "float": "float", "int": "SymInt", "int | None": "SymInt?",
    "bool": "bool", "bool | None": "bool?", "Extras": "int",
}  # fmt: skip


def operator_schema() -> str:
    """The fields as arguments of a torch operator: "Tensor q, Tensor k, ..."."""
    kinds = {name: Call.__annotations__[name].__forward_arg__ for name in ARGUMENTS}
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in kinds.items())
