"""Examples without the tensor core, and the state-space kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lab.foreign import example
from tests.conformance.program import (
    NUMPY_TYPES,
    Arrays,
    Program,
    array_of,
    compare,
    exactly,
    normal,
    tensor_of,
)


def rmsnorm(rows: int, columns: int, dtype: str) -> Program:
    """rmsnorm: each row divided by its root mean square, times a weight.

    More than 1024 columns take several warps for a row, more than 16384 (32768 for Float32) a
    cluster.
    """
    x, weight = normal((rows, columns), dtype, 0), normal((columns,), dtype, 1)
    tensors = [tensor_of(a) for a in (x, weight, np.zeros_like(x))]

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        from cutlass.cute.runtime import make_ptr

        module = example("blackwell/rmsnorm.py")
        kind, stream = getattr(cutlass, dtype), cutlass.torch.default_stream()
        compiled = module.get_compiled_kernel(kind, columns, True, stream)
        pointers = [make_ptr(kind, tensor.data_ptr()) for tensor in tensors]
        compiled(*pointers, cutlass.Int32(rows), cutlass.Float32(_EPSILON), stream)
        return {"out": array_of(tensors[2])}

    exact = _rmsnorm(x.astype(np.float64), weight.astype(np.float64))
    plain = _rmsnorm(x.astype(np.float32), weight.astype(np.float32)).astype(NUMPY_TYPES[dtype])
    return Program(run, lambda found: compare(found, {"out": exact}, {"out": plain}))


_EPSILON = 1e-6


def _rmsnorm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    mean = (x * x).mean(-1, keepdims=True)
    return x / np.sqrt(mean + x.dtype.type(_EPSILON)) * weight


def row_maxima(rows: int, threads_per_row: int, cluster: int) -> Program:
    """reduce: the functions for rows that span threads, warps and CTAs, in a kernel of ours."""
    columns = 4 * threads_per_row * cluster
    x = normal((rows, columns), "Float32", 0)
    tensors = [tensor_of(x), tensor_of(np.zeros((rows, cluster), np.float32))]
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass.torch
        from cutlass import cute
        from cutlass.cute.runtime import from_dlpack

        from tests.conformance import kernels

        views = [from_dlpack(tensor) for tensor in tensors]
        stream = cutlass.torch.default_stream()
        if not compiled:
            shape = (threads_per_row, rows // 2, cluster)
            compiled.append(cute.compile(kernels.row_maxima, *views, *shape, stream))
        tensors[1].zero_()
        compiled[0](*views, stream)
        return {"maxima": array_of(tensors[1])}

    maxima = np.repeat(x.max(-1, keepdims=True), cluster, -1).astype(np.float64)
    return Program(run, exactly({"maxima": maxima}))


def dependent_launch(rows: int, columns: int) -> Program:
    """programmatic_dependent_launch: w = u + v, then y = w + x, which may start before w is there.

    The two calls are made back to back, so that the launches overlap.
    """
    u, v, x = (normal((rows, columns), "Float32", seed) for seed in range(3))
    w = np.zeros_like(u)
    tensors = [tensor_of(a) for a in (u, v, w, x, w)]
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cuda.bindings.driver as cuda
        from cutlass import cute
        from cutlass.cute.runtime import from_dlpack

        module = example("blackwell/programmatic_dependent_launch.py")
        stream = cuda.CUstream(0)
        operands = (tensors[:3], tensors[2:])
        if not compiled:
            for first, given in zip((True, False), operands, strict=True):
                views = [from_dlpack(tensor).mark_layout_dynamic() for tensor in given]
                compiled.append(
                    cute.compile(
                        module.elementwise_add,
                        *views,
                        stream,
                        True,
                        is_first_kernel=first,
                        options="--enable-tvm-ffi",
                    )
                )
        for output in (tensors[2], tensors[4]):
            output.zero_()
        with session.back_to_back():
            for call, given in zip(compiled, operands, strict=True):
                call(*given, stream)
        return {"w": array_of(tensors[2]), "y": array_of(tensors[4])}

    return Program(run, exactly({"w": (u + v).astype(np.float64), "y": (u + v + x).astype(float)}))


def mamba2_ssd(batch: int, groups: int, heads: int, chunks: int, weighted: bool) -> Program:
    """mamba2_ssd: the state-space recurrence over chunks of 128 steps, head dim 64, state 128.

    heads: of each group. weighted: with the term D x. Its work tiles go to two CTAs.
    """
    steps, dim, state = 128, 64, 128
    count = groups * heads
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return 0.5 * rng.standard_normal(shape)

    half = ml_dtypes.bfloat16
    # In the order of memory: batch and heads outermost, steps innermost.
    x = drawn(batch, count, dim, chunks, steps).astype(half)
    delta = np.log1p(np.exp(drawn(batch, count, chunks, steps) - 4)).astype(half)
    a = -np.exp(drawn(count)).astype(half).astype(np.float64)
    b, c = (drawn(batch, groups, state, chunks, steps).astype(half) for _ in range(2))
    d = drawn(count, dim).astype(half) if weighted else None
    cumsum = np.cumsum(delta.astype(np.float64) * a[:, None, None], -1).astype(np.float32)
    y = np.zeros_like(x)
    final = np.zeros((batch, count, dim, state), half)
    orders = {
        "x": (x, (2, 4, 3, 1, 0), (2, 3, 4)),
        "cumsum": (cumsum, (3, 2, 1, 0), (1, 2, 3)),
        "delta": (delta, (3, 2, 1, 0), (1, 2, 3)),
        "b": (b, (4, 2, 3, 1, 0), (2, 3, 4)),
        "c": (c, (4, 2, 3, 1, 0), (2, 3, 4)),
        "y": (y, (4, 2, 3, 1, 0), (2, 3, 4)),
        "final": (final, (2, 3, 1, 0), (2, 3)),
    } | ({"d": (d, (1, 0), (1,))} if d is not None else {})
    tensors = {name: tensor_of(array).permute(order) for name, (array, order, _) in orders.items()}
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        from cutlass import cute

        module = example("blackwell/mamba2_ssd/mamba2_ssd.py")
        views = [_dynamic(tensors[name], modes) for name, (_, _, modes) in orders.items()]
        views += [None] * (8 - len(views))
        stream = cutlass.torch.default_stream()
        if not compiled:
            shape = (steps, dim, state)
            types = (cutlass.BFloat16, cutlass.Float32, cutlass.Float32)
            kernel = module.SSDKernel(*types, *shape, weighted, weighted)
            compiled.append(cute.compile(kernel, *views, 2, stream))
        for name in ("y", "final"):
            tensors[name].zero_()
        compiled[0](*views, stream)
        back = {"y": (4, 3, 1, 2, 0), "final": (3, 2, 0, 1)}
        return {name: array_of(tensors[name].permute(order)) for name, order in back.items()}

    inputs = [v.astype(np.float64) for v in (x, delta, cumsum, b, c)]
    weight = np.zeros((count, dim)) if d is None else d.astype(np.float64)
    exact = _recurrence(inputs, weight, heads)
    plain = _in_chunks(inputs, weight, heads)
    return Program(run, lambda found: compare(found, exact, plain))


def _dynamic(tensor: Any, modes: tuple[int, ...]) -> Any:
    from cutlass.cute.runtime import from_dlpack

    view = from_dlpack(tensor, assumed_align=16)
    for mode in modes:
        view = view.mark_compact_shape_dynamic(mode=mode, stride_order=tensor.dim_order())
    return view


def _recurrence(inputs: list[np.ndarray], weight: np.ndarray, heads: int) -> Arrays:
    """Step by step: h = exp(delta a) h + delta x b^T, y = h c + D x, in float64."""
    x, delta, cumsum, b, c = inputs
    b, c = (np.repeat(v, heads, axis=1) for v in (b, c))
    decay = np.exp(np.diff(cumsum, axis=-1, prepend=0.0))
    final = np.zeros((*x.shape[:3], b.shape[2]))
    y = np.zeros_like(x)
    for chunk in range(x.shape[3]):
        for step in range(x.shape[4]):
            at = (slice(None), slice(None), chunk, step)
            now = (..., chunk, step)
            update = (delta[at][..., None] * x[now])[..., None] * b[now][..., None, :]
            final = decay[at][..., None, None] * final + update
            y[now] = np.einsum("bhpn,bhn->bhp", final, c[now]) + weight * x[now]
    return {"y": y, "final": final}


def _in_chunks(inputs: list[np.ndarray], weight: np.ndarray, heads: int) -> Arrays:
    """The same by matrix products over each chunk, whose operands are rounded to bfloat16."""

    def rounded(value: np.ndarray) -> np.ndarray:
        return value.astype(ml_dtypes.bfloat16).astype(np.float32)

    x, delta, cumsum, b, c = (value.astype(np.float32) for value in inputs)
    b, c = (np.repeat(v, heads, axis=1) for v in (b, c))
    state = np.zeros((*x.shape[:3], b.shape[2]), np.float32)
    y = np.zeros_like(x)
    seen = np.tril(np.ones((x.shape[4],) * 2, bool))
    for chunk in range(x.shape[3]):
        xs, bs, cs = (v[..., chunk, :] for v in (x, b, c))
        sums, deltas = cumsum[:, :, chunk], delta[:, :, chunk]
        between = np.where(seen, sums[..., :, None] - sums[..., None, :], -np.inf)
        scores = np.einsum("bhnl,bhns->bhls", cs, bs) * np.exp(between) * deltas[..., None, :]
        inside = np.einsum("bhls,bhps->bhpl", rounded(scores), xs)
        before = np.einsum("bhpn,bhnl->bhpl", rounded(state), cs) * np.exp(sums)[..., None, :]
        y[..., chunk, :] = inside + before + weight[..., None] * xs
        scaled = bs * (np.exp(sums[..., -1:] - sums) * deltas)[..., None, :]
        added = np.einsum("bhpl,bhnl->bhpn", xs, rounded(scaled))
        state = np.exp(sums[..., -1])[..., None, None] * state + added
    return {"y": rounded(y), "final": rounded(state)}
