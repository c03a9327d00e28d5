"""Latent attention (MLA): the values are a part of the keys, shared by all heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.testing import Inputs, dense_inputs
from lab.foreign import cuda_is_cpu, example, flash_attention, multiprocessors
from tests.conformance.attention import judge, values_of
from tests.conformance.program import Arrays, Program, normal, tensor_of

LATENT, ROPE = 512, 64  # head dims: of the values and a part of the keys, and of the rest


@dataclass(frozen=True)
class Latent:
    """A problem: queries and keys for each batch entry, query heads."""

    batch: int
    rows: int
    keys: int
    heads: int
    dtype: str
    causal: bool = False

    def parts(self) -> dict[str, np.ndarray]:
        """q and its latent part qv, k, and v, which is the latent part of the keys."""
        shapes = {
            "q": (self.batch, self.rows, self.heads, ROPE),
            "qv": (self.batch, self.rows, self.heads, LATENT),
            "k": (self.batch, self.keys, 1, ROPE),
            "v": (self.batch, self.keys, 1, LATENT),
        }
        drawn = ((n, normal(shape, self.dtype, i)) for i, (n, shape) in enumerate(shapes.items()))
        return dict(drawn)

    def inputs(self) -> Inputs:
        """The same as ordinary attention."""
        part = self.parts()
        q = np.concatenate([part["q"], part["qv"]], axis=-1)
        k = np.concatenate([part["k"], part["v"]], axis=-1)
        return dense_inputs(q, k, part["v"], **({"causal": True} if self.causal else {}))


def mla_decode(problem: Latent, split_kv: int, page_size: int, persistent: bool) -> Program:
    """NVIDIA's mla_decode_fp16: 128 heads in a pair of CTAs, keys in pages of a shuffled table."""
    inputs, part = problem.inputs(), problem.parts()
    pages = problem.keys // page_size
    table = np.random.default_rng(0).permutation(problem.batch * pages).astype(np.int32)
    table = table.reshape(problem.batch, pages)
    paged = {name: np.empty((table.size, page_size, part[name].shape[-1]), part[name].dtype)
             for name in ("k", "v")}  # fmt: skip
    for name, store in paged.items():
        store[table] = part[name].reshape(problem.batch, pages, page_size, -1)
    out = np.zeros((problem.batch, problem.rows, problem.heads, LATENT), np.float16)
    queries = {"qv": part["qv"], "q": part["q"], "o": out}
    tensors = {name: tensor_of(x).permute(2, 3, 1, 0) for name, x in queries.items()}
    tensors |= {name: tensor_of(x).permute(1, 2, 0) for name, x in paged.items()}
    tensors["lse"] = tensor_of(np.zeros(out.shape[:3], np.float32)).permute(2, 1, 0)
    tensors["table"] = tensor_of(table).permute(1, 0)
    tensors["lengths"] = tensor_of(np.full(problem.batch, problem.keys, np.int32))
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cuda.bindings.driver as cuda
        import cutlass
        import torch
        from cutlass import cute
        from cutlass.cute.runtime import from_dlpack

        module = example("blackwell/mla/mla_decode_fp16.py")
        kind = module.BlackwellMultiHeadLatentAttentionForwardFP16
        size = kind.get_workspace_size(
            problem.heads, problem.rows, LATENT, problem.batch, split_kv, cutlass.Float32
        )
        workspace = from_dlpack(torch.zeros(size, dtype=torch.int8), assumed_align=32)
        view = {name: from_dlpack(x, assumed_align=16) for name, x in tensors.items()}
        for name, leading in (("lse", 0), ("table", 0), ("lengths", None)):
            view[name] = view[name].mark_layout_dynamic(leading_dim=leading)
        orders = dict.fromkeys(queries, (3, 2, 0, 1)) | dict.fromkeys(paged, (2, 0, 1))
        for name, order in orders.items():
            dynamic = view[name].mark_layout_dynamic(leading_dim=1)
            view[name] = dynamic.mark_compact_shape_dynamic(
                mode=1, stride_order=order, divisibility=8
            )
        arguments = (
            *(view[name] for name in ("qv", "q", "v", "k", "table", "o", "lse")),
            workspace if size else None,
            split_kv,
            view["lengths"],
            None,
            1 / math.sqrt(LATENT + ROPE),
            1.0,
            cuda.CUstream(0),
        )
        if not compiled:
            types, tilers = (cutlass.Float32, cutlass.Float32), ((128, 128), (128, 256))
            kernel = kind(*types, *tilers, 1, page_size, 0.0, persistent, False, False)
            compiled.append(cute.compile(kernel, *arguments, options="--opt-level 2"))
        compiled[0](*arguments)
        o, lse = tensors["o"].permute(3, 2, 0, 1), tensors["lse"].permute(2, 0, 1)
        return {"out": values_of(o), "lse": values_of(lse) * math.log(2)}

    return Program(run, lambda found: judge(inputs, found))


def flash_mla(problem: Latent) -> Program:
    """flash-attn-4's latent attention."""
    inputs = problem.inputs()
    tensors = {name: tensor_of(x) for name, x in problem.parts().items()}

    def run(session: Any) -> Arrays:
        with cuda_is_cpu(), multiprocessors(2):
            out, lse, *_ = flash_attention()._flash_attn_fwd(
                **tensors, causal=problem.causal, return_lse=True
            )
        return {"out": values_of(out), "lse": values_of(lse.transpose(1, 2))}

    return Program(run, lambda found: judge(inputs, found))
