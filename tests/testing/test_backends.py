"""What a back end may raise, refuse and be called: names, pairs, torch functions."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import numpy as np
import pytest

from fa4.testing import Case, assert_within_budget, build_inputs, load_backend
from fa4.testing.checks import equals_oracle
from fa4.testing.contract import MOST_SILENT, Backend
from fa4.testing.refusals import (
    BackendFailed,
    NoAnswer,
    NotCovered,
    is_poison,
    named_keywords,
    quiet,
)
from tests.testing import planted

PLANTED, FAULTY, TORCH = (
    "tests.testing.planted",
    "tests.testing.faulty",
    "tests.testing.torch_functions",
)
SMALL = Case(seqlen_q=3, seqlen_k=5, heads_k=2, group=2)


class Interrupt(BaseException):
    """No Exception, and not SystemExit either."""


@pytest.mark.parametrize("error", [SystemExit(3), Interrupt("stop"), GeneratorExit()])
def test_whatever_is_no_exception_is_a_failed_call(error: BaseException) -> None:
    """An ordinary exception that names it; in the backward pass too."""

    def raises(*arrays, **options):
        raise error

    backend = load_backend(raises)
    backend.backward = raises
    inputs = build_inputs(SMALL)
    saved = load_backend("reference").forward(inputs)
    for call in (lambda: backend.forward(inputs), lambda: backend.gradients(inputs, saved)):
        with pytest.raises(BackendFailed, match="raised ") as caught:
            call()
        assert repr(error) in str(caught.value)
    assert backend.reason_missing("fp32") is None and not backend.returns_lse


@pytest.mark.parametrize("dim", [64, 128, Case().head_dim])
def test_an_lse_is_found_in_the_first_call_that_is_accepted(dim: int) -> None:
    """A function of one head dim and one element type."""

    def attend(q, k, v):
        if q.shape[-1] != dim or q.dtype != np.float32:
            raise NotImplementedError(f"head dim {q.shape[-1]}")
        return np.zeros_like(q), np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)

    assert load_backend(attend).returns_lse and load_backend(attend).reason_missing("lse") is None
    without = load_backend(lambda q, k, v: attend(q, k, v)[0])
    assert without.reason_missing("lse") == "returns no LSE"


def test_a_function_that_hangs_is_asked_twice_for_an_lse() -> None:
    """Each call that does not answer takes the whole time limit: one of a type, of two types."""
    asked = []

    def silent(q, k, v):
        asked.append(q.dtype)
        raise NoAnswer("no answer within 1 s")

    assert not load_backend(silent).returns_lse
    assert len(asked) == len(set(asked)) == MOST_SILENT


def test_one_case_in_eight_is_called_twice() -> None:
    """By its seed, whichever the first one is."""
    calls = []

    def attend(q, k, v):
        calls.append(1)
        return load_backend("reference").function(q, k, v)

    backend = load_backend(attend)
    for seed in range(7, 26):
        calls.clear()
        assert equals_oracle(backend, replace(SMALL, seed=seed)) <= 1
        assert len(calls) == (2 if seed in (8, 16, 24) else 1)


def test_ctrl_c_is_not_a_failed_call() -> None:
    """KeyboardInterrupt ends the run."""

    def raises(q, k, v):
        raise KeyboardInterrupt

    for ask in (lambda b: b.forward(build_inputs(SMALL)), lambda b: b.reason_missing("fp32")):
        with pytest.raises(KeyboardInterrupt):
            ask(load_backend(raises))


def refuses_shapes(error: Exception, **attributes):
    """A back end that refuses head_dim_v unequal to head_dim, head dims below 32 and fp64."""

    def attend(q, k, v, *, causal=False):
        if q.dtype == np.float64 or q.shape[-1] < 32 or q.shape[-1] != v.shape[-1]:
            raise error
        return planted.honest(q, k, v, causal=causal)

    for name, value in attributes.items():
        setattr(attend, name, value)
    return load_backend(attend)


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (NotImplementedError("no kernel for 104"), {}),
        (RuntimeError("no kernel for 104"), {"unsupported": (RuntimeError,)}),
        (RuntimeError("no kernel for 104"), {"unsupported": RuntimeError}),
        (ValueError("no kernel for 104"), {"unsupported": lambda e: "no kernel" in str(e)}),
    ],
)
def test_a_refused_shape_is_that_shape(error: Exception, attributes: dict) -> None:
    """It names the call, and neither the element type nor other shapes are lost with it."""
    backend = refuses_shapes(error, **attributes)
    inputs = build_inputs(Case(head_dim=32, head_dim_v=104, dtype="bf16", causal=True))
    with pytest.raises(NotCovered) as caught:
        backend.forward(inputs)
    assert (
        caught.value.feature == "head_dim 32 with head_dim_v 104 in bf16, lengths 1 and 1, causal"
    )
    assert backend.reason_missing("bf16") is None
    good = build_inputs(Case(seqlen_k=5, head_dim=64, head_dim_v=64, dtype="bf16"))
    assert assert_within_budget(good, backend.forward(good)) <= 1.0
    assert "no kernel" in backend.reason_missing("fp64")
    with pytest.raises(NotCovered, match=r"^fp64: no kernel"):
        backend.forward(build_inputs(Case(head_dim=64, head_dim_v=64, dtype="fp64")))


def test_a_function_that_is_not_there_is_named() -> None:
    """And what would do in its place: of packed sequences alone, offsets of the one that is."""
    backend = load_backend(f"{PLANTED}:minimal")
    assert backend.reason_missing("varlen") == "no attribute `varlen` and no cu_seqlens_q"
    assert backend.reason_missing("paged") == "no attribute `varlen` and no cu_seqlens_q"
    assert backend.reason_missing("dlse") == "no attribute `backward`"


def test_the_same_refusal_is_noted_once() -> None:
    """Sizes differ from call to call; the list of what is not covered stays short."""
    backend = refuses_shapes(NotImplementedError("no kernel"))
    for dim in (40, 48, 56):
        with pytest.raises(NotCovered, match=f"head_dim {dim} with head_dim_v 64") as caught:
            backend.forward(build_inputs(Case(head_dim=dim, head_dim_v=64)))
        assert caught.value.kind == "no kernel"
    assert [name for name in backend.notes if "head_dim" in name] == [
        "head_dim 40 with head_dim_v 64 in fp32, lengths 1 and 1"
    ]


def test_errors_that_are_no_refusals() -> None:
    """A RuntimeError is a fault unless the back end says otherwise; a CUDA error always is."""
    inputs = build_inputs(Case())
    with pytest.raises(RuntimeError, match="no kernel"):
        refuses_shapes(RuntimeError("no kernel")).forward(inputs)
    poison = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert is_poison(poison) and not is_poison(RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        refuses_shapes(poison, unsupported=(RuntimeError,)).forward(inputs)
    with pytest.raises(ValueError, match="unsupported must be exception types or a predicate"):
        refuses_shapes(poison, unsupported="RuntimeError")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "bf16"])
def test_any_float_type_of_lse_is_taken(dtype) -> None:
    """float32 by our own documentation, whatever the inputs are."""
    dtype = build_inputs(Case(dtype="bf16")).q.dtype if dtype == "bf16" else dtype

    def attend(q, k, v, *, return_lse=False):
        out, lse = planted.honest(q, k, v, return_lse=True)
        return out, lse.astype(dtype)

    outputs = load_backend(attend).forward(build_inputs(Case(dtype="fp64", seqlen_k=3)))
    assert outputs.lse is not None and outputs.lse.dtype == dtype


def test_claims_and_where_it_runs() -> None:
    """Ours claim robustness; a function says what it claims and that it uses CUDA."""
    for name in ("reference", "oracle"):
        assert load_backend(name).claims == {"robustness", "deterministic"}
        assert not load_backend(name).isolate_by_default
    plain = load_backend(f"{PLANTED}:minimal")
    assert (plain.claims, plain.uses_cuda, plain.isolate_by_default) == (frozenset(), False, False)
    assert load_backend(f"{FAULTY}:complete_backend").claims == {"robustness"}

    def attend(q, k, v):
        return planted.honest(q, k, v)

    attend.uses_cuda = True
    assert Backend.wrap(attend, "module:attend").isolate_by_default
    assert load_backend(attend).uses_cuda
    assert not load_backend(attend).isolate_by_default  # it has no name to be found by


def test_a_pair_of_forward_and_backward() -> None:
    """Each from where it is."""
    backend = load_backend(f"{PLANTED}:honest,{PLANTED}:honest.backward")
    inputs = build_inputs(SMALL)
    grads = backend.gradients(inputs, backend.forward(inputs))
    assert assert_within_budget(inputs, grads) <= 1.0
    assert load_backend(f"{PLANTED}:minimal").backward is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_a_torch_function(dtype: str) -> None:
    """Values, LSE and every gradient, the sink's and the LSE's too; packed sequences as well."""
    pytest.importorskip("torch")
    backend = load_backend(f"torch:{TORCH}:attention")
    for case in (
        Case(seqlen_q=5, seqlen_k=7, heads_k=2, group=2, sink=0.5, causal=True, dtype=dtype),
        Case(seqlen_q=5, seqlen_k=7, softcap=3.0, dtype=dtype, strided=8),
        Case(layout="packed", lengths=((3, 5), (4, 2)), heads_k=2, dtype=dtype),
    ):
        inputs = build_inputs(case)
        saved = backend.forward(inputs)
        assert saved.out.dtype == inputs.q.dtype
        with_dlse = case.layout == "dense"
        grads = backend.gradients(inputs, saved, with_dlse=with_dlse)
        assert assert_within_budget(inputs, grads, with_dlse=with_dlse) <= 1.0
        assert (grads.dsink is None) == (case.sink is None)
    assert backend.reason_missing("dlse") is None and backend.reason_missing("window_size")


def test_bits_are_carried_unchanged() -> None:
    """bf16 NaN payloads, infinities and subnormals survive the way to torch and back."""
    pytest.importorskip("torch")
    from fa4.call.arrays import to_numpy
    from fa4.testing.torch_function import to_torch

    for dtype in ("bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2"):
        x = build_inputs(Case(dtype=dtype)).q
        bits = np.random.default_rng(0).integers(0, 256, (4, 6 * x.itemsize), np.uint8)
        array = bits.view(x.dtype).copy()
        assert to_numpy("x", to_torch(array, "cpu")).tobytes() == array.tobytes()
        view = array[:, 1:4]
        tensor = to_torch(view, "cpu")
        assert to_numpy("x", tensor.clone()).tobytes() == view.tobytes()
        assert tensor.stride() == (6, 1)


def test_a_tensor_lies_as_its_array_does() -> None:
    """Any strides that torch has, 0 among them; what it has not, as a copy."""
    pytest.importorskip("torch")
    from fa4.testing.torch_function import to_torch

    buffer = np.arange(48.0).reshape(2, 4, 6)
    expanded = np.broadcast_to(buffer[:, :1], buffer.shape)
    for view in (buffer[:, ::2], buffer[..., 1:3], buffer.transpose(1, 0, 2), expanded):
        tensor = to_torch(view, "cpu")
        assert tensor.stride() == tuple(step // 8 for step in view.strides)
        assert np.array_equal(tensor.numpy(), view)
    for array in (buffer[:, ::-1], buffer.view(np.float32)[..., ::2], np.asfortranarray(buffer)):
        tensor = to_torch(array, "cpu")
        assert tensor.is_contiguous() and np.array_equal(tensor.numpy(), array)


def test_torch_functions_that_are_wrong() -> None:
    """A detached LSE is not covered, detached keys break the budget."""
    pytest.importorskip("torch")
    inputs = build_inputs(SMALL)
    cut = load_backend(f"torch:{TORCH}:detached_lse")
    with pytest.raises(NotCovered, match="its LSE has no gradient"):
        cut.gradients(inputs, cut.forward(inputs), with_dlse=True)
    wrong = load_backend(f"torch:{TORCH}:detached_keys")
    with pytest.raises(AssertionError, match="dk"):
        assert_within_budget(inputs, wrong.gradients(inputs, wrong.forward(inputs)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"torch:nowhere:{TORCH}:attention", "torch knows no device 'nowhere'"),
        (f"torch:{TORCH}:missing", "has no 'missing'"),
        (f"{PLANTED}:minimal,", "must be one of"),
        (f"{PLANTED}:", "must be one of"),
        (f"{PLANTED}:minimal:more", "must be one of"),
        (f"{PLANTED}:minimal,{PLANTED}:backward,x:y", "must be one of"),
        (f"{PLANTED}:minimal,{PLANTED}:missing", "has no 'missing'"),
        ("flash-attn", "must be one of reference, oracle, torch-sdpa, .*flash-attn-2"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    """One line that says what is wrong."""
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=message) as caught:
        load_backend(name)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_not_there() -> None:
    """One line, before anything runs."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"attention needs a CUDA device; torch .* sees none"):
        load_backend(f"torch:cuda:{TORCH}:attention")


def test_modules_that_exit_when_imported(tmp_path, monkeypatch) -> None:
    """SystemExit while a module is imported is one line too."""
    (tmp_path / "leaver.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"cannot import 'leaver' .*: raised SystemExit\(3\)"):
        load_backend("leaver:f")


def test_a_function_whose_signature_cannot_be_read_is_given_all_options() -> None:
    """Compiled extensions have none; what they take shows in the call."""

    def compiled(q, k, v, **options):
        return q, options

    compiled.__signature__ = "no signature"
    with pytest.raises(TypeError):
        inspect.signature(compiled)
    assert named_keywords(compiled) == (frozenset(), True)
    assert named_keywords(lambda q, causal=False: q) == ({"q", "causal"}, False)
    assert named_keywords(lambda q, *, scale, **rest: q) == ({"q", "scale"}, True)


def test_warnings_are_back_when_the_last_has_left() -> None:
    """One within another, as calls of several threads are."""
    before = list(warnings.filters)
    with quiet():
        with quiet():
            warnings.warn("not shown", UserWarning, stacklevel=1)
        warnings.warn("not shown", UserWarning, stacklevel=1)
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="shown"):
        warnings.warn("shown", UserWarning, stacklevel=1)
