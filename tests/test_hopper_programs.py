"""The programs that look at the Hopper kernels on a GPU, without one: what they would notice."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import fa4
from lab.hardware import repeated_launches, sanitized, small_transformer
from lab.hardware.repeated_launches import RepeatedGradient, compute, differ, make_inputs
from lab.hardware.sanitized import read_report
from lab.hardware.small_transformer import draw_tokens, judge, logits_of, make_model
from lab.hardware.warpgroup_forward.random_launches import Drawn, compare

SMALL = (
    RepeatedGradient(64, 64, 1, 40, (4, 2), causal=True),
    RepeatedGradient(72, 40, 1, 40, (4, 2), causal=False, packed=True),
)


@pytest.mark.parametrize("call", SMALL, ids=["dense", "packed"])
def test_other_bits_of_any_result_are_seen(call: RepeatedGradient) -> None:
    """Equal inputs differ nowhere; one bit of one element, or a NaN, is seen."""
    inputs = make_inputs(call, 0, "cpu")
    first = compute(call, inputs, impl="reference")
    assert not differ(compute(call, inputs, impl="reference"), first)
    for place in range(len(first)):
        for wrong in (lambda x: torch.nextafter(x, 2 * x + 1), lambda x: x * torch.nan):
            found = [x.clone() for x in first]
            flat = found[place].view(-1)
            flat[-1] = wrong(flat[-1])
            assert differ(found, first)


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five launches with other bits."""
    numbers = iter([1.0, 1.0, 2.0, 1.0, 3.0])
    monkeypatch.setattr(repeated_launches, "make_inputs", lambda *_: [])
    monkeypatch.setattr(
        repeated_launches, "compute", lambda *_, **__: [torch.tensor([next(numbers)])]
    )
    assert repeated_launches.one_behind_the_other(SMALL[0], 5) == 2


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("launched\n========= ERROR SUMMARY: 0 errors\n", True),
        ("launched\n== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("launched\n== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", False),
        ("launched\n========= Invalid read\n========= ERROR SUMMARY: 12 errors\n", False),
        ("========= ERROR SUMMARY: 0 errors\n", False),
        ("launched\n", False),
    ],
)  # fmt: skip
def test_a_tool_must_have_counted_nothing(text: str, ok: bool) -> None:
    """A launch that did not happen, and a tool that did not speak, are no proof."""
    assert read_report("racecheck", "d64", text)["ok"] == ok


def test_every_family_of_kernels_is_looked_at() -> None:
    assert sanitized.PLANTED in sanitized.FAMILIES
    for word in ("parts", "e4m3", "e5m2", "gradients", "in order", "(192, 128)", "d256"):
        assert any(word in name for name in sanitized.FAMILIES), word


def test_the_planted_fault_is_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a warpgroup waits for dS of the other in every tile: in the loop and behind it."""
    pytest.importorskip("cutlass")
    from fa4.compiled.backward import compile_warpgroup_backward
    from fa4.plan.schema import Wait
    from fa4.sm90.backward import consumer
    from fa4.sm90.backward.spec import WarpgroupBackwardSpec

    def waits() -> int:
        steps: list = []
        spec = WarpgroupBackwardSpec(head_dim=16, head_dim_v=16)
        compile_warpgroup_backward(spec, trace=steps)
        return sum(step == ("consumer0", Wait("met")) for step in steps)

    assert waits() == 2
    monkeypatch.setattr(consumer, "start_queries", consumer.start_queries)
    sanitized.plant()
    assert waits() == 0


def test_losses_further_away_than_torchs_own_are_refused() -> None:
    """As near to one as the others are to one another: right; a tenth further: wrong."""
    down = [4.0 - 0.02 * step for step in range(100)]
    theirs = {"math": down, "flash": [x + 0.01 for x in down]}
    near, far = ({**theirs, "fa4": [x + by for x in down]} for by in (0.015, 0.021))
    further = {**theirs, "fa4": [x + 0.025 for x in down]}
    assert judge([near])["ok"] and not judge([far])["ok"] and not judge([theirs])["ok"]
    assert judge([near, near, far])["ok"] and not judge([further, further, near])["ok"]
    flat = [4.0] * 100
    assert not judge([near, {"math": flat, "flash": flat, "fa4": flat}])["learnt"]


def test_the_model_looks_back_and_never_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a row change with an earlier token, not with a later one."""
    monkeypatch.setattr(small_transformer, "LAYERS", 1)
    model = make_model(16, "cpu")
    tokens = draw_tokens(1, "cpu")[0, :1, :20]
    attend = small_transformer.find_attention("math")
    with torch.no_grad():
        first = logits_of(model, tokens, 16, attend)
        tokens[0, 10] = (tokens[0, 10] + 1) % small_transformer.WORDS
        second = logits_of(model, tokens, 16, attend)
    assert (first[0, :10] == second[0, :10]).all()
    assert (first[0, 11:] != second[0, 11:]).any(-1).all()


def draw_heads(seed: int) -> tuple[torch.Tensor, ...]:
    """Q, K and V of 144 queries and 295 keys, eight heads on two: (rows, heads, 64)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((8, 144, 64), (2, 295, 64), (2, 295, 64))
    return tuple(
        torch.randn(shape, generator=generator).bfloat16().transpose(0, 1) for shape in shapes
    )


def test_one_large_element_has_a_band_of_its_own() -> None:
    """1.2113, beyond all others: plain attention is off by 0.0004, the kernel, by the rounding of P
    and of O, by 0.0074. Twice that is refused."""
    call = Drawn(dims=(64, 64), heads=(8, 2), window=(None, 0), lengths=((144, 295),), packed=False,
                 used=False, sink=False, softcap=0.0, dtype="bf16")  # fmt: skip
    tensors = draw_heads(127)
    out, lse = fa4.flash_attn_func(
        *(x[None] for x in tensors), causal=True, impl="emulator_sm90", return_lse=True
    )
    assert 0.6 < compare(tensors, (out[0], lse[0]), call, None) < 1
    at = int((out[0].abs() == out.abs().max()).flatten().nonzero()[0])
    wrong = out[0].clone()
    wrong.view(-1)[at] += 0.0078125 * wrong.view(-1)[at].sign()
    with pytest.raises(AssertionError, match="O is off by"):
        compare(tensors, (wrong, lse[0]), call, None)
