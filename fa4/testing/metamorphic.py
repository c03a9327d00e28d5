"""Relations between calls: what must stay equal when inputs change in a known way.

The back end is compared with itself, within the sum of the budgets of both calls; the oracle only
says how large these are. `fa4.testing.relations` says what each is checked on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa4.testing.backends import Backend
from fa4.testing.budget import expect_forward, lse_type_of
from fa4.testing.case import Case
from fa4.testing.inputs import Inputs, dense_inputs
from fa4.testing.layouts import build_inputs

FloatArray = np.ndarray


@dataclass(frozen=True)
class DenseRun:
    """A dense call: out (B, Sq, Hq, dv), lse (B, Hq, Sq) or None in float64, and their budgets."""

    inputs: Inputs
    out: FloatArray
    lse: FloatArray | None
    out_allowed: FloatArray
    lse_allowed: FloatArray


def run(backend: Backend, inputs: Inputs) -> DenseRun:
    """Call the back end on dense inputs (at least one batch entry) and fetch the budgets."""
    outputs = backend.forward(inputs)
    lse_type = None if outputs.lse is None else lse_type_of(outputs.lse)
    expected = expect_forward(inputs, lse_type, backend.numerics)
    return DenseRun(
        inputs,
        outputs.out.astype(np.float64),
        None if outputs.lse is None else outputs.lse.astype(np.float64),
        np.stack(expected["out"].allowed),
        np.stack(expected["lse"].allowed),
    )


def rerun(backend: Backend, first: DenseRun, **changes: Any) -> DenseRun:
    """The call again with other q, k, v or options; an option set to None is left out."""
    arrays = [changes.pop(name, getattr(first.inputs, name)) for name in ("q", "k", "v")]
    options = {k: v for k, v in (first.inputs.options | changes).items() if v is not None}
    return run(backend, dense_inputs(*arrays, **options))


def agree(label: str, a: FloatArray, b: FloatArray, allowed: FloatArray) -> float:
    """The largest share of `allowed` that a and b differ by; AssertionError if above 1 or NaN."""
    if a.size == 0:
        return 0.0
    with np.errstate(all="ignore"):  # where nothing is allowed
        error = np.where(a == b, 0.0, np.abs(a - b))
        share = np.where(error == 0, 0.0, error / allowed)
    share = np.where(np.isnan(share) | np.isinf(error), np.inf, share)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape))
    if share[at] > 1.0:
        raise AssertionError(
            f"{label}[{', '.join(map(str, at))}]: {a[at]:.9g} and {b[at]:.9g} differ by "
            f"{error[at]:.3g}, allowed {np.broadcast_to(allowed, a.shape)[at]:.3g}"
        )
    return float(share[at])


def same(a: DenseRun, b: DenseRun, pick: Callable[[FloatArray], FloatArray] = lambda x: x) -> float:
    """Both outputs of two calls agree; `pick` maps b's arrays (rows second) onto a's."""
    share = agree("out", a.out, pick(b.out), a.out_allowed + pick(b.out_allowed))
    return max(share, same_lse(a, b, pick))


def same_lse(
    a: DenseRun, b: DenseRun, pick: Callable[[FloatArray], FloatArray] = lambda x: x
) -> float:
    """As `same`, of the LSE alone; 0 where one of the calls has none."""
    if a.lse is None or b.lse is None:
        return 0.0
    lse, lse_allowed = (pick(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (b.lse, b.lse_allowed))
    return agree("lse", a.lse, lse, a.lse_allowed + lse_allowed)


def _order(case: Case, size: int) -> np.ndarray:
    return np.random.default_rng([case.seed, 5]).permutation(size)


def kv_permutation(backend: Backend, case: Case) -> float:
    """Keys and values in another order."""
    a = run(backend, build_inputs(case))
    order = _order(case, case.seqlen_k)
    return same(a, rerun(backend, a, k=a.inputs.k[:, order], v=a.inputs.v[:, order]))


def query_permutation(backend: Backend, case: Case) -> float:
    """Rows in another order."""
    a = run(backend, build_inputs(case))
    order = _order(case, case.seqlen_q)
    back = np.argsort(order)
    return same(a, rerun(backend, a, q=a.inputs.q[:, order]), lambda x: x[:, back])


def batch_permutation(backend: Backend, case: Case) -> float:
    """Batch entries in another order, and each alone."""
    a = run(backend, build_inputs(case))
    order = _order(case, case.batch)
    back = np.argsort(order)
    moved = [x[order] for x in (a.inputs.q, a.inputs.k, a.inputs.v)]
    share = same(a, run(backend, dense_inputs(*moved, **a.inputs.options)), lambda x: x[back])
    alone = [x[:1] for x in (a.inputs.q, a.inputs.k, a.inputs.v)]
    one = run(backend, dense_inputs(*alone, **a.inputs.options))
    first = replace(
        a, out=a.out[:1], lse=None if a.lse is None else a.lse[:1],
        out_allowed=a.out_allowed[:1], lse_allowed=a.lse_allowed[:1],
    )  # fmt: skip
    return max(share, same(first, one))


def head_permutation(backend: Backend, case: Case) -> float:
    """KV heads, each with its group of query heads, in another order."""
    a = run(backend, build_inputs(case))
    order = _order(case, case.heads_k)
    rows = (order[:, None] * case.group + np.arange(case.group)).ravel()
    back = np.argsort(rows)
    moved = rerun(
        backend, a, q=a.inputs.q[:, :, rows], k=a.inputs.k[:, :, order], v=a.inputs.v[:, :, order]
    )
    share = agree(
        "out", a.out, moved.out[:, :, back], a.out_allowed + moved.out_allowed[:, :, back]
    )
    if a.lse is None or moved.lse is None:
        return share
    allowed = a.lse_allowed + moved.lse_allowed[:, back]
    return max(share, agree("lse", a.lse, moved.lse[:, back], allowed))


def gqa_repeats(backend: Backend, case: Case) -> float:
    """Grouped heads equal K and V repeated for every query head."""
    a = run(backend, build_inputs(case))
    k, v = (np.repeat(x, case.group, axis=2) for x in (a.inputs.k, a.inputs.v))
    return same(a, rerun(backend, a, k=k, v=v))


def v_linearity(backend: Backend, case: Case) -> float:
    """attention(v1 + v2) = attention(v1) + attention(v2); the sums of the inputs are exact. V does
    not enter the LSE."""
    a = run(backend, build_inputs(case))
    other = build_inputs(replace(case, seed=case.seed + 1)).v
    total = (a.inputs.v.astype(np.float64) + other.astype(np.float64)).astype(other.dtype)
    b, c = rerun(backend, a, v=other), rerun(backend, a, v=total)
    share = agree("out", a.out + b.out, c.out, a.out_allowed + b.out_allowed + c.out_allowed)
    return max(share, same_lse(a, b), same_lse(a, c))


def kv_concatenation(backend: Backend, case: Case) -> float:
    """Attention over two parts of the keys, merged by their LSE, is attention over all of them."""
    a = run(backend, build_inputs(case))
    cut = int(np.random.default_rng([case.seed, 6]).integers(0, case.seqlen_k + 1))
    k, v = a.inputs.k, a.inputs.v
    parts = [
        rerun(backend, a, k=np.ascontiguousarray(x), v=np.ascontiguousarray(y))
        for x, y in ((k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:]))
    ]
    first, second = (part.lse for part in parts)
    if a.lse is None or first is None or second is None:
        raise backend.missing("lse", "returns no LSE")
    merged = np.logaddexp(first, second)
    errors = parts[0].lse_allowed + parts[1].lse_allowed
    share = agree("lse", a.lse, merged, a.lse_allowed + errors)
    out, allowed = np.zeros_like(a.out), a.out_allowed.copy()
    for part, lse in zip(parts, (first, second), strict=True):
        weight = np.exp(lse - merged).swapaxes(1, 2)[..., None]
        slack = np.expm1(2 * errors).swapaxes(1, 2)[..., None]
        out += weight * part.out
        allowed += weight * (part.out_allowed + slack * np.abs(part.out))
    return max(share, agree("out", a.out, out, allowed))


def padding(backend: Backend, case: Case) -> float:
    """Unused rows behind the used ones (seqused) change nothing for the used ones."""
    inputs = build_inputs(case)
    outputs = backend.forward(inputs)
    outs = inputs.split_rows(outputs.out)
    lses = [None] * len(outs) if outputs.lse is None else inputs.split_lse(outputs.lse)
    share = 0.0
    for seq, out, lse in zip(inputs.sequences, outs, lses, strict=True):
        dense = dense_inputs(seq.q[None], seq.k[None], seq.v[None], **build_dense_options(case))
        alone = run(backend, dense)
        found = replace(
            alone,
            out=out.astype(np.float64)[None],
            lse=None if lse is None else lse.astype(np.float64)[None],
        )
        share = max(share, same(found, alone))
    return share


def build_dense_options(case: Case) -> dict[str, Any]:
    """The options of a case without its layout."""
    return dict(build_inputs(replace(case, layout="dense", lengths=())).options)


def causal_prefix(backend: Backend, case: Case) -> float:
    """Under the causal mask, the first rows of a problem are a shorter problem of their own."""
    a = run(backend, build_inputs(case))
    drop = int(np.random.default_rng([case.seed, 6]).integers(0, min(case.seqlen_q, case.seqlen_k)))
    rows, keys = case.seqlen_q - drop, case.seqlen_k - drop
    q, k, v = a.inputs.q[:, :rows], a.inputs.k[:, :keys], a.inputs.v[:, :keys]
    b = rerun(backend, a, q=q.copy(), k=k.copy(), v=v.copy())
    return same(b, a, lambda x: x[:, :rows])


def decode_row(backend: Backend, case: Case) -> float:
    """The last row of a causal problem is the problem with that query alone."""
    a = run(backend, build_inputs(case))
    b = rerun(backend, a, q=a.inputs.q[:, -1:].copy())
    return same(b, a, lambda x: x[:, -1:])


def keys_outside_window(backend: Backend, case: Case) -> float:
    """Keys put in front of a left window's reach change nothing."""
    inputs = build_inputs(case)
    a = run(backend, inputs)
    extra = build_inputs(replace(case, seed=case.seed + 1))
    k, v = (np.concatenate([x, y], axis=1) for x, y in ((extra.k, inputs.k), (extra.v, inputs.v)))
    return same(a, rerun(backend, a, k=k, v=v))


def logit_shift(backend: Backend, case: Case) -> float:
    """The same vector w added to every key shifts the logits of row i by scale q_i w."""
    a = run(backend, build_inputs(case))
    rng = np.random.default_rng([case.seed, 6])
    shift = rng.integers(-4, 5, (1, 1, case.heads_k, case.head_dim)) / 4.0
    k = (a.inputs.k.astype(np.float64) + shift).astype(a.inputs.k.dtype)
    b = rerun(backend, a, k=k)
    share = agree("out", a.out, b.out, a.out_allowed + b.out_allowed)
    if a.lse is None or b.lse is None:
        return share
    moved = np.repeat(shift, case.group, axis=2) * a.inputs.q.astype(np.float64)
    raised = a.lse + case.scale * moved.sum(axis=-1).swapaxes(1, 2)
    return max(share, agree("lse", raised, b.lse, a.lse_allowed + b.lse_allowed))


def q_scale(backend: Backend, case: Case) -> float:
    """q twice as large with half the softmax_scale."""
    a = run(backend, build_inputs(case))
    doubled = (2.0 * a.inputs.q.astype(np.float64)).astype(a.inputs.q.dtype)
    return same(a, rerun(backend, a, q=doubled, softmax_scale=case.scale / 2))


def plan_invariance(backend: Backend, case: Case) -> float:
    """Splits, tile sizes and the rescaling threshold do not change the result."""
    a = run(backend, build_inputs(case))
    plain = build_inputs(replace(case, num_splits=1, tiles=None, tau=None))
    return same(a, run(backend, plain))


def constant_v(backend: Backend, case: Case) -> float:
    """If all values of a head are the same, so is every row of the output."""
    inputs = build_inputs(case)
    first = np.repeat(inputs.v[:, :1], case.seqlen_k, axis=1)
    a = run(backend, replace_v(inputs, first))
    expected = np.repeat(first[:, :1].astype(np.float64), case.group, axis=2)
    expected = np.broadcast_to(expected, a.out.shape)
    return agree("out", a.out, expected, a.out_allowed)


def replace_v(inputs: Inputs, v: FloatArray) -> Inputs:
    """Dense inputs with other values."""
    return dense_inputs(inputs.q, inputs.k, v, **inputs.options)


def convexity(backend: Backend, case: Case) -> float:
    """Every output lies between the least and the largest value that its row sees."""
    a = run(backend, build_inputs(case))
    v = np.repeat(a.inputs.v.astype(np.float64), case.group, axis=2)
    least, most = v.min(axis=1, keepdims=True), v.max(axis=1, keepdims=True)
    return agree("out", a.out, np.clip(a.out, least, most), a.out_allowed)


def window_spellings(backend: Backend, case: Case) -> float:
    """causal, (None, 0), (-1, 0) and a window as wide as the sequence are one mask."""
    a = run(backend, build_inputs(case))
    wide = case.seqlen_q + case.seqlen_k
    return max(
        same(a, rerun(backend, a, causal=None, window_size=window))
        for window in ((None, 0), (-1, 0), (wide, 0), (case.seqlen_k - 1, 0))
    )


def lse_requested(backend: Backend, case: Case) -> float:
    """out is bitwise the same whether the LSE is asked for or not."""
    inputs = build_inputs(case)
    with_lse = backend.forward(inputs).out
    arrays = (inputs.q, inputs.k, inputs.v)
    result = backend.call(backend.function, *arrays, return_lse=False, **inputs.options)
    alone = result[0] if isinstance(result, tuple) else result
    with_lse, alone = (np.asarray(x).astype(np.float64) for x in (with_lse, alone))
    return agree("out", with_lse, alone, np.zeros_like(with_lse))
