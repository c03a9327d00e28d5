"""Stand-ins for a call's arguments while its kernel is compiled: sizes and strides are symbols."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from fa4.kit.descriptors import ELEMENTS

AUX_ELEMENTS = {**ELEMENTS, "fp32": Float32, "int32": Int32}
ALIGN_BYTES = 16  # of rows in global memory: what TMA asks of addresses and strides


class StandIns:
    """The tensors of one call, whose sizes are the same symbols wherever they are the same.

    spec: a ForwardSpec or BackwardSpec.
    """

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        names = ("splits", "batch", "batches", "rows_q", "rows_k", "heads_q", "heads_k", "entries",
                 "parts_q", "parts_k")  # fmt: skip
        self.size = {name: cute.sym_int() for name in names}

    def of_queries(self, dim: int, dtype: str = "") -> Any:
        """A tensor with the rows and heads of q, and its type unless another is named."""
        return self._operand("q", self._spec.packed_q, dim, dtype)

    def of_keys(self, dim: int) -> Any:
        """A tensor with the rows and heads of k."""
        return self._operand("k", self._spec.packed_k, dim)

    def of_query_parts(self, dim: int) -> Any:
        """A dQ in parts, in float32; None where there are none."""
        if not getattr(self._spec, "query_parts", False):
            return None
        return self._operand("q", self._spec.packed_q, dim, "fp32", self.size["parts_q"])

    def of_key_parts(self, dim: int) -> Any:
        """The same of a gradient in parts, in float32; None where there are none."""
        if not getattr(self._spec, "key_parts", False):
            return None
        return self._operand("k", self._spec.packed_k, dim, "fp32", self.size["parts_k"])

    def _operand(
        self, side: str, packed: bool, dim: int, dtype: str = "", heads: Any = None
    ) -> Any:
        element = AUX_ELEMENTS[dtype or self._spec.dtype]
        rows = (self.size[f"rows_{side}"], heads or self.size[f"heads_{side}"], dim)
        shape = rows if packed else (self.size["batch"], *rows)
        divisor = ALIGN_BYTES * 8 // element.width
        strides = (*(cute.sym_int64(divisibility=divisor) for _ in shape[:-1]), 1)
        return make_fake_tensor(element, shape, stride=strides, assumed_align=ALIGN_BYTES)

    def of_rows(self, given: bool = True) -> Any:
        """float32, one for each row of each head, as LSE; None if not given."""
        if not given:
            return None
        size = self.size
        rows = (size["heads_q"], size["rows_q"])
        shape = rows if self._spec.packed_q else (size["batch"], *rows)
        strides = (*(cute.sym_int64() for _ in shape[:-1]), 1)
        return make_fake_tensor(Float32, shape, stride=strides, assumed_align=4)

    def parts_of_queries(self, dim: int) -> Any:
        """float32, of each part of the keys a tensor with the rows and heads of q."""
        size = self.size
        rows = (size["rows_q"], size["heads_q"], dim)
        shape = (size["splits"], *(rows if self._spec.packed_q else (size["batch"], *rows)))
        strides = (*(cute.sym_int64(divisibility=4) for _ in shape[:-1]), 1)
        return make_fake_tensor(Float32, shape, stride=strides, assumed_align=ALIGN_BYTES)

    def parts_of_rows(self) -> Any:
        """float32, of each part of the keys one for each row of each head."""
        size = self.size
        rows = (size["heads_q"], size["rows_q"])
        shape = (size["splits"], *(rows if self._spec.packed_q else (size["batch"], *rows)))
        strides = (*(cute.sym_int64() for _ in shape[:-1]), 1)
        return make_fake_tensor(Float32, shape, stride=strides, assumed_align=4)

    def counter(self) -> Any:
        """One int32."""
        return vector(Int32, 1)

    def of_heads(self, given: bool) -> Any:
        """float32, one for each query head; None if not given."""
        return vector(Float32, self.size["heads_q"]) if given else None

    def of_entries(self, given: bool) -> Any:
        """float32, one for each KV head of each batch entry; None if not given."""
        if not given:
            return None
        strides = (cute.sym_int64(), 1)
        shape = (self.size["entries"], self.size["heads_k"])
        return make_fake_tensor(Float32, shape, stride=strides, assumed_align=4)

    def lengths(self) -> dict[str, Any]:
        """cu_seqlens and seqused, None for those that the spec has not."""
        spec, batches = self._spec, self.size["batches"]
        given = {
            "cu_seqlens_q": (spec.packed_q, batches),
            "cu_seqlens_k": (spec.packed_k, batches),
            "seqused_q": (spec.used_q, cute.sym_int()),
            "seqused_k": (spec.used_k, cute.sym_int()),
        }
        return {name: vector(Int32, size) if has else None for name, (has, size) in given.items()}

    def numbers(self) -> dict[str, Any]:
        """Scale, softcap and window, None for those that the spec has not."""
        spec = self._spec
        return {
            "softmax_scale": Float32(0.0),
            "softcap": Float32(0.0) if spec.softcap else None,
            "window_left": Int32(0) if spec.window_left else None,
            "window_right": Int32(0) if spec.window_right else None,
        }

    def aux(self) -> tuple[Any, ...] | None:
        """Tensors of any strides for the callables; None if there are none."""
        return tuple(_auxiliary(*described) for described in self._spec.aux) or None


def vector(element: Any, size: Any) -> Any:
    """A contiguous one."""
    return make_fake_tensor(element, (size,), stride=(1,), assumed_align=4)


def _auxiliary(dtype: str, rank: int) -> Any:
    element = AUX_ELEMENTS[dtype]
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64() for _ in range(rank))
    return make_fake_tensor(element, shape, stride=strides, assumed_align=element.width // 8)
