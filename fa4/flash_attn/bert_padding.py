"""flash_attn 2's helpers that take padding out of a batch and put it back, for torch tensors.

Source of names, arguments and results: flash_attn.bert_padding, release 2.7 and later, where
`unpad_input` gives five results.
"""

from __future__ import annotations

from typing import Any


def index_first_axis(input: Any, indices: Any) -> Any:
    """Rows `indices` (n,) of input (rows, ...): (n, ...)."""
    return input[indices]


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """(first_axis_dim, ...) zeros with values (n, ...) at the rows `indices` (n,)."""
    empty = values.new_zeros(first_axis_dim, *values.shape[1:])
    return empty.index_put((indices,), values)


def index_first_axis_residual(input: Any, indices: Any) -> tuple[Any, Any]:
    """(rows `indices` of input, input): the input goes on beside its rows."""
    return input[indices], input


def unpad_input(
    hidden_states: Any, attention_mask: Any, unused_mask: Any = None
) -> tuple[Any, Any, Any, int, Any]:
    """The tokens of hidden_states (B, S, ...) that attention_mask (B, S) has as 1.

    unused_mask (B, S): tokens that keep their place, too, but are not used.
    Returns (tokens (total, ...), indices (total,) in the flattened batch, cu_seqlens (B+1,) int32,
    longest sequence, used tokens (B,) int32 of each sequence).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = _lengths(kept), _lengths(attention_mask)
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _offsets(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Any, attention_mask_in_length: Any
) -> tuple[Any, Any, Any, int]:
    """The same for rows that hold several sequences each, one after the other.

    attention_mask_in_length (B, S): the lengths of a row's sequences, then zeros.
    Returns the first four results of `unpad_input`, with one sequence per length that is not 0.
    """
    import torch

    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    place = torch.arange(attention_mask_in_length.shape[1], device=lengths.device)
    kept = place < attention_mask_in_length.sum(dim=1, keepdim=True)
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _offsets(lengths), int(lengths.max())


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """(batch, seqlen, ...) with the tokens (total, ...) at their indices and 0 elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _lengths(mask: Any) -> Any:
    import torch

    return mask.sum(dim=-1, dtype=torch.int32)


def _offsets(lengths: Any) -> Any:
    import torch

    total = lengths.cumsum(0, dtype=torch.int32)
    return torch.cat([total.new_zeros(1), total])
