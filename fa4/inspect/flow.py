"""Control flow of a kernel, machine code or PTX: basic blocks, dominators, natural loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Blocks = dict[int, tuple["CodeInstruction", ...]]
Edges = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class CodeInstruction:
    """One instruction. opcode: with its modifiers, "MUFU.EX2". guard: its predicate, "!P0", or "".

    ends: it is the last of its basic block. targets: labels that it may jump to. falls: the next
    instruction may follow it.
    """

    address: int
    opcode: str
    operands: str
    guard: str = ""
    targets: tuple[str, ...] = ()
    ends: bool = False
    falls: bool = True

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True)
class Function:
    """A function. section: the kernel whose code section it is in, its own or of its caller.
    labels: name -> address of the instruction behind it."""

    name: str
    section: str
    instructions: tuple[CodeInstruction, ...]
    labels: dict[str, int]

    @property
    def count(self) -> int:
        """Instructions without NOP."""
        return sum(one.base != "NOP" for one in self.instructions)

    @cached_property
    def graph(self) -> Graph:
        """Basic blocks and what follows from them."""
        return Graph(self)


@dataclass(frozen=True)
class NaturalLoop:
    """A natural loop: every block from which its header is reached again without leaving.

    inline: the instructions from the header to the end of the last latch, in address order. The
    others, which ptxas puts elsewhere (retries of mbarrier waits, at the end of the kernel), are in
    `outside`. parent: header of the smallest loop around it, or None.
    """

    header: int
    inline: tuple[CodeInstruction, ...]
    outside: tuple[CodeInstruction, ...]
    parent: int | None = None

    @property
    def length(self) -> int:
        """Issue slots of a trip: in-line instructions, guarded ones that do nothing included."""
        return len(self.inline)


class Graph:
    """Control flow of a function. Blocks are named by the address of their first instruction."""

    def __init__(self, function: Function) -> None:
        self.blocks = _split(function)
        self.successors = _successors(function, self.blocks)
        self._order = _reverse_postorder(self.successors, min(self.blocks))
        self.dominator = _immediate_dominators(self.successors, self._order)
        self.loops = tuple(self._find_loops())

    def dominators(self, block: int) -> Iterator[int]:
        """The block itself, then the blocks that every path to it goes through, nearest first."""
        while True:
            yield block
            above = self.dominator[block]
            if above == block:
                return
            block = above

    def _find_loops(self) -> Iterator[NaturalLoop]:
        latches: dict[int, list[int]] = {}
        for block in self._order:
            for header in self.successors[block]:
                if header in self.dominators(block):
                    latches.setdefault(header, []).append(block)
        before = _predecessors(self.successors, self._order)
        bodies = {header: _body(header, ends, before) for header, ends in latches.items()}
        for header in sorted(bodies):
            body = bodies[header]
            around = [h for h, other in bodies.items() if h != header and header in other]
            parent = min(around, key=lambda h: len(bodies[h]), default=None)
            inline = _inline_blocks(header, latches[header], before, self.blocks)
            yield NaturalLoop(
                header,
                _flatten(self.blocks, inline),
                _flatten(self.blocks, body - inline),
                parent,
            )


def _split(function: Function) -> Blocks:
    """Basic blocks: they begin at labels and behind jumps."""
    starts = set(function.labels.values())
    blocks: dict[int, list[CodeInstruction]] = {}
    current: list[CodeInstruction] | None = None
    for one in function.instructions:
        if current is None or one.address in starts:
            current = blocks[one.address] = []
        current.append(one)
        if one.ends:
            current = None
    return {start: tuple(body) for start, body in blocks.items()}


def _successors(function: Function, blocks: Blocks) -> Edges:
    starts = list(blocks)
    following = dict(pairwise(starts))
    result = {}
    for start, body in blocks.items():
        last = body[-1]
        found = []
        if last.ends:
            found = [function.labels[name] for name in last.targets if name in function.labels]
        if last.falls and start in following:
            found.append(following[start])
        result[start] = tuple(dict.fromkeys(found))
    return result


def _reverse_postorder(successors: Edges, entry: int) -> list[int]:
    order: list[int] = []
    seen = {entry}
    stack = [(entry, iter(successors[entry]))]
    while stack:
        block, rest = stack[-1]
        ahead = next((x for x in rest if x not in seen), None)
        if ahead is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(ahead)
            stack.append((ahead, iter(successors[ahead])))
    return order[::-1]


def _predecessors(successors: Edges, blocks: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {block: [] for block in blocks}
    for block in blocks:
        for ahead in successors[block]:
            found[ahead].append(block)
    return found


def _immediate_dominators(successors: Edges, order: list[int]) -> dict[int, int]:
    """Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm" (2001)."""
    place = {block: index for index, block in enumerate(order)}
    before = _predecessors(successors, order)
    found = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [x for x in before[block] if x in found]
            meet = known[0]
            for other in known[1:]:
                while meet != other:
                    while place[meet] > place[other]:
                        meet = found[meet]
                    while place[other] > place[meet]:
                        other = found[other]
            if found.get(block) != meet:
                found[block] = meet
                changed = True
    return found


def _body(header: int, latches: Sequence[int], before: dict[int, list[int]]) -> set[int]:
    body = {header}
    stack = list(latches)
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack += before[block]
    return body


def _inline_blocks(
    header: int,
    latches: Sequence[int],
    before: dict[int, list[int]],
    blocks: Blocks,
) -> set[int]:
    """From the header to the latch whose own loop holds the most instructions.

    A retry at the end of the kernel that jumps straight to the header is a latch too, of a loop of
    its own. Where the loop is entered in its middle (the latch stands before the header) it is the
    run of adjoining blocks around the header.
    """
    body = _body(header, latches, before)

    def size(latch: int) -> int:
        return sum(len(blocks[x]) for x in _body(header, [latch], before) if header <= x <= latch)

    last = max(latches, key=lambda latch: (size(latch), latch))
    if last >= header:
        return {block for block in body if header <= block <= last}
    order = sorted(blocks)
    first = end = order.index(header)
    while first > 0 and order[first - 1] in body:
        first -= 1
    while end + 1 < len(order) and order[end + 1] in body:
        end += 1
    return set(order[first : end + 1])


def _flatten(blocks: Blocks, chosen: set[int]) -> tuple[CodeInstruction, ...]:
    return tuple(one for start in sorted(chosen) for one in blocks[start])
