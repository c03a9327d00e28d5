"""Memory around a call: every write outside the results is seen, and nothing else is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from fa4.testing import Case, build_inputs, isolate, load_backend, strategies, verify
from fa4.testing.case import STRIDES
from fa4.testing.guard import MARGIN_BYTES, Guard, guarded_call
from tests.testing import planted

HERE = "tests.testing.test_guard"


def flat_memory(x: np.ndarray) -> tuple[np.ndarray, int]:
    """The bytes of the buffer of a guarded array, and where the array starts."""
    base = x.base
    assert isinstance(base, np.ndarray)
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return base.view(np.uint8), start


@settings(max_examples=40)
@given(strategies.dense_cases(lengths_q=(1, 3, 17), lengths_k=(1, 5, 33)))
def test_copies_are_the_arrays(case: Case) -> None:
    """Elements, shape, type and strides, with every kind of strides; the originals are not used."""
    for strides in STRIDES:
        part = {"head_dim_v": min(case.head_dim, case.head_dim_v)} if strides == "latent" else {}
        inputs = build_inputs(replace(case, strides=strides, **part))
        guard = Guard()
        for name in ("q", "k", "v", "dout"):
            given_one = getattr(inputs, name)
            placed = guard.place(name, given_one)
            assert placed.dtype == given_one.dtype and placed.tobytes() == given_one.tobytes()
            assert placed.strides == given_one.strides or given_one.flags.c_contiguous
            assert not np.shares_memory(placed, given_one)
        guard.check()


@pytest.mark.parametrize("count", [3, MARGIN_BYTES])
def test_an_array_with_columns_first_is_copied_whole(count: int) -> None:
    """It owns its memory and is not contiguous; larger and smaller than its margins."""
    given_one = np.asfortranarray(np.arange(2.0 * count).reshape(2, count))
    placed = Guard().place("q", given_one)
    np.testing.assert_array_equal(placed, given_one)


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("keys", [3, 4])
def test_one_linear_layer_gives_q_as_well_where_rows_are_keys(layout: str, keys: int) -> None:
    """q, k and v lie in one buffer then; else k and v alone."""
    sizes = {"lengths": ((3, keys), (5, keys + 2))} if layout == "packed" else {"seqlen_k": keys}
    inputs = build_inputs(Case(layout=layout, seqlen_q=3, heads_k=2, strides="fused", **sizes))
    assert inputs.k.base is inputs.v.base is not None
    assert (inputs.q.base is inputs.k.base) == (keys == 3)


def test_views_of_one_buffer_go_on_sharing_it() -> None:
    """k and v of a fused buffer, as a function on fused projections takes them."""
    inputs = build_inputs(Case(seqlen_k=5, heads_k=2, strides="fused"))
    guard = Guard()
    k, v = (guard.place(name, getattr(inputs, name)) for name in "kv")
    assert k.base is v.base and not np.shares_memory(k, v)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(
    ("offset", "words"), [(-3, " 3 bytes before"), (0, "in place"), (None, " 0 bytes behind")]
)
def test_every_byte_is_watched(strides: str, offset: int | None, words: str) -> None:
    """In the array, right before it, right behind it; and in the gaps of a view."""
    inputs = build_inputs(Case(seqlen_q=3, seqlen_k=5, heads_k=2, strides=strides))
    guard = Guard()
    memory, _ = flat_memory(guard.place("k", inputs.k))
    end = memory.size - MARGIN_BYTES
    at = end if offset is None else MARGIN_BYTES + offset
    memory[at] ^= 1
    with pytest.raises(AssertionError, match=words):
        guard.check()


def test_a_part_without_gaps_is_watched_by_itself() -> None:
    """Rows of a larger array: what lies beside them there is not theirs."""
    guard = Guard()
    placed = guard.place("k", np.arange(40, dtype=np.float32).reshape(1, 5, 1, 8)[:, 1:3])
    memory, start = flat_memory(placed)
    memory[start + placed.nbytes] ^= 1
    with pytest.raises(AssertionError, match="wrote 0 bytes behind the memory of k"):
        guard.check()


def test_options_are_watched_too() -> None:
    """Offsets, sinks, and arrays inside tuples."""

    def writes(q: Any, k: Any, v: Any, *, aux_tensors: Any = (), learnable_sink: Any = None) -> Any:
        (learnable_sink if learnable_sink is not None else aux_tensors[1])[0] += 1
        return q

    q = np.ones((1, 2, 1, 8), np.float32)
    sink, aux = np.zeros(1, np.float32), (np.zeros(3), np.zeros(3))
    with pytest.raises(AssertionError, match="learnable_sink was changed in place"):
        guarded_call(writes, (q, q, q), {"learnable_sink": sink})
    with pytest.raises(AssertionError, match="aux_tensors was changed in place"):
        guarded_call(writes, (q, q, q), {"aux_tensors": aux})
    assert sink[0] == 0 and aux[1][0] == 0


def test_a_result_in_the_memory_of_an_argument_is_seen() -> None:
    """V itself, or a part of it."""
    q = np.ones((1, 2, 1, 8), np.float32)
    with pytest.raises(AssertionError, match="result 0 lies in the memory of v"):
        guarded_call(lambda q, k, v: v[:, :1], (q, q, q + 1), {})


def overwrites_k(q, k, v):
    """A back end that can be imported by a worker."""
    out = planted.honest(q, k, v)
    k[...] = 0
    return out


def test_a_worker_watches_its_own_memory() -> None:
    """What a worker process overwrites never comes back, but is reported."""
    backend = isolate(f"{HERE}:overwrites_k")
    try:
        with pytest.raises(AssertionError, match="k was changed in place"):
            backend.forward(build_inputs(Case(seqlen_k=5)))
    finally:
        backend.close()


def leaves_rows_unwritten(q, k, v, *, out=None):
    """Writes all rows but the last into what it is given."""
    assert out is not None and np.isnan(out.astype(np.float64)).all()
    out[:, :-1] = planted.honest(q, k, v)[:, :-1]
    return out


def test_results_are_poisoned_where_the_function_takes_them() -> None:
    """NaN is left in what is not written."""
    (result,) = verify(leaves_rows_unwritten, only=["plain"], max_examples=4).results
    assert result.status == "failed" and "NaN is never right" in result.error


def test_declared_sums_over_groups_are_judged_as_declared() -> None:
    """dK in 16 bits, head after head, fails; with `numerics` it passes, and both words are read."""
    only = ["gradients_gqa_error_rms"]
    fault = planted.dk_group_in_16_bits
    assert not verify(fault, only=only).passed

    def declared(*arrays: Any, **options: Any) -> Any:
        return fault(*arrays, **options)

    declared.__signature__ = fault.__signature__  # type: ignore[attr-defined]
    declared.backward = fault.backward  # type: ignore[attr-defined]
    declared.numerics = {"group_sum": "element"}  # type: ignore[attr-defined]
    assert verify(declared, only=only).passed
    declared.numerics = {"group_sum": "bf8"}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="group_sum must be one of"):
        load_backend(declared)
