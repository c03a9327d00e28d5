"""Memory semantics of thread instructions: what a flag in memory publishes (PTX ISA 8).

A release leaves what it publishes with the location it writes; an acquire that reads the location
takes it over. A relaxed write behind a fence publishes what the fence did
(`warp.fences.published`); what a relaxed read sees is kept for the next fence
(`warp.fences.pending`). An atomic continues the release sequence of its location, a
plain strong write ends it.

Approximations towards fewer reports: the lanes of a warp share what they learn, and a weak write
to a flag does not withdraw what was published there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fa4.emulator.checks.clocks import Message
from fa4.emulator.isa.spaces import Piece
from fa4.emulator.machine.state import Cta, Warp
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import Array

SEMANTICS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")
SCOPES = ("cta", "cluster", "gpu", "sys")
WORD_BYTES = 4

Location = tuple[int, int]  # (memory, word): see `locations`


@dataclass(frozen=True, slots=True)
class Ordering:
    """semantics: one of SEMANTICS. scope: one of SCOPES."""

    semantics: str
    scope: str

    @property
    def strong(self) -> bool:
        """Whether the access takes part in synchronisation."""
        return self.semantics != "weak"

    @property
    def acquires(self) -> bool:
        """Whether it takes over what a release published."""
        return self.semantics in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        """Whether it publishes what came before."""
        return self.semantics in ("release", "acq_rel")


def ordering_of(semantics: str, scope: str, default: str, allowed: Iterable[str]) -> Ordering:
    """From the modifiers of an instruction. Raises Unsupported where they do not fit together."""
    semantics = semantics or default
    if semantics not in allowed:
        raise Unsupported(f"semantics .{semantics}")
    if scope and semantics in ("weak", "volatile"):
        raise Unsupported(f"scope .{scope} of a .{semantics} access")
    return Ordering(semantics, scope or ("sys" if semantics == "volatile" else "gpu"))


@dataclass(frozen=True, slots=True)
class Flag:
    """What a location publishes, to whom: the threads of `scope` around the CTA `owner`."""

    message: Message
    scope: str
    cluster: int
    rank: int

    def reaches(self, cta: Cta, scope: str) -> bool:
        """Whether the scopes of writer and reader include each other (PTX ISA 8.7, morally
        strong)."""
        same_cluster = self.cluster == cta.cluster.number
        same_cta = same_cluster and self.rank == cta.rank
        near = {"cta": same_cta, "cluster": same_cluster}
        return near.get(self.scope, True) and near.get(scope, True)


def locations(piece: Piece, size_bytes: int) -> set[Location]:
    """The words that the units of a piece cover; none for private memory."""
    home = piece.home
    if home is None:
        return set()
    memory = -(home.cluster.number * 64 + home.rank) if isinstance(home, Cta) else home.address
    starts: Array = piece.offsets // WORD_BYTES
    count = -(-size_bytes // WORD_BYTES)
    return {(memory, word + k) for word in starts.tolist() for k in range(count)}


def observe(warp: Warp, ordering: Ordering, places: set[Location]) -> None:
    """A strong read of `places`: takes over, now or at the next fence, what they publish."""
    cta = warp.cta
    flags = cta.machine.memory.flags
    found = {
        id(flag.message): flag.message
        for flag in map(flags.get, places)
        if flag is not None and flag.reaches(cta, ordering.scope)
    }
    for message in found.values():
        if ordering.acquires:
            warp.clock.acquire(message)
        else:
            warp.fences.see(message)


def publish(
    warp: Warp, ordering: Ordering, places: set[Location], mask: int, atomic: bool = False
) -> None:
    """A strong write to `places` by the lanes in `mask`: leaves there what it publishes."""
    cta = warp.cta
    flags = cta.machine.memory.flags
    message = warp.clock.release(mask) if ordering.releases else warp.fences.published
    for place in places:
        before = flags.get(place) if atomic else None
        if message is None and before is None:
            flags.pop(place, None)
        elif message is not None:
            published = message
            if before is not None:
                published = before.message.copy()
                published.join(message)
            flags[place] = Flag(published, ordering.scope, cta.cluster.number, cta.rank)


def polls_in_vain(warp: Warp, line: int, values: Array) -> bool:
    """Whether a strong access saw the same as when the warp last executed it."""
    seen = values.tobytes()
    before = warp.polled.get(line)
    warp.polled[line] = seen
    return bool(before == seen)
