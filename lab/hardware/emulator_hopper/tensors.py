"""Tensor copies: every rank, type and swizzle, boxes that cross the tensor's edges; mma.sync."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fa4.emulator.tma.descriptor import ELEMENT_BYTES, TensorMap
from fa4.emulator.tma.reduction import SUPPORTED
from lab.hardware.emulator_hopper.accesses import noise
from lab.hardware.emulator_hopper.barriers import wait
from lab.hardware.emulator_hopper.clusters import COMPLETE
from lab.hardware.emulator_hopper.programs import (
    Array,
    Closeness,
    Program,
    Result,
    TensorMapAt,
    bits_of,
    module_text,
)
from lab.hardware.emulator_hopper.tensor_maps import replacements
from lab.hardware.emulator_hopper.values import FORMATS, below, floats, integers

REGION_BYTES = 8192  # of shared memory that a copy may touch
TENSOR_BYTES = 16384
IN_A_PROGRAM = 8
LOADS, STORES = 192, 64

START = """
  mov.u32 %r19, 0;
  mov.u32 %r3, %tid.x;
  mov.u32 %r20, smem;
  add.u32 %r21, %r20, 1024;
  setp.eq.u32 %p1, %r3, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
  mul.wide.u32 %rd10, %r3, 16;
  mad.lo.u32 %r22, %r3, 16, %r21;
"""
CHUNKS = range(0, REGION_BYTES, 2048)  # 128 threads move 16 bytes each


@dataclass(frozen=True)
class Case:
    """A map whose address is left 0, and the coordinates of a copy."""

    map: TensorMap
    at: tuple[int, ...]

    @property
    def form(self) -> str:
        """For the table of results."""
        m = self.map
        return f"{m.rank}d {m.element} swizzle {m.swizzle} box {m.box} of {m.dims} at {self.at}"


class Draw:
    """Small random numbers, the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._numbers: Iterator[int] = iter(below(4096, 1 << 30, seed).tolist())

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + next(self._numbers) % (high - low + 1)


def draw_case(seed: int, store: bool, element: str = "", rank: int = 0) -> Case:
    """A small map and a box near it; loads may start at negative coordinates."""
    draw = Draw(seed)
    elements = sorted(ELEMENT_BYTES)
    element = element or elements[draw.between(0, len(elements) - 1)]
    size, rank = ELEMENT_BYTES[element], rank or draw.between(1, 5)
    swizzle = (0, 32, 64, 128)[draw.between(0, 3)]
    chunk = 16 // size
    box = [chunk * draw.between(1, (swizzle or 128) // 16)]
    dims = [draw.between(1, 2 * box[0] + 3)]
    rows, strides = 1, []
    extent = -(-dims[0] * size // 16) * 16
    limit = REGION_BYTES // (swizzle or 128)
    for _ in range(rank - 1):
        box.append(draw.between(1, max(1, min(9, limit // rows))))
        rows *= box[-1]
        most = TENSOR_BYTES // (2 * (extent + 32))
        dims.append(draw.between(1, max(1, min(5, most))))
        strides.append(extent + 16 * draw.between(0, 2))
        extent = strides[-1] * dims[-1]
    steps = [1] + [(1, 1, 1, 2, 3, 8)[draw.between(0, 5)] for _ in box[1:]]
    nan = element[0] in "fbt" and not store and draw.between(0, 1) == 1
    tensor_map = TensorMap(
        0, element, tuple(dims), tuple(strides), tuple(box), tuple(steps), swizzle,
        fill_nan=nan, hints=0,
    )  # fmt: skip
    inside = draw.between(0, 2) == 0
    at = [0] * rank if inside else [
        draw.between(0 if store else -b - 1, d + 1) for b, d in zip(box, dims, strict=True)
    ]  # fmt: skip
    at[0] = at[0] // chunk * chunk
    return Case(tensor_map, tuple(at))


def tensors() -> list[Program]:
    """Loads, stores, reductions, and copies to several CTAs."""
    loads = [draw_case(2000 + k, store=False) for k in range(LOADS)]
    stores = [draw_case(4000 + k, store=True) for k in range(STORES)]
    stores = [case for case in stores if not case.map.element.startswith("tf32")]
    reductions = [
        (operation, draw_case(6000 + 20 * k + j, True, element, 1 + (k + j) % 5))
        for k, operation in enumerate(SUPPORTED)
        for j, element in enumerate(sorted(SUPPORTED[operation] - {"b32", "b64"}))
    ]
    step = IN_A_PROGRAM
    programs = [_loads(k // step, loads[k : k + step]) for k in range(0, len(loads), step)]
    programs += [
        _drains(f"stores-{k // step}", [("", case) for case in stores[k : k + step]], 30 * k)
        for k in range(0, len(stores), step)
    ]
    programs += [
        _drains(f"reductions-{k // step}", reductions[k : k + step], 7000 + 30 * k)
        for k in range(0, len(reductions), step)
    ]
    return [*programs, _multicast(), replacements(), *_products()]


def _coordinates(case: Case) -> str:
    return "{" + ", ".join(str(c) for c in case.at) + "}"


def _program(
    name: str,
    body: str,
    arrays: tuple[Array, ...],
    results: list[Result],
    maps: list[TensorMapAt],
) -> Program:
    return Program(
        f"tensors-{name}", "tensors", module_text(body, len(arrays), len(maps)), arrays,
        tuple(results), (1, 1, 1), (128, 1, 1), smem_bytes=1024 + REGION_BYTES, maps=tuple(maps),
    )  # fmt: skip


def _tensor_offset(case: int) -> int:
    return TENSOR_BYTES * case + 16 * case


def _loads(number: int, cases: list[Case]) -> Program:
    """Each box into shared memory full of noise, all of which is the result."""
    body, maps, results = START, [], []
    for k, case in enumerate(cases):
        for at in CHUNKS:
            body += f"""
  add.u64 %rd11, %rd2, %rd10;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd11+{at}];
  st.shared.v4.b32 [%r22+{at}], {{%r10, %r11, %r12, %r13}};
"""
        body += f"""
  fence.proxy.async.shared::cta;
  bar.sync 0;
  mov.u64 %rd20, map{k};
  cvta.param.u64 %rd20, %rd20;
  @!%p1 bra ISSUED{k};
  prefetch.tensormap [%rd20];
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {case.map.box_bytes};
  cp.async.bulk.tensor.{case.map.rank}d.shared::cluster.global.tile.{COMPLETE}
    [%r21], [%rd20, {_coordinates(case)}], [%r20];
ISSUED{k}:
{wait("%r20", str(k % 2), f"WAIT{k}")}
  add.u64 %rd12, %rd3, %rd10;
"""
        for at in CHUNKS:
            place = REGION_BYTES * k + at
            body += f"  ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r22+{at}];\n"
            body += f"  st.global.v4.b32 [%rd12+{place}], {{%r10, %r11, %r12, %r13}};\n"
        body += "  bar.sync 0;\n"
        maps.append(TensorMapAt(case.map.encode(), 0, _tensor_offset(k)))
        form = f"cp.async.bulk.tensor.{case.form}"
        results.append(Result(form, 2, REGION_BYTES // 4 * k, REGION_BYTES // 4))
    tensor = noise(_tensor_offset(len(cases)), 1000 + number).view(np.uint32)
    out = np.zeros(REGION_BYTES // 4 * len(cases), np.uint32)
    arrays = (tensor, noise(REGION_BYTES, 999).view(np.uint32), out)
    return _program(f"loads-{number}", body, arrays, results, maps)


def _typed(element: str, size_bytes: int, seed: int) -> Array:
    """Bytes of values of a type: those that reductions must round, saturate or compare."""
    name = {"f32_ftz": "f32", "tf32": "f32", "tf32_ftz": "f32"}.get(element, element)
    width = bits_of(name)
    count = 8 * size_bytes // width
    source = floats(FORMATS[name], 2, seed, count)[seed % 2] if name in FORMATS else None
    return (integers(width, seed, count) if source is None else source).view(np.uint8)


def _drains(name: str, cases: list[tuple[str, Case]], seed: int) -> Program:
    """Boxes of shared memory into tensors; the result is all of the memory around each tensor."""
    body, maps, results = START, [], []
    places, sources = [], []
    for k, (operation, case) in enumerate(cases):
        at_tensor = seed + 2 * k + k % 2
        places.append(_typed(case.map.element, TENSOR_BYTES, at_tensor))
        places.append(noise(16, seed + k))
        sources.append(_typed(case.map.element, REGION_BYTES, at_tensor ^ 1))
        body += f"  add.u64 %rd11, %rd2, %rd10;\n  bar.sync 0;\n  mov.u64 %rd20, map{k};\n"
        body += "  cvta.param.u64 %rd20, %rd20;\n"
        for at in CHUNKS:
            place = REGION_BYTES * k + at
            body += f"  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd11+{place}];\n"
            body += f"  st.shared.v4.b32 [%r22+{at}], {{%r10, %r11, %r12, %r13}};\n"
        opcode = f"cp.async.bulk.tensor.{case.map.rank}d.global.shared::cta.tile.bulk_group"
        if operation:
            opcode = f"cp.reduce.async.bulk.tensor.{case.map.rank}d.global.shared::cta.{operation}"
            opcode += ".tile.bulk_group"
        body += f"""
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @!%p1 bra ISSUED{k};
  {opcode} [%rd20, {_coordinates(case)}], [%r21];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
ISSUED{k}:
"""
        maps.append(TensorMapAt(case.map.encode(), 0, _tensor_offset(k)))
        form = f"{opcode.partition('.tensor')[0]}.tensor.{operation} {case.form}"
        start = _tensor_offset(k) // 4
        results.append(Result(form, 0, start, TENSOR_BYTES // 4 + 4))
    tensor = np.concatenate(places).view(np.uint32)
    arrays = (tensor, np.concatenate(sources).view(np.uint32))
    return _program(name, body, arrays, results, maps)


def _multicast() -> Program:
    """Each CTA of a cluster loads a part of the box of all of them."""
    m = TensorMap(0, "bf16", (64, 64), (128,), (64, 4), (1, 1), 128, hints=0)
    body = (
        START
        + f"""
  mov.u32 %r5, %cluster_ctarank;
  mov.u32 %r1, %ctaid.x;
  mov.u64 %rd20, map0;
  cvta.param.u64 %rd20, %rd20;
  mov.b32 %r10, -1;
  st.shared.v4.b32 [%r22], {{%r10, %r10, %r10, %r10}};
  fence.proxy.async;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 1024;
  barrier.cluster.arrive;
  barrier.cluster.wait;
  mad.lo.u32 %r6, %r5, 512, %r21;
  and.b32 %r7, %r1, 2;
  mad.lo.u32 %r7, %r7, 9, %r5;
  shl.b32 %r7, %r7, 2;
  mov.b32 %r8, 32;
  sub.s32 %r8, %r8, 32;
  mov.b16 %h1, 3;
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.{COMPLETE}.multicast::cluster
    [%r6], [%rd20, {{%r8, %r7}}], [%r20], %h1;
{wait("%r20", "0", "WAIT")}
  ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r22];
  mul.wide.u32 %rd11, %r1, 2048;
  add.u64 %rd11, %rd11, %rd10;
  add.u64 %rd11, %rd2, %rd11;
  st.global.v4.b32 [%rd11], {{%r10, %r11, %r12, %r13}};
  barrier.cluster.arrive;
  barrier.cluster.wait;
"""
    )
    arrays = (noise(64 * 128, 998).view(np.uint32), np.zeros(4 * 512, np.uint32))
    result = Result("cp.async.bulk.tensor.2d.multicast::cluster", 1, 0, 4 * 512)
    return Program(
        "tensors-multicast", "tensors", module_text(body, 2, 1), arrays, (result,), (4, 1, 1),
        (128, 1, 1), (2, 1, 1), 1024 + REGION_BYTES, (TensorMapAt(m.encode(), 0),),
    )  # fmt: skip


def _products() -> list[Program]:
    """mma.sync on small integers, whose sums are exact whatever the order, and on any fractions,
    for which the emulator's sum, rounded once, is a model."""
    forms = [("f32", "f16", 8), ("f32", "f16", 16), ("f32", "bf16", 8), ("f32", "bf16", 16)]
    exact = [_product(*form, exact=True) for form in (*forms, ("f16", "f16", 16))]
    return exact + [_product(*form, exact=False) for form in forms]


def _product(sums: str, kind: str, depth: int, exact: bool) -> Program:
    wide = 4 if sums == "f32" else 2
    form = f"mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{kind}.{kind}.{sums}"
    counts = ((40, wide), (10, depth // 4), (20, depth // 8), (30, wide))
    lists = [[f"%r{start + k}" for k in range(n)] for start, n in counts]
    d, a, b, c = ("{" + ", ".join(names) + "}" for names in lists)
    body = "  mov.u32 %r3, %tid.x;\n  mul.wide.u32 %rd10, %r3, 4;\n"
    for pointer, names in ((1, lists[1]), (2, lists[2]), (3, lists[3])):
        body += f"  add.u64 %rd11, %rd{pointer}, %rd10;\n"
        for k, name in enumerate(names):
            body += f"  ld.global.b32 {name}, [%rd11+{1024 * k}];\n"
    body += f"  {form} {d}, {a}, {b}, {c};\n  add.u64 %rd11, %rd4, %rd10;\n"
    for k, name in enumerate(lists[0]):
        body += f"  st.global.b32 [%rd11+{1024 * k}], {name};\n"
    numbers = _small if exact else _fractions
    addends = numbers(sums, 4096 // (2 if sums == "f16" else 4), 993)
    arrays = (
        numbers(kind, 2048, 990),
        numbers(kind, 2048, 991),
        addends,
        np.zeros(1024, np.uint32),
    )
    result = Result(form, 3, 0, 256 * wide)
    if not exact:
        result = Result(f"{form}, fractions", 3, 0, 256 * wide, "f32", Closeness(2, 2.0**-18))
    return Program(
        f"tensors-{form.replace('.', '-')}{'' if exact else '-fractions'}",
        "tensors",
        module_text(body, 4),
        tuple(array.view(np.uint32) for array in arrays),
        (result,),
        block=(256, 1, 1),
    )


def _small(kind: str, count: int, seed: int) -> Array:
    """Integers from -8 to 8 in a floating-point type."""
    values = (below(count, 17, seed) - 8).astype(np.float32)
    if kind == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype({"f16": np.float16, "f32": np.float32}[kind])


def _fractions(kind: str, count: int, seed: int) -> Array:
    """Any numbers between -2 and 2."""
    values = (below(count, 1 << 22, seed) / float(1 << 20) - 2.0).astype(np.float32)
    if kind == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype({"f16": np.float16, "f32": np.float32}[kind])
