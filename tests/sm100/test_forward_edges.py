"""What drawn problems hardly reach: offsets beyond 2^31, NaN behind an end, sinks, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fa4
from fa4.compiled.support import FORWARD
from fa4.emulator.errors import LaunchError
from fa4.kit.rowmath import LARGEST
from fa4.sm100.forward import operands
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm100.forward_kernel import arguments, build, kernel, make_inputs

PACKED = {"layout": "packed", "heads_k": 1}


def test_offsets_beyond_32_bits() -> None:
    """Batch entries 2^31 + 2^19 elements apart, of which most is never touched."""
    run = kernel("causal")
    case = Case(**PACKED, lengths=((129, 130), (129, 130)), head_dim=64, head_dim_v=64,
                dtype="fp16", causal=True)  # fmt: skip
    inputs = make_inputs(run.spec, case)
    call = list(arguments(run.spec, inputs, 1))
    for place in range(4):
        call[place] = far_apart(call[place])
    run.session.call(run.compiled, call, {})
    outputs, _ = run(inputs)
    np.testing.assert_array_equal(call[3].numpy(), outputs.out)
    assert_within_budget(inputs, outputs)


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with batch entries more than 2^32 bytes apart; pages are mapped on use."""
    step = 2**31 + 2**19
    room = torch.empty(step + x[0].numel(), dtype=x.dtype)
    heads, dim = x.shape[-2:]
    far = room.as_strided(x.shape, (step, heads * dim, dim, 1))
    far.copy_(x)
    return far


def test_nan_behind_a_sequence_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the view that ends with each sequence, the NaN in unused rows of V reaches O."""
    case = Case(**PACKED, lengths=((5, 40), (5, 7)), head_dim=16, head_dim_v=16, dtype="bf16")
    spec = ForwardSpec(head_dim=16, head_dim_v=16, used_k=True)
    inputs = make_inputs(spec, case)
    assert np.isnan(inputs.v.astype(np.float32)).any()
    assert_within_budget(inputs, build(spec)(inputs)[0])

    clean = replace(inputs, v=np.nan_to_num(inputs.v.astype(np.float32)).astype(inputs.v.dtype))
    monkeypatch.setattr(operands.ForwardSpec, "ragged_k", False)
    outputs, _ = build(spec)(clean)
    assert_within_budget(inputs, outputs)
    outputs, _ = build(spec)(inputs)
    assert np.isnan(outputs.out.astype(np.float32)).any()


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_nan_at_a_hidden_key_is_as_the_matrix_says(tensor: str) -> None:
    """Key 0, which no window shows but whose tile is loaded: harmless in K, in every row of V."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 160, 1, 64)).astype(np.float16) for name in "qkv"}
    arrays["q"] = arrays["q"][:, 100:]
    arrays[tensor][:, 0] = np.nan
    call = partial(fa4.flash_attn_func, **arrays, window_size=(32, 0))
    assert np.isfinite(call(impl="reference")).all()
    (row,) = (row for row in FORWARD if row.name == f"NaN, inf in hidden {tensor.upper()}")
    reached = np.isnan(call(impl="emulator")).all(-1)
    assert (reached == (not row.supported)).all()


@pytest.mark.parametrize("sink", [float("-inf"), -1e4, 0.0, 300.0, 1e4])
def test_sinks_of_any_size(sink: float) -> None:
    """Rows with keys and rows without, sinks that would overflow a power of two."""
    run = kernel("window")
    case = Case(**PACKED, lengths=((64, 5),), group=4, head_dim=72, head_dim_v=16, dtype="bf16",
                sink=sink, window_size=(3, -2))  # fmt: skip
    inputs = make_inputs(run.spec, case)
    assert not inputs.sequences[0].visible.any(axis=-1).all()
    assert_within_budget(inputs, run(inputs)[0])


def test_rows_without_keys_at_any_scale() -> None:
    """The reference maximum of an unseen row times the scale stays finite, for every scale."""
    scales = np.linspace(1.0, 64.0, 100_001, dtype=np.float32)
    lowest = np.float32(-LARGEST) / scales * scales
    assert np.isfinite(lowest).all() and (lowest < -1e30).all()


def test_outputs_of_another_shape_are_refused() -> None:
    """The host code compares sizes that must agree, so that nothing is written outside."""
    run = kernel("causal")
    case = Case(**PACKED, lengths=((130, 64),), head_dim=64, head_dim_v=64, dtype="fp16")
    call = list(arguments(run.spec, make_inputs(run.spec, case), 1))
    call[4] = call[4][..., :100]
    with pytest.raises(LaunchError, match="lse"):
        run.session.call(run.compiled, call, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_mod": min, "causal": True}, "mask_mod replaces causal"),
        ({"mask_mod": min, "window_left": True}, "mask_mod replaces causal"),
        ({"score_mod": min, "softcap": True}, "softcap is a score_mod"),
        ({"causal": True, "window_right": True}, "causal has its own right bound"),
        ({"group": 3}, "group must divide 128"),
        ({"aux": (("fp64", 1),)}, "aux dtype must be one of"),
        ({"aux": (("fp32", 0),)}, "rank of an aux tensor"),
        ({"dtype": "fp32"}, "dtype must be bf16 or fp16"),
    ],
)
def test_specs_that_contradict_themselves(fields: dict[str, object], message: str) -> None:
    """Refused before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        ForwardSpec(head_dim=64, head_dim_v=64, **fields)
