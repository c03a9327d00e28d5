"""Machine code as `nvdisasm -c` prints it, taken apart into functions.

With plain string operations: nvdisasm pads annotated lines to the longest, for which regular
expressions pay with minutes of backtracking.
"""

from __future__ import annotations

from dataclasses import replace

from fa4.inspect.flow import CodeInstruction, Function

# What ends a basic block. Calls return behind themselves and end none.
_JUMPS = ("BRA", "JMP")
_TABLE_JUMPS = ("BRX", "JMX", "BRXU", "JMXU")
_ENDS = ("EXIT", "RET", "KILL")
_TARGETS = '(*"BRANCH_TARGETS '


def parse(text: str) -> tuple[Function, ...]:
    """The functions of a disassembly, in order. Raises ValueError if there is none."""
    functions: list[Function] = []
    names: set[str] = set()
    name = section = ""
    instructions: list[CodeInstruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []

    def finish() -> None:
        nonlocal instructions, labels, waiting
        if instructions:
            functions.append(Function(name, section, _with_meetings(instructions), labels))
        instructions, labels, waiting = [], {}, []

    for raw in text.splitlines():
        line = raw.strip()
        if line.split(None, 1)[:1] == [".section"]:  # and not .sectioninfo
            finish()
            name = section = line.removeprefix(".section").split(",")[0].strip()[len(".text.") :]
        elif line.startswith(".type") and line.endswith(",@function"):
            names.add(line.removeprefix(".type").removesuffix(",@function").strip())
        elif line.endswith(":"):
            if line[:-1] in names:
                finish()
                name = line[:-1]
            waiting.append(line[:-1])
        elif (found := _instruction(line)) is not None:
            labels.update(dict.fromkeys(waiting, found.address))
            waiting.clear()
            instructions.append(found)
    finish()
    if not functions:
        raise ValueError(f"no instructions in {text[:60]!r}; expected the output of nvdisasm -c")
    return tuple(functions)


def _instruction(line: str) -> CodeInstruction | None:
    """`/*0a40*/ @!P0 BRA.U UP1, `(.L_x_3) ;`; None for every other line."""
    if not line.startswith("/*"):
        return None
    address, closed, rest = line[2:].partition("*/")
    if not closed or not address.isalnum():  # encodings are "/* 0x... */"
        return None
    code, _, listed = rest.partition(_TARGETS)
    words = code.partition(";")[0].partition("(*")[0].strip(" \t{}").split(None, 1)
    guard = ""
    if words and words[0].startswith("@"):
        guard = words[0][1:]
        words = words[1].split(None, 1)
    if not words:
        return None
    operands = words[1].strip() if len(words) > 1 else ""
    guard = "" if guard in ("PT", "UPT") else guard
    return _with_flow(int(address, 16), words[0], operands, guard, listed.partition('"')[0])


def _with_flow(
    address: int, opcode: str, operands: str, guard: str, listed: str
) -> CodeInstruction:
    """listed: targets of a jump through a table, separated by commas."""
    base = opcode.partition(".")[0]
    label = operands.partition("`(")[2].partition(")")[0]
    targets = (label,) if label else ()
    if base in _JUMPS:
        # A predicate before the label makes it conditional, as a guard does.
        falls = bool(guard) or "," in operands
        return CodeInstruction(address, opcode, operands, guard, targets, True, falls)
    if base in _TABLE_JUMPS:
        known = tuple(name for name in listed.split(",") if name)
        return CodeInstruction(address, opcode, operands, guard, known, True, bool(guard))
    if base in _ENDS:
        return CodeInstruction(address, opcode, operands, guard, (), True, bool(guard))
    return CodeInstruction(address, opcode, operands, guard, targets)


def _with_meetings(instructions: list[CodeInstruction]) -> tuple[CodeInstruction, ...]:
    """BSYNC jumps to where diverged threads meet: what the BSSY of its barrier register named. Of
    several with one register the last one before it counts, as ptxas keeps such regions together.
    """
    meetings: dict[str, tuple[str, ...]] = {}
    found = []
    for one in instructions:
        if one.base == "BSSY":
            meetings[one.operands.partition(",")[0].strip()] = one.targets
        elif one.base == "BSYNC":
            targets = meetings.get(one.operands.rpartition(",")[2].strip(), ())
            one = replace(one, targets=targets, ends=True, falls=not targets or bool(one.guard))
        found.append(one)
    return tuple(found)
