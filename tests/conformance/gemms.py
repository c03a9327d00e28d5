"""NVIDIA's GEMM examples. Their inputs are small integers, so that the outputs must be exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.foreign import example
from tests.conformance.program import Arrays, Program, array_of, exactly, integers, tensor_of


def tutorial_gemm(number: str, m: int, n: int, k: int) -> Program:
    """fp16_gemm_0 to 3, 3_1, 4 and 5 of the tutorial: C = A B^T, all K-major."""
    a, b = integers((m, k), "Float16", 0), integers((n, k), "Float16", 1)
    tensors = [tensor_of(x) for x in (a, b, np.zeros((m, n), np.float16))]

    def run(session: Any) -> Arrays:
        from cutlass.cute.runtime import from_dlpack

        module = example(f"blackwell/tutorial_gemm/fp16_gemm_{number}.py")
        if number in ("0", "1", "2"):
            module.host_function(*(_k_major(x) for x in tensors))
        else:
            views = [from_dlpack(x).mark_layout_dynamic() for x in tensors]
            # Two clusters for all tiles: each computes several.
            limits = (2, 2) if number == "4" else (2,)
            module.host_function(*views, *limits)
        return {"c": array_of(tensors[2])}

    return Program(run, exactly({"c": a.astype(np.float64) @ b.astype(np.float64).T}))


def _k_major(tensor: Any) -> Any:
    from cutlass.cute.runtime import from_dlpack

    view = from_dlpack(tensor, assumed_align=32).mark_layout_dynamic(leading_dim=1)
    return view.mark_compact_shape_dynamic(mode=1, divisibility=tensor.shape[1])


def tutorial_gemm_6(m: int, n: int, k: int) -> Program:
    """fp16_gemm_6: B is dequantised by a first kernel, on which the GEMM depends (PDL)."""
    scale = 2.25
    a = integers((m, k), "Float16", 0)
    b = np.random.default_rng(1).integers(-2, 3, (n, k)).astype(np.int8)
    zeros = [np.zeros((rows, k if rows == n else n), np.float16) for rows in (n, m)]
    tensors = [tensor_of(x) for x in (a, b, *zeros)]

    def run(session: Any) -> Arrays:
        import cuda.bindings.driver as cuda
        from cutlass.cute.runtime import from_dlpack

        module = example("blackwell/tutorial_gemm/fp16_gemm_6.py")
        plain = [from_dlpack(tensors[i]).mark_layout_dynamic() for i in (0, 3)]
        views = (plain[0], _k_major(tensors[1]), _k_major(tensors[2]), plain[1])
        module.host_function(*views, scale, 2, cuda.CUstream(0))
        return {"b": array_of(tensors[2]), "c": array_of(tensors[3])}

    scaled = scale * b.astype(np.float64)
    product = (a.astype(np.float64) @ scaled.T).astype(np.float16)
    return Program(run, exactly({"b": scaled, "c": product.astype(np.float64)}))


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """How a GEMM example is configured.

    mnkl: sizes; l is the batch. majors: which mode of A, B and C is contiguous. tiler: of the MMA.
    clusters: how many may run at once, for persistent kernels.
    """

    mnkl: tuple[int, int, int, int]
    majors: str = "kkn"
    inputs: str = "Float16"
    output: str = "Float32"
    tiler: tuple[int, int] = (128, 128)
    cluster: tuple[int, int] = (1, 1)
    two_ctas: bool = False
    tma_store: bool = True
    clusters: int = 1


def dense_gemm(name: str, gemm: Gemm) -> Program:
    """dense_gemm, dense_gemm_persistent and its variants, dense_gemm_software_pipeline."""
    m, n, k, batch = gemm.mnkl
    a = _matrices(batch, m, k, gemm.majors[0] == "m", gemm.inputs, 0)
    b = _matrices(batch, n, k, gemm.majors[1] == "n", gemm.inputs, 1)
    c = np.zeros_like(_matrices(batch, m, n, gemm.majors[2] == "m", gemm.output, 2))
    tensors = [tensor_of(x) for x in (a, b, c)]
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        from cutlass import cute

        views = [_leading(x) for x in tensors]
        stream = cutlass.torch.default_stream()
        if not compiled:
            module = example(f"blackwell/{name}.py")
            kind = next(x for x in vars(module) if x.endswith("DenseGemmKernel"))
            kernel = getattr(module, kind)(
                cutlass.Float32, gemm.two_ctas, gemm.tiler, gemm.cluster, gemm.tma_store
            )
            limit = (gemm.clusters,) if "persistent" in name else ()
            compiled.append(cute.compile(kernel, *views, *limit, stream))
        tensors[2].zero_()
        compiled[0](*views, stream)
        return {"c": array_of(tensors[2])}

    product = np.einsum("mkl,nkl->mnl", a.astype(np.float64), b.astype(np.float64))
    return Program(run, exactly({"c": product}))


def hopper_gemm(name: str, gemm: Gemm) -> Program:
    """dense_gemm and dense_gemm_persistent for Hopper."""
    m, n, k, batch = gemm.mnkl
    a = _matrices(batch, m, k, gemm.majors[0] == "m", gemm.inputs, 0)
    b = _matrices(batch, n, k, gemm.majors[1] == "n", gemm.inputs, 1)
    c = np.zeros_like(_matrices(batch, m, n, gemm.majors[2] == "m", gemm.output, 2))
    tensors = [tensor_of(x) for x in (a, b, c)]
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        from cutlass import cute

        views = [_leading(x) for x in tensors]
        stream = cutlass.torch.default_stream()
        if not compiled:
            module = example(f"hopper/{name}.py")
            persistent = "persistent" in name
            kind = next(x for x in vars(module) if x.startswith("HopperWgmmaGemm"))
            order = (1, True) if persistent else ()
            kernel = getattr(module, kind)(cutlass.Float32, gemm.tiler, gemm.cluster, *order)
            limit = (gemm.clusters,) if persistent else ()
            compiled.append(cute.compile(kernel, *views, *limit, stream))
        tensors[2].zero_()
        compiled[0](*views, stream)
        return {"c": array_of(tensors[2])}

    product = np.einsum("mkl,nkl->mnl", a.astype(np.float64), b.astype(np.float64))
    return Program(run, exactly({"c": product}))


def _matrices(
    batch: int, rows: int, columns: int, rows_major: bool, dtype: str, seed: int
) -> np.ndarray:
    """(rows, columns, batch) whose contiguous mode is the first or the second."""
    if rows_major:
        return integers((batch, columns, rows), dtype, seed).transpose(2, 1, 0)
    return integers((batch, rows, columns), dtype, seed).transpose(1, 2, 0)


def _leading(tensor: Any) -> Any:
    from cutlass.cute.runtime import from_dlpack

    leading = tensor.stride().index(1)
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=leading)


def grouped_gemm(
    sizes: tuple[tuple[int, int, int], ...], in_smem: bool, clusters: int = 2
) -> Program:
    """grouped_gemm: problems (m, n, k) behind a table of pointers.

    The kernel writes a tensor map for each problem, in shared or in global memory.
    """
    groups, exact = [], {}
    for index, (m, n, k) in enumerate(sizes):
        a = _matrices(1, m, k, False, "Float16", 2 * index)
        b = _matrices(1, n, k, False, "Float16", 2 * index + 1)
        c = _matrices(1, m, n, False, "Float16", 0)
        groups.append([tensor_of(x) for x in (a, b, np.zeros_like(c))])
        product = np.einsum("mkl,nkl->mnl", a.astype(np.float64), b.astype(np.float64))
        exact[f"c{index}"] = product
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass.torch
        import torch
        from cutlass import cute
        from cutlass.cute.runtime import from_dlpack

        module = example("blackwell/grouped_gemm.py")
        kind, modes = module.GroupedGemmKernel, module.utils.TensorMapUpdateMode
        # Only their type and layout count.
        initial = [_leading(tensor_of(_matrices(1, 8, 8, False, "Float16", 0))) for _ in range(3)]
        tables = [
            torch.tensor([(*size, 1) for size in sizes], dtype=torch.int32),
            torch.tensor([[x.stride()[:2] for x in g] for g in groups], dtype=torch.int32),
            torch.tensor([[x.data_ptr() for x in g] for g in groups], dtype=torch.int64),
        ]
        words = kind.bytes_per_tensormap // 8
        maps = torch.zeros(148, kind.num_tensormaps, words, dtype=torch.int64)
        views = [from_dlpack(x, assumed_align=16) for x in (*tables, maps)]
        stream = cutlass.torch.default_stream()
        tiles = sum(-(-m // 128) * -(-n // 128) for m, n, _ in sizes)
        if not compiled:
            mode = modes.SMEM if in_smem else modes.GMEM
            kernel = kind(cutlass.Float32, False, (128, 128), (1, 1), mode)
            compiled.append(
                cute.compile(
                    kernel, *initial, len(sizes), *views[:3], tiles, views[3], clusters, stream
                )
            )
        compiled[0](*initial, *views, stream)
        return {f"c{index}": array_of(c) for index, (_, _, c) in enumerate(groups)}

    return Program(run, exactly(exact))
