"""NVIDIA's block-scaled GEMM: factors of 32 or 16 elements of K for rows of A and B."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lab.foreign import example
from tests.conformance.program import NUMPY_TYPES, Arrays, Program, array_of, exactly, tensor_of

ATOM_ROWS, ATOM_BLOCKS = 128, 4


def block_scaled_gemm(
    mnk: tuple[int, int, int],
    inputs: str,
    factors: str,
    vector: int,
    tiler: tuple[int, int] = (128, 128),
    cluster: tuple[int, int] = (1, 1),
) -> Program:
    """dense_blockscaled_gemm_persistent: C = (A SFA) (B SFB)^T, all K-major."""
    m, n, k = mnk
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, (rows, k)).astype(np.float64) for rows in (m, n))
    scales = [2.0 ** rng.integers(-2, 3, (rows, k // vector)) for rows in (m, n)]
    data = [_bytes(x, inputs) for x in (a, b)]
    blocked = [_blocked(_codes(x, factors)) for x in scales]
    tensors = [tensor_of(x) for x in (*data, *blocked, np.zeros((m, n), np.float32))]
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        from cutlass import cute
        from cutlass.cute.nvgpu import tcgen05
        from cutlass.cute.runtime import make_ptr

        module = example("blackwell/dense_blockscaled_gemm_persistent.py")
        kinds = [getattr(cutlass, kind) for kind in (inputs, inputs, factors, factors, "Float32")]
        pointers = [
            make_ptr(kind, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
            for kind, tensor in zip(kinds, tensors, strict=True)
        ]
        stream = cutlass.torch.default_stream()
        if not compiled:
            kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(vector, tiler, cluster)
            major = tcgen05.OperandMajorMode.K
            layouts = (major, major, module.utils.LayoutEnum.ROW_MAJOR)
            sizes = (*map(cutlass.Int32, mnk), cutlass.Int32(1))
            compiled.append(cute.compile(kernel, *pointers, layouts, sizes, 1, stream))
        tensors[4].zero_()
        compiled[0](*pointers, (m, n, k, 1), stream)
        return {"c": array_of(tensors[4])}

    whole = [x * np.repeat(s, vector, 1) for x, s in zip((a, b), scales, strict=True)]
    return Program(run, exactly({"c": whole[0] @ whole[1].T}))


def _bytes(values: np.ndarray, kind: str) -> np.ndarray:
    """As the kernel reads them; 4-bit values two to a byte, the first in the low half."""
    if kind != "Float4E2M1FN":
        return values.astype(NUMPY_TYPES[kind]).view(np.uint8)
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _codes(scales: np.ndarray, kind: str) -> np.ndarray:
    types = {"Float8E8M0FNU": ml_dtypes.float8_e8m0fnu, "Float8E4M3FN": ml_dtypes.float8_e4m3fn}
    return scales.astype(types[kind]).view(np.uint8)


def _blocked(codes: np.ndarray) -> np.ndarray:
    """(rows, blocks) in atoms of 128 rows by 4 blocks: 32 rows of 16 bytes, four times four."""
    rows, blocks = (-(-size // unit) for size, unit in zip(codes.shape, (ATOM_ROWS, ATOM_BLOCKS),
                                                           strict=True))  # fmt: skip
    whole = np.zeros((rows * ATOM_ROWS, blocks * ATOM_BLOCKS), np.uint8)
    whole[: codes.shape[0], : codes.shape[1]] = codes
    atoms = whole.reshape(rows, 4, 32, blocks, ATOM_BLOCKS).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(atoms)
