"""Messages between GPUs of one host by copy engines: no multiprocessor works for them.

Each rank has an inbox in memory that its peers can write to. A message is copied from the sender's
tensor straight into the receiver's inbox, where it is used; a signal says that it is there. Every
message of a program has its own place, so that within one execution nothing is overwritten; a
barrier at its beginning says that all ranks are through with the one before. All of it is on
streams: the host never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from fa4.distributed.execute import Tensors
from fa4.distributed.plan import CommunicationPlan, Parcel, Post, Sizes

ALIGNED = 256  # bytes: where a tensor may begin
MOST_TENSORS = 4  # of a message
FLAGS = 16  # messages of a pair that may be under way
TIMEOUT = timedelta(seconds=60)

_inboxes: dict[Any, tuple[torch.Tensor, Any]] = {}
_streams: dict[int, torch.cuda.Stream] = {}


def reaches_all_peers(group: Any) -> bool:
    """Are all ranks on GPUs of this host that can write to each other's memory?"""
    import socket

    from fa4.distributed.group import gather_objects

    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    found = gather_objects(group, (socket.gethostname(), device))
    hosts, devices = {host for host, _ in found}, {number for _, number in found}
    reached = all(
        number == device or torch.cuda.can_device_access_peer(device, number)
        for number in devices
        if device >= 0
    )
    alike = len(hosts) == 1 and len(devices) == len(found) and -1 not in devices
    return all(gather_objects(group, bool(alike and reached)))


def _room(sizes: Sizes, message: Parcel) -> int:
    """Bytes of a message's place."""
    return -(-sizes.bytes(message.piece) // ALIGNED) * ALIGNED + MOST_TENSORS * ALIGNED


class Places:
    """Where in the receiver's inbox each message lies, by its pair of ranks and its number."""

    def __init__(self, plan: CommunicationPlan) -> None:
        self.of: dict[tuple[int, int], list[int]] = {}
        ends = []
        for rank, program in enumerate(plan.programs):
            end = 0
            for step in program.steps:
                for message in step.receives if isinstance(step, Post) else ():
                    self.of.setdefault((message.peer, rank), []).append(end)
                    end += _room(plan.spec.sizes, message)
            ends.append(end)
        self.bytes = max(ends)


def _inbox(group: Any, size: int) -> tuple[torch.Tensor, Any]:
    """This rank's inbox and the handle by which peers reach theirs; all ranks ask alike."""
    found = _inboxes.get(id(group))
    if found is None or found[0].numel() < size:
        # What is queued on any rank still uses the old inbox, which its end would unmap.
        torch.cuda.synchronize()
        dist.barrier(group)
        device = torch.device("cuda", torch.cuda.current_device())
        room = max(1 << 20, 1 << math.ceil(math.log2(max(2, size))))
        memory = symmetric.empty(room, dtype=torch.uint8, device=device)
        found = _inboxes[id(group)] = memory, symmetric.rendezvous(memory, group)
    return found


class PeerChannel:
    """A rank's end, for one execution of a plan."""

    def __init__(self, group: Any, places: Places) -> None:
        self.rank, self.places = dist.get_rank(group), places
        self.memory, self.handle = _inbox(group, places.bytes)
        device = torch.cuda.current_device()
        self.stream = _streams.setdefault(device, torch.cuda.Stream(priority=-1))
        self.sent: dict[int, int] = {}
        self.expected: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.under_way: dict[str, tuple[Post, Any, Any]] = {}
        self.sent_bytes = 0
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.handle.barrier(channel=0, timeout_ms=_milliseconds())

    def post(
        self, post: Post, sends: Sequence[Tensors], receives: Sequence[Tensors]
    ) -> Sequence[Tensors]:
        """Start the copies; what arrives will be in the tensors that are returned."""
        kept = [tuple(x.contiguous() for x in tensors) for tensors in sends]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for message, tensors in zip(post.sends, kept, strict=True):
                self._send(message.peer, tensors)
            done = self.stream.record_event()
        self.under_way[post.name] = (post, done, kept)
        return [
            self._arriving(message.peer, tensors)
            for message, tensors in zip(post.receives, receives, strict=True)
        ]

    def _send(self, peer: int, tensors: Tensors) -> None:
        number = self.sent[peer] = self.sent.get(peer, -1) + 1
        place = self.places.of[self.rank, peer][number]
        for x in tensors:
            if x.numel():
                flat = x.view(torch.uint8).view(-1)
                there = self.handle.get_buffer(peer, (flat.numel(),), torch.uint8, place)
                there.copy_(flat, non_blocking=True)
            place += -(-x.numel() * x.element_size() // ALIGNED) * ALIGNED
            self.sent_bytes += x.numel() * x.element_size()
        self.handle.put_signal(peer, channel=1 + number % FLAGS, timeout_ms=_milliseconds())

    def _arriving(self, peer: int, tensors: Tensors) -> Tensors:
        number = self.expected[peer] = self.expected.get(peer, -1) + 1
        place = self.places.of[peer, self.rank][number]
        found = []
        for x in tensors:
            size = x.numel() * x.element_size()
            flat = self.memory[place : place + size]
            found.append(flat.view(x.dtype).view(x.shape))
            place += -(-size // ALIGNED) * ALIGNED
        return tuple(found)

    def done(self, name: str) -> bool:
        """What is on the current stream from now on finds the messages of a post."""
        post, sent, _ = self.under_way.pop(name)
        for message in post.receives:
            number = self.received[message.peer] = self.received.get(message.peer, -1) + 1
            flag = 1 + number % FLAGS
            self.handle.wait_signal(message.peer, channel=flag, timeout_ms=_milliseconds())
        torch.cuda.current_stream().wait_event(sent)
        return True


def _milliseconds() -> int:
    return int(TIMEOUT.total_seconds() * 1000)
