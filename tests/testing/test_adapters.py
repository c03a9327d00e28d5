"""Adapters to other libraries: for real where torch alone is needed, else against stand-ins.

The stand-ins (`fakes`) have the libraries' signatures and conventions; what is tested is the way of
arguments and results, for every option that an adapter offers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fa4.testing import Case, assert_within_budget, build_inputs, load_backend, torch_function
from fa4.testing.adapters import ADAPTERS, load_adapter, sdpa
from fa4.testing.contract import Backend
from fa4.testing.numerics import USUAL_NUMERICS
from fa4.testing.properties import check_property
from fa4.testing.refusals import NotCovered

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.testing.fakes")

BASE = Case(seqlen_q=7, seqlen_k=13, heads_k=2, head_dim=16, head_dim_v=16, dtype="bf16", batch=2)
PACKED = replace(BASE, layout="packed", lengths=((7, 13), (1, 5), (9, 4)))
CASES = {
    "plain": BASE,
    "fp16": replace(BASE, dtype="fp16"),
    "grouped": replace(BASE, group=2),
    "causal": replace(BASE, causal=True),
    "rows without keys": replace(BASE, causal=True, seqlen_q=15),
    "window": replace(BASE, window_size=(2, 3)),
    "left": replace(BASE, window_size=(2, None)),
    "right": replace(BASE, window_size=(None, 3)),
    "causal window": replace(BASE, causal=True, window_size=(2, None)),
    "to the diagonal": replace(BASE, window_size=(None, 0)),
    "behind the diagonal": replace(BASE, window_size=(2, 0)),
    "scale": replace(BASE, softmax_scale=0.7),
    "softcap": replace(BASE, softcap=5.0),
    "sink": replace(BASE, sink=0.5, causal=True, group=2),
    "offset": replace(BASE, window_size=(-2, 5)),
    "v dim": replace(BASE, head_dim_v=32),
    "strided": replace(BASE, strided=8, group=2),
    "packed": PACKED,
    "packed causal": replace(PACKED, causal=True, group=2),
    "packed window": replace(PACKED, causal=True, window_size=(2, None), softmax_scale=0.3),
    "padded": replace(PACKED, layout="padded"),
    "paged": replace(PACKED, layout="paged", page_size=4),
    "paged causal": replace(PACKED, layout="paged", page_size=4, causal=True),
}
# adapter: what it does not offer; everything else must be within the budget.
LACKS = {
    "flash-attn-2": {"sink", "offset", "v dim", "padded", "paged", "paged causal"},
    "flash-attn-3": {"sink", "offset"},
    "flash-attn-4": set(),
    "xformers": {"softcap", "sink", "offset", "padded", "paged", "paged causal"},
    "flashinfer": {"sink", "offset", "padded"},
    "flex-attention": {"padded", "paged", "paged causal"},
    "torch-sdpa": {"softcap", "sink", *(n for n in CASES if n[:3] in ("pac", "pad", "pag"))},
}  # fmt: skip
LACKS["torch-sdpa-math"] = LACKS["torch-sdpa"]
LACKS["torch-sdpa-flash"] = LACKS["torch-sdpa"] | {"v dim"}
WITHOUT_LSE = {"torch-sdpa", "torch-sdpa-math", "torch-sdpa-flash"}
GRADIENTS = set(LACKS) - {"flashinfer", "flex-attention"}


@pytest.fixture
def adapter(monkeypatch):
    """Load an adapter on the CPU, with its library's stand-in where there is one."""

    def load(name):
        make = getattr(fakes, name.replace("-", "_"), None)
        for module, content in (make() if make else {}).items():
            monkeypatch.setitem(sys.modules, module, content)
        return load_adapter(name, device="cpu")

    return load


@pytest.mark.parametrize("name", LACKS)
def test_what_it_offers_is_right_and_the_rest_is_refused(adapter, name: str) -> None:
    """Out and LSE within the budget, or NotCovered, exactly as listed."""
    backend = adapter(name)
    refused = set()
    for label, case in CASES.items():
        inputs = build_inputs(case)
        try:
            outputs = backend.forward(inputs)
        except NotCovered:
            refused.add(label)
            continue
        assert assert_within_budget(inputs, outputs) <= 1.0, label
        assert (outputs.lse is None) == (name in WITHOUT_LSE)
    assert refused == LACKS[name]
    assert backend.reason_missing("bf16") is None
    assert (backend.reason_missing("lse") is None) == (name not in WITHOUT_LSE)


@pytest.mark.parametrize(("name", "case", "message"), [
    ("flash-attn-2", CASES["v dim"], "one head dim for Q, K and V; got 16 and 32"),
    ("flash-attn-2", CASES["offset"], r"a window side below 0 \(-2\) means unbounded there"),
    ("xformers", CASES["offset"], r"a window side below 0 \(-2\) means unbounded there"),
    ("xformers", replace(PACKED, window_size=(2, 3)), "windows that reach beyond the diagonal"),
    ("flashinfer", replace(PACKED, window_size=(2, 3)), "windows that reach beyond the diagonal"),
    ("flex-attention", replace(BASE, seqlen_k=0), "takes no empty tensors"),
    ("flex-attention", replace(BASE, batch=0), "takes no empty tensors"),
])  # fmt: skip
def test_refusals_say_what_and_how_much(adapter, name: str, case: Case, message: str) -> None:
    """In a call that is otherwise offered."""
    with pytest.raises(NotCovered, match=message):
        adapter(name).forward(build_inputs(case))


@pytest.mark.parametrize("name", sorted(GRADIENTS))
def test_gradients(adapter, name: str) -> None:
    """dQ, dK, dV and dsink, dense and packed, wherever the forward pass is offered."""
    backend = adapter(name)
    for label in ("plain", "grouped", "causal", "softcap", "sink", "strided", "packed causal"):
        if label in LACKS[name]:
            continue
        inputs = build_inputs(CASES[label])
        grads = backend.gradients(inputs, backend.forward(inputs))
        assert assert_within_budget(inputs, grads) <= 1.0, label
        assert (grads.dsink is not None) == (label == "sink")


@pytest.mark.parametrize("name", sorted(LACKS))
def test_gradients_through_the_lse(adapter, name: str) -> None:
    """FlashAttention-4 has them; FlashAttention 2, 3 and xFormers would ignore them silently."""
    backend = adapter(name)
    if name != "flash-attn-4":
        assert backend.reason_missing("dlse")
        return
    inputs = build_inputs(CASES["causal"])
    grads = backend.gradients(inputs, backend.forward(inputs), with_dlse=True)
    assert assert_within_budget(inputs, grads, with_dlse=True) <= 1.0


@pytest.mark.parametrize("case", [
    Case(seqlen_q=5, seqlen_k=9, heads_k=2, score_mod="temper"),
    Case(seqlen_q=5, seqlen_k=9, heads_k=2, score_mod="forbid"),
    Case(seqlen_q=5, seqlen_k=9, heads_k=2, mask_mod="stripes", softcap=2.0),
    Case(heads_k=2, layout="packed", lengths=((5, 9), (3, 2)), score_mod="alibi", causal=True),
])  # fmt: skip
def test_flex_attention_takes_modifiers(adapter, case: Case) -> None:
    """The kit's own functions, NumPy's calls in them too, traced by torch."""
    inputs = build_inputs(case)
    assert assert_within_budget(inputs, adapter("flex-attention").forward(inputs)) <= 1.0


@pytest.mark.parametrize("case", [
    BASE, replace(BASE, softcap=2.0), replace(BASE, score_mod="alibi"),
    replace(BASE, mask_mod="stripes"), PACKED,
])  # fmt: skip
def test_what_torch_cannot_trace(adapter, monkeypatch, case: Case) -> None:
    """A modifier that its compiler gives up on is not covered; without one, it is a failure."""
    backend = adapter("flex-attention")
    broken = torch._dynamo.exc.Unsupported("no such call\nand a long story")

    def gives_up(compiled: bool):
        def attention(*tensors, **options):
            raise broken

        return attention

    monkeypatch.setattr("fa4.testing.adapters.flex._flex", gives_up)
    has_modifier = case.score_mod is not None or case.mask_mod is not None
    with pytest.raises(NotCovered if has_modifier else type(broken)) as caught:
        backend.forward(build_inputs(case))
    assert not has_modifier or str(caught.value).endswith("the modifier: no such call")


WINDOWS = {  # what xFormers is told: no bias is its fastest kernel, then its causal one
    "plain": ("none", None),
    "causal": ("LowerTriangularFromBottomRightMask", (None, 0)),
    "window": ("LocalAttentionFromBottomRightMask", (2, 3)),
    "left": ("LocalAttentionFromBottomRightMask", (2, 13)),
    "right": ("LocalAttentionFromBottomRightMask", (13, 3)),
    "causal window": ("LocalAttentionFromBottomRightMask", (2, 0)),
    "packed": ("BlockDiagonalMask", (None, None)),
    "packed causal": ("BlockDiagonalMask", (None, 0)),
    "packed window": ("BlockDiagonalMask", (2, 0)),
}


@pytest.mark.parametrize("label", WINDOWS)
@pytest.mark.parametrize("name", ["", "_forward_requires_grad"])
def test_the_bias_that_xformers_is_given(adapter, monkeypatch, label: str, name: str) -> None:
    """With the LSE and without it."""
    backend, seen = adapter("xformers"), []
    fmha, full_name = sys.modules["xformers.ops.fmha"], f"memory_efficient_attention{name}"
    run = getattr(fmha, full_name)

    def note(*tensors, attn_bias=None, **options):
        seen.append((type(attn_bias).__name__, getattr(attn_bias, "window", None)))
        return run(*tensors, attn_bias=attn_bias, **options)

    monkeypatch.setattr(fmha, full_name, note)
    inputs = build_inputs(CASES[label])
    options = inputs.options | {"return_lse": bool(name)}
    function = backend.varlen if inputs.is_varlen else backend.function
    backend.call(function, inputs.q, inputs.k, inputs.v, **options)
    kind, window = WINDOWS[label]
    assert seen == [(kind if window else "NoneType", window)]


@pytest.mark.parametrize(
    ("label", "told"),
    [("plain", (False, -1, None)), ("causal", (True, -1, None)), ("causal window", (True, 2, None)),
     ("window", (False, -1, 36)), ("right", (False, -1, 85))],
)  # fmt: skip
def test_the_mask_that_flashinfer_is_given(adapter, monkeypatch, label: str, told) -> None:
    """(causal, left side, pairs of an explicit mask); beside such a mask there is no window."""
    backend, seen, library = adapter("flashinfer"), [], sys.modules["flashinfer"]

    def note(q, k, v, *, causal, window_left, custom_mask=None, **options):
        pairs = None if custom_mask is None else int(custom_mask.sum())
        seen.append((causal, window_left, pairs))
        return torch.zeros(len(q), v.shape[1], v.shape[2], dtype=q.dtype)

    monkeypatch.setattr(library, "single_prefill_with_kv_cache", note)
    function = load_adapter("flashinfer", device="cpu").function
    inputs = build_inputs(CASES[label])
    backend.call(function, inputs.q, inputs.k, inputs.v, **inputs.options)
    assert seen == [told] * BASE.batch


@pytest.mark.parametrize("label", ["plain", "grouped", "packed", "paged"])
@pytest.mark.parametrize("name", sorted(set(LACKS) - WITHOUT_LSE))
def test_without_asking_there_is_no_lse(adapter, name: str, label: str) -> None:
    """The output alone, as every function of the kit's contract, and the same as with the LSE."""
    if label in LACKS[name]:
        return
    backend, inputs = adapter(name), build_inputs(CASES[label])
    function = backend.varlen if inputs.is_varlen else backend.function
    options = {key: value for key, value in inputs.options.items() if key != "return_lse"}
    found = backend.call(function, inputs.q, inputs.k, inputs.v, **options)
    assert found.shape == (*inputs.q.shape[:-1], inputs.v.shape[-1])
    assert np.array_equal(found, backend.forward(inputs).out)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_mask_that_torch_is_given(monkeypatch, kind: str) -> None:
    """Its own words for causal where they mean the same; a GPU's kernels know one more."""
    from torch.nn.attention.bias import CausalBias

    monkeypatch.setattr(sdpa, "band", lambda *given: given)
    device = SimpleNamespace(type=kind)

    def chosen(rows: int, keys: int, window: tuple[int | None, int | None]) -> Any:
        return sdpa.choose_mask(rows, keys, window, device)

    for rows, keys in ((5, 5), (3, 5), (5, 3)):
        assert chosen(rows, keys, (None, None)) == (None, False)
        for window in ((2, 0), (None, 1), (0, None), (None, -1)):
            assert chosen(rows, keys, window) == ((rows, keys, window, device), False)
    assert chosen(5, 5, (None, 0)) == (None, True)
    assert chosen(5, 3, (None, 0)) == ((5, 3, (None, 0), device), False)
    mask, is_causal = chosen(3, 5, (None, 0))
    assert not is_causal
    if kind == "cpu":
        assert mask == (3, 5, (None, 0), device)
    else:
        assert isinstance(mask, CausalBias)
        assert (mask.variant.name, mask.seq_len_q, mask.seq_len_kv) == ("LOWER_RIGHT", 3, 5)


def test_a_kernel_is_held_to_itself(adapter) -> None:
    """The CPU's flash kernel refuses what the math kernel takes, and torch says why."""
    with pytest.raises(NotCovered, match="same last dimension"):
        adapter("torch-sdpa-flash").forward(build_inputs(CASES["v dim"]))
    adapter("torch-sdpa-math").forward(build_inputs(CASES["v dim"]))
    assert not torch.is_warn_always_enabled()


def test_stand_ins_take_what_the_libraries_take() -> None:
    """Tensors by place or name, options by name, and nothing else."""
    take = fakes.accepts("q k", "scale causal", scale=2.0)(lambda a: (a.q, a.k, a.scale, a.causal))
    assert take(1, k=3) == (1, 3, 2.0, False) and take(1, 3, scale=4)[2] == 4
    for given, named in (((1,), {}), ((1, 3, 2.0), {}), ((1, 3), {"dropout": 0.0})):
        with pytest.raises(TypeError):
            take(*given, **named)


def test_refused_shapes_by_the_library_are_not_covered(adapter) -> None:
    """FlashAttention-3 says in a RuntimeError what it has no kernel for."""
    backend = adapter("flash-attn-3")
    with pytest.raises(NotCovered, match="at most 256"):
        backend.forward(build_inputs(replace(BASE, head_dim_v=264)))
    assert backend.reason_missing("bf16") is None and "float32" in backend.reason_missing("fp32")
    assert backend.unsupported is not None
    assert not backend.unsupported(RuntimeError("CUDA error: an illegal memory access"))


def test_a_derivative_of_scores_is_for_who_names_it() -> None:
    """torch differentiates the function; one that wants the derivative as well is given it."""
    pytest.importorskip("torch")
    given: list[Any] = []

    def names_it(q: Any, k: Any, v: Any, *, score_mod_bwd: Any = None) -> Any:
        given.append(score_mod_bwd)
        return q * k * v

    def takes_three(q: Any, k: Any, v: Any) -> Any:
        return q * k * v

    ones = [np.ones((1, 1, 1, 8), np.float32)] * 6
    for function in (names_it, takes_three):
        backward = torch_function._autograd(function, None, "cpu")
        dq, *_ = backward(*ones, score_mod_bwd=len)
        np.testing.assert_array_equal(dq, ones[0])
    assert given == [len]


def test_torch_adds_up_grouped_heads_in_the_element_type() -> None:
    """On a CPU; without its saying so the errors of dV would be too large."""
    case = Case(seqlen_q=32, seqlen_k=128, group=16, head_dim=128, head_dim_v=128, dtype="bf16")
    backend = load_backend("torch-sdpa")
    assert check_property("gradients_gqa_error_rms", backend, case) <= 1.0
    with pytest.raises(AssertionError, match="root mean square"):
        check_property("gradients_gqa_error_rms", replace(backend, numerics=USUAL_NUMERICS), case)


@pytest.mark.parametrize("name", sorted(set(ADAPTERS) - {"torch-sdpa"}))
def test_missing_libraries_are_one_line(monkeypatch, name: str) -> None:
    """What to install, or that there is no GPU."""
    for module in ("flash_attn", "flash_attn_interface", "flash_attn.cute", "xformers",
                   "flash_attn.cute.interface", "xformers.ops.fmha", "flashinfer"):  # fmt: skip
        monkeypatch.setitem(sys.modules, module, None)
    if name in ("torch-sdpa-math", "torch-sdpa-flash", "flex-attention"):
        assert load_backend(name).name == name
        return
    with pytest.raises(
        ValueError, match=f"{name} needs (a CUDA device|.*(pip install|build))"
    ) as e:
        load_backend(name)
    assert "\n" not in str(e.value)


def test_a_library_that_cannot_be_imported(monkeypatch, tmp_path) -> None:
    """A broken installation says so, in one line."""
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.12:\\n cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(ValueError, match="flashinfer is installed but cannot be used: libcudart"):
        load_backend("flashinfer")


def test_own_hopper_kernels_declare_how_they_add(monkeypatch) -> None:
    """An LSE of 8-bit inputs is beyond what exact sums would be allowed, and as it must be."""
    pytest.importorskip("cutlass")
    from fa4.testing.adapters import own_kernels
    from fa4.testing.torch_function import numpy_function

    found = type("Found", (), {"device": "cpu", "why": ""})
    monkeypatch.setattr(own_kernels, "find_gpu", lambda impl: found)
    attend = own_kernels.make("fa4-emulator_sm90", None)
    backend = Backend.wrap(numpy_function(attend), "own")
    case = Case(
        seqlen_k=17, head_dim=16, head_dim_v=16, dtype="e4m3", descale=True, scales="tensor"
    )
    inputs = build_inputs(case)
    outputs = backend.forward(inputs)
    assert assert_within_budget(inputs, outputs, numerics=backend.numerics) <= 1.0
    with pytest.raises(AssertionError, match="lse"):
        assert_within_budget(inputs, outputs)


def test_own_kernels_are_those_asked_for(monkeypatch) -> None:
    """The implementation of the name, with every option but modifiers; here one without a GPU."""
    from fa4.testing.adapters import own_kernels
    from fa4.testing.torch_function import numpy_function

    found = type("Found", (), {"device": "cpu", "why": ""})
    monkeypatch.setattr(own_kernels, "find_gpu", lambda impl: found)
    attend = own_kernels.make("fa4-reference", None)
    inputs = build_inputs(replace(BASE, causal=True, softcap=5.0))
    outputs = Backend.wrap(numpy_function(attend), "own").forward(inputs)
    assert assert_within_budget(inputs, outputs) <= 1.0
    assert "score_mod" in attend.not_covered and attend.device == "cpu"
    with pytest.raises(ValueError, match="impl"):
        own_kernels.make("fa4-nothing", None)(*(torch.zeros(1, 2, 1, 8) for _ in range(3)))
