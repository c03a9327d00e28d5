"""Tensor maps that a kernel changes before it copies with them (PTX ISA 9.7.9.26)."""

from __future__ import annotations

import numpy as np

from fa4.emulator.tma.descriptor import TensorMap
from lab.hardware.emulator_hopper.accesses import noise
from lab.hardware.emulator_hopper.barriers import wait
from lab.hardware.emulator_hopper.clusters import COMPLETE
from lab.hardware.emulator_hopper.programs import Program, Result, TensorMapAt, module_text

BEFORE = TensorMap(0, "u16", (40, 9), (96,), (16, 3), (1, 1), 32, hints=0)
# field, ordinal or None, type, value as a program gives it
CHANGES = (
    ("elemtype", None, "b32", 7),  # f32
    ("box_dim", 0, "b32", 32),
    ("box_dim", 1, "b32", 7),
    ("global_dim", 0, "b32", 29),
    ("global_dim", 1, "b32", 6),
    ("global_stride", 0, "b64", 144),
    ("element_stride", 1, "b32", 2),
    ("swizzle_mode", None, "b32", 3),  # 128 bytes
    ("fill_mode", None, "b32", 1),  # NaN
    ("interleave_layout", None, "b32", 0),
    ("rank", None, "b32", 1),  # of 2 dimensions
)
CONSTANT = ("elemtype", "swizzle_mode", "fill_mode", "interleave_layout")
BOX_BYTES = 4 * 128


START = """
  mov.u32 %r19, 0;
  mov.u32 %r3, %tid.x;
  mov.u32 %r20, smem;
  setp.eq.u32 %p1, %r3, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
  mov.u64 %rd20, map0;
  cvta.param.u64 %rd20, %rd20;
  mul.wide.u32 %rd10, %r3, 4;
  add.u64 %rd21, %rd20, %rd10;
  ld.b32 %r10, [%rd21];
  mad.lo.u32 %r21, %r3, 4, %r20;
  st.shared.b32 [%r21+512], %r10;
  add.u64 %rd12, %rd3, %rd10;
  bar.warp.sync -1;
  add.u32 %r22, %r20, 512;
  cvt.u64.u32 %rd22, %r22;
"""
PUBLISH = """
  add.u64 %rd24, %rd1, 64;
  @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%rd22], %rd24;
  bar.warp.sync -1;
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
    [%rd2], [%rd22], 128;
  fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
  mov.b32 %r12, 0x1234567;
"""
COPY = f"""
  fence.proxy.async.shared::cta;
  bar.warp.sync -1;
  add.u32 %r23, %r20, 1024;
  mov.b32 %r13, -4;
  mov.b32 %r14, 1;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {BOX_BYTES};
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.{COMPLETE}
    [%r23], [%rd2, {{%r13, %r14}}], [%r20];
{wait("%r20", "0", "WAIT")}
"""


def _change(number: int) -> str:
    """Replaces one field, and stores the map without its address, word 0."""
    field, ordinal, kind, value = CHANGES[number]
    register, text = "%rd24" if kind == "b64" else "%r11", ""
    if field in CONSTANT:
        register = str(value)
    else:
        text = f"  mov.{kind} {register}, {value};\n"
    place = f"{ordinal}, " if ordinal is not None else ""
    text += f"  @%p1 tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [%rd22], "
    text += f"{place}{register};\n  bar.warp.sync -1;\n  ld.shared.b32 %r10, [%r21+512];\n"
    text += "  setp.lt.u32 %p2, %r3, 2;\n  @%p2 mov.b32 %r10, 0;\n"
    return text + f"  st.global.b32 [%rd12+{128 * number}], %r10;\n  bar.warp.sync -1;\n"


def replacements() -> Program:
    """A map in shared memory, changed field by field; its words after each change, and the box."""
    body = START + "".join(_change(number) for number in range(len(CHANGES))) + PUBLISH
    for k in range(1024 // 128):
        body += f"  st.shared.b32 [%r21+{1024 + 128 * k}], %r12;\n"
    body += COPY
    for k in range(1024 // 128):
        body += f"  ld.shared.b32 %r10, [%r21+{1024 + 128 * k}];\n"
        body += f"  st.global.b32 [%rd12+{128 * (len(CHANGES) + k)}], %r10;\n"
    results = [
        Result(f"tensormap.replace.tile.{field}", 2, 32 * k, 32)
        for k, (field, *_) in enumerate(CHANGES)
    ]
    results.append(Result("tensormap.cp_fenceproxy", 2, 32 * len(CHANGES), 256))
    out = np.zeros(32 * len(CHANGES) + 256, np.uint32)
    arrays = (noise(2048, 997).view(np.uint32), np.zeros(32, np.uint32), out)
    return Program(
        "tensors-maps", "tensors", module_text(body, 3, 1), arrays, tuple(results), (1, 1, 1),
        (32, 1, 1), smem_bytes=2048, maps=(TensorMapAt(BEFORE.encode(), 0),),
    )  # fmt: skip
