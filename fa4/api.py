"""The public functions, with FlashAttention's names, layouts and conventions.

    impl="auto"            the kernel of the GPU that has the tensors; elsewhere the reference
                           (`fa4.call.choose`)
    impl="sm100"           the compiled kernels, on a B200 or B300
    impl="sm90"            the compiled forward kernel, on an H100 or H200
    impl="emulator"        the kernels of sm100, on the CPU
    impl="emulator_sm90"   the kernel of sm90, on the CPU
    impl="reference"       FA4's algorithm in NumPy, in the kernel's order of operations
    impl="oracle"          the definition in float64; results stay float64

Kernels take @cute.jit functions as score_mod, score_mod_bwd and mask_mod, the others Python's.
Gradients are computed by the implementation of the call. What its kernels have no gradient of is
refused when the call is made, if an input requires grad; impl="auto" then takes the reference.

Everything after v is keyword-only. Causal and windowed masks are bottom-right aligned; a window
side of None or -1 is unbounded. LSE is float32, natural logarithm, (batch, heads, seqlen) or
(heads, total). A row that sees no key has out 0 and LSE -inf (or the sink, if one is given).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from fa4.backends import AttentionGradients, Saved
from fa4.call.arrays import Array, ArrayT
from fa4.call.checked import make_call
from fa4.call.compute import AttentionOutput, attend, differentiate
from fa4.config import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fa4.call.options import Choices, DenseOptions, VarlenOptions


@overload
def flash_attn_func(
    q: ArrayT, k: Array, v: Array, *, impl: str = ..., return_lse: Literal[False] = ...,
    **options: Unpack[DenseOptions],
) -> ArrayT: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, impl: str = ..., return_lse: Literal[True],
    **options: Unpack[DenseOptions],
) -> AttentionOutput: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, impl: str = ..., return_lse: bool,
    **options: Unpack[DenseOptions],
) -> Any: ...  # fmt: skip
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Array | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = True,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Array] | None = None,
    block_sparse_tensors: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    config: Choices = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Any:
    """softmax(softmax_scale q k^T) v for q (B, Sq, Hq, d), k (B, Sk, Hk, d), v (B, Sk, Hk, dv).

    Args:
        softmax_scale: factor of the scores; None means 1/sqrt(d).
        causal: query i sees keys up to i + Sk - Sq: the window's right side is 0 in any case.
        window_size: (left, right) keys visible on each side of that diagonal.
        learnable_sink: (Hq,) logit per head that takes probability but has no value vector.
        softcap: scores become softcap * tanh(score / softcap); 0 switches it off.
        num_splits: parts of the KV sequence computed apart and combined; 0: the kernel's choice,
            by which a CTA has all keys where there is work for all SMs. A number has the same bits
            in every call.
        pack_gqa: do query heads share a kernel's tile? None: where they can. Changes no result.
        deterministic: a fixed order of sums in the backward pass, and so the same bits each time;
            False is faster. torch.use_deterministic_algorithms(True) means True in any case.
        score_mod: (score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> score.
        score_mod_bwd: (grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> grad.
        mask_mod: (batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> keep; replaces causal
            and window_size. aux_tensors: handed to the callables.
        block_sparse_tensors: `fa4.reference.BlockSparseTensors`.
        dropout_p, dropout_seed: drop probabilities by a counter-based generator. Without a seed one
            is drawn from torch's or NumPy's global generator; the result with return_lse has it as
            `dropout_seed`, for `flash_attn_backward`.
        q_descale, k_descale, v_descale: (B, Hk) factors of FP8 inputs.
        config: `fa4.ForwardConfig`, `fa4.BackwardConfig` or both; None: FA4's choices.
        impl: one of the names above; `fa4 doctor --matrix` lists what the kernels refuse.

    Returns:
        out (B, Sq, Hq, dv) in the type of q (bf16 for FP8), with torch tensors in, torch out
        (differentiable for q, k, v and learnable_sink); with return_lse an `AttentionOutput`.

    Raises:
        ValueError, TypeError; NotImplementedError for what a kernel lacks: one line, what is wrong.
    """
    options = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "learnable_sink": learnable_sink, "softcap": softcap, "num_splits": num_splits,
        "pack_gqa": pack_gqa, "deterministic": deterministic, "score_mod": score_mod,
        "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod, "aux_tensors": aux_tensors,
        "block_sparse_tensors": block_sparse_tensors, "dropout_p": dropout_p,
        "dropout_seed": dropout_seed, "q_descale": q_descale, "k_descale": k_descale,
        "v_descale": v_descale, "config": config,
    }  # fmt: skip
    return attend(make_call(q, k, v, options, varlen=False), impl, return_lse=return_lse)


@overload
def flash_attn_varlen_func(
    q: ArrayT, k: Array, v: Array, *, impl: str = ..., return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> ArrayT: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, *, impl: str = ..., return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> AttentionOutput: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, *, impl: str = ..., return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Any: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    page_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Array | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = True,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Array] | None = None,
    block_sparse_tensors: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    config: Choices = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Any:
    """`flash_attn_func` over sequences of different lengths, packed, padded or paged.

    Args:
        cu_seqlens_q, cu_seqlens_k: (B+1,) integer offsets; the tensor is then (total, heads, dim).
        max_seqlen_q, max_seqlen_k: longest sequence; checked where lengths are on the CPU. The
            kernel makes its work tiles from max_seqlen_q; without it from all rows of q, since
            looking at cu_seqlens_q would wait for the GPU. Every sequence must be within it.
        seqused_q, seqused_k: (B,) used length of each sequence; the rest of out is 0, LSE -inf.
        page_table: (B, pages) page of each part of a sequence; k and v are then
            (num_pages, page_size, Hk, dim) and seqused_k gives the lengths.

    The other arguments, results and errors are those of `flash_attn_func`; LSE is (Hq, total) for
    packed q.
    """
    options = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "seqused_q": seqused_q,
        "seqused_k": seqused_k, "page_table": page_table, "softmax_scale": softmax_scale,
        "causal": causal, "window_size": window_size, "learnable_sink": learnable_sink,
        "softcap": softcap, "num_splits": num_splits, "pack_gqa": pack_gqa,
        "deterministic": deterministic, "score_mod": score_mod, "score_mod_bwd": score_mod_bwd,
        "mask_mod": mask_mod, "aux_tensors": aux_tensors,
        "block_sparse_tensors": block_sparse_tensors, "dropout_p": dropout_p,
        "dropout_seed": dropout_seed, "q_descale": q_descale, "k_descale": k_descale,
        "v_descale": v_descale, "config": config,
    }  # fmt: skip
    return attend(make_call(q, k, v, options, varlen=True), impl, return_lse=return_lse)


def flash_attn_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    out_residual: Array | None = None,
    impl: str = "auto",
    **options: Unpack[DenseOptions],
) -> AttentionGradients:
    """AttentionGradients of a dense call from its saved out and lse.

    Args:
        dout: gradient of out, (B, Sq, Hq, dv), in out's type and of any strides.
        q, k, v: of the call.
        out, lse: what the call returned with return_lse=True: (B, Sq, Hq, dv), and (B, Hq, Sq) in
            float32. impl="oracle" computes both again in float64.
        dlse: gradient of lse, (B, Hq, Sq); None if there is none.
        out_residual: what rounding took from out, (B, Sq, Hq, dv) in its type, of a forward pass
            that had more bits: D = rowsum(dO (O + residual)). None if nobody kept it.
        impl: as in `flash_attn_func`; options: the call's. A call with dropout needs its
            dropout_seed; gradients through a score_mod need its score_mod_bwd.

    Returns:
        `AttentionGradients(dq, dk, dv, dsink)` in the layouts of their inputs, and with kernels in
        their types; dsink is None without a learnable_sink. Rows of no sequence get 0.

    Raises:
        TypeError, ValueError for what is missing or not of the call (shape, type, device; on the
        CPU also an LSE that is NaN or infinite where rows see keys); NotImplementedError for what
        a kernel lacks: one line, nothing launched, nothing overwritten.
    """
    call = make_call(q, k, v, options, varlen=False)
    return differentiate(call, Saved(out, lse, out_residual), dout, dlse, impl)


def flash_attn_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    out_residual: Array | None = None,
    impl: str = "auto",
    **options: Unpack[VarlenOptions],
) -> AttentionGradients:
    """`flash_attn_backward` for `flash_attn_varlen_func`.

    Of packed queries dout, out and out_residual are (total, Hq, dv), lse and dlse (Hq, total).
    What lies in rows of no sequence is not looked at; their gradients are 0. With a page_table,
    which the kernels lack, dk and dv are paged as k and v are.
    """
    call = make_call(q, k, v, options, varlen=True)
    return differentiate(call, Saved(out, lse, out_residual), dout, dlse, impl)
