"""Barriers of a CTA, mbarriers, fences, and instructions that change no value."""

from __future__ import annotations

import numpy as np

from lab.hardware.emulator_hopper.programs import Program, Result, Triple, module_text
from lab.hardware.emulator_hopper.values import below, integers

TURNS = 1 << 22  # spins after which a program gives up, rather than hang the GPU

# %r3: thread, %r20: shared memory, %rd10: this thread's word of array 1.
START = """
  mov.u32 %r3, %tid.x;
  mov.u32 %r20, smem;
  mov.u32 %r19, 0;
  mul.wide.u32 %rd10, %r3, 4;
  add.u64 %rd10, %rd1, %rd10;
  mad.lo.u32 %r21, %r3, 4, %r20;
"""


def wait(barrier: str, parity: str, label: str) -> str:
    """Spins until a phase of an mbarrier is over; adds 1 to %r19 if it never is."""
    return f"""
  mov.u32 %r18, 0;
{label}:
  mbarrier.try_wait.parity.shared::cta.b64 %p31, [{barrier}], {parity};
  add.u32 %r18, %r18, 1;
  setp.gt.u32 %p30, %r18, {TURNS};
  @%p30 add.u32 %r19, %r19, 1;
  @%p30 bra {label}_DONE;
  @!%p31 bra {label};
{label}_DONE:
"""


def barriers() -> list[Program]:
    """Programs of this family."""
    return [_exchanges(), _reductions(), _pairs(), *_sequences(), _hints(), _registers()]


def _program(name: str, body: str, words: int, block: Triple, labels: list[str]) -> Program:
    """One row of `words` results for each label, in array 0."""
    results = tuple(Result(label, 0, words * k, words) for k, label in enumerate(labels))
    out = np.full(words * len(labels), 0xDEAD, np.uint32)
    text = module_text(body, 1)
    return Program(
        f"barriers-{name}", "barriers", text, (out,), results, (1, 1, 1), block, smem_bytes=4096
    )


def _exchanges() -> Program:
    """Each thread writes, meets the others, and reads what thread xor 32 wrote."""
    synchronise = (
        "bar.sync 0;", "bar.sync 3, 64;", "barrier.sync 1;", "barrier.cta.sync.aligned 15, 64;",
        "bar.cta.sync 2;", "bar.red.popc.u32 %r9, 0, %p0;", "membar.cta;\n  bar.sync 0;",
        "barrier.cluster.arrive;\n  barrier.cluster.wait;",
        "barrier.cluster.arrive.release.aligned;\n  barrier.cluster.wait.acquire.aligned;",
        "fence.acq_rel.cta;\n  bar.sync 0;",
        "fence.release.cluster;\n  barrier.cluster.arrive.relaxed;\n"
        "  barrier.cluster.wait;\n  fence.acquire.cluster;",
    )  # fmt: skip
    body = START + "  setp.eq.u32 %p0, %r3, 5;\n"
    for k, text in enumerate(synchronise):
        body += f"""
  add.u32 %r4, %r3, {100 * k};
  st.shared.b32 [%r21+{256 * (k % 2)}], %r4;
  {text}
  xor.b32 %r5, %r21, 128;
  ld.shared.b32 %r6, [%r5+{256 * (k % 2)}];
  st.global.b32 [%rd10+{256 * k}], %r6;
"""
    labels = [text.partition(";")[0] for text in synchronise]
    return _program("exchanges", body, 64, (64, 1, 1), labels)


def _reductions() -> Program:
    """bar.red over 96 threads."""
    body = START
    labels: list[str] = []
    for name in ("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red"):
        aligned = ".aligned" if name == "barrier.cta.red" else ""
        for limit in (0, 1, 40, 96):
            body += f"  setp.lt.u32 %p1, %r3, {limit};\n"
            body += f"  {name}.popc{aligned}.u32 %r5, 0, %p1;\n"
            body += f"  {name}.and{aligned}.pred %p2, 1, %p1;\n"
            body += f"  {name}.or{aligned}.pred %p3, 2, 96, !%p1;\n"
            body += "  selp.u32 %r6, 1000, 0, %p2;\n  selp.u32 %r7, 2000, 0, %p3;\n"
            body += "  add.u32 %r5, %r5, %r6;\n  add.u32 %r5, %r5, %r7;\n"
            body += f"  st.global.b32 [%rd10+{384 * len(labels)}], %r5;\n"
            labels.append(f"{name}{aligned} {limit}")
    return _program("reductions", body, 96, (96, 1, 1), labels)


def _pairs() -> Program:
    """A producer warp arrives, a consumer warp waits; a warp that has left is not waited for."""
    body = (
        START
        + """
  setp.ge.u32 %p1, %r3, 64;
  @%p1 ret;
  setp.ge.u32 %p2, %r3, 32;
  mov.u32 %r10, 0;
  mov.u32 %r11, 0;
LOOP:
  @%p2 bra CONSUME;
  mad.lo.u32 %r12, %r10, 77, %r3;
  st.shared.b32 [%r21], %r12;
  bar.arrive 1, 64;
  bar.sync 2, 64;
  bra NEXT;
CONSUME:
  barrier.cta.sync 1, 64;
  ld.shared.b32 %r13, [%r21+-128];
  mad.lo.u32 %r11, %r11, 3, %r13;
  barrier.arrive 2, 64;
NEXT:
  add.u32 %r10, %r10, 1;
  setp.lt.u32 %p3, %r10, 9;
  @%p3 bra LOOP;
  bar.sync 0;
  st.global.b32 [%rd10], %r11;
"""
    )
    return _program("pairs", body, 64, (96, 1, 1), ["bar.arrive"])


def _sequences() -> list[Program]:
    """Random operations on an mbarrier, and after each what the waits answer."""
    return [_sequence(k) for k in range(12)]


OPERATIONS = (
    "mbarrier.arrive.shared::cta.b64 %rd20, [%r21];",
    "mbarrier.arrive.release.cta.shared::cta.b64 %rd20, [%r21], {count};",
    "mbarrier.arrive.expect_tx.shared::cta.b64 %rd20, [%r21], {bytes};",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r21], {bytes};",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r21], {bytes};",
    "mbarrier.arrive_drop.shared::cta.b64 %rd20, [%r21];",
    "mbarrier.arrive.noComplete.shared::cta.b64 %rd20, [%r21], {count};",
    "mbarrier.arrive_drop.release.cta.shared::cta.b64 %rd20, [%r21], {count};",
    "mbarrier.arrive_drop.expect_tx.relaxed.cta.shared::cta.b64 %rd20, [%r21], {bytes};",
    "mbarrier.arrive.release.cluster.shared::cta.b64 %rd20, [%r21];",
)
STEPS = 40


def _sequence(seed: int) -> Program:
    """One thread. The operations keep to what the manual allows: no more arrivals than pending,
    no negative count of bytes at the end of a phase."""
    count = (1, 2, 3, 5, 7, 20, 1000, (1 << 20) - 1, 4, 9, 12, 30)[seed]
    body = START + f"  mbarrier.init.shared::cta.b64 [%r21], {count};\n  mov.u64 %rd20, 0;\n"
    pending, missing = count, 0
    labels: list[str] = []
    has_state = False
    draws = iter(below(100 * STEPS, 1 << 16, 900 + seed).tolist())
    while len(labels) < STEPS:
        operation = next(draws) % len(OPERATIONS)
        if not pending and operation not in (3, 4):
            continue
        amount = 1 + next(draws) % max(pending, 1)
        size = 16 * (next(draws) % 64)
        if operation == 4:
            if not missing:
                continue
            size = missing if next(draws) % 2 else 16 * (next(draws) % (missing // 16 + 1))
        if operation == 6 and amount >= pending:
            continue
        dropped = {5: 1, 7: amount, 8: 1}.get(operation, 0)
        if dropped >= count:
            continue
        missing += size * (operation in (2, 3, 8)) - size * (operation == 4)
        pending -= {0: 1, 1: amount, 2: 1, 5: 1, 6: amount, 7: amount, 8: 1, 9: 1}.get(operation, 0)
        count -= dropped
        has_state = has_state or operation not in (3, 4)
        body += f"  {OPERATIONS[operation].format(count=amount, bytes=size)}\n"
        body += "  mov.u32 %r10, 0;\n"
        if not pending and not missing:
            pending = count
        questions = [f"test_wait.parity.shared::cta.b64 %p1, [%r21], {p}" for p in (0, 1)]
        if has_state:
            questions.append("test_wait.shared::cta.b64 %p1, [%r21], %rd20")
        for k, question in enumerate(questions):
            body += f"  mbarrier.{question};\n  @%p1 or.b32 %r10, %r10, {1 << k};\n"
        body += f"  st.global.b32 [%rd10+{4 * len(labels)}], %r10;\n"
        labels.append(OPERATIONS[operation].partition(" ")[0])
    body += "  mbarrier.inval.shared::cta.b64 [%r21];\n"
    return _program(f"mbarrier-{seed}", body, 1, (1, 1, 1), labels)


def _hints() -> Program:
    """Prefetches, policies, fences, sleeps: they change no value."""
    body = """
  mov.u32 %r3, %tid.x;
  mul.wide.u32 %rd10, %r3, 16;
  add.u64 %rd11, %rd1, %rd10;
  add.u64 %rd12, %rd2, %rd10;
  griddepcontrol.wait;
  prefetch.global.L1 [%rd11];
  prefetch.global.L2 [%rd11];
  prefetch.global.L2::evict_last [%rd11];
  prefetchu.L1 [%rd11];
  createpolicy.fractional.L2::evict_last.b64 %rd20, 1.0;
  createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %rd21, 0.5;
  ld.global.L2::cache_hint.v4.b32 {%r10, %r11, %r12, %r13}, [%rd11], %rd20;
  and.b64 %rd22, %rd11, -128;
  applypriority.global.L2::evict_normal [%rd22], 128;
  cp.async.bulk.prefetch.L2.global [%rd1], 1024;
  fence.sc.gpu;
  fence.acq_rel.sys;
  fence.acquire.cluster;
  fence.release.gpu;
  fence.acquire.sync_restrict::shared::cluster.cluster;
  fence.release.sync_restrict::shared::cta.cluster;
  fence.proxy.async;
  fence.proxy.async.global;
  fence.proxy.async.shared::cta;
  fence.proxy.alias;
  fence.mbarrier_init.release.cluster;
  fence.proxy.tensormap::generic.release.gpu;
  membar.gl;
  membar.sys;
  nanosleep.u32 50;
  pmevent 3;
  griddepcontrol.launch_dependents;
  add.u32 %r10, %r10, 1;
  st.global.L2::cache_hint.v4.b32 [%rd12], {%r10, %r11, %r12, %r13}, %rd21;
"""
    arrays = (integers(32, 950, 512), np.zeros(512, np.uint32))
    return Program(
        "barriers-hints", "barriers", module_text(body, 2), arrays, (Result("hints", 1, 0, 512),),
        (1, 1, 1), (128, 1, 1),
    )  # fmt: skip


def _registers() -> Program:
    """setmaxnreg in a warp-specialised kernel: one half of the warps gets what the other gave."""
    body = (
        START
        + """
  setp.lt.u32 %p1, %r3, 128;
  @%p1 bra LOW;
  setmaxnreg.inc.sync.aligned.u32 136;
  mad.lo.u32 %r4, %r3, 3, 1;
  bra END;
LOW:
  setmaxnreg.dec.sync.aligned.u32 56;
  mad.lo.u32 %r4, %r3, 5, 2;
END:
  st.global.b32 [%rd10], %r4;
"""
    )
    program = _program("setmaxnreg", body, 256, (256, 1, 1), ["setmaxnreg"])
    header = ".maxntid 256, 1, 1\n.maxnreg 96\n{\n  .reg .pred"
    text = program.text.replace("{\n  .reg .pred", header)
    return Program(
        program.name, program.family, text, program.arrays, program.results, block=program.block
    )
