"""Messages over a torch.distributed group: one batch of sends and receives for each post.

NCCL carries a post out on a stream of its own, behind what is on the current stream and beside what
comes after; a wait makes the current stream wait, not the host. With gloo a wait blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fa4.distributed.execute import Executor, Tensors
from fa4.distributed.plan import Post

DIFFERENT = 4  # ranks that a message about a disagreement names


@contextmanager
def while_waiting(group: Any, what: str) -> Iterator[None]:
    """ConnectionError in one line for a rank that is gone, or silent for the group's time-out."""
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split()).partition("] ")[2] or str(error)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        raise ConnectionError(
            f"rank {rank} of {ranks} lost another one in {what} (it ended, or did not answer "
            f"within the group's time-out): {said.partition('. ')[0][:200]}"
        ) from error


class GroupChannel:
    """A rank's end of a group. sent_bytes: so far."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sent_bytes = 0
        self.under_way: dict[str, tuple[str, list[Any], list[Any]]] = {}

    def post(
        self, post: Post, sends: Sequence[Tensors], receives: Sequence[Tensors]
    ) -> Sequence[Tensors]:
        """Start all messages of a post at once."""
        operations = []
        for kind, messages, tensors in (
            (dist.isend, post.sends, sends),
            (dist.irecv, post.receives, receives),
        ):
            for message, parts in zip(messages, tensors, strict=True):
                peer = dist.get_global_rank(self.group, message.peer)
                operations += [
                    dist.P2POp(kind, _as_bytes(x), peer, self.group) for x in parts if x.numel()
                ]
        self.sent_bytes += sum(x.numel() * x.element_size() for parts in sends for x in parts)
        peers = sorted({message.peer for message in (*post.sends, *post.receives)})
        what = f"{post.name}, with {', '.join(map(str, peers))}"
        with while_waiting(self.group, what):
            works = dist.batch_isend_irecv(operations) if operations else []
        self.under_way[post.name] = what, works, operations  # which keeps the tensors
        return receives

    def done(self, name: str) -> bool:
        """Wait for the messages of a post."""
        what, works, _ = self.under_way.pop(name)
        with while_waiting(self.group, what):
            for work in works:
                work.wait()
        return True


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """What gloo has no type for still has bytes."""
    return x.contiguous().view(torch.uint8)


def run_rank(executor: Executor, given: dict[str, Tensors]) -> dict[str, Tensors]:
    """One rank's program, to its end."""
    for _ in executor.run(given):
        raise RuntimeError("a group's wait blocks, so that nothing is left to wait for")
    return executor.results


def gather_objects(group: Any, mine: Any) -> list[Any]:
    """What every rank has, on every rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with while_waiting(group, "asking what all ranks are about to do"):
        dist.all_gather_object(found, mine, group=group)
    return found


def require_agreement(group: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks are about to do. ValueError, the same on every rank, if they differ in it.

    Names that end in "_" may differ.
    """
    every = gather_objects(group, mine)
    for name in sorted(set().union(*every)):
        values = [x.get(name) for x in every]
        if name.endswith("_") or all(value == values[0] for value in values):
            continue
        first: dict[str, int] = {}
        for rank, value in enumerate(values):
            first.setdefault(repr(value), rank)
        said = ", ".join(
            f"rank {rank} has {text}" for text, rank in list(first.items())[:DIFFERENT]
        )
        raise ValueError(f"{name} must be the same on every rank; {said}")
    return every
