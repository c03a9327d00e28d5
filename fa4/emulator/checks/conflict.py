"""What the shadow memories are told about an access, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fa4.emulator.warp_lanes import LANES

ASYNC_PROXY, STRONG, MUST_BE_INITIALISED = 1, 2, 4
FLAG_BITS = 3

READ_AFTER_WRITE = "race-read-after-write"
WRITE_AFTER_WRITE = "race-write-after-write"
WRITE_AFTER_READ = "race-write-after-read"
UNINITIALISED = "uninitialised"
MISSING_PROXY_FENCE = "missing-proxy-fence"
SAME_INSTRUCTION_WRITE = "same-instruction-write"
KINDS = (  # at the number that compiled code uses
    "",
    READ_AFTER_WRITE,
    WRITE_AFTER_WRITE,
    WRITE_AFTER_READ,
    UNINITIALISED,
    MISSING_PROXY_FENCE,
    SAME_INSTRUCTION_WRITE,
)

_STORY = {
    READ_AFTER_WRITE: "reads what {other} wrote, and nothing orders the write before the read",
    WRITE_AFTER_WRITE: "overwrites what {other} wrote, and nothing orders the two writes",
    WRITE_AFTER_READ: "overwrites what {other} read, and nothing orders the read before the write",
    UNINITIALISED: "reads what nothing has written",
    MISSING_PROXY_FENCE: (
        "reads through the async proxy what {other} wrote through the generic proxy,"
        " without a fence.proxy.async between the two"
    ),
    SAME_INSTRUCTION_WRITE: "writes where {other} writes in the same instruction",
}


@dataclass(frozen=True)
class Access:
    """How an instruction accesses memory; one may serve for all executions of an instruction.

    line: its PTX line. async_proxy: through the async proxy (TMA, tensor pipe). strong: atomic,
    or a relaxed or acquire/release access; two strong accesses never race. check_initialised:
    reading what was never written is a conflict.
    """

    line: int = 0
    async_proxy: bool = False
    strong: bool = False
    check_initialised: bool = True
    word: int = field(init=False, repr=False, compare=False)  # line and flags, for compiled code

    def __post_init__(self) -> None:
        flags = ASYNC_PROXY * self.async_proxy | STRONG * self.strong
        flags |= MUST_BE_INITIALISED * self.check_initialised
        object.__setattr__(self, "word", self.line << FLAG_BITS | flags)


# Who made an access, and where: of the actor's id, its PTX line (0: none) and its cluster, -1 for
# that of the accessing actor.
NameAccess = Callable[[int, int, int], str]


@dataclass(frozen=True)
class Conflict:
    """The first granule of an access that is not as it should be.

    other_*: the earlier access it conflicts with (-1 and 0 if there is none); other_cluster is -1
    for the accessing actor's own cluster, other_lanes the mask of its lanes. my_id: the actor that
    made the access, line: its PTX line.
    """

    kind: str
    granule: int
    granule_bytes: int
    other_id: int
    other_epoch: int
    other_line: int
    other_is_write: bool
    my_id: int
    line: int
    other_cluster: int = -1
    other_lanes: int = 0

    @property
    def mine(self) -> int:
        """The lane of the accessing actor."""
        return self.my_id % LANES


def describe(conflict: Conflict, name_access: NameAccess, place: str = "") -> str:
    """One sentence: who did what, which earlier access it conflicts with, and where.

    place: where, for a memory without byte addresses; otherwise the bytes are named.
    """
    other = ""
    if conflict.other_id >= 0:
        other = name_access(conflict.other_id, conflict.other_line, conflict.other_cluster)
    me = name_access(conflict.my_id, conflict.line, -1)
    start = conflict.granule * conflict.granule_bytes
    place = place or f"at bytes {start}..{start + conflict.granule_bytes - 1}"
    return f"{me} {_STORY[conflict.kind].format(other=other)} ({place})"
