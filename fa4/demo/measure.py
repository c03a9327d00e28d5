"""One layer through FA4 mode in bf16, laid beside the oracle on the same rounded inputs.

How large an error may be is for `fa4.testing.budget` to say, the same budget as everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fa4.backends.request import Request, make_request
from fa4.call.checked import make_call
from fa4.demo.inputs import Layer
from fa4.dtypes import round_to
from fa4.reference import Counters, attention_forward
from fa4.testing.budget import Check, Expected, check_output, expect_forward
from fa4.testing.inputs import dense_inputs

DTYPE = "bf16"

# The oracle and the budget hold about 15 float64 arrays of this many scores at once: 2 GiB.
MOST_SCORES = 2**24


@dataclass(frozen=True)
class LayerResult:
    """The checks of O and LSE of a layer, and what FA4 mode did to compute them.

    plain_errors: largest errors of O and LSE in plain bf16 attention, the yardstick of the budget.
    """

    name: str
    heads: int
    head_dim: int
    checks: dict[str, Check]
    plain_errors: dict[str, float]
    counters: Counters

    @property
    def within(self) -> bool:
        """Are both outputs within their budgets?"""
        return all(check.share <= 1.0 for check in self.checks.values())

    def as_dict(self) -> dict[str, Any]:
        """For the report; skipped_share is None where there was nothing to rescale."""
        done, skipped = self.counters.rescales_done, self.counters.rescales_skipped
        return {
            "name": self.name,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "within_budget": self.within,
            "out": self._describe("out"),
            "lse": self._describe("lse"),
            "rescales_done": done,
            "rescales_skipped": skipped,
            "skipped_share": skipped / (done + skipped) if done + skipped else None,
            "emulated_share": self.counters.emulated_share,
            "counters": self.counters.as_dict(),
        }

    def _describe(self, output: str) -> dict[str, Any]:
        """Error, budget and their ratio at the element that used most of its budget."""
        check = self.checks[output]
        return {
            "error": math.inf if math.isnan(check.error) else check.error,
            "budget": check.allowed,
            "share_of_budget": check.share,
            "plain_max_error": self.plain_errors[output],
            "within_budget": check.share <= 1.0,
        }


class Part(NamedTuple):
    """One query head of one sequence: q, k, v (1, S, 1, D), and where its out and lse lie."""

    tensors: tuple[np.ndarray, np.ndarray, np.ndarray]
    out_index: tuple[Any, ...]
    lse_index: tuple[Any, ...]


def prepare(layer: Layer, causal: bool) -> Request:
    """Round a layer to bf16 and check it as `flash_attn_func` would.

    Raises ValueError naming the layer if shapes do not fit, values exceed bf16's range, or a
    sequence is too long for the oracle.
    """
    place = f"{layer.place}: {layer.name}"
    tensors = []
    for name, array in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        rounded = round_to(array, DTYPE)
        if not np.isfinite(rounded.astype(np.float32)).all():
            largest = np.abs(array).max()
            raise ValueError(f"{place}: {name} must fit in {DTYPE}; got {largest}")
        tensors.append(rounded)
    q, k, v = tensors
    options: dict[str, Any] = {"causal": causal}
    if layer.cu_seqlens is not None:
        options |= {"cu_seqlens_q": layer.cu_seqlens, "cu_seqlens_k": layer.cu_seqlens}
    try:
        call = make_call(q, k, v, options, varlen=layer.cu_seqlens is not None)
        request = make_request(call)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    for part in split_heads(request):
        rows, keys = (x.shape[1] for x in part.tensors[:2])
        if rows * keys > MOST_SCORES:
            raise ValueError(
                f"{place}: rows x keys of a sequence must be at most {MOST_SCORES} for the "
                f"float64 oracle; got {rows} x {keys}"
            )
    return request


def split_heads(request: Request) -> Iterator[Part]:
    """Every query head of every sequence, with the KV head it reads."""
    offsets = request.packing.cu_seqlens_q
    heads_q = request.q.shape[-2]
    group = heads_q // request.k.shape[-2]
    if offsets is None:
        rows: list[Any] = list(range(len(request.q)))
    else:
        rows = [slice(a, b) for a, b in pairwise(offsets.tolist())]
    for span in rows:
        for head in range(heads_q):
            kv_head = head // group
            q = request.q[span][:, head, None]
            k, v = (x[span][:, kv_head, None] for x in (request.k, request.v))
            # out is (B, S, H, D) or (total, H, D), lse (B, H, S) or (H, total).
            lse_index = (span, head) if offsets is None else (head, span)
            out_index = (span, slice(None), head) if offsets is None else (span, head)
            yield Part((q[None], k[None], v[None]), out_index, lse_index)


def measure(layer: Layer, request: Request, causal: bool) -> LayerResult:
    """Run FA4 mode on a prepared layer and measure O and LSE against their budgets."""
    result = attention_forward(
        request.q,
        request.k,
        request.v,
        request.spec,
        packing=request.packing,
        config=request.forward_config,
    )
    values: dict[str, list[np.ndarray]] = {"out": [], "lse": []}
    expected: dict[str, list[Expected]] = {"out": [], "lse": []}
    for part in split_heads(request):
        # Heads one by one: the oracle's score matrices stay small.
        for name, wanted in expect_forward(dense_inputs(*part.tensors, causal=causal)).items():
            expected[name].append(wanted)
        values["out"].append(result.out[part.out_index][:, None])
        values["lse"].append(result.lse[part.lse_index][None])
    whole = {name: join(parts) for name, parts in expected.items()}
    heads, head_dim = request.q.shape[-2:]
    return LayerResult(
        name=layer.name,
        heads=heads,
        head_dim=head_dim,
        checks={name: check_output(name, values[name], whole[name]) for name in whole},
        plain_errors={name: wanted.plain_error for name, wanted in whole.items()},
        counters=result.counters,
    )


def join(parts: list[Expected]) -> Expected:
    """One output of a whole layer: the sequences of all of its heads."""

    def all_of(name: str) -> list[np.ndarray]:
        return [array for part in parts for array in getattr(part, name)]

    plain_error = max(part.plain_error for part in parts)
    return Expected(
        all_of("oracle"), all_of("allowed"), all_of("exact"), all_of("plain"), plain_error
    )
