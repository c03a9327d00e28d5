"""From a call to its kernel: the spec that is chosen, the window, and the arguments."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4.compiled.launch import check_operand, element_strides, launch_arguments, regular
from fa4.compiled.support import ForwardCall, NotSupported
from fa4.compiled.variants import choose_spec, find_gpu, kernel_window
from fa4.config import ForwardConfig

PLAIN = ForwardCall(
    dtype="bf16", head_dim=128, head_dim_v=128, heads_q=2, heads_k=2, batch=1, rows_q=512,
    rows_k=700,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, {"causal": False, "window_left": False, "window_right": False, "group": 1}),
        ({"window": (None, 0)}, {"causal": True, "window_left": False, "window_right": False}),
        ({"window": (9, 0)}, {"causal": True, "window_left": True, "window_right": False}),
        ({"window": (None, 3)}, {"causal": False, "window_left": False, "window_right": True}),
        ({"window": (None, -3)}, {"causal": False, "window_right": True}),
        ({"window": (699, 511)}, {"causal": False, "window_left": False, "window_right": False}),
        ({"window": (698, 510)}, {"window_left": True, "window_right": True}),
        ({}, {"scheduler": "static"}),
        ({"window": (None, 0)}, {"scheduler": "lpt"}),
        ({"heads_q": 8}, {"group": 4}),
        ({"heads_q": 8, "pack_gqa": False}, {"group": 1}),
        ({"heads_q": 6}, {"group": 1}),
        ({"lse": False, "sink": True}, {"lse": False, "sink": True, "softcap": False}),
        ({"softcap": 2.0}, {"lse": True, "sink": False, "softcap": True}),
        ({"packed_q": True, "used_k": True}, {"packed_q": True, "used_k": True, "used_q": False}),
    ],
)  # fmt: skip
def test_spec_fields(changes, chosen) -> None:
    spec = choose_spec(replace(PLAIN, **changes))
    assert {name: getattr(spec, name) for name in chosen} == chosen


def test_numerics() -> None:
    """Tuned per mask and head dim, one Q tile where one is enough, and the caller's own as is."""
    tuned = ForwardConfig.tuned("bf16", 128, False)
    assert choose_spec(PLAIN).numerics == tuned
    causal = choose_spec(replace(PLAIN, window=(None, 0))).numerics
    assert causal == ForwardConfig.tuned("bf16", 128, True) != tuned
    assert choose_spec(replace(PLAIN, rows_q=128)).numerics == replace(tuned, q_tiles=1)
    assert choose_spec(replace(PLAIN, rows_q=129)).numerics == tuned
    assert choose_spec(replace(PLAIN, rows_q=65, heads_q=4)).numerics == tuned  # packed: 130 rows
    packed = replace(PLAIN, packed_q=True, max_seqlen_q=100)  # short sequences in a long tensor
    assert choose_spec(packed).numerics.q_tiles == 1
    assert choose_spec(replace(packed, max_seqlen_q=None)).numerics.q_tiles == 2
    own = ForwardConfig(rescale_threshold_log2=0.0)
    assert choose_spec(replace(PLAIN, rows_q=1, numerics=own)).numerics == own


def test_pairs_serve_long_unmasked_calls() -> None:
    """With d 128 or 192, and no others."""
    assert choose_spec(PLAIN).cta_group == 2
    assert choose_spec(replace(PLAIN, head_dim=192)).cta_group == 2
    for changes in (
        {"rows_q": 256}, {"numerics": ForwardConfig(q_tiles=1)}, {"window": (None, 0)},
        {"packed_k": True}, {"used_q": True}, {"head_dim": 64}, {"head_dim_v": 64},
    ):  # fmt: skip
        assert choose_spec(replace(PLAIN, **changes)).cta_group == 1, changes


@given(
    st.integers(1, 6), st.integers(1, 6),
    st.one_of(st.none(), st.integers(-9, 9), st.just(2**40)),
    st.one_of(st.none(), st.integers(-9, 9), st.sampled_from([2**40, -(2**40)])),
)  # fmt: skip
def test_window_shows_the_same_keys(rows, keys, left, right) -> None:
    """And its bounds fit 32 bits."""

    def visible(left, right):
        offset = np.arange(keys) - np.arange(rows)[:, None] - (keys - rows)
        seen = np.ones((rows, keys), bool)
        seen &= True if left is None else offset >= -left
        return seen & (True if right is None else offset <= right)

    call = replace(PLAIN, rows_q=rows, rows_k=keys, window=(left, right))
    found = kernel_window(call)
    assert (visible(*found) == visible(left, right)).all()
    assert all(side is None or abs(side) < 2**31 for side in found)


def test_machines() -> None:
    assert find_gpu((10, 0)).arch == "sm_100a" and find_gpu((10, 3)).arch == "sm_103a"
    assert find_gpu((9, 0), "sm90").arch == "sm_90a"
    for capability, family in (((9, 0), "sm100"), ((10, 0), "sm90"), ((12, 0), ""), ((10, 1), "")):
        with pytest.raises(ValueError, match=re.escape(".".join(map(str, capability)))):
            find_gpu(capability, family)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


BAD_OPERANDS = [
    (bf16(1, 4, 2, 64).transpose(1, 3), "the last dimension must be contiguous"),
    (bf16(1, 4, 2, 68)[..., :64], "strides must be multiples of 8 elements"),
    (bf16(1, 4, 2, 128).flatten()[1 : 1 + 512].view(1, 4, 2, 64), "at a multiple of 16 bytes"),
    (np.zeros((1, 4, 2, 64), np.float16)[:, ::-1], "strides must be multiples of 8 elements"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD_OPERANDS)
def test_layouts_that_tma_cannot_address(tensor, message) -> None:
    with pytest.raises(NotSupported, match=message) as caught:
        check_operand("k", tensor)
    assert "; k has " in str(caught.value)


def test_layouts_that_it_can() -> None:
    """Any order of batch, rows and heads; odd strides where there is one element only."""
    check_operand("q", bf16(2, 4, 3, 64).transpose(1, 2))
    check_operand("q", np.zeros((2, 4, 3, 64), ml_dtypes.bfloat16)[:, ::2])
    odd = torch.empty_strided((1, 4, 1, 64), (3, 64, 5, 1), dtype=torch.bfloat16)
    check_operand("q", odd)
    for tensor in (odd, np.lib.stride_tricks.as_strided(odd.half().numpy(), strides=(6, 128, 10, 2),
                                                        shape=(1, 4, 1, 64))):  # fmt: skip
        same = regular(tensor)
        assert element_strides(same) == (256, 64, 64, 1) and same.shape == tensor.shape
    plain = bf16(2, 4, 3, 64)
    assert regular(plain) is plain


def test_arguments_are_the_kernels() -> None:
    """In the order of its parameters, with None exactly where its stand-ins have it."""
    from fa4.compiled.forward import fake_arguments
    from fa4.sm100.forward.kernel import forward

    names = [*inspect.signature(forward).parameters][:18]
    assert names == [
        "q", "k", "v", "o", "lse", "softmax_scale", "softcap", "window_left", "window_right",
        "max_seqlen_q", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "aux",
        "num_sms", "stream",
    ]  # fmt: skip
    vectors = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "aux"))
    for call, sink in (
        (PLAIN, None),
        (replace(PLAIN, window=(4, 0), sink=True), "sink"),
        (replace(PLAIN, window=(None, 5), lse=False), None),
    ):
        spec = choose_spec(call)
        tensors = [bf16(1, 512, 2, 128) for _ in range(4)]
        values = launch_arguments(
            call, spec, tensors[:3], (tensors[3], "lse"), {**vectors, "sink": sink}, 148
        )
        stand_ins = fake_arguments(spec)
        assert [x is None for x in values] == [x is None for x in stand_ins]
        given = dict(zip(names, values, strict=False))
        assert (given["max_seqlen_q"], given["num_sms"]) == (512, 148)
        assert given["window_left"] == (4 if spec.window_left else None)
