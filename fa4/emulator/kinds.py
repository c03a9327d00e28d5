"""The kinds of findings: how severe each is, which section of the PTX ISA it rests on, and why.

A finding that is less than its kind says has an excuse, which has a severity, section and sentence
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

# From what is needless and allowed, over what the manual asks and no hardware is known to need, to
# what is certainly wrong.
SEVERITIES = ("style", "formal", "hazard", "error")


@dataclass(frozen=True, kw_only=True)
class FindingKind:
    """severity: of all its findings without an excuse, or of an excuse. section: of the PTX ISA
    9.x manual, "" where it has none. why: one sentence."""

    severity: str
    section: str
    why: str


def _hazard(section: str, why: str) -> FindingKind:
    """Depends on timing that the memory model leaves open."""
    return FindingKind(severity="hazard", section=section, why=why)


def _error(section: str, why: str) -> FindingKind:
    """Wrong in the run that was made, whatever the timing."""
    return FindingKind(severity="error", section=section, why=why)


KINDS = {
    "race": _hazard(
        "8.7.1", "accesses that nothing orders may happen in either order, and at the same time"
    ),
    "uninitialised": _hazard(
        "5.4.4", "memory that nothing has written holds whatever was there before"
    ),
    "missing-proxy-fence": _hazard(
        "8.6", "what threads store is not visible to another proxy without a proxy fence between"
    ),
    "missing-wait": _hazard(
        "9.7.15.7.3", "registers belong to an asynchronous instruction until it has been waited for"
    ),
    "missing-fence": _hazard(
        "9.7.15.7.1", "the accesses of wgmma.mma_async to registers are ordered by wgmma.fence only"
    ),
    "mbarrier": _hazard(
        "9.7.13.15", "an mbarrier works only with its phases, counts and bytes as promised"
    ),
    "warpgroup": _error(
        "9.7.15", "all four warps of a warpgroup have to execute the same wgmma instruction"
    ),
    "deadlock": _error("9.7.13", "a wait ends only when all that it counts on have arrived"),
    "livelock": _error("8.9", "a poll ends only when somebody else writes what it looks for"),
    "barrier": _error(
        "9.7.13.1", "a barrier opens when the number of threads that it was told has arrived"
    ),
    "divergence": _error(
        "9.7.13", "aligned and .sync instructions are executed by all threads that they name"
    ),
    "out-of-bounds": _error("6.4.1", "there is no memory of the kernel's at that address"),
    "misaligned": _error("6.4.1", "an address is a multiple of the size of its access"),
    "descriptor": _error(
        "5.5", "the unit works by what the descriptor says, and this one says what it cannot mean"
    ),
    "tmem": _error(
        "9.7.16.7.1", "tensor memory is used between allocation and deallocation"
    ),
    "registers": _error(
        "9.7.19.5", "setmaxnreg changes the number of registers in the direction that it names"
    ),
    "exit": _error(
        "9.7.9.25", "shared memory is another CTA's as soon as its own has exited"
    ),
    "branch": _error("9.7.12.3", "an index of brx.idx is below the length of its list"),
    "division": _error("9.7.1.8", "an integer divided by zero has an unspecified result"),
    "step-limit": _error("", "it loops for ever, or the limit is too low"),
    "assert": _error("", "the kernel's own assertion"),
    "trap": _error("9.7.19.4", "the kernel ends itself so"),
    "brkpt": _error("9.7.19.1", "the kernel stops there"),
    "fault": _error("", "the instruction refuses its operands"),
}  # fmt: skip


def _style(section: str, why: str) -> FindingKind:
    """Every outcome that the memory model allows is the same: needless, and not wrong."""
    return FindingKind(severity="style", section=section, why=why)


def _formal(section: str, why: str) -> FindingKind:
    """The manual asks for what is missing, and kernels without it are not known to fail."""
    return FindingKind(severity="formal", section=section, why=why)


# Races of two accesses to the same bytes ("uniform-size") have an outcome in the memory model: that
# of one order or the other. Of races in which the sizes differ it says nothing.
_MIXED = "of races in which the sizes of the two accesses differ the memory model says nothing"
EXCUSES = {
    "unfenced-init": _formal(
        "9.7.13.5", "fence.mbarrier_init makes an mbarrier visible to the copies that signal it"
    ),
    "rounding": _formal(
        "8.7.2", "one of the two stores is last, it is open which, and their rounding differs"
    ),
    "unused-read": _style(
        "8.7.2", "either order is allowed, and nobody uses what the read gives in either"
    ),
    "mixed-unused-read": _formal("8.7.2", f"{_MIXED}, though nobody uses what this one reads"),
    "same-value": _style(
        "8.7.2", "either order is allowed, and leaves the same value: one of the stores is needless"
    ),
    "mixed-same-value": _formal("8.7.2", f"{_MIXED}, though these leave the same bytes"),
}


def kind_of(name: str) -> FindingKind:
    """What is known of a kind; of one without an entry that it is an error."""
    return KINDS.get(name) or _error("", "the kernel cannot go on")
