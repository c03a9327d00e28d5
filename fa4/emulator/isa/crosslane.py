"""Instructions that exchange values between the lanes of a warp: PTX ISA 9.7.9.6 and 9.7.13.

Every lane of the membermask reaches them before they run, so they see all participants at once.
The membermask may differ from lane to lane (two halves of a warp that vote apart, for example);
lane l's own mask decides what lane l sees. Lanes outside it, and lanes that have left or whose
guard is false, do not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fa4.emulator.isa.formula import destinations, intrinsic, like
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.shuffle import constant_sources, source_lane
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import LANES

ROWS = TableRows()

# What shfl reads from a lane that does not take part. PTX leaves the value undefined; this one is
# easy to recognise in a wrong result.
POISON = 0xBAD0BAD0
CANONICAL_NAN = 0x7FFFFFFF


def _ballot(b: SegmentBuilder, predicate: Lanes) -> Lanes:
    """In every lane: the active lanes where `predicate` is true, as a bit mask."""
    return b.splat(b.ballot(predicate & b.active()), "i32")


def _participants(b: SegmentBuilder, members: Lanes) -> Lanes:
    return members & b.splat(b.ballot(b.active()), "i32")


def _broadcast(b: SegmentBuilder, value: Lanes, source: int) -> Lanes:
    """Lane `source` of the value in all lanes."""
    return _gather_constant(b, value, [source] * LANES)


def _gather_constant(b: SegmentBuilder, value: Lanes, sources: Sequence[int]) -> Lanes:
    kind = f"<32 x {value.type}>"
    indices = ", ".join(f"i32 {source}" for source in sources)
    return b.emit(
        f"shufflevector {kind} {value.name}, {kind} poison, <32 x i32> <{indices}>", value.type
    )


def _gather(b: SegmentBuilder, value: Lanes, sources: Lanes) -> Lanes:
    """result[l] = value[sources[l]] for i32 values; LLVM shuffles take constant indices only."""
    spilled = b.scalar("alloca <32 x i32>, align 128")
    b.lines.append(f"  store <32 x i32> {value.name}, ptr {spilled}, align 128")
    pointers = b.scalar(f"getelementptr i32, ptr {spilled}, <32 x i32> {sources.name}")
    function = "@llvm.masked.gather.v32i32.v32p0"
    b.declarations.add(f"declare <32 x i32> {function}(<32 x ptr>, <32 x i1>, <32 x i32>)")
    return b.emit(
        f"call <32 x i32> {function}(<32 x ptr> align 4 {pointers}, "
        "<32 x i1> splat (i1 true), <32 x i32> poison)",
        "i32",
    )


@ROWS.lane("shfl.sync", "9.7.9.6", "(.up .down .bfly .idx) .b32", converges=True)
def emit_shfl(b: SegmentBuilder, i: PtxInstruction) -> None:
    """d = a of the source lane (`source_lane`), or of the own lane if that is out of range.

    Constant operands, the usual case, make it one LLVM shuffle.
    """
    mode, _ = modifiers(i, "shfl.sync", ("up", "down", "bfly", "idx"), ("b32",))
    value = b.read(i.operands[1], "b32")
    offset, clamp = i.operands[2], i.operands[3]
    own = b.lane_ids()
    if isinstance(offset, Integer) and isinstance(clamp, Integer):
        known = constant_sources(mode, offset.value, clamp.value)
        indices = [lane for lane, _ in known]
        in_range = Lanes(b, "i1", f"<{', '.join(f'i1 {int(reached)}' for _, reached in known)}>")
        moved = _gather_constant(b, value, indices)
        source = _gather_constant(b, own, indices)
    else:
        source, bound = source_lane(mode, own, b.read(offset, "b32"), b.read(clamp, "b32"))
        in_range = source.compare("sge" if mode == "up" else "sle", bound)
        source = in_range.select(source, own)
        moved = _gather(b, value, source)
    takes_part = (_participants(b, b.read(i.operands[4], "b32")) >> source) & 1
    result = takes_part.compare("ne", 0).select(moved, like(moved, POISON))
    target, predicate = destinations(i.operands[0])
    b.write(target, result)
    b.write(predicate, in_range)


@ROWS.lane("vote.sync", "9.7.13.9", "(.all .any .uni) .pred, .ballot .b32", converges=True)
def emit_vote(b: SegmentBuilder, i: PtxInstruction) -> None:
    """What the predicates of the participants have in common, or all of them as a mask."""
    mode, kind = modifiers(i, "vote.sync", ("all", "any", "uni", "ballot"), ("pred", "b32"))
    if (mode == "ballot") != (kind == "b32"):
        raise Unsupported(f"modifiers .{mode}.{kind} together")
    condition = b.read(i.operands[1], "pred")
    members = b.read(i.operands[2], "b32")
    yes = members & _ballot(b, condition)
    if mode == "ballot":
        b.write(i.operands[0], yes)
        return
    every = yes.compare("eq", _participants(b, members))
    some = yes.compare("ne", 0)
    results = {"all": every, "any": some, "uni": every | ~some}
    b.write(i.operands[0], results[mode])


def _define_match(mode: str) -> None:
    name = f"match.{mode}.sync"

    @ROWS.lane(name, "9.7.13.10", ".b32 .b64", converges=True)
    def emit(b: SegmentBuilder, i: PtxInstruction) -> None:
        (kind,) = modifiers(i, name, ("b32", "b64"))
        value = b.read(i.operands[1], kind)
        present = _participants(b, b.read(i.operands[2], "b32"))
        equal = like(present, 0)
        for other in range(LANES):
            same = _broadcast(b, value, other).compare("eq", value)
            equal = equal | same.select(like(present, 1 << other), like(present, 0))
        equal = equal & present
        target, predicate = destinations(i.operands[0])
        every = equal.compare("eq", present)
        b.write(target, equal if mode == "any" else every.select(equal, like(equal, 0)))
        b.write(predicate, every)


def _reduced(
    b: SegmentBuilder,
    value: Lanes,
    present: Lanes,
    identity: int,
    combine: Callable[[Lanes, Lanes], Lanes],
) -> Lanes:
    """In every lane: `combine` over the lanes that its mask `present` names."""
    total = like(value, identity)
    for other in range(LANES):
        takes_part = ((present >> other) & 1).compare("ne", 0)
        total = takes_part.select(combine(total, _broadcast(b, value, other)), total)
    return total


_EXTREME = {"u32": {"min": (-1, "umin"), "max": (0, "umax")}}
_EXTREME["s32"] = {"min": (0x7FFFFFFF, "smin"), "max": (0x80000000, "smax")}
_BITWISE: dict[str, tuple[int, Callable[[Lanes, Lanes], Lanes]]] = {
    "and": (-1, lambda a, b: a & b),
    "or": (0, lambda a, b: a | b),
    "xor": (0, lambda a, b: a ^ b),
}


@ROWS.lane(
    "redux.sync",
    "9.7.13.13",
    "(.add .min .max) .u32 .s32, (.and .or .xor) .b32",
    types=("u32", "s32", "b32"),
    converges=True,
)
def emit_redux(b: SegmentBuilder, i: PtxInstruction) -> None:
    """One integer or bitwise operation over the values of the participants."""
    operation, kind = modifiers(
        i, "redux.sync", ("add", "min", "max", *_BITWISE), ("u32", "s32", "b32")
    )
    value = b.read(i.operands[1], kind)
    present = _participants(b, b.read(i.operands[2], "b32"))
    if (operation in _BITWISE) != (kind == "b32"):
        raise Unsupported(f"modifiers .{operation}.{kind} together")
    if operation == "add":
        result = _reduced(b, value, present, 0, lambda x, y: x + y)
    elif operation in _BITWISE:
        result = _reduced(b, value, present, *_BITWISE[operation])
    else:
        identity, name = _EXTREME[kind][operation]
        result = _reduced(b, value, present, identity, lambda x, y: intrinsic(name, x, y))
    b.write(i.operands[0], result)


def _ordered(bits: Lanes) -> Lanes:
    """float bits <-> integers in the same signed order, -0 below +0 (its own inverse)."""
    return bits ^ (bits.ashr(31) & 0x7FFFFFFF)


@ROWS.lane(
    "redux.sync", "9.7.13.13", "(.min .max) {.abs} {.NaN} .f32", types=("f32",), converges=True
)
def emit_redux_f32(b: SegmentBuilder, i: PtxInstruction) -> None:
    """Minimum or maximum; NaN inputs are left out, or decide the result with .NaN."""
    operation, magnitude, strict, _ = modifiers(
        i, "redux.sync", ("min", "max"), ("abs",), ("NaN",), ("f32",)
    )
    value = b.read(i.operands[1], "f32")
    present = _participants(b, b.read(i.operands[2], "b32"))
    if magnitude:
        value = value & 0x7FFFFFFF
    number = (value & 0x7FFFFFFF).compare("ule", 0x7F800000)
    numbers = present & _ballot(b, number)
    identity, name = _EXTREME["s32"][operation]
    best = _reduced(b, _ordered(value), numbers, identity, lambda x, y: intrinsic(name, x, y))
    is_nan = numbers.compare("ne", present) if strict else numbers.compare("eq", 0)
    b.write(i.operands[0], is_nan.select(like(value, CANONICAL_NAN), _ordered(best)))


@ROWS.lane("elect.sync", "9.7.13.15", "", converges=True)
def emit_elect(b: SegmentBuilder, i: PtxInstruction) -> None:
    """The lowest active lane of the membermask leads; d is its number."""
    modifiers(i, "elect.sync")
    present = _participants(b, b.read(i.operands[1], "b32"))
    below = ~present & (present - 1)
    leader = intrinsic("ctpop", below)
    target, predicate = destinations(i.operands[0])
    b.write(target, leader)
    b.write(predicate, leader.compare("eq", b.lane_ids()))


@ROWS.lane("activemask", "9.7.13.12", ".b32")
def emit_activemask(b: SegmentBuilder, i: PtxInstruction) -> None:
    """The lanes that execute this very instruction now; it waits for nobody."""
    modifiers(i, "activemask", ("b32",))
    b.write(i.operands[0], b.splat(b.ballot(b.active()), "i32"))


_define_match("any")
_define_match("all")
