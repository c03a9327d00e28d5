"""What a consumer warpgroup computes for a KV tile between its products, of either design.

A thread holds tile_n / 2 scores and dv / 2 elements of O, of two rows.

flash_attn.cute: Nsight Compute's counts per pipe of twelve of its configurations on an H200
(tests/sim/data/h200_counters.csv) divided by steps and warps are, for tile_n keys and dv columns of
O, to a hundredth or two of all instructions:

    exponentials tile_n / 2 + 2, FMA pipe tile_n + dv / 2 + 9, ALU pipe 3/4 tile_n + 22.

fa4: the loops of its compiled kernels (19 of them, disassembled) are, to 3 instructions,

    exponentials tile_n / 2, FMA pipe tile_n + 14, ALU pipe 3/4 tile_n + 8, masks 0.8 tile_n.

It scales all scores before the exponentials, with which it adds up the rows. Only where a maximum
has risen by more than tau are maxima exchanged and is O rescaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa4.config import PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS, WarpgroupPipeline
from fa4.plan.schema import GlobalStore, Math, Mma, Program, SmemAccess, Sync, Wait, Work

EXP_PARTS = 4  # pieces of a tile's exponentials, in which several warpgroups share the units
OWN_ROWS = 2  # of a thread

# Instructions of a score's polynomial: range, rounding, two differences, degree 3, exponent.
EMULATED_FMA, EMULATED_ALU = 6.0, 2.0

# What scoreboards add to the exponentials' and their sums' time on the pipes, in dependent
# instructions per score. Assumed: the control codes of the compiled kernels leave 8 cycles each,
# MUFU's own, and S is scaled beside the first ones; what its results take is not in them.
SCOREBOARD_PER_SCORE = 0.1

STORE_INSTRUCTIONS = 30.0  # of P to shared memory: stores, addresses, fence; likewise counted

# Cycles of a wgmma's descriptors and issue, up to NARROW_DIM columns of Q and K and beyond.
ISSUE_CYCLES, NARROW_DIM = (12.0, 20.0), 128


def rows_of(name: str, i: int, row_bytes: int) -> str:
    """Warpgroup i's rows of Q, P or O; `q@` is the Q that was last waited for."""
    return f"{name}[{i * WARPGROUP_ROWS * row_bytes}:{(i + 1) * WARPGROUP_ROWS * row_bytes}]"


def unpacked(
    *, mufu: float = 0.0, fma: float = 0.0, alu: float = 0.0, other: float = 0.0, chain: float = 0.0
) -> Math:
    """Instructions one by one: Hopper has no packed float32, so each FMA takes an issue slot."""
    return Math(mufu=mufu, fma=fma, alu=alu, other=other + fma / 2, chain=chain)


def products(pipeline: WarpgroupPipeline, product: Mma, waited: bool) -> Mma:
    """A product with what its instructions, of 32 bytes of depth, take to issue.

    From the control codes of compiled kernels: P V takes 12 cycles each up to head dim 128, 20 at
    192, 28 at 256; S takes 12, for which no less is assumed. Not known of flash_attn.cute. waited:
    in all loops that spill registers the compiler waits for each instruction before the next one.
    """
    instructions = product.depth * pipeline.element_bytes // PRODUCT_DEPTH_BYTES
    if waited:
        product = replace(product, waits=instructions)
    if pipeline.published:
        return product
    wide = pipeline.head_dim > NARROW_DIM
    return replace(product, issue_cycles=instructions * ISSUE_CYCLES[wide])


def softmax(pipeline: WarpgroupPipeline, i: int, masked: bool) -> Program:
    """Row maximum, the reference that all exponentials are taken of, exponentials and row sums."""
    return (*row_max(pipeline, i, masked), *powers(pipeline, i))


def row_max(pipeline: WarpgroupPipeline, i: int, masked: bool) -> Program:
    """The largest of a thread's scores of each row, of those that the mask leaves."""
    scores, mask = pipeline.tile_n / 2, 1.25 if pipeline.published else 1.6
    masking = (Work(f"mask S{i}", unpacked(alu=mask * scores)),) if masked else ()
    # 8-bit types: one instruction takes two more scores, as integers.
    return (
        *masking,
        Work(f"row max {i}", unpacked(alu=scores / 2 if pipeline.transposes else scores)),
    )


def powers(pipeline: WarpgroupPipeline, i: int) -> Program:
    """What follows: references, exponentials, row sums."""
    return (_published_powers if pipeline.published else _own_powers)(pipeline, i)


def _own_powers(pipeline: WarpgroupPipeline, i: int) -> Program:
    scores = pipeline.tile_n / 2
    return (
        # Has a maximum risen? A vote of the warp, on which the branch depends.
        Work(f"vote {i}", unpacked(fma=14, alu=8, other=30, chain=10)),
        Work(f"exchange {i}", unpacked(mufu=OWN_ROWS, fma=4, alu=8, other=8, chain=8),
             share="rescale_rate"),
        Work(f"scale S{i}", unpacked(fma=scores)),
        *_own_exponentials(pipeline, i),
    )  # fmt: skip


def _own_exponentials(pipeline: WarpgroupPipeline, i: int) -> Iterator[Work]:
    """In parts; without overlap, those of P that go to shared memory do so among the last ones."""
    stored = pipeline.p_source == "smem" and not pipeline.overlap
    for n in range(EXP_PARTS - stored):
        yield Work(f"exp S{i} {n}", exponentials_part(pipeline, n))


def exponentials_part(pipeline: WarpgroupPipeline, n: int) -> Math:
    """Instructions of part `n`; the polynomials are in the first ones, as the compiler has them."""
    part = pipeline.tile_n / 2 / EXP_PARTS
    emulated = min(part, max(0.0, pipeline.tile_n / 2 * pipeline.emulated - n * part))
    return unpacked(
        mufu=part - emulated,
        fma=part + EMULATED_FMA * emulated,
        alu=EMULATED_ALU * emulated + (0 if pipeline.overlap else 0.5 * part),
        chain=SCOREBOARD_PER_SCORE * part,
    )


def _published_powers(pipeline: WarpgroupPipeline, i: int) -> Program:
    """Without products in flight that hold P's or O's registers, the compiler converts P and
    rescales O between the exponentials; with overlap both come when P V is done."""
    scores = pipeline.tile_n / 2
    part, between = scores / EXP_PARTS, Math()
    if not pipeline.overlap:
        between = unpacked(fma=pipeline.head_dim_v / 2 / EXP_PARTS, alu=part / 2)
    return (
        # Two exchanges with other lanes, the new maximum, and the scale of what came before.
        Work(f"exchange {i}", unpacked(mufu=OWN_ROWS, fma=9, alu=22, other=36)),
        *(
            Work(f"exp S{i} {n}", unpacked(mufu=part, fma=2 * part + between.fma,
                                           alu=between.alu))
            for n in range(EXP_PARTS)
        ),
    )  # fmt: skip


def probabilities(pipeline: WarpgroupPipeline, i: int) -> Program:
    """P in the operands' type, into shared memory if P V takes it from there."""
    amount = unpacked(alu=pipeline.tile_n / 4)
    if pipeline.p_source == "registers":
        return (Work(f"convert P{i}", amount),) if pipeline.overlap else ()
    row_bytes, own = pipeline.tile_n * pipeline.element_bytes, not pipeline.published
    if not pipeline.overlap:
        amount = exponentials_part(pipeline, EXP_PARTS - 1)
    # flash_attn.cute writes a part of P while it converts the next, which was not counted.
    among = replace(amount, other=amount.other + STORE_INSTRUCTIONS) if own else Math()
    store = SmemAccess(num_bytes=WARPGROUP_ROWS * row_bytes, among=among)
    return (
        Work(f"write P{i}", store, writes=(rows_of("p", i, row_bytes),)),
        Work(f"show P{i}", Sync(fenced=True, by_warp=not own)),  # else a warp's rows are its own
    )


def release(pipeline: WarpgroupPipeline, i: int) -> Program:
    """What a step does once P V is done: the slot of V given back, the ring's next, branches."""
    if pipeline.published:
        return ()
    return (Work(f"release {i}", unpacked(other=12, chain=6)),)


def rescale(pipeline: WarpgroupPipeline, i: int) -> Program:
    """O times what the new maxima make of it: in every step, or where one has risen."""
    share = None if pipeline.published else "rescale_rate"
    return (Work(f"rescale O{i}", unpacked(fma=pipeline.head_dim_v / 2), share=share),)


def cleared_sums(pipeline: WarpgroupPipeline, i: int) -> Program:
    """The sums set to zero; in shared memory once the last O has been read from there."""
    row_bytes = pipeline.head_dim_v * pipeline.output_bytes
    if pipeline.direct:
        return (Work(f"clear O{i}", GlobalStore(num_bytes=WARPGROUP_ROWS * row_bytes)),)
    return (
        Wait(f"stored{i}"),
        Work(f"meet {i}", Sync()),
        Work(f"clear O{i}", SmemAccess(num_bytes=WARPGROUP_ROWS * row_bytes),
             writes=(rows_of("o", i, row_bytes),)),
    )  # fmt: skip


def promoted(pipeline: WarpgroupPipeline, i: int, tiles: int) -> Program:
    """O added to the sums and back, once in so many tiles.

    To O's own rows, L2 is taken to give what is held as fast as it takes it.
    """
    row_bytes = pipeline.head_dim_v * pipeline.output_bytes
    num_bytes = 2 * WARPGROUP_ROWS * row_bytes // tiles
    among = unpacked(fma=pipeline.head_dim_v / 2 / tiles)
    if pipeline.direct:
        return (
            Work(f"add O{i}", among),
            Work(f"promote O{i}", GlobalStore(num_bytes=num_bytes)),
        )
    place = rows_of("o", i, row_bytes)
    access = SmemAccess(num_bytes=num_bytes, among=among)
    return (Work(f"promote O{i}", access, reads=(place,), writes=(place,)),)
