"""What the loops of an attention kernel are, and what their issue slots go to.

A softmax thread owns one row of S, or on Hopper, where its loop has the products as well, parts of
two: a trip turns `elements` scores into P, so that length x 128 / elements is the cost of a row of
128 in warp issue slots. A thread of the backward
pass recomputes P and makes a dS of each of its `elements` scores. Counts are static: guarded
instructions that do nothing are included, retries of barrier waits are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType

from fa4.inspect.flow import CodeInstruction, Function, NaturalLoop

MIN_EXP2 = 30  # fewer MUFU.EX2 make no softmax loop
# A masked loop selects per element (FSEL) or computes its predicates with integer logic.
MASK_SELECTS, MASK_LOGIC = 60, 100
# Maxima of a softmax loop; the backward pass has the LSE and looks for none.
MIN_MAXIMA = 16
MIN_REDUCED = 8  # STS of a loop that brings float32 sums out of tensor memory
ROW = 128  # elements of a row of S that one tile holds
NARROW = 4  # registers: a smaller tcgen05.st is no chunk of P, but a factor of the row

SOFTMAX, MASKED, MMA = "softmax", "softmax masked", "mma"
GRADIENTS, GRADIENTS_MASKED, REDUCE = "gradients", "gradients masked", "reduce"
CORRECTION, LOAD, OTHER = "correction", "load", "other"
_OF_SCORES = {SOFTMAX: 2, MASKED: 2, GRADIENTS: 1, GRADIENTS_MASKED: 1}  # scores for each F2FP

# Column of the table -> opcodes, with the modifiers that matter. The longest name that fits counts.
COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "MUFU.EX2": ("MUFU.EX2",),
        "FFMA2": ("FFMA2",),
        "FADD2": ("FADD2",),
        "FMUL2": ("FMUL2",),
        "FMNMX3": ("FMNMX3",),
        "FMNMX": ("FMNMX",),
        "F2FP": ("F2FP",),
        "LDTM": ("LDTM",),
        "STTM": ("STTM",),
        "MMA": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "HGMMA"),
        "scalar FP": ("FADD", "FMUL", "FFMA", "FSEL", "FSETP", "FSET", "MUFU"),
        "MOV": (
            "MOV", "UMOV", "IMAD.MOV", "IMAD.U32", "HFMA2", "R2UR", "CS2R", "S2R", "S2UR", "RPCMOV",
            "P2R",
        ),
        "integer": (
            "IADD", "IADD3", "IMAD", "SHF", "LEA", "LOP3", "PRMT", "PLOP3", "SEL", "R2P", "ISETP",
            "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "I2FP", "I2F", "F2I", "POPC", "FLO", "BMSK",
            "SGXT", "IABS", "VOTE", "VOTEU", "REDUX", "LEPC",
        ),
        "sync": (
            "SYNCS", "BAR", "FENCE", "ELECT", "MEMBAR", "DEPBAR", "WARPSYNC", "NANOSLEEP", "UTCBAR",
            "BSSY", "BSYNC", "ERRBAR", "CCTL", "LDGDEPBAR",
        ),
        "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS", "STAS"),
        "global": ("LDG", "STG", "RED", "REDG", "ATOMG", "ATOM", "LD", "ST"),
        "constant": ("LDC", "LDCU"),
        "spill": ("LDL", "STL"),
        "branch": ("BRA", "BRX", "NOP", "EXIT", "RET", "CALL", "JMP", "BPT"),
    }
)  # fmt: skip
_NAMES = (*COLUMNS, "uniform", "other")
_MARKED = ("STS", "STTM", "LDTM", "BAR", "SYNCS")
_COLUMN_OF = {opcode: column for column, opcodes in COLUMNS.items() for opcode in opcodes}


def column_of(instruction: CodeInstruction) -> str:
    """The column of the table that an instruction is counted in."""
    parts = instruction.opcode.split(".")
    for end in range(min(2, len(parts)), 0, -1):
        column = _COLUMN_OF.get(".".join(parts[:end]))
        if column:
            return column
    return "uniform" if parts[0].startswith("U") else "other"


@dataclass(frozen=True)
class Mark:
    """An instruction that waits or hands something on. percent: its place in the in-line order."""

    opcode: str
    percent: float


@dataclass(frozen=True)
class LoopReport:
    """One loop. columns: in-line instructions by column of the table; outside: those elsewhere.

    length: in-line instructions; shortest: those of the shortest way around (a correction that
    skips). elements: scores turned into P by a trip, in the backward pass into P and dS; 0 in loops
    of other kinds. emulated: how many of them without MUFU. registers: budget of the role
    (USETMAXREG), None if nothing sets it. highest_register: the largest index named.
    """

    kind: str
    header: int
    length: int
    shortest: int
    outside: int
    columns: Mapping[str, int]
    elements: int
    registers: int | None
    highest_register: int
    marks: tuple[Mark, ...]

    @property
    def per_row(self) -> float:
        """Issue slots of a row of 128 elements; 0 where the loop makes none."""
        return self.length * ROW / self.elements if self.elements else 0.0

    @property
    def emulated(self) -> int:
        """Elements whose exponential is not a MUFU: each row has one MUFU more, of its factor; the
        backward pass has no factors."""
        if not self.elements:
            return 0
        rows = max(1, self.elements // ROW) if self.is_softmax else 0
        return max(0, self.elements + rows - self.columns.get("MUFU.EX2", 0))

    @property
    def is_softmax(self) -> bool:
        """Is it a loop of the forward pass over scores?"""
        return self.kind in (SOFTMAX, MASKED)

    @property
    def barriers(self) -> int:
        """Barriers among warps (BAR) of a trip; mbarriers are none."""
        return sum(mark.opcode.startswith("BAR") for mark in self.marks)

    @property
    def spills(self) -> int:
        """LDL and STL on the in-line path."""
        return self.columns.get("spill", 0)

    @property
    def alpha(self) -> float | None:
        """Where the factor of the row is published: a narrow store to SMEM or TMEM. In percent."""
        factors = (m.percent for m in self.marks if _is_factor(m.opcode))
        return next(factors, None) if self.is_softmax else None

    @property
    def p_stored(self) -> tuple[float, ...]:
        """Where the chunks of P, in the backward pass then those of dS, are stored to TMEM. In
        percent."""
        return tuple(mark.percent for mark in self.marks if _is_chunk(mark.opcode))

    @property
    def p_arrived(self) -> tuple[float, ...]:
        """The first arrival on an mbarrier behind chunks of P or dS. In percent."""
        found: list[float] = []
        stored = False
        for mark in self.marks:
            if _is_chunk(mark.opcode):
                stored = True
            elif stored and mark.opcode.startswith("SYNCS.ARRIVE"):
                found.append(mark.percent)
                stored = False
        return tuple(found)

    def describe(self) -> dict[str, object]:
        """Everything as plain data, for JSON."""
        return {
            "kind": self.kind,
            "header": hex(self.header),
            "length": self.length,
            "per_row": round(self.per_row, 1),
            "elements": self.elements,
            "emulated": self.emulated,
            "shortest": self.shortest,
            "outside": self.outside,
            "registers": self.registers,
            "highest_register": self.highest_register,
            "spills": self.spills,
            "barriers": self.barriers,
            "alpha_percent": self.alpha,
            "p_stored_percent": list(self.p_stored),
            "p_arrived_percent": list(self.p_arrived),
            "columns": dict(self.columns),
            "marks": [[mark.opcode, mark.percent] for mark in self.marks],
        }


def classify(function: Function) -> tuple[LoopReport, ...]:
    """The loops of a kernel, by address. Of loops of one kind around each other, such as those over
    work tiles and over KV tiles, the inner one is of that kind and the outer one is "other"."""
    loops = function.graph.loops
    kinds = {loop.header: _kind(loop) for loop in loops}
    parents = {loop.header: loop.parent for loop in loops}
    outer: set[int] = set()
    for loop in loops:
        around = loop.parent
        while around is not None:
            if kinds[around] != OTHER and kinds[loop.header] != OTHER:
                outer.add(around)
            around = parents[around]
    known = _budgets(function)
    return tuple(
        _report(function, loop, OTHER if loop.header in outer else kinds[loop.header], known)
        for loop in loops
    )


def _is_factor(opcode: str) -> bool:
    return opcode.startswith("STS") or (opcode.startswith("STTM") and not _is_chunk(opcode))


def _is_chunk(opcode: str) -> bool:
    """Of P: a store of more than a few registers."""
    if not opcode.startswith("STTM"):
        return False
    widths = [part[1:] for part in opcode.split(".") if part[0] == "x" and part[1:].isdigit()]
    return bool(widths) and int(widths[0]) > NARROW


def _kind(loop: NaturalLoop) -> str:
    counts = Counter(one.base for one in loop.inline)
    exp2 = sum(one.opcode.startswith("MUFU.EX2") for one in loop.inline)
    if exp2 >= MIN_EXP2 and (counts["LDTM"] or counts["HGMMA"]):
        selects = counts["FSEL"] + counts["FSETP"]
        logic = counts["LOP3"] + counts["PRMT"] + counts["SEL"]
        # Hopper's tiles have any number of columns; each score is selected.
        most = 2 * counts["F2FP"] - 1 if counts["HGMMA"] else MASK_SELECTS
        masked = selects > most or logic > MASK_LOGIC
        if _maxima(loop) >= MIN_MAXIMA:
            return MASKED if masked else SOFTMAX
        return GRADIENTS_MASKED if masked else GRADIENTS
    if any(counts[opcode] for opcode in COLUMNS["MMA"]):
        return MMA
    if counts["LDTM"] and counts["STTM"] and counts["FMUL2"] + counts["FMUL"]:
        return CORRECTION
    if counts["LDTM"] and counts["STS"] >= MIN_REDUCED and not counts["F2FP"]:
        return REDUCE
    return LOAD if counts["UTMALDG"] else OTHER


def _maxima(loop: NaturalLoop) -> int:
    """Maxima of scores; an LDTM that finds the largest of what it loads counts as all of them."""
    found = 0
    for one in loop.inline:
        found += one.base in ("FMNMX", "FMNMX3")
        found += MIN_MAXIMA * one.opcode.startswith("LDTM.STAT")
    return found


def _report(
    function: Function, loop: NaturalLoop, kind: str, known: Mapping[int, int]
) -> LoopReport:
    counts = Counter(column_of(one) for one in loop.inline)
    marks = tuple(
        Mark(one.opcode, round(100 * place / loop.length, 1))
        for place, one in enumerate(loop.inline, 1)
        if one.opcode.startswith(_MARKED)
    )
    chain = function.graph.dominators(loop.header)
    return LoopReport(
        kind=kind,
        header=loop.header,
        length=loop.length,
        shortest=_shortest(function, loop),
        outside=len(loop.outside),
        columns=MappingProxyType({name: counts[name] for name in _NAMES if counts[name]}),
        elements=_OF_SCORES.get(kind, 0) * counts["F2FP"],
        registers=next((known[block] for block in chain if block in known), None),
        highest_register=max(
            (_highest(one.operands) for one in (*loop.inline, *loop.outside)), default=-1
        ),
        marks=marks,
    )


def budgets(instructions: Iterable[CodeInstruction]) -> Iterator[int]:
    """The registers per thread that each USETMAXREG leaves."""
    for one in instructions:
        if one.base == "USETMAXREG":
            yield int(one.operands.split(",")[-1].strip(), 0)


def _budgets(function: Function) -> dict[int, int]:
    """Block -> the registers per thread that its last USETMAXREG leaves."""
    by_block = {start: list(budgets(body)) for start, body in function.graph.blocks.items()}
    return {start: found[-1] for start, found in by_block.items() if found}


def _shortest(function: Function, loop: NaturalLoop) -> int:
    """Instructions on the shortest way from the header back to it, inside the loop."""
    graph = function.graph
    inside = {one.address for one in (*loop.inline, *loop.outside)}
    best = {loop.header: len(graph.blocks[loop.header])}
    queue = [(best[loop.header], loop.header)]
    while queue:
        cost, block = heappop(queue)
        for ahead in graph.successors[block]:
            if ahead == loop.header:
                return cost
            longer = cost + len(graph.blocks[ahead])
            if ahead in inside and longer < best.get(ahead, longer + 1):
                best[ahead] = longer
                heappush(queue, (longer, ahead))
    return loop.length


def _highest(operands: str) -> int:
    """The largest index of a register R in some operands."""
    found = -1
    for word in operands.replace("[", " ").replace("+", " ").replace("-", " ").split():
        word = word.lstrip("|~!").split(".")[0].rstrip(",]|")
        if word[:1] == "R" and word[1:].isdigit():
            found = max(found, int(word[1:]))
    return found
