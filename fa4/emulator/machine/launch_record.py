"""What the host side hands to the execution: launches, and the memory they may touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Allocation:
    """A region of real host memory that kernels may touch.

    name: the argument's, such as "q" or "pages[1]". owner keeps the memory alive. shift: what
    kernels add to an address here for that at which they see it (`fa4.emulator.host.addresses`).
    """

    name: str
    address: int
    size_bytes: int
    writable: bool
    owner: object = field(default=None, repr=False, compare=False)
    shift: int = 0

    def holds(self, address: int) -> bool:
        """Whether the byte at this address, its own or the one that kernels see, belongs to it."""
        places = (address - self.address, address - self.address - self.shift)
        return any(0 <= place < self.size_bytes for place in places)


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as the driver would receive it.

    kernel: the entry's name. ptx: the text of its module. cluster: (1, 1, 1) if there is none.
    parameters: the bytes of each .param in order, sizes from the PTX (TMA descriptors: 128).
    programmatic: the attribute programmatic stream serialization ("programmatic dependent launch")
    is set: the kernel may start before the previous one on its stream has ended.
    stream: the stream's handle, 0 for the default one.
    """

    kernel: str
    ptx: str = field(repr=False)
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    parameters: tuple[bytes, ...]
    programmatic: bool = False
    cooperative: bool = False
    stream: int = 0


def overlapping_groups(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Splits launches, in order, so that only kernels of one group may overlap.

    A programmatic launch joins the launch directly before it on the same stream.
    """
    groups: list[list[Launch]] = []
    for launch in launches:
        if groups and launch.programmatic and groups[-1][-1].stream == launch.stream:
            groups[-1].append(launch)
        else:
            groups.append([launch])
    return groups
