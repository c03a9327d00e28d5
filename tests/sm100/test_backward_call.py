"""From a call to its backward kernels: the spec, the arguments, and three kernels in one module."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from fa4.compiled import build as build_module
from fa4.compiled.backward import fake_arguments
from fa4.compiled.build import build, find_key
from fa4.compiled.launch import (
    COUNTS,
    BackwardArguments,
    backward_template,
    workspace_shapes,
)
from fa4.compiled.support import BackwardCall
from fa4.compiled.variants import choose_backward_spec
from fa4.emulator import launch
from fa4.inspect.codegen import read_kernels
from fa4.masks import Chunked
from fa4.sm100.backward import host
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import tiles_of
from tests.sm100 import backward_double

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PLAIN = BackwardCall(
    dtype="bf16", head_dim=64, head_dim_v=32, heads_q=4, heads_k=2, batch=2, rows_q=130, rows_k=200
)  # fmt: skip


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> ModuleType:
    """The small kernels in the place of the real ones, and an empty cache."""
    monkeypatch.setattr("fa4.compiled.backward.backward", backward_double.backward)
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build_module, "_made", {})
    return backward_double


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, {"causal": False, "deterministic": True, "cta_group": 1, "lse_gradient": False}),
        ({"window": (None, 0)}, {"causal": True, "window_right": False}),
        ({"window": (9, 3)}, {"causal": False, "window_left": True, "window_right": True}),
        ({"window": (199, 129)}, {"window_left": False, "window_right": False}),
        ({"lse_gradient": True, "deterministic": False},
         {"lse_gradient": True, "deterministic": False}),
        ({"sink": True, "softcap": 2.0, "used_q": True}, {"sink": True, "softcap": True}),
        ({"mask_mod": Chunked(3)}, {"mask": Chunked(3), "mask_mod": None}),
    ],
)  # fmt: skip
def test_spec_fields(changes: dict[str, Any], chosen: dict[str, Any]) -> None:
    spec = choose_backward_spec(replace(PLAIN, **changes))
    assert {name: getattr(spec, name) for name in chosen} == chosen


CALLS = [
    PLAIN,
    replace(PLAIN, sink=True, softcap=1.0, lse_gradient=True, window=(5, 0)),
    replace(PLAIN, packed_q=True, packed_k=True, used_k=True, deterministic=False, window=(5, 7)),
]


@pytest.mark.parametrize("call", CALLS)
def test_arguments_are_the_kernels(call: BackwardCall) -> None:
    """Numbers where their stand-ins are; tensors are filled in by the launch."""
    spec = choose_backward_spec(call)
    given, stand_ins = backward_template(call, spec), fake_arguments(spec)
    for name in BackwardArguments._fields:
        value, stand_in = getattr(given, name), getattr(stand_ins, name)
        tensor = stand_in is None or hasattr(stand_in, "shape") or name == "aux"
        assert (value is None) == tensor, name
    assert (stand_ins.turns is None) != spec.deterministic
    assert (stand_ins.sink_parts is None) != spec.sink


def test_the_longest_sequences() -> None:
    """As the caller says where sequences are packed, otherwise all rows."""
    packed = replace(PLAIN, packed_q=True, packed_k=True, max_seqlen_q=7, max_seqlen_k=900)
    for call, expected in ((PLAIN, (130, 200)), (packed, (7, 200))):
        template = backward_template(call, choose_backward_spec(call))
        assert (template.max_seqlen_q, template.max_seqlen_k) == expected


def test_workspace() -> None:
    """d padded to 16; what a spec does not need is not there."""
    spec = BackwardSpec(head_dim=72, head_dim_v=8, sink=True, deterministic=True)
    tiles = tiles_of(130, 2, packed=False)
    assert workspace_shapes(spec, 4, tiles) == {
        "dq_accum": (4, 4, 128 * 80), "stats": (4, 4, 2, 128), "sink_parts": (4, 4),
        "turns": (4, 4, 8),
    }  # fmt: skip
    assert [*workspace_shapes(BackwardSpec(head_dim=8, head_dim_v=8), 1, 1)] == [
        "dq_accum", "stats"
    ]  # fmt: skip


@pytest.mark.parametrize("function", [host.backward, backward_double.backward])
def test_the_kernels_take_the_record(function: Any) -> None:
    """The fields in their order; then stream, spec and trace."""
    names = [*inspect.signature(inspect.unwrap(function)).parameters]
    assert tuple(names) == (*BackwardArguments._fields, "stream", "spec", "trace")


def test_three_kernels_of_one_call(double: ModuleType) -> None:
    """Compiled, kept, called in the emulator: every argument arrives in its place."""
    call = replace(PLAIN, sink=True, lse_gradient=True)
    spec = choose_backward_spec(call)
    compiled = build(spec, "sm_100a")
    assert compiled.function_name == "fa4_backward" and compiled.key == find_key(spec, "sm_100a")
    kernels = [
        one.with_smem(compiled.metadata["dynamic_smem_bytes"])
        for one in read_kernels(compiled.cubin, compiled.ptx)
    ]
    found = {one.resources.name.split("_tensor")[0]: one.dynamic_smem_bytes for one in kernels}
    names = [f"kernel_cutlass_{name}" for name in ("prepare", "fill_keys", "fill_queries")]
    assert found == dict(zip(names, double.SMEM_BYTES, strict=True))
    build_module._made.clear()
    again = build(spec, "sm_100a")  # from the disk
    assert again is not compiled and again.cubin == compiled.cubin

    tensors = arrays_of(call, spec)
    launch(again, *backward_template(call, spec)._replace(**tensors))
    expected = np.moveaxis(-tensors["lse"] * double.LOG2_E, 1, 2)[..., None]
    assert np.allclose(tensors["dq"].astype(np.float32), expected, rtol=0.01)
    assert (tensors["dk"] == 130).all() and (tensors["dv"] == 200).all()
    assert (tensors["dsink"] == tensors["sink"]).all()


def arrays_of(call: BackwardCall, spec: BackwardSpec) -> dict[str, np.ndarray]:
    """Random tensors of a dense call, outputs and workspaces full of NaN."""
    rng = np.random.default_rng(0)
    sides = {"q": (call.rows_q, call.heads_q), "k": (call.rows_k, call.heads_k)}
    dims = {"q": ("q", 64), "k": ("k", 64), "v": ("k", 32), "out": ("q", 32), "dout": ("q", 32)}
    found = {}
    for name, (side, dim) in dims.items():
        x = rng.standard_normal((call.batch, *sides[side], dim), np.float32)
        found[name] = x.astype(ml_dtypes.bfloat16)
    for name in "qkv":
        found[f"d{name}"] = np.full_like(found[name], np.nan)
    rows = (call.batch, call.heads_q, call.rows_q)
    found |= {name: rng.standard_normal(rows, np.float32) for name in ("lse", "dlse")}
    found["sink"] = rng.standard_normal(call.heads_q, np.float32)
    found["dsink"] = np.full_like(found["sink"], np.nan)
    tiles = tiles_of(call.rows_q, call.batch, packed=False)
    for name, shape in workspace_shapes(spec, call.heads_q, tiles).items():
        kind = np.int32 if name in COUNTS else np.float32
        found[name] = np.full(shape, -1 if name in COUNTS else np.nan, kind)
    return found
