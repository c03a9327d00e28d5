"""Padding taken out and put back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4.flash_attn import bert_padding

masks = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from((0, 1, 2)), min_size=width, max_size=width),
        min_size=1,
        max_size=4,
    )
)


@given(masks, st.booleans())
def test_there_and_back(rows: list[list[int]], as_bool: bool) -> None:
    """Marks: 0 padding, 1 used, 2 kept but not used. Order, offsets, lengths and gradients."""
    marks = torch.tensor(rows)
    mask, unused = marks == 1, marks == 2
    if not as_bool:
        mask, unused = mask.int(), unused.int()
    states = torch.randn(*marks.shape, 3, requires_grad=True)
    tokens, indices, offsets, longest, used = bert_padding.unpad_input(states, mask, unused)
    kept = [[place for place, mark in enumerate(row) if mark] for row in rows]
    assert tokens.equal(states[marks > 0])
    assert indices.tolist() == [
        b * len(rows[0]) + place for b, row in enumerate(kept) for place in row
    ]
    assert offsets.diff().tolist() == list(map(len, kept)) and offsets[0] == 0
    assert offsets.dtype == used.dtype == torch.int32
    assert longest == max(map(len, kept)) and isinstance(longest, int)
    assert used.tolist() == [row.count(1) for row in rows]
    back = bert_padding.pad_input(tokens, indices, *marks.shape)
    assert back.equal(torch.where((marks > 0)[..., None], states, 0.0))
    back.sum().backward()
    assert states.grad is not None
    assert states.grad.equal((marks > 0)[..., None].expand_as(states).float())


def test_without_unused_tokens() -> None:
    """Used is all that is kept."""
    states, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 1, 0]])
    tokens, _, offsets, longest, used = bert_padding.unpad_input(states, mask)
    assert (tokens.shape, offsets.tolist(), longest) == ((3, 4), [0, 2, 3], 2)
    assert used.tolist() == [2, 1]


def test_concatenated_sequences() -> None:
    """Rows that hold sequences of 2 and 3, of 3 and 2, and of 6."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    states = torch.arange(18.0).reshape(3, 6, 1)
    tokens, indices, offsets, longest = bert_padding.unpad_input_for_concatenated_sequences(
        states, lengths
    )
    kept = [*range(5), *range(6, 11), *range(12, 18)]
    assert indices.tolist() == kept and tokens.flatten().tolist() == kept
    assert offsets.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert offsets.dtype == torch.int32


def test_rows_and_the_rest() -> None:
    """index_first_axis, its inverse, and the form that hands the input on."""
    x, at = torch.randn(4, 2, requires_grad=True), torch.tensor([3, 1])
    assert bert_padding.index_first_axis(x, at).equal(x[at])
    back = bert_padding.index_put_first_axis(x[at], at, 5)
    assert back.shape == (5, 2) and back[at].equal(x[at]) and not back[[0, 2, 4]].any()
    rows, whole = bert_padding.index_first_axis_residual(x, at)
    (rows.sum() + 2 * whole.sum()).backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [2, 3, 2, 3]
