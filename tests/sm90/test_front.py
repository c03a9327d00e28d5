"""The Hopper kernel behind the public functions and commands, in the emulator, without a GPU."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import cute

import fa4
from fa4 import cli
from fa4.compiled.build import build, find_key
from fa4.compiled.support import ForwardCall, NotSupported
from fa4.compiled.variants import (
    choose_sm90_spec,
    common_specs,
    find_tuned,
    find_tuned_backward,
)
from fa4.config import ForwardConfig
from fa4.hardware import H200
from fa4.masks import Chunked
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CALL = ForwardCall(
    dtype="bf16", head_dim=128, head_dim_v=128, heads_q=8, heads_k=2, batch=2, rows_q=4096,
    rows_k=4096,
)  # fmt: skip


@cute.jit
def halved(score, b, h, i, j, info, aux):
    """A score_mod, without its derivative."""
    return score * 0.5


def draw(rows: int = 70, keys: int = 150, dim: int = 64) -> list[np.ndarray]:
    """q, k, v with two query heads on one KV head."""
    rng = np.random.default_rng(0)
    shapes = ((1, rows, 2, dim), (1, keys, 1, dim), (1, keys, 1, dim))
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]


@pytest.mark.parametrize("options", [{"causal": True}, {"mask_mod": Chunked(64)}])
def test_within_the_budget(options) -> None:
    """Arrays in, arrays out; a mask of `fa4.masks` too. The budget sees a wrong LSE."""
    arrays = draw()
    out, lse = fa4.flash_attn_func(*arrays, **options, impl="emulator_sm90", return_lse=True)
    inputs = dense_inputs(*arrays, **options)
    assert_within_budget(inputs, Outputs(out, lse))
    with pytest.raises(AssertionError):
        assert_within_budget(inputs, Outputs(out, lse + np.float32(0.01)))


def test_variable_lengths() -> None:
    """As the reference, also in rows that belong to no sequence."""
    q, k, v = (x[0] for x in draw(rows=60))
    options = {
        "cu_seqlens_q": np.array([0, 10, 10, 50]), "cu_seqlens_k": np.array([0, 20, 90, 140]),
        "seqused_k": np.array([20, 3, 0]), "causal": True, "return_lse": True,
    }  # fmt: skip
    ours = fa4.flash_attn_varlen_func(q, k, v, impl="emulator_sm90", **options)
    expected = fa4.flash_attn_varlen_func(q, k, v, impl="reference", **options)
    for found, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(
            found.astype(np.float32), wanted.astype(np.float32), rtol=2**-7, atol=1e-4
        )


def test_gradients_are_refused_when_the_call_is_made() -> None:
    """With the reason and what works; without grad the call is computed."""
    q, k, v = (torch.tensor(x.astype(np.float32)).bfloat16() for x in draw(8, 8, 192))
    q.requires_grad_()
    options = {"score_mod": halved, "impl": "emulator_sm90"}
    with pytest.raises(NotSupported, match=r'SM90 backward kernel, score_mod.*"reference"'):
        fa4.flash_attn_func(q, k, v, **options)
    with torch.no_grad():
        assert fa4.flash_attn_func(q, k, v, **options).shape == q.shape
    with pytest.raises(NotSupported, match="SM90 backward kernel, score_mod"):
        fa4.flash_attn_backward(q, q, k, v, q, torch.zeros(1, 2, 8), **options)


@pytest.mark.parametrize(
    ("rows", "dim", "options"),
    [
        (70, 64, {"causal": True}),
        (170, 104, {"deterministic": True}),
        (70, 192, {"causal": True}),
    ],
)
def test_gradients_by_autograd(rows: int, dim: int, options: dict[str, bool]) -> None:
    """Of a call with grouped heads, within the budget; the budget sees a wrong dK.

    Tiles of all sizes; 160 queries are a block of those of 80.
    """
    arrays = draw(rows, dim=dim)
    q, k, v = (torch.tensor(x.astype(np.float32)).bfloat16().requires_grad_() for x in arrays)
    out = fa4.flash_attn_func(q, k, v, **options, impl="emulator_sm90")
    inputs = dense_inputs(*arrays, causal="causal" in options)
    out.backward(torch.tensor(inputs.dout.astype(np.float32)).bfloat16())
    dq, dk, dv = (x.grad.float().numpy().astype(ml_dtypes.bfloat16) for x in (q, k, v))
    assert_within_budget(inputs, Outputs(None, dq=dq, dk=dk, dv=dv), gradients_alone=True)
    wrong = (dk * 1.1).astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError):
        assert_within_budget(inputs, Outputs(None, dq=dq, dk=wrong, dv=dv), gradients_alone=True)


def test_wide_gradients_of_lse_and_sink() -> None:
    """As the reference's, in a fixed order too; each gradient is seen if it is off."""
    found = {}
    for impl in ("emulator_sm90", "reference"):
        drawn = torch.Generator().manual_seed(1)
        shapes = ((1, 70, 4, 24), (1, 90, 2, 24), (1, 90, 2, 136))
        q, k, v = (torch.randn(shape, generator=drawn).bfloat16() for shape in shapes)
        sink = torch.randn(4, generator=drawn)
        inputs = [x.requires_grad_() for x in (q, k, v, sink)]
        out, lse = fa4.flash_attn_func(
            *inputs[:3], causal=True, learnable_sink=sink, impl=impl, return_lse=True,
            deterministic=True,
        )  # fmt: skip
        upstream = [torch.randn(x.shape, generator=drawn).to(x.dtype) for x in (out, lse)]
        found[impl] = torch.autograd.grad((out, lse), inputs, upstream)
    for mine, wanted in zip(*found.values(), strict=True):
        largest = float(wanted.abs().max())
        torch.testing.assert_close(mine, wanted, rtol=0, atol=2**-8 * largest)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(mine * 1.01, wanted, rtol=0, atol=2**-8 * largest)


def test_run_and_doctor(capsys) -> None:
    """`fa4 run --impl emulator_sm90`: within budget, no findings, beside an H200's prediction."""
    with pytest.raises(SystemExit) as stop:
        cli.main(("run", "--random", "1,2,70,64", "--causal", "--impl", "emulator_sm90", "--json"))
    report = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and report["within_budget"] and report["findings"] == []
    assert report["impl"] == "emulator_sm90" and report["prediction"]["machine"] == "H200"


def test_specs_of_calls() -> None:
    """Heads of a group share tiles of 64 rows; the order of work tiles; numerics are kept."""
    plain = choose_sm90_spec(CALL)
    assert (plain.group, plain.scheduler, plain.gpu) == (4, "static", H200)
    many = dataclasses.replace(CALL, batch=64, rows_q=1024, rows_k=1024)
    assert choose_sm90_spec(dataclasses.replace(many, window=(None, 0))).scheduler == "queue"
    ragged = dataclasses.replace(many, window=(None, 0), used_k=True)
    assert choose_sm90_spec(ragged).scheduler == "queue"
    few = dataclasses.replace(CALL, batch=1, rows_q=64, window=(None, 0), used_k=True)
    assert choose_sm90_spec(few).scheduler == "lpt"
    assert choose_sm90_spec(dataclasses.replace(CALL, heads_q=6, heads_k=2)).group == 3
    own = ForwardConfig(rescale_threshold_log2=0.0)
    assert choose_sm90_spec(dataclasses.replace(CALL, numerics=own)).numerics == own
    with pytest.raises(NotSupported, match=r"config: .*got tile_n = 64"):
        choose_sm90_spec(dataclasses.replace(CALL, numerics=ForwardConfig(tile_n=64)))


def test_specs_of_gradients() -> None:
    """Wide heads have kernels of their own, and one for either order of sums."""
    narrow, wide = (find_tuned_backward(dim, 128, H200, deterministic=True) for dim in (128, 136))
    assert isinstance(narrow, WarpgroupBackwardSpec) and narrow.deterministic
    assert isinstance(wide, WideBackwardSpec)
    assert wide == find_tuned_backward(136, 128, H200, deterministic=False)
    assert isinstance(find_tuned_backward(16, 256, H200), WideBackwardSpec)
    for fields, message in (
        ({"deterministic": True}, "deterministic must be False: .*; got True"),
        ({"head_dim": 264}, "head_dim must be .*256.*; got 264"),
        ({"head_dim_v": 12}, "head_dim_v must be a multiple of 8; got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            WideBackwardSpec(**{"head_dim": 256, "head_dim_v": 256, **fields})


def test_what_is_compiled() -> None:
    """Twelve common kernels; the key holds the spec; another architecture is refused."""
    specs = list(common_specs(H200))
    assert len(specs) == 12 and all(isinstance(spec, WarpgroupSpec) for spec in specs)
    assert len({find_key(spec, "sm_90a") for spec in specs}) == 12
    spec = find_tuned(64, 64, H200)
    assert find_key(spec, "sm_90a") != find_key(spec, "sm_100a")
    for change in ({"tile_n": 96}, {"consumers": 1}, {"kv_stages": 3}, {"scheduler": "naive"}):
        other = dataclasses.replace(spec, **change)
        assert find_key(other, "sm_90a") != find_key(spec, "sm_90a"), change
    with pytest.raises(ValueError, match="arch must be one of sm_90a; got 'sm_100a'"):
        build(spec, "sm_100a")


@pytest.mark.parametrize(("dim", "main"), [("128", "main kernel"), ("256", "dK and dV")])
def test_compile_of_gradients(dim, main, capsys, tmp_path, monkeypatch) -> None:
    """Three kernels, none of which spills."""
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    options = ("--arch", "sm_90a", "--causal", "--head-dim", dim, "--json")
    with pytest.raises(SystemExit) as stop:
        cli.main(("compile", "backward", *options))
    report = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and len(report["kernels"]) == 3
    assert [kernel["frame_bytes"] for kernel in report["kernels"]] == [0, 0, 0]
    assert report["kernels"][1]["dynamic_smem_bytes"] == report["plan"]["smem_bytes"]
    assert report["kernels"][1]["does"] == main


def test_compile_reports_the_loops(capsys, tmp_path, monkeypatch) -> None:
    """Registers of the roles, no spills, the plan's shared memory; softmax loops where a
    disassembler is installed."""
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        cli.main(("compile", "--arch", "sm_90a", "--head-dim", "64", "--json"))
    report = json.loads(capsys.readouterr().out)
    (kernel,) = report["kernels"]
    assert stop.value.code == 0 and report["arch"] == "sm_90a" and kernel["frame_bytes"] == 0
    assert kernel["dynamic_smem_bytes"] == report["plan"]["smem_bytes"] <= 232448
    assert report["plan"]["tmem_columns_limit"] == 0
    if not kernel["problem"]:
        kinds = [loop["kind"] for loop in kernel["loops"]]
        assert "softmax" in kinds and "softmax masked" in kinds
        assert kernel["ignored_budgets"] == []


@pytest.mark.parametrize("sizes", [(0, 5, 5), (1, 0, 5), (1, 5, 0)])
def test_calls_without_work(sizes: tuple[int, int, int]) -> None:
    """No sequences, no queries, no keys: O of its shape, zero, and gradients of theirs."""
    batch, rows, keys = sizes
    q, k, v = (
        torch.ones(batch, n, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        for n in (rows, keys, keys)
    )
    out = fa4.flash_attn_func(q, k, v, causal=True, impl="emulator_sm90")
    assert out.shape == (batch, rows, 2, 64) and not out.any()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]
