"""Classes of bugs of GPU kernels, each as a small kernel, broken and mended.

`<>` in a kernel stands for what differs: `broken` or `mended`. Bodies are those of
`tests.emulator.kernels.run_ptx`: %rd1 and %rd2 hold the addresses of two arrays of 256 words,
`smem` is shared memory. lab/pages/bug_zoo.py makes docs/how-to/bugs.md of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.ptx_module import module_text

if TYPE_CHECKING:
    from fa4.emulator.execute import Report

WORDS, SMEM_BYTES = 256, 4096
START = "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 4, %r2;\n"
ELECT = START + "setp.eq.u32 %p1, %r1, 0;\n"
# Thread 0 makes an mbarrier at smem and a copy of 256 bytes to smem + 256 that it signals.
FILL = """@%p1 mbarrier.init.shared.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2+256], [%rd1], 256, [%r2];
"""
WAIT = "again: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra again;\n"
# Four rounds: warps 0 and 1 wait for room at smem + 8, warp 0 announces the round at smem, warp 2
# waits for that and gives room again.
IN_STEP = (
    ELECT
    + """setp.eq.u32 %p2, %r1, 64; mov.u32 %r5, 0;
@%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 mbarrier.init.shared.b64 [%r2+8], 1; bar.sync 0;
setp.ge.u32 %p3, %r1, 64; @%p3 bra taker;
giver: not.b32 %r6, %r5; and.b32 %r6, %r6, 1;
room: mbarrier.try_wait.parity.shared.b64 %p4, [%r2+8], %r6; @!%p4 bra room;
<>
@%p1 mbarrier.arrive.shared.b64 _, [%r2];
add.u32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 4; @%p5 bra giver; bra end;
taker: and.b32 %r6, %r5, 1;
news: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], %r6; @!%p4 bra news;
@%p2 mbarrier.arrive.shared.b64 _, [%r2+8];
add.u32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 4; @%p5 bra taker;
end:
"""
)
CLUSTER_SYNC = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
RELAXED_SYNC = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One class. kind, severity: of the finding that the broken kernel must give. story: what is
    wrong. grid: CTAs; cluster: of how many. fresh: the first array was never written."""

    name: str
    story: str
    text: str
    broken: str = ""
    mended: str = ""
    kind: str
    severity: str = "hazard"
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    fresh: bool = False
    max_steps: int | None = None

    def module(self, hole: str) -> str:
        """The PTX of the kernel with one of its two texts."""
        return module_text(self.text.replace("<>", hole), 2)

    def run(self, hole: str, schedule: str = "fifo", seed: int = 0) -> Report:
        """The kernel with one of its two texts, in the emulator."""
        import numpy as np

        from fa4.emulator.machine.unwritten import empty
        from tests.emulator.kernels import aligned, run_ptx

        words = empty((WORDS,), np.dtype(np.uint32)) if self.fresh else np.zeros(WORDS, np.uint32)
        return run_ptx(
            self.text.replace("<>", hole), [aligned(words), aligned(np.zeros(WORDS, np.uint32))],
            (self.grid, 1, 1), (self.threads, 1, 1), (self.cluster, 1, 1), smem=SMEM_BYTES,
            schedule=schedule, seed=seed, collect=True, max_steps=self.max_steps,
        )  # fmt: skip


def _error(**fields: object) -> Bug:
    make: Callable[..., Bug] = Bug
    return make(severity="error", **fields)


SHARED = [
    Bug(name="no barrier before a read", kind="race",
        story="A warp reads what another has stored in shared memory, without a barrier between.",
        text=START + "st.shared.b32 [%r3], %r1; st.shared.b32 [%r3+256], 0; bar.sync 0;"
        "st.shared.b32 [%r3], 1; <> xor.b32 %r4, %r1, 32; mad.lo.u32 %r4, %r4, 4, %r2;"
        "ld.shared.b32 %r5, [%r4];", mended="bar.sync 0;"),
    Bug(name="no barrier before a reuse", kind="race",
        story="A warp overwrites shared memory that another may still read.",
        text=START + "st.shared.b32 [%r3], %r1; bar.sync 0; xor.b32 %r4, %r1, 32;"
        "mad.lo.u32 %r4, %r4, 4, %r2; ld.shared.b32 %r5, [%r4]; <> st.shared.b32 [%r3], 7;",
        mended="bar.sync 0;"),
    Bug(name="a barrier for too few threads", kind="race",
        story="bar.sync names 32 threads of the 64: each warp passes by itself.",
        text=START + "st.shared.b32 [%r3], %r1; st.shared.b32 [%r3], 1; bar.sync 1, <>;"
        "xor.b32 %r4, %r1, 32; mad.lo.u32 %r4, %r4, 4, %r2; st.shared.b32 [%r4], 2;",
        broken="32", mended="64"),
    Bug(name="no barrier within a warp", kind="race", threads=32,
        story="Lanes exchange words without bar.warp.sync; that they ran together was luck.",
        text=START + "st.shared.b32 [%r3], %r1; <> xor.b32 %r4, %r1, 1;"
        "mad.lo.u32 %r4, %r4, 4, %r2; ld.shared.b32 %r5, [%r4];",
        mended="bar.warp.sync 0xffffffff;"),
    Bug(name="two lanes, one place", kind="race", threads=32,
        story="Lanes store different values to one word in one instruction.",
        text=START + "shr.u32 %r4, %r1, <>; mad.lo.u32 %r4, %r4, 4, %r2;"
        "st.shared.b32 [%r4], %r1;", broken="1", mended="0"),
    Bug(name="shared memory that nobody filled", kind="uninitialised",
        story="The loop that fills a tile ends one word early.",
        text=START + "setp.lt.u32 %p2, %r1, <>; @%p2 st.shared.b32 [%r3], %r1; bar.sync 0;"
        "ld.shared.b32 %r5, [%r3];", broken="63", mended="64"),
    _error(name="beyond shared memory", kind="out-of-bounds",
           story="An index passes the end of dynamic shared memory.",
           text=START + "st.shared.b32 [%r3+<>], %r1;", broken="3844", mended="3840"),
    _error(name="a vector at an odd word", kind="misaligned",
           story="A vector of two words is loaded from an address that is no multiple of eight.",
           text=START + "st.shared.b32 [%r3], %r1; bar.sync 0;"
           "ld.shared.v2.b32 {%r4, %r5}, [%r2+<>];",
           broken="4", mended="8"),
]  # fmt: skip

THREADS = [
    _error(name="a barrier that a warp does not reach", kind="deadlock",
           story="A warp leaves a barrier out that counts it.",
           text=START + "setp.lt.u32 %p2, %r1, <>; @!%p2 bra over; bar.sync 1, 64; over:",
           broken="32", mended="64"),
    _error(name="two counts for one barrier", kind="barrier",
           story="Two warps name different thread counts at the same barrier.",
           text=START + "setp.lt.u32 %p2, %r1, 32; @%p2 bar.sync 1, 64; @!%p2 bar.sync 1, <>;",
           broken="96", mended="64"),
    _error(name="a barrier that does not exist", kind="barrier",
           story="There are 16 barriers.",
           text=START + "mov.u32 %r4, <>; bar.sync %r4, 64;", broken="16", mended="15"),
    _error(name="a product by a part of the warp", kind="divergence", threads=32,
           story="mma.sync stands in a branch that some lanes do not take.",
           text=START + "setp.lt.u32 %p2, %r1, <>; mov.b32 %r4, 0;"
           "@%p2 mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r5, %r6}, {%r4, %r4}, {%r4},"
           "{%r4, %r4};",
           broken="16", mended="32"),
    _error(name="setmaxnreg upwards that gives back", kind="registers", threads=128,
           story="setmaxnreg.inc with fewer registers than the warp has.",
           text=START + "setmaxnreg.dec.sync.aligned.u32 64; setmaxnreg.inc.sync.aligned.u32 <>;",
           broken="40", mended="80"),
    _error(name="division by zero", kind="division",
           story="An integer is divided by a count that may be zero.",
           text=START + "add.u32 %r4, %r1, <>; div.u32 %r5, 100, %r4;", broken="0", mended="1"),
    _error(name="an index beyond a jump table", kind="branch",
           story="brx.idx has an index that its list does not have.",
           text="T: .branchtargets A, B;" + START + "mov.u32 %r4, <>; brx.idx %r4, T; A: B:",
           broken="2", mended="1"),
    _error(name="a loop without an end", kind="step-limit", max_steps=2000,
           story="The loop's counter passes the value that it is compared with.",
           text=START + "mov.u32 %r4, 0; L: add.u32 %r4, %r4, 2; setp.ne.u32 %p2, %r4, <>;"
           "@%p2 bra L;", broken="7", mended="8"),
    _error(name="an assertion", kind="trap", story="The kernel's own check fails.",
           text=START + "setp.gt.u32 %p2, %r1, <>; @%p2 trap;", broken="62", mended="63"),
]  # fmt: skip

GLOBAL = [
    _error(name="a forgotten mask", kind="out-of-bounds", threads=128, grid=3,
           story="The last block is not whole, and loads behind the array.",
           text=START + "mov.u32 %r4, %ctaid.x; mad.lo.u32 %r4, %r4, 128, %r1;"
           "setp.lt.u32 %p2, %r4, <>; mad.wide.u32 %rd3, %r4, 4, %rd1;"
           "@%p2 ld.global.b32 %r5, [%rd3];", broken="384", mended="256"),
    Bug(name="a sum without an atomic", kind="race", grid=2, threads=32,
        story="CTAs add to one word by load, add and store.",
        text=ELECT + "<>",
        broken="@%p1 ld.global.b32 %r4, [%rd1]; add.u32 %r4, %r4, 1;"
        "@%p1 st.global.b32 [%rd1], %r4;",
        mended="@%p1 red.global.add.u32 [%rd1], 1;"),
    Bug(name="a flag without release", kind="race", grid=2, threads=32,
        story="The flag that hands data to another CTA is stored relaxed.",
        text=ELECT + "mov.u32 %r4, %ctaid.x; setp.ne.u32 %p3, %r4, 0; @!%p1 ret; @%p3 bra take;"
        "st.global.b32 [%rd2], 5; <> [%rd1], 1; ret;"
        "take: ld.acquire.gpu.global.b32 %r5, [%rd1]; setp.eq.u32 %p2, %r5, 0; @%p2 bra take;"
        "ld.global.b32 %r6, [%rd2];",
        broken="st.relaxed.gpu.global.b32", mended="st.release.gpu.global.b32"),
    Bug(name="a flag without acquire", kind="race", grid=2, threads=32,
        story="The flag is polled relaxed; what it announces may not be visible yet.",
        text=ELECT + "mov.u32 %r4, %ctaid.x; setp.ne.u32 %p3, %r4, 0; @!%p1 ret; @%p3 bra take;"
        "st.global.b32 [%rd2], 5; st.release.gpu.global.b32 [%rd1], 1; ret;"
        "take: <> %r5, [%rd1]; setp.eq.u32 %p2, %r5, 0; @%p2 bra take;"
        "ld.global.b32 %r6, [%rd2];",
        broken="ld.relaxed.gpu.global.b32", mended="ld.acquire.gpu.global.b32"),
    Bug(name="a buffer that nobody wrote", kind="uninitialised", fresh=True,
        story="torch.empty, and a kernel that adds to it.",
        text=START + "mad.wide.u32 %rd3, %r1, 4, %rd1; <> ld.global.b32 %r4, [%rd3];",
        mended="st.global.b32 [%rd3], 0;"),
    Bug(name="a counter that nobody zeroed", kind="uninitialised", fresh=True, threads=32,
        story="An atomic counts from whatever was there.",
        text=ELECT + "<> @%p1 atom.global.add.u32 %r4, [%rd1], 1;",
        mended="@%p1 st.global.b32 [%rd1], 0;"),
    Bug(name="in place, shifted", kind="race",
        story="Each thread overwrites what its neighbour reads.",
        text=START + "mad.wide.u32 %rd3, %r1, 4, %rd1; ld.global.b32 %r4, [%rd3+4];"
        "<> st.global.b32 [%rd3], %r4;", mended="bar.sync 0;"),
    _error(name="a poll for what nobody writes", kind="livelock", threads=32,
           story="A flag is awaited that no CTA sets.",
           text=START + "<> poll: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0;"
           "@%p2 bra poll;", mended="st.release.gpu.global.b32 [%rd1], 1;"),
]  # fmt: skip

MBARRIERS = [
    Bug(name="an mbarrier that nobody made", kind="mbarrier", threads=32,
        story="An arrival at memory that holds no mbarrier.",
        text=ELECT + "<> bar.sync 0; @%p1 mbarrier.arrive.shared.b64 _, [%r2];",
        mended="@%p1 mbarrier.init.shared.b64 [%r2], 1;"),
    Bug(name="an mbarrier that others do not see yet", kind="mbarrier",
        story="Threads use an mbarrier without a barrier behind its initialisation.",
        text=ELECT + "@%p1 mbarrier.init.shared.b64 [%r2], 64; <>"
        "mbarrier.arrive.shared.b64 _, [%r2];", mended="bar.sync 0;"),
    _error(name="one arrival too few", kind="deadlock",
           story="The mbarrier counts a thread that never arrives.",
           text=ELECT + "@%p1 mbarrier.init.shared.b64 [%r2], <>; bar.sync 0;"
           "mbarrier.arrive.shared.b64 _, [%r2];" + WAIT, broken="65", mended="64"),
    Bug(name="one arrival too many", kind="mbarrier", threads=32,
        story="More threads arrive than a phase has room for; the next phase gets the rest.",
        text=ELECT + "@%p1 mbarrier.init.shared.b64 [%r2], <>; bar.sync 0;"
        "mbarrier.arrive.shared.b64 _, [%r2];", broken="31", mended="32"),
    Bug(name="the other parity", kind="race",
        story="A wait for the phase before the one that is meant ends at once.",
        text=ELECT + FILL + "again: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], <>;"
        "@!%p2 bra again; ld.shared.b32 %r4, [%r3+256];", broken="1", mended="0"),
    _error(name="bytes that nobody brings", kind="deadlock",
           story="expect_tx promises more than the copies bring.",
           text=ELECT + FILL.replace("_, [%r2], 256", "_, [%r2], <>") + WAIT,
           broken="272", mended="256"),
    Bug(name="a wait that nothing keeps in step", kind="mbarrier", threads=96,
        story="Of two warps that wait for room, one may be late and miss the phase.",
        text=IN_STEP, broken="", mended="bar.sync 1, 64;"),
    Bug(name="made anew in use", kind="mbarrier",
        story="An mbarrier is initialised again while a copy is to signal it.",
        text=ELECT + FILL + "<>" + WAIT, broken="@%p1 mbarrier.init.shared.b64 [%r2], 1;"),
]  # fmt: skip

DRAIN = (START + "setp.eq.u32 %p1, %r1, 0; st.shared.b32 [%r3+256], %r1; {fence} bar.sync 0;"
         "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2+256], 256;"
         "@%p1 cp.async.bulk.commit_group; {wait}")  # fmt: skip
FENCE, DRAINED = "fence.proxy.async.shared::cta;", "@%p1 cp.async.bulk.wait_group.read 0;"
COPIES = [
    Bug(name="a copy that nobody waits for", kind="race",
        story="Shared memory is read while TMA fills it.",
        text=ELECT + FILL + "<> ld.shared.b32 %r4, [%r3+256];" + WAIT.replace("again", "behind"),
        mended=WAIT),
    _error(name="exit under a copy", kind="exit",
           story="The CTA exits while TMA fills its shared memory.",
           text=ELECT + FILL + "<>", mended=WAIT),
    _error(name="a copy beyond the tensor", kind="out-of-bounds",
           story="A bulk copy passes the end of the array.",
           text=ELECT + FILL.replace("[%rd1], 256", "[%rd3], 256").replace(
               "bar.sync 0;", "bar.sync 0; add.u64 %rd3, %rd1, <>;") + WAIT,
           broken="784", mended="768"),
    _error(name="a copy to an odd address", kind="misaligned",
           story="Bulk copies need multiples of 16 bytes.",
           text=ELECT + FILL.replace("[%r2+256]", "[%r2+<>]") + WAIT, broken="264", mended="272"),
    Bug(name="an mbarrier without its fence", kind="missing-proxy-fence", severity="formal",
        story="Nothing makes the mbarrier's initialisation visible to the copy that signals it.",
        text=ELECT + FILL.replace("@%p1 fence.mbarrier_init.release.cluster;", "<>") + WAIT,
        mended="@%p1 fence.mbarrier_init.release.cluster;"),
    Bug(name="a store through TMA without a fence", kind="missing-proxy-fence",
        story="TMA reads what threads stored, without fence.proxy.async.",
        text=DRAIN.format(fence="<>", wait=DRAINED), mended=FENCE),
    Bug(name="reuse under a store through TMA", kind="race",
        story="Shared memory is overwritten before TMA has read it.",
        text=DRAIN.format(fence=FENCE, wait="<> bar.sync 0; st.shared.b32 [%r3+256], 3;" + DRAINED),
        mended=DRAINED),
    _error(name="exit under a store through TMA", kind="exit",
           story="The CTA may be gone before TMA has read its shared memory.",
           text=DRAIN.format(fence=FENCE, wait="<>"), mended=DRAINED),
    Bug(name="the result of a store through TMA", kind="race",
        story=".read waits for the reads of shared memory only; the target is not written yet.",
        text=DRAIN.format(fence=FENCE, wait="@%p1 <> 0; @%p1 ld.global.b32 %r5, [%rd2];"),
        broken="cp.async.bulk.wait_group.read", mended="cp.async.bulk.wait_group"),
    Bug(name="one group too few", kind="race", threads=32,
        story="cp.async.wait_group 1 leaves the group under way that is used.",
        text=START + "mad.wide.u32 %rd3, %r1, 4, %rd1; cp.async.ca.shared.global [%r3], [%rd3], 4;"
        "cp.async.commit_group; cp.async.wait_group <>; ld.shared.b32 %r4, [%r3];",
        broken="1", mended="0"),
]  # fmt: skip

PEER = (
    "mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r3, %r5;\n"
)
CLUSTERS = [
    Bug(name="a neighbour that has not written yet", kind="race", grid=2, cluster=2,
        story="Shared memory of another CTA is read without a cluster barrier.",
        text=START + PEER + "st.shared.b32 [%r3], 0; " + CLUSTER_SYNC + "st.shared.b32 [%r3], %r1;"
        "<> ld.shared::cluster.b32 %r7, [%r6];" + CLUSTER_SYNC, mended=CLUSTER_SYNC),
    Bug(name="a relaxed cluster barrier hands data over", kind="race", grid=2, cluster=2,
        story="barrier.cluster.arrive.relaxed orders execution, not memory.",
        text=START + PEER + "st.shared.b32 [%r3], %r1; <> ld.shared::cluster.b32 %r7, [%r6];"
        + CLUSTER_SYNC, broken=RELAXED_SYNC, mended=CLUSTER_SYNC),
    _error(name="a neighbour that has left", kind="exit", grid=2, cluster=2,
           story="Nothing keeps a CTA until another has read its shared memory.",
           text=START + PEER + "st.shared.b32 [%r3], %r1;" + CLUSTER_SYNC
           + "ld.shared::cluster.b32 %r7, [%r6]; <>", mended=RELAXED_SYNC),
    _error(name="a CTA that does not exist", kind="out-of-bounds", grid=2, cluster=2,
           story="mapa names a rank beyond the cluster.",
           text=START + "st.shared.b32 [%r3], 0;" + CLUSTER_SYNC
           + "mapa.shared::cluster.u32 %r6, %r3, <>; ld.shared::cluster.b32 %r7, [%r6];"
           + CLUSTER_SYNC, broken="2", mended="1"),
    _error(name="a cluster barrier without arrival", kind="barrier", grid=2, cluster=2,
           story="barrier.cluster.wait by threads that have not arrived.",
           text="<> barrier.cluster.wait;", mended="barrier.cluster.arrive;"),
]  # fmt: skip

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], {columns};"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;"
WITH_TMEM = (START + ALLOC.format(columns=32) + "tcgen05.relinquish_alloc_permit.cta_group::1.sync."
             "aligned; bar.warp.sync -1; ld.shared.b32 %r9, [%r2]; {body}")  # fmt: skip
STORE_TMEM = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r1}; "
LOAD_TMEM = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r9]; "
TENSOR = [
    _error(name="tensor memory that nobody frees", kind="tmem", threads=32,
           story="A CTA exits with columns; the next one waits for them for ever.",
           text=WITH_TMEM.format(body="<>"), mended=FREE),
    _error(name="an odd number of columns", kind="tmem", threads=32,
           story="Allocations are powers of two from 32 to 512.",
           text=START + ALLOC.format(columns="<>") + "bar.warp.sync -1; ld.shared.b32 %r9, [%r2];"
           + FREE, broken="48", mended="32"),
    _error(name="beyond its columns", kind="tmem", threads=32,
           story="A load behind what was allocated.",
           text=WITH_TMEM.format(body=STORE_TMEM + "tcgen05.wait::st.sync.aligned;"
           "add.u32 %r9, %r9, <>;" + LOAD_TMEM + "tcgen05.wait::ld.sync.aligned;"
           "sub.u32 %r9, %r9, <>;" + FREE), broken="32", mended="0"),
    Bug(name="tensor memory that nobody filled", kind="uninitialised", threads=32,
        story="An accumulator is read that no product has written.",
        text=WITH_TMEM.format(body="<>" + LOAD_TMEM + "tcgen05.wait::ld.sync.aligned;" + FREE),
        mended=STORE_TMEM + "tcgen05.wait::st.sync.aligned;"),
    Bug(name="tensor memory without its wait", kind="race", threads=32,
        story="tcgen05.st is under way until tcgen05.wait::st.",
        text=WITH_TMEM.format(body=STORE_TMEM + "<>" + LOAD_TMEM + "tcgen05.wait::ld.sync.aligned;"
        "tcgen05.wait::st.sync.aligned;" + FREE), mended="tcgen05.wait::st.sync.aligned;"),
]  # fmt: skip

# Zeros for A (64 x 16) and B (8 x 16), both bf16 without a swizzle, and their descriptors.
PRODUCT = (
    START
    + """mad.lo.u32 %r4, %r1, 16, %r2; mov.u32 %r5, 0;
st.shared.v4.b32 [%r4], {%r5, %r5, %r5, %r5}; st.shared.v4.b32 [%r4+2048], {%r5, %r5, %r5, %r5};
<fence> bar.sync 0; shr.u32 %r6, %r2, 4; cvt.u64.u32 %rd10, %r6; or.b64 %rd10, %rd10, 0x1000080000;
add.u64 %rd11, %rd10, 128; setp.eq.u32 %p5, %r1, -1; mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1;
mov.f32 %f3, %f1; mov.f32 %f4, %f1; <order>
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
  {%f1, %f2, %f3, %f4}, %rd10, %rd11, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; <wait>
add.f32 %f5, %f1, %f2; wgmma.wait_group.sync.aligned 0;
"""
)


def _product(hole: str) -> str:
    parts = {"fence": "fence.proxy.async.shared::cta;", "order": "wgmma.fence.sync.aligned;",
             "wait": "wgmma.wait_group.sync.aligned 0;"}  # fmt: skip
    text = PRODUCT
    for name, part in parts.items():
        text = text.replace(f"<{name}>", "<>" if name == hole else part)
    return text


HOPPER = [
    Bug(name="wgmma without its fence", kind="missing-fence", threads=128,
        story="Registers that threads wrote are read by wgmma without wgmma.fence.",
        text=_product("order"), mended="wgmma.fence.sync.aligned;"),
    Bug(name="an accumulator under way", kind="missing-wait", threads=128,
        story="The accumulator is used before wgmma.wait_group.",
        text=_product("wait"), mended="wgmma.wait_group.sync.aligned 0;"),
    Bug(name="operands without a proxy fence", kind="missing-proxy-fence", threads=128,
        story="wgmma reads what threads stored, without fence.proxy.async.",
        text=_product("fence"), mended="fence.proxy.async.shared::cta;"),
    _error(name="wgmma by half a warpgroup", kind="warpgroup", threads=128,
           story="Two of the four warps have left.",
           text=START + "setp.ge.u32 %p6, %r1, <>; @%p6 ret;"
           + _product("order").replace("<>", "wgmma.fence.sync.aligned;"),
           broken="64", mended="128"),
]  # fmt: skip

GROUPS = {
    "Shared memory": SHARED,
    "Threads and control": THREADS,
    "Global memory": GLOBAL,
    "mbarriers": MBARRIERS,
    "Copies": COPIES,
    "Clusters": CLUSTERS,
    "Tensor memory (Blackwell)": TENSOR,
    "wgmma (Hopper)": HOPPER,
}
BUGS = [bug for group in GROUPS.values() for bug in group]
