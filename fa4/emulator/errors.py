"""What the emulator raises, and what its checks report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fa4.emulator.kinds import EXCUSES, SEVERITIES, FindingKind, kind_of

__all__ = ["SEVERITIES", "ArgumentError", "EmulationFailed", "EmulatorError", "KernelFinding",
           "LaunchError", "PtxError", "Site", "UnsupportedInstruction"]  # fmt: skip


class EmulatorError(Exception):
    """Anything the emulator refuses or finds. The message is one readable block of text."""


class PtxError(EmulatorError):
    """The PTX text cannot be read: says the line and what was expected."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(message if line is None else f"PTX line {line}: {message}")


class UnsupportedInstruction(EmulatorError):
    """Instructions that the emulator does not execute, all of them, found when a kernel is loaded.

    `problems` holds (PTX line, instruction text, reason).
    """

    def __init__(self, kernel: str, problems: list[tuple[int, str, str]]) -> None:
        self.kernel = kernel
        self.problems = problems
        listed = "\n".join(f"  line {line}: {text}   ({why})" for line, text, why in problems)
        super().__init__(f"{len(problems)} unsupported instruction(s) in {kernel}:\n{listed}")


class LaunchError(EmulatorError):
    """The launch is impossible: wrong arguments, too much shared memory, wrong target, ..."""


class ArgumentError(LaunchError):
    """A kernel argument that does not fit. argument: its name."""

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        super().__init__(message)


class Site(NamedTuple):
    """A warp of a CTA at a PTX line, which it has come to `visits` times; or, with warp -1, an
    asynchronous operation of the CTA that this line started."""

    cta: int
    warp: int
    line: int
    visits: int


@dataclass(frozen=True)
class KernelFinding:
    """One thing a check found.

    kind: "race", "deadlock", "uninitialised", "out-of-bounds", "misaligned", "missing-fence",
    "mbarrier", "tmem", "descriptor", "registers", "exit", "livelock", "divergence", ...
    message: what happened, with addresses and buffers. line: the PTX line (0: none).
    source: "file.py:123" of the Python source if the PTX has .loc, else "".
    cta, warp: linear index of the CTA in the grid, of the warp in its CTA (-1: none).
    instruction: its text, where several stand on the line; else "". excuse: why it is less than
    its kind says, one of `fa4.emulator.kinds.EXCUSES`, or "". kernel: its name. text: of the
    instruction, always. sites: what happened in an order that nothing keeps, the earlier first.
    """

    kind: str
    message: str
    line: int = 0
    source: str = ""
    cta: int = -1
    warp: int = -1
    instruction: str = ""
    excuse: str = ""
    kernel: str = ""
    text: str = ""
    sites: tuple[Site, ...] = field(default=(), compare=False)

    @property
    def severity(self) -> str:
        """One of SEVERITIES."""
        return self._known.severity

    @property
    def why(self) -> str:
        """The section of the manual that it rests on, if there is one, and a sentence."""
        known = self._known
        return f"PTX ISA {known.section}: {known.why}" if known.section else known.why

    @property
    def _known(self) -> FindingKind:
        return EXCUSES[self.excuse] if self.excuse else kind_of(self.kind)

    def __str__(self) -> str:
        place = f"PTX line {self.line}" if self.line else "no PTX line"
        if self.instruction:
            place += f": {self.instruction};"
        if self.source:
            place += f" ({self.source})"
        who = f"CTA {self.cta} warp {self.warp}" if self.warp >= 0 else f"CTA {self.cta}"
        kind = f"{self.kind} ({self.severity})" if self.excuse else self.kind
        place += f", {who}" if self.cta >= 0 else ""
        return f"{kind}: {self.message}\n    at {place}\n    {self.severity}; {self.why}"


class EmulationFailed(EmulatorError):
    """A kernel ran (to its end, or to a deadlock) and the checks found something.

    `report` is the emulator's full report, `findings` its findings.
    """

    def __init__(self, report: Any) -> None:
        self.report = report
        self.findings: list[KernelFinding] = list(report.findings)
        super().__init__(str(report))
