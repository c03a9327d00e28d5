"""After a forward kernel that divides the keys: its parts of O and LSE become one.

With LSE_s of part s, m their maximum (and a sink's logit), each row is sum_s exp(LSE_s - m) O_s
divided by l = sum_s exp(LSE_s - m), and its LSE is m + ln l. Parts are added in their order, so
that a division of the keys has the same bits each time.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.rowmath import LOG2_E, store_rounded
from fa4.kit.tiles import sequence
from fa4.kit.units import WARP

ROWS = 4  # of a CTA: a warp for each
VECTOR = 4  # float32 of a 16-byte load
AT_ONCE = 8  # parts of a row that are under way
LN_2 = 1 / LOG2_E


@dataclass(frozen=True)
class CombinedRow:
    """A warp's row: its head, its place in the tensors, and which parts it has."""

    spec: cutlass.Constexpr
    head: Int32
    batch: Int32
    row: Int32
    splits: Int32

    def of(self, tensor: cute.Tensor, parts: bool = False) -> cute.Tensor:
        """Its elements of O, (dv,), or of all parts of O, (splits, dv)."""
        place: tuple[Any, ...] = (self.row, self.head, None)
        if not self.spec.packed_q:
            place = (self.batch, *place)
        return tensor[(None, *place) if parts else place]


@cute.jit
def combine(o_parts: Any, lse_parts: Any, o: Any, lse: Any, sink: Any, seqlen_q: Any,
            cu_seqlens_q: Any, seqused_q: Any, stream: Any,
            spec: cutlass.Constexpr) -> None:  # fmt: skip
    """Launch on parts (splits, *shape of O) and (splits, *shape of LSE), both float32.

    o, lse: as the forward kernel's; lse and sink may be None. seqlen_q: of the longest sequence.
    """
    batch, heads = o.shape[0], o.shape[-2]
    if cutlass.const_expr(spec.packed_q):
        batch = cu_seqlens_q.shape[0] - 1
    count = batch * seqlen_q * heads
    kernel(
        o_parts, lse_parts, o, lse, sink, (heads, seqlen_q, count), cu_seqlens_q, seqused_q, spec
    ).launch(
        grid=((count + ROWS - 1) // ROWS, 1, 1),
        block=(ROWS * WARP, 1, 1),
        use_pdl=True,  # it begins while the CTAs before it run, and waits for the last one
        stream=stream,
    )


@cute.kernel
def kernel(o_parts: Any, lse_parts: Any, o: Any, lse: Any, sink: Any, sizes: Any,
           cu_seqlens_q: Any, seqused_q: Any, spec: cutlass.Constexpr) -> None:  # fmt: skip
    """A row for each warp; heads vary fastest, then positions."""
    heads, longest, count = sizes
    thread = cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    index = cute.arch.block_idx()[0] * ROWS + thread // WARP
    if index < count:
        head, rest = index % heads, index // heads
        position, batch = rest % longest, rest // longest
        start, length = sequence(cu_seqlens_q, seqused_q, batch, longest)
        if position < length:
            splits = o_parts.shape[0]
            row = CombinedRow(spec, head, batch, start + position, splits)
            combine_row(row, o_parts, lse_parts, o, lse, sink)


@cute.jit
def combine_row(
    row: CombinedRow, o_parts: Any, lse_parts: Any, o: Any, lse: Any, sink: Any
) -> None:
    """The parts of one row, weighted."""
    spec: cutlass.Constexpr = row.spec
    lane = cute.arch.lane_idx()
    logs = lse_of(row, lse_parts)
    highest = -Float32.inf
    for first in cutlass.range(0, row.splits, WARP, unroll=1):
        found = logs[cutlass.min(first + lane, row.splits - 1)]
        highest = cute.arch.fmax(highest, found)
    for distance in (16, 8, 4, 2, 1):
        other = cute.arch.shuffle_sync_bfly(highest, offset=distance)
        highest = cute.arch.fmax(highest, other)
    total = Float32(0.0)
    if cutlass.const_expr(sink is not None):
        highest = cute.arch.fmax(highest, sink[row.head])
    base = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
    if cutlass.const_expr(sink is not None):
        total = power(sink[row.head] - base)
    for vector in cutlass.range_constexpr(vectors_of_lane(spec)):
        place = vector * WARP + lane
        if place < spec.head_dim_v // VECTOR:
            add_parts(row, logs, o_parts, o, place, base, total)
    if cutlass.const_expr(lse is not None):  # noqa: SIM102
        if lane == 0:
            for part in cutlass.range(row.splits, unroll=AT_ONCE):
                total += power(logs[part] - base)
            value = base + cute.math.log2(total, fastmath=True) * LN_2
            store_lse(row, lse, cutlass.select_(total == 0.0, -Float32.inf, value))


@cute.jit
def add_parts(
    row: CombinedRow, logs: Any, o_parts: Any, o: Any, place: Int32, base: Float32, total: Float32
) -> None:
    """A lane's four elements of O: those of all parts, in order, over the sum of the weights."""
    held = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    sums = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    sums.fill(0.0)
    parts = row.of(o_parts, True)
    for part in cutlass.range(row.splits, unroll=AT_ONCE):
        weight = power(logs[part] - base)
        cute.autovec_copy(cute.local_tile(parts[part, None], (VECTOR,), (place,)), held)
        total += weight
        for i in cutlass.range_constexpr(VECTOR):
            sums[i] = sums[i] + weight * held[i]
    factor = 1.0 / cutlass.select_(total == 0.0, Float32(1.0), total)
    values = [sums[i] * factor for i in range(VECTOR)]
    store_rounded(values, cute.local_tile(row.of(o), (VECTOR,), (place,)), row.spec.dtype)


def vectors_of_lane(spec: Any) -> int:
    """How many vectors of a row a lane has at most."""
    return -(-spec.head_dim_v // (VECTOR * WARP))


def power(x: Float32) -> Float32:
    """e^x."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def lse_of(row: CombinedRow, lse_parts: cute.Tensor) -> cute.Tensor:
    """A row's LSE of all parts, (splits,)."""
    if row.spec.packed_q:
        return lse_parts[None, row.head, row.row]
    return lse_parts[None, row.batch, row.head, row.row]


def store_lse(row: CombinedRow, lse: cute.Tensor, value: Float32) -> None:
    """A row's LSE."""
    if row.spec.packed_q:
        lse[row.head, row.row] = value
    else:
        lse[row.batch, row.head, row.row] = value
