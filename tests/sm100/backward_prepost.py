"""The compiled kernels around the backward kernel, their calls in one buffer, and what they give.

A call's tensors are parts of a buffer that is NaN, and -1 as integers, wherever nothing is put: the
rows of no sequence, what lies between rows and tensors, and the workspace. `errors` compares the
whole buffer after a launch, so that nothing else may have been written. The tests run the kernels
in the emulator, lab/hardware/backward_hopper on a Hopper GPU.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from cutlass import Float32, Int32, cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4.dtypes import numpy_dtype
from fa4.kit.descriptors import ELEMENTS
from fa4.kit.units import TILE_ROWS, padded_dim
from fa4.sm100.backward.postprocess import postprocess
from fa4.sm100.backward.preprocess import preprocess
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import DQ_WARPS, dq_offset, first_tile, tiles_of

Array = np.ndarray[Any, np.dtype[Any]]

FUNCTIONS = {"preprocess": preprocess, "postprocess": postprocess}
PARAMETERS = {
    "preprocess": ("out", "dout", "lse", "dlse", "residual", "dq_accum", "stats", "sink_parts",
                   "turns", "drawn", "sink", "cu_seqlens_q", "seqused_q"),
    "postprocess": ("dq_accum", "dq", "dsink", "sink_parts", "softmax_scale", "cu_seqlens_q",
                    "seqused_q"),
}  # fmt: skip
DOUT_LAYOUTS = ("rows", "heads first", "one for all heads", "one for all")
LSE_LAYOUTS = ("heads first", "rows first")
SCALE = 0.0883
ROUND = 2.0**-24  # of one float32 operation, relative
EXP2 = 2.0**-22  # of ex2.approx, relative (PTX ISA 9.7.3.20)
LOG2_E = np.log2(np.e)


def compile_small(name: str, spec: BackwardSpec, arch: str = "sm_100a") -> Any:
    """`cute.compile` of "preprocess" or "postprocess"; sizes and strides are run-time values."""
    given = fake_arguments(spec)
    arguments = [given[parameter] for parameter in PARAMETERS[name]]
    with tempfile.TemporaryDirectory() as folder:
        options = (
            cute.EnableTVMFFI(True),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GPUArch(arch),
            DumpDir(folder),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile[options](FUNCTIONS[name], *arguments, stream, spec)


def fake_arguments(spec: BackwardSpec) -> dict[str, Any]:
    """Stand-ins with symbolic sizes for the arguments of both kernels."""
    batch, batches, rows, heads, tiles = (cute.sym_int() for _ in range(5))

    def tensor(element: Any, *shape: Any, step: int = 1, last: Any = 1, align: int = 4) -> Any:
        strides = (*(cute.sym_int64(divisibility=step) for _ in shape[:-1]), last)
        return make_fake_tensor(element, shape, stride=strides, assumed_align=align)

    def operand(dim: int) -> Any:
        shape = (rows, heads, dim) if spec.packed_q else (batch, rows, heads, dim)
        return tensor(ELEMENTS[spec.dtype], *shape, step=8, align=16)

    def of_rows() -> Any:
        shape = (heads, rows) if spec.packed_q else (batch, heads, rows)
        return tensor(Float32, *shape, last=cute.sym_int64())

    size = TILE_ROWS * padded_dim(spec.head_dim)
    return {
        "out": operand(spec.head_dim_v),
        "dout": operand(spec.head_dim_v),
        "lse": of_rows(),
        "dlse": of_rows() if spec.lse_gradient else None,
        "residual": operand(spec.head_dim_v) if spec.out_residual else None,
        "dq_accum": tensor(Float32, heads, tiles, size, step=4, align=16),
        "stats": tensor(Float32, heads, tiles, 2, TILE_ROWS),
        "sink_parts": tensor(Float32, heads, tiles) if spec.sink else None,
        "turns": tensor(Int32, heads, tiles, DQ_WARPS) if spec.deterministic else None,
        "drawn": tensor(Int32, 1, 1),
        "sink": tensor(Float32, heads) if spec.sink else None,
        "dq": operand(spec.head_dim),
        "dsink": tensor(Float32, heads) if spec.sink else None,
        "softmax_scale": Float32(0.0),
        "cu_seqlens_q": tensor(Int32, batches) if spec.packed_q else None,
        "seqused_q": tensor(Int32, cute.sym_int()) if spec.used_q else None,
    }


@dataclass(frozen=True)
class Sizes:
    """What may vary without compiling again.

    lengths: rows of each sequence. slack: unused rows behind each, where lengths are given. tail:
    rows behind all sequences of a packed tensor. blind: share of the rows that see no key. gaps:
    something lies between the rows of each tensor.
    """

    lengths: tuple[int, ...]
    heads: int = 2
    slack: int = 0
    tail: int = 0
    dout: str = "rows"
    lse: str = "heads first"
    dlse: str = "heads first"
    blind: float = 0.1
    gaps: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the buffer; strides in bytes."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Bytes from the first element to the end of the last."""
        steps = zip(self.shape, self.strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + np.dtype(self.dtype).itemsize

    def view(self, buffer: Array) -> Array:
        """The tensor in a buffer."""
        return np.ndarray(self.shape, self.dtype, buffer, self.start, self.strides)  # type: ignore[call-overload]


class Call:
    """One call's tensors, by name, and its sequences."""

    def __init__(self, spec: BackwardSpec, sizes: Sizes) -> None:
        self.spec, self.sizes = spec, sizes
        slack = sizes.slack if spec.used_q else 0
        given = [n + slack for n in sizes.lengths]
        self.starts = np.concatenate([[0], np.cumsum(given)]).astype(np.int32)
        self.seqlen = max(*given, 1)
        self.blocks = -(-self.seqlen // TILE_ROWS)
        self.places: dict[str, Place] = {}
        self.bytes_used = 0
        self._lay_out()

    def _lay_out(self) -> None:
        spec, sizes, heads = self.spec, self.sizes, self.sizes.heads
        element = numpy_dtype(spec.dtype)
        rows = max(int(self.starts[-1]) + sizes.tail, 1) if spec.packed_q else self.seqlen
        outer = (rows,) if spec.packed_q else (len(sizes.lengths), rows)
        tiles = tiles_of(rows, len(sizes.lengths), packed=spec.packed_q)
        for name, dim in (("out", spec.head_dim_v), ("residual", spec.head_dim_v),
                          ("dq", spec.head_dim)):  # fmt: skip
            self._put(name, (*outer, heads, dim), element)
        self._put("dout", (*outer, heads, spec.head_dim_v), element, sizes.dout)
        for name, layout in (("lse", sizes.lse), ("dlse", sizes.dlse)):
            shape = (*outer[:-1], heads, rows)
            self._put(name, shape, np.float32, "rows" if layout == "heads first" else layout)
        size = TILE_ROWS * padded_dim(spec.head_dim)
        self._put("dq_accum", (heads, tiles, size), np.float32)
        self._put("stats", (heads, tiles, 2, TILE_ROWS), np.float32)
        self._put("sink_parts", (heads, tiles), np.float32)
        self._put("turns", (heads, tiles, DQ_WARPS), np.int32)
        self._put("drawn", (1, 1), np.int32)
        self._put("sink", (heads,), np.float32)
        self._put("dsink", (heads,), np.float32)
        self._put("cu_seqlens_q", (len(self.starts),), np.int32)
        self._put("seqused_q", (len(sizes.lengths),), np.int32)

    def _put(self, name: str, shape: tuple[int, ...], dtype: Any, layout: str = "rows") -> None:
        """The next tensor, with room for one more index between those of each dimension.

        layout: "heads first" and "rows first" exchange two dimensions in memory; "one for all
        heads" and "one for all" repeat what is there once.
        """
        item_bytes = np.dtype(dtype).itemsize
        order = list(range(len(shape)))
        if layout == "heads first":
            order[-3], order[-2] = order[-2], order[-3]
        elif layout == "rows first":
            order[-2], order[-1] = order[-1], order[-2]
        strides, step = [0] * len(shape), item_bytes
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
            if self.sizes.gaps and len(shape) > 1:
                step = (step + (16 if axis == order[-1] else strides[axis]) + 15) // 16 * 16
        if layout == "one for all heads":
            strides[-2] = 0
        elif layout == "one for all":
            strides = [0] * (len(shape) - 1) + [item_bytes if len(shape) > 2 else 0]
        self.places[name] = place = Place(self.bytes_used, shape, tuple(strides), dtype)
        self.bytes_used = (self.bytes_used + place.size + 16 + 255) // 256 * 256

    def view(self, buffer: Array, name: str) -> Array:
        """A tensor of the call in a buffer."""
        return self.places[name].view(buffer)

    def bytes_of(self, buffer: Array, name: str) -> Array:
        """All bytes between a tensor's first and last element."""
        place = self.places[name]
        return buffer[place.start : place.start + place.size]

    def buffer(self, name: str) -> Array:
        """The call's memory before a kernel runs; the second one finds results in the workspace."""
        buffer = room(self.bytes_used)
        buffer[:] = 0xFF
        rng = np.random.default_rng(self.sizes.seed)
        self.view(buffer, "cu_seqlens_q")[:] = self.starts
        self.view(buffer, "seqused_q")[:] = self.sizes.lengths
        self.view(buffer, "sink")[:] = rng.standard_normal(self.sizes.heads)
        names = ("out", "dout", "lse", "dlse")
        out, dout, lse, dlse = (self.view(buffer, name) for name in names)
        for batch, length in enumerate(self.sizes.lengths):
            for head in range(self.sizes.heads):
                for tensor in (out, dout):
                    rows = self.rows(tensor, head, batch, 0, length)
                    rows[:] = rng.standard_normal(rows.shape)
                rows = self.rows(self.view(buffer, "residual"), head, batch, 0, length)
                rows[:] = 2.0**-9 * rng.standard_normal(rows.shape)
                self.rows_of_lse(dlse, head, batch, 0, length)[:] = rng.standard_normal(length)
                values = 5 * rng.standard_normal(length)
                values[rng.random(length) < self.sizes.blind] = -np.inf
                self.rows_of_lse(lse, head, batch, 0, length)[:] = values
        for block in self.existing() if name == "postprocess" else ():
            places = dq_places(block.rows, self.spec)
            values = rng.standard_normal(places.shape)
            block.of_tile(buffer, "dq_accum")[0, places] = values
            block.of_tile(buffer, "sink_parts")[:] = rng.standard_normal()
        return buffer

    def arguments(self, name: str, buffer: Array) -> list[Any]:
        """What the compiled function is called with."""
        spec = self.spec
        numbers = {"softmax_scale": SCALE}
        absent = {
            "dlse": not spec.lse_gradient,
            "residual": not spec.out_residual,
            "sink_parts": not spec.sink,
            "turns": not spec.deterministic,
            "sink": not spec.sink,
            "dsink": not spec.sink,
            "cu_seqlens_q": not spec.packed_q,
            "seqused_q": not spec.used_q,
        }
        return [
            None if absent.get(x) else numbers[x] if x in numbers else self.view(buffer, x)
            for x in PARAMETERS[name]
        ]

    def rows(self, tensor: Array, head: int, batch: int, first: int, stop: int) -> Array:
        """(rows, dim) of a sequence, in a tensor like q."""
        start = int(self.starts[batch])
        if self.spec.packed_q:
            return tensor[start + first : start + stop, head]
        return tensor[batch, first:stop, head]

    def rows_of_lse(self, tensor: Array, head: int, batch: int, first: int, stop: int) -> Array:
        """(rows,) of a sequence, in a tensor like the LSE."""
        start = int(self.starts[batch])
        if self.spec.packed_q:
            return tensor[head, start + first : start + stop]
        return tensor[batch, head, first:stop]

    def existing(self) -> Iterator["Block"]:
        """The blocks that have rows."""
        for batch, length in enumerate(self.sizes.lengths):
            start = int(self.starts[batch])
            tile = first_tile(batch, start, self.blocks, packed=self.spec.packed_q)
            for number in range(-(-length // TILE_ROWS)):
                first = number * TILE_ROWS
                rows = min(length - first, TILE_ROWS)
                for head in range(self.sizes.heads):
                    yield Block(self, batch, head, first, rows, tile + number)


@dataclass(frozen=True)
class Block:
    """A block that has rows: `rows` from `first` of the sequence on."""

    call: Call
    batch: int
    head: int
    first: int
    rows: int
    tile: int

    def of(self, buffer: Array, name: str) -> Array:
        """(rows, dim) of a tensor like q."""
        tensor = self.call.view(buffer, name)
        return self.call.rows(tensor, self.head, self.batch, self.first, self.first + self.rows)

    def of_lse(self, buffer: Array, name: str) -> Array:
        """(rows,) of a tensor like the LSE, in float64."""
        tensor = self.call.view(buffer, name)
        rows = self.call.rows_of_lse(
            tensor, self.head, self.batch, self.first, self.first + self.rows
        )
        return rows.astype(np.float64)

    def of_tile(self, buffer: Array, name: str) -> Array:
        """What the workspace holds of the block."""
        return self.call.view(buffer, name)[self.head, self.tile : self.tile + 1]


def room(size_bytes: int) -> Array:
    """Memory at a multiple of 256 bytes, as a GPU's is."""
    base = np.empty(size_bytes + 256, np.uint8)
    start = -base.ctypes.data % 256
    return base[start : start + size_bytes]


def copy(buffer: Array) -> Array:
    """The same contents elsewhere."""
    other = room(buffer.size)
    other[:] = buffer
    return other


def dq_places(rows: int, spec: BackwardSpec) -> Array:
    """(rows, head_dim): where the elements of a dQ tile lie."""
    row, col = np.ogrid[:rows, : spec.head_dim]
    return np.asarray(dq_offset(row, col, padded_dim(spec.head_dim)))


def errors(name: str, call: Call, before: Array, after: Array) -> list[str]:
    """What a launch left that is not as defined, by tensor."""
    expected, found = before.copy(), set()
    approximate = preprocessed if name == "preprocess" else postprocessed
    for tensor, places, value, bound in approximate(call, before, expected):
        got = call.view(after, tensor)[places].astype(np.float64)
        with np.errstate(invalid="ignore"):
            right = (np.abs(got - value) <= bound) | (got == value)
        if not np.all(right):
            found.add(tensor)
        call.view(expected, tensor)[places] = call.view(after, tensor)[places]
    for tensor in call.places:
        if call.view(expected, tensor).tobytes() != call.view(after, tensor).tobytes():
            found.add(tensor)
    if not found and expected.tobytes() != after.tobytes():
        found.add("memory between tensors")
    return sorted(found)


# (tensor, index, value, bound of the error)
Expected = Iterator[tuple[str, Any, Any, Any]]


def preprocessed(call: Call, before: Array, expected: Array) -> Expected:
    """Statistics and parts of dsink; zeros are put into `expected`."""
    spec = call.spec
    call.view(expected, "drawn")[:] = 0
    for block in call.existing():
        out = block.of(before, "out").astype(float)
        if spec.out_residual:
            out = out + block.of(before, "residual").astype(float)
        products = out * block.of(before, "dout").astype(float)
        d, size = products.sum(-1), np.abs(products).sum(-1)
        if spec.lse_gradient:
            d, size = d - block.of_lse(before, "dlse"), size + np.abs(block.of_lse(before, "dlse"))
        lse = block.of_lse(before, "lse")
        base = np.where(np.isneginf(lse), 0.0, -lse * LOG2_E)
        # Eight products in a row, then at most 16 lanes as a tree; O and its residual are one sum.
        d_bound = (15 if spec.out_residual else 14) * ROUND * size
        at, rows = (block.head, block.tile), slice(block.rows)
        yield "stats", (*at, 0, rows), base, 3 * ROUND * np.abs(base)
        yield "stats", (*at, 1, rows), -d, d_bound
        yield "stats", (*at, 0, slice(block.rows, None)), -np.inf, 0.0
        yield "stats", (*at, 1, slice(block.rows, None)), 0.0, 0.0
        block.of_tile(expected, "dq_accum")[:] = 0.0
        if spec.deterministic:
            block.of_tile(expected, "turns")[:] = 0
        if spec.sink:
            exponent = float(call.view(before, "sink")[block.head]) - lse
            share = np.where(np.isneginf(lse), 1.0, np.exp(np.minimum(exponent, 700.0)))
            exponent = np.where(np.isneginf(lse), 0.0, np.abs(exponent))
            relative = 3 * ROUND * exponent + EXP2 + 10 * ROUND
            bound = (share * (relative * np.abs(d) + d_bound)).sum()
            yield "sink_parts", at, -(share * d).sum(), bound


def postprocessed(call: Call, before: Array, expected: Array) -> Expected:
    """dsink; dQ, which has one right answer, is put into `expected`."""
    parts: list[list[float]] = [[] for _ in range(call.sizes.heads)]
    for block in call.existing():
        tile = block.of_tile(before, "dq_accum")[0]
        target = block.of(expected, "dq")
        target[:] = (tile[dq_places(block.rows, call.spec)] * np.float32(SCALE)).astype(
            target.dtype
        )
        parts[block.head].append(float(block.of_tile(before, "sink_parts")[0]))
    if call.spec.sink:
        for head, values in enumerate(parts):
            bound = (len(values) // TILE_ROWS + 10) * ROUND * np.abs(values).sum()
            yield "dsink", head, np.sum(values), bound
