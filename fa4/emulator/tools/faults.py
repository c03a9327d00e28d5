"""Plants synchronisation faults into PTX, one at a time: does the emulator notice?

    for fault in plant(ptx):
        report = run([replace(launch, ptx=fault.text)], allocations, Options(collect=True))

Each wait, arrival, fence, commit, byte count and barrier count of the kernels is removed or
altered in turn, and so is the CTA of a cluster that one of them is for; everything else stays as it
is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fa4.emulator.ptx.parser import parse
from fa4.emulator.ptx.syntax import Integer, PtxInstruction

# Opcode prefix -> what its removal is called. The longest prefix counts.
_REMOVED = {
    "mbarrier.arrive": "arrive removed",
    "mbarrier.arrive.expect_tx": "arrive.expect_tx removed",
    "mbarrier.expect_tx": "expect_tx removed",
    "bar.sync": "barrier removed",
    "bar.arrive": "barrier arrival removed",
    "barrier.sync": "barrier removed",
    "barrier.arrive": "barrier arrival removed",
    "barrier.cluster.arrive": "cluster arrival removed",
    "barrier.cluster.wait": "cluster wait removed",
    "bar.warp.sync": "warp barrier removed",
    "fence.proxy.async": "proxy fence removed",
    "fence.mbarrier_init": "init fence removed",
    "fence.acq_rel": "fence removed",
    "tcgen05.commit": "commit removed",
    "tcgen05.wait": "TMEM wait removed",
    "tcgen05.fence": "tcgen05 fence removed",
    "tcgen05.dealloc": "dealloc removed",
    "cp.async.bulk.commit_group": "bulk commit removed",
    "cp.async.bulk.wait_group": "bulk wait removed",
    "cp.async.commit_group": "copy commit removed",
    "cp.async.wait_group": "copy wait removed",
    "cp.async.wait_all": "copy wait removed",
    "cp.async.mbarrier.arrive": "arrive removed",
    "wgmma.fence": "wgmma fence removed",
    "wgmma.commit_group": "wgmma commit removed",
    "wgmma.wait_group": "wgmma wait removed",
    "griddepcontrol.wait": "dependency wait removed",
}
_ORDERED = (
    "ld.acquire",
    "st.release",
    "red.release",
    "atom.acquire",
    "atom.release",
    "atom.acq_rel",
)
_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
_BYTES = 16  # by how much a byte count is altered: the smallest unit of a bulk copy


@dataclass(frozen=True)
class Fault:
    """line: PTX line of the altered instruction. kind: what was done. text: the whole PTX."""

    line: int
    kind: str
    instruction: str
    text: str


def plant(ptx: str, kernel: str | None = None) -> list[Fault]:
    """All single faults of a module's kernels, or of one kernel."""
    module = parse(ptx)
    lines = ptx.split("\n")
    faults = []
    for name, body in module.kernels.items():
        if kernel is not None and name != kernel:
            continue
        for instruction in body.instructions:
            for kind, statement in _alterations(instruction):
                text = _replace(lines, instruction, statement)
                if text is not None:
                    faults.append(Fault(instruction.written_line, kind, instruction.text, text))
    return faults


def _alterations(instruction: PtxInstruction) -> Iterator[tuple[str, str]]:
    """(what is done, the statement instead) for an instruction; "" removes it."""
    opcode = instruction.opcode
    if opcode.startswith(_WAITS):
        yield "wait removed", _succeed(instruction)
        if ".parity" in opcode:
            yield "parity flipped", _with_operand(instruction, 2, "xor", 1)
        return
    if opcode.startswith(_ORDERED):
        order = opcode.split(".")[1]
        yield "order removed", instruction.text.replace(f".{order}", ".relaxed", 1) + ";"
        if ".gpu" in opcode or ".sys" in opcode:
            yield (
                "order within the CTA",
                re.sub(r"\.(gpu|sys)", ".cta", instruction.text, count=1) + ";",
            )
    removed = [prefix for prefix in _REMOVED if opcode.startswith(prefix)]
    if removed:
        yield _REMOVED[max(removed, key=len)], ""
    if opcode.startswith("tcgen05.commit") and ".multicast" in opcode:
        start, _, end = _split_at(instruction.text, 1)
        yield "commit to one CTA alone", f"{start} 1{end};"
    if opcode.startswith("mapa"):
        yield "another CTA of the pair", _with_operand(instruction, 2, "xor", 1)
    if opcode.startswith("mbarrier.arrive") and "expect_tx" not in opcode:
        yield "arrive twice", f"{{ {instruction.text}; {instruction.text}; }}"
    if opcode.startswith("mbarrier.init"):
        yield "init count + 1", _with_last(instruction, 1)
        yield "init count - 1", _with_last(instruction, -1)
    if "expect_tx" in opcode:
        yield f"{_BYTES} bytes more expected", _with_last(instruction, _BYTES)
        yield f"{_BYTES} bytes fewer expected", _with_last(instruction, -_BYTES)
    if opcode.startswith(("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")) and (
        len(instruction.operands) > 1
    ):
        yield "32 threads more expected", _with_last(instruction, 32)
    if opcode.startswith("wgmma.wait_group"):
        yield "one group more left", _with_last(instruction, 1)


def _succeed(instruction: PtxInstruction) -> str:
    """A wait that always succeeds: its predicate becomes true."""
    predicate = re.search(r"mbarrier\.\S+\s+([^\s,]+)\s*,", instruction.text)
    assert predicate is not None
    guard = instruction.text.split("mbarrier")[0]
    return f"{guard}setp.eq.u32 {predicate[1]}, 0, 0;"


def _with_last(instruction: PtxInstruction, change: int) -> str:
    """The same instruction with its last operand increased; "" if nothing would be left of it."""
    last = instruction.operands[-1]
    if isinstance(last, Integer) and last.value + change <= 0:
        return ""
    return _with_operand(instruction, len(instruction.operands) - 1, "add", change)


def _with_operand(instruction: PtxInstruction, index: int, operation: str, change: int) -> str:
    """The same instruction with a 32-bit operand altered. operation: "add" or "xor"."""
    start, operand, end = _split_at(instruction.text, index)
    if re.fullmatch(r"\d+", operand):
        value = int(operand) + change if operation == "add" else int(operand) ^ change
        return f"{start} {value}{end};"
    opcode = {"add": "add.u32", "xor": "xor.b32"}[operation]
    return (
        f"{{ .reg .b32 altered_value; {opcode} altered_value, {operand}, {change}; "
        f"{start} altered_value{end}; }}"
    )


def _split_at(text: str, index: int) -> tuple[str, str, str]:
    """The text before an operand, the operand, and the text behind it."""
    opening = re.match(r"(?:@\S+\s+)?\S+", text)
    assert opening is not None
    depth, starts = 0, [opening.end()]
    for place, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            starts.append(place + 1)
    stop = starts[index + 1] - 1 if index + 1 < len(starts) else len(text)
    return text[: starts[index]], text[starts[index] : stop].strip(), text[stop:]


def _replace(lines: list[str], instruction: PtxInstruction, statement: str) -> str | None:
    """The text with the instruction's statement, which starts on its line, replaced.

    None if the statement is not found.
    """
    index = instruction.written_line - 1
    tail = "\n".join(lines[index:])
    guard = r"(?:@!?[^\s;]+\s+)?"
    found = re.search(guard + re.escape(instruction.opcode) + r"(?![\w.:])[^;]*;", tail)
    if found is None or tail[: found.start()].count("\n"):
        return None
    # The parser renames what inner scopes declare ("P1@2"); the text has the plain names.
    written = re.sub(r"(?<=[\w$%])@\d+", "", statement)
    tail = tail[: found.start()] + written + tail[found.end() :]
    return "\n".join([*lines[:index], tail])
