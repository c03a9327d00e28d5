"""The backward kernels' double: what they are launched with, computed by the reference.

It takes the arguments of the compiled kernels, checks that a kernel could read them, and writes
where a kernel writes: no row of no sequence, and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fa4.backends import AttentionGradients, Saved, find_backend, kernel_backward
from fa4.call.arrays import like, to_numpy
from fa4.call.checked import make_call
from fa4.compiled.launch import (
    COUNTS,
    LENGTHS,
    WORKSPACE,
    BackwardArguments,
    check_operand,
    element_strides,
    regular,
    workspace_shapes,
)
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import tiles_of


class BackwardDouble:
    """Stands for the compiled kernels of a spec. calls: what it was launched with."""

    def __init__(self, spec: BackwardSpec) -> None:
        self.spec = spec
        self.calls: list[BackwardArguments] = []

    def __call__(self, *values: Any) -> None:
        given = BackwardArguments(*values)
        self._check(given)
        self.calls.append(given)
        for name, value in self._gradients(given)._asdict().items():
            if value is not None:
                self._write(given, name, value)

    def _check(self, given: BackwardArguments) -> None:
        """TMA can address the operands; the rest is contiguous and of the type it should be."""
        spec = self.spec
        residual = ("residual",) if spec.out_residual else ()
        assert (given.residual is None) == (not residual)
        for name in ("q", "k", "v", "out", "dout", *residual, "dq", "dk", "dv"):
            tensor = getattr(given, name)
            check_operand(name, tensor)
            assert regular(tensor) is tensor and tensor.dtype == given.q.dtype, name
            strides = zip(tensor.shape, element_strides(tensor), strict=True)
            assert all(stride or size == 1 for size, stride in strides), name
        for name, wanted in {"lse": True, "dlse": spec.lse_gradient, "sink": spec.sink,
                             "dsink": spec.sink}.items():  # fmt: skip
            tensor = getattr(given, name)
            assert (tensor is not None) == wanted, name
            assert tensor is None or (_is(tensor, "float32") and _is_contiguous(tensor)), name
        packed = given.cu_seqlens_q is not None
        batch = len(given.cu_seqlens_q) - 1 if packed else given.q.shape[0]
        tiles = tiles_of(given.q.shape[-3], batch, packed=packed, block_rows=spec.block_rows)
        shapes = workspace_shapes(spec, given.q.shape[-2], tiles)
        for name in WORKSPACE:
            tensor = getattr(given, name)
            assert (tensor is None) == (name not in shapes), name
            if tensor is not None:
                kind = "int32" if name in COUNTS else "float32"
                assert _is(tensor, kind) and _is_contiguous(tensor), name
                assert tuple(tensor.shape) == shapes[name], name
                tensor[...] = -1

    def _gradients(self, given: BackwardArguments) -> AttentionGradients:
        spec = self.spec
        left = given.window_left if spec.window_left else None
        right = 0 if spec.causal else given.window_right if spec.window_right else None
        options = {
            "softmax_scale": given.softmax_scale, "window_size": (left, right),
            "softcap": given.softcap or 0.0, "mask_mod": spec.mask,
            "learnable_sink": None if given.sink is None else given.sink.reshape(-1),
        } | {name: getattr(given, name) for name in LENGTHS}  # fmt: skip
        given_tensors = [x.detach() if isinstance(x, torch.Tensor) else x for x in given[:3]]
        call = make_call(*given_tensors, options, varlen=True)
        saved = Saved(given.out, given.lse, given.residual)
        return find_backend("reference").backward(call, saved, given.dout, given.dlse)

    def _write(self, given: BackwardArguments, name: str, value: Any) -> None:
        target = getattr(given, name)
        if name == "dsink":
            target[...] = like(target, to_numpy(name, value).astype(np.float32))
            return
        side = "q" if name == "dq" else "k"
        for rows in _rows(given, side):
            target[rows] = value[rows]


def _rows(given: BackwardArguments, side: str) -> list[Any]:
    """Index of the rows of each sequence."""
    offsets, used = getattr(given, f"cu_seqlens_{side}"), getattr(given, f"seqused_{side}")
    if offsets is None:
        tensor = getattr(given, side)
        lengths = [tensor.shape[1]] * tensor.shape[0] if used is None else used.tolist()
        return [(b, slice(0, n)) for b, n in enumerate(lengths)]
    bounds = offsets.tolist()
    lengths = np.diff(bounds).tolist() if used is None else used.tolist()
    return [slice(start, start + n) for start, n in zip(bounds[:-1], lengths, strict=True)]


def _is(tensor: Any, kind: str) -> bool:
    return str(tensor.dtype).removeprefix("torch.") == kind


def _is_contiguous(tensor: Any) -> bool:
    if isinstance(tensor, torch.Tensor):
        return tensor.is_contiguous()
    return bool(tensor.flags.c_contiguous)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[BackwardDouble]:
    """From now on backward kernels are doubles, of both ways to run them; those that were built.

    New tensors are full of NaN.
    """
    import fa4.emulator
    from fa4.call import checked, form

    built: list[BackwardDouble] = []
    launch = fa4.emulator.launch

    def build(spec: BackwardSpec, arch: str) -> BackwardDouble:
        assert arch in ("sm_100a", "sm_103a")
        built.append(BackwardDouble(spec))
        return built[-1]

    def launch_either(compiled: Any, *values: Any, **options: Any) -> list[Any]:
        if not isinstance(compiled, BackwardDouble):
            return launch(compiled, *values, **options)
        compiled(*values)
        return []

    def full_of_nan(new: Any) -> Any:
        def make(template: Any, shape: Any) -> Any:
            tensor = new(template, shape)
            tensor[...] = float("nan")
            return tensor

        return make

    for name in ("_new_in_torch", "_new_in_numpy"):
        monkeypatch.setattr(kernel_backward, name, full_of_nan(getattr(kernel_backward, name)))
    monkeypatch.setattr(form, "_forms", {})
    monkeypatch.setattr(checked, "_known", {})
    monkeypatch.setattr(kernel_backward, "build", build)
    monkeypatch.setattr(fa4.emulator, "launch", launch_either)
    return built
