"""What a run tells a recorder (`Options.events`): each thing that happens, when it does."""

from __future__ import annotations

from enum import Enum
from typing import Any

from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.translate.program import Step


class BarrierUse(Enum):
    """How an mbarrier is used, in the words of reports: "arrives at" the mbarrier."""

    INVALIDATE = "invalidates"
    COUNT_BYTES = "counts bytes at"
    ARRIVE = "arrives at"
    ARRIVE_AFTER_COPIES = "cp.async arrives at"
    WAIT = "waits at"
    COMMIT = "commits to"
    COPY = "a copy signals"
    STORE = "a store signals"
    CANCEL = "signals"


class RunEvents:
    """Hears what happens in a run, and does nothing with it: recorders override what they need.

    fragment, cluster: `Fragment` and `Cluster` of fa4.emulator.machine.state. tick: the machine's
    count of executed steps.
    """

    def executed(self, fragment: Any, step: Step, outcome: Any, tick: int) -> None:
        """A handler ran; `outcome`: None, or why the fragment does not simply go on."""

    def barrier_used(self, fragment: Any, cta: Any, offset: int, use: BarrierUse) -> None:
        """An instruction used the mbarrier at a shared address of a CTA.

        A wait is told when it succeeds; what an operation signals, when the operation is issued.
        """

    def issued(self, operation: AsyncOperation, tick: int) -> None:
        """An asynchronous operation was handed to its unit."""

    def completed(self, operation: AsyncOperation, tick: int) -> None:
        """An asynchronous operation is done."""

    def moved(self, issuer: Any, owner: Any, line: int, num_bytes: int) -> None:
        """An asynchronous operation that a CTA issued reads or writes shared memory of `owner`.

        line: of its PTX. A copy within shared memory is told twice, for each side.
        """

    def cluster_started(self, cluster: Any, tick: int) -> None:
        """The CTAs of a cluster began."""
