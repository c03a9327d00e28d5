"""The options of a call, each said once: name, default, kind, rule, what it means, since when.

The defaults and the reading of plain numbers (`fa4.call.checked`) are taken from this table.
Signatures, their docstrings, the fields of `fa4.call.call.Call` and the rows of the kernels' tables
(`fa4.compiled.support`) are written out where they are read, and tests/test_options.py holds them
to it, drop-ins and the kit too; docs/options.md is written from it. A new option is its row here,
and a line in `fa4.api`, `fa4.call.call` and `fa4.backends.request` (tests/test_stub_option.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    from fa4.call.arrays import Array
    from fa4.config import BackwardConfig, ForwardConfig, Window

    Choices: TypeAlias = (
        ForwardConfig | BackwardConfig | tuple[ForwardConfig, BackwardConfig] | None
    )

NUMBER, COUNT, FLAG = "number", "integer", "True or False"  # read as such by make_call
COUNT_OR_NONE = "integer or None"
TENSOR, TENSORS, FUNCTION = "tensor or None", "list of tensors or None", "function or None"


class DenseOptions(TypedDict, total=False):
    """The options of `flash_attn_func` for type checkers, by the names of the table below."""

    softmax_scale: float | None
    causal: bool
    window_size: Window
    learnable_sink: Array | None
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    score_mod: Callable[..., Any] | None
    score_mod_bwd: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: Sequence[Array] | None
    block_sparse_tensors: Any
    dropout_p: float
    dropout_seed: int | None
    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    config: Choices


class VarlenOptions(DenseOptions, total=False):
    """The options of `flash_attn_varlen_func`."""

    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Array | None
    seqused_k: Array | None
    page_table: Array | None


@dataclass(frozen=True, kw_only=True)
class Option:
    """One keyword of the public functions.

    kind: of its values. rule: which of them are allowed; "" if the kind says it. fields: of `Call`
    that carry it. row: of the kernels' tables; where none has it, kernels refuse the option.
    varlen: only of `flash_attn_varlen_func`. since: version of fa4. no_drop_in: why the functions
    that people switch from do not map it, "" if they do; not_drawn: why the kit does not draw it.
    """

    name: str
    default: Any
    kind: str
    doc: str
    rule: str = ""
    fields: tuple[str, ...] = ()
    row: str = ""
    varlen: bool = False
    since: str = "0.1.0"
    no_drop_in: str = ""
    not_drawn: str = ""

    @property
    def carried_by(self) -> tuple[str, ...]:
        """Fields of `Call`: its own, if no others are named."""
        return self.fields or (self.name,)

    @property
    def support_row(self) -> str:
        """Row of the kernels' tables: its own, if no other is named."""
        return self.row or self.name


def _lengths(name: str, doc: str) -> Option:
    return Option(name=name, default=None, kind=TENSOR, row="varlen", varlen=True, doc=doc,
                  rule="integers")  # fmt: skip


_EXTRAS = ("extras",)
OPTIONS = (
    _lengths("cu_seqlens_q", "(B+1,) offsets of packed queries"),
    _lengths("cu_seqlens_k", "(B+1,) offsets of packed keys"),
    Option(name="max_seqlen_q", default=None, kind=COUNT_OR_NONE, row="varlen", varlen=True,
           doc="longest sequence of queries"),
    Option(name="max_seqlen_k", default=None, kind=COUNT_OR_NONE, row="varlen", varlen=True,
           doc="longest sequence of keys"),
    _lengths("seqused_q", "(B,) used rows of each sequence of queries"),
    _lengths("seqused_k", "(B,) used rows of each sequence of keys"),
    Option(name="page_table", default=None, kind=TENSOR, varlen=True, rule="integers",
           doc="(B, pages) page of each part of a sequence"),
    Option(name="softmax_scale", default=None, kind="number or None",
           doc="factor of the scores; None means 1/sqrt(d)"),
    Option(name="causal", default=False, kind=FLAG, fields=("window_right",),
           doc="query i sees keys up to i + Sk - Sq"),
    Option(name="window_size", default=(None, None), kind="(left, right)",
           fields=("window_left", "window_right"), rule="None or -1 is unbounded",
           doc="keys visible on each side of that diagonal"),
    Option(name="learnable_sink", default=None, kind=TENSOR, rule="of shape (Hq,)",
           doc="logit per head that takes probability but has no value vector"),
    Option(name="softcap", default=0.0, kind=NUMBER, rule="0 or more, finite",
           doc="scores become softcap * tanh(score / softcap); 0 switches it off"),
    Option(name="num_splits", default=0, kind=COUNT, rule="0 to 256; 0: the kernel's choice",
           doc="parts of the KV sequence computed apart and combined"),
    Option(name="pack_gqa", default=None, kind="True, False or None",
           doc="do query heads share a kernel's tile?", not_drawn="changes no result"),
    Option(name="deterministic", default=True, kind=FLAG,
           doc="a fixed order of sums in the backward pass"),
    Option(name="score_mod", default=None, kind=FUNCTION, fields=_EXTRAS, rule="not with softcap",
           doc="changes a score"),
    Option(name="score_mod_bwd", default=None, kind=FUNCTION, fields=_EXTRAS, row="score_mod",
           doc="the gradient of score_mod"),
    Option(name="mask_mod", default=None, kind=FUNCTION, fields=_EXTRAS,
           rule="not with causal or window_size", doc="says which keys are kept"),
    Option(name="aux_tensors", default=None, kind=TENSORS, doc="handed to the callables"),
    Option(name="block_sparse_tensors", default=None, kind="BlockSparseTensors or None",
           fields=("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx",
                   "sparse_block"), rule="lists for every block of queries",
           doc="which blocks of keys are computed"),
    Option(name="dropout_p", default=0.0, kind=NUMBER, rule="0 or more, below 1",
           doc="drop probabilities by a counter-based generator"),
    Option(name="dropout_seed", default=None, kind=COUNT_OR_NONE, row="dropout_p",
           rule="0 to 2^64 - 1", doc="of that generator; without one it is drawn"),
    *(Option(name=f"{x}_descale", default=None, kind=TENSOR, row="fp8",
             doc=f"factors of an FP8 {x}", rule="of shape (B, Hk), with FP8 inputs",
             no_drop_in="flash_attn 2 and flash-attn-4 have no FP8 factors")
      for x in "qkv"),
    Option(name="config", default=None, kind="ForwardConfig, BackwardConfig or both",
           fields=_EXTRAS, doc="None: FA4's choices",
           no_drop_in="only a caller of fa4 knows them; models have a `config` of theirs"),
)  # fmt: skip
