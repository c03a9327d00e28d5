"""Work tiles, masks, exponentials and rounding of the forward kernel, against definitions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.config import Exp2Split, ForwardConfig
from fa4.emulator import launch
from fa4.sm100.forward.spec import ForwardSpec
from tests.sm100.neutral import COLUMNS, ROWS, TILE_FIELDS, compile_neutral
from tests.sm100.neutral_expected import row_errors, sizes_array, tile_errors

TILE_SPECS = (
    ForwardSpec(head_dim=128, head_dim_v=128),
    ForwardSpec(head_dim=128, head_dim_v=128, causal=True, scheduler="lpt"),
    ForwardSpec(
        head_dim=64, head_dim_v=64, window_left=True, window_right=True, group=4, scheduler="lpt"
    ),
)
ROW_SPECS = (
    ForwardSpec(head_dim=128, head_dim_v=128, numerics=ForwardConfig.tuned("bf16", 128, False)),
    ForwardSpec(
        head_dim=64,
        head_dim_v=64,
        dtype="fp16",
        numerics=ForwardConfig(rescale_threshold_log2=0.0, exp2=Exp2Split(frequency=8, degree=4)),
    ),
)


@cache
def compiled(name: str, number: int) -> tuple[ForwardSpec, Any]:
    spec = (TILE_SPECS if name == "tiles" else ROW_SPECS)[number]
    return spec, compile_neutral(name, spec, "sm_100a")


@pytest.mark.parametrize("number", range(len(TILE_SPECS)))
@settings(max_examples=12)
@given(data=st.data())
def test_work_tiles_against_visible_keys(number: int, data: st.DataObject) -> None:
    spec, kernel = compiled("tiles", number)
    left, right = data.draw(st.integers(-40, 300)), data.draw(st.integers(-40, 300))
    sizes = {
        "seqlen_q": data.draw(st.integers(1, 900)),
        "seqlen_k": data.draw(st.sampled_from([1, 127, 128, 129, 700, 300_000])),
        "heads": data.draw(st.integers(1, 5)),
        "group": 1,
        "batch": data.draw(st.integers(1, 3)),
        "left": left,
        "right": max(right, -left),
    }
    out = np.full((ROWS, len(TILE_FIELDS)), -1, np.int32)
    launch(kernel, sizes_array(sizes), out)
    assert tile_errors(spec, sizes, out) == []


def rows_case(rng: np.random.Generator, spread: float, scale: float) -> dict[str, Any]:
    s = (rng.standard_normal((ROWS, COLUMNS)) * spread).astype(np.float32)
    bounds = rng.integers(-300, 400, (ROWS, 2)).astype(np.int32)
    bounds[:16] = [[0, 128]] * 16
    reference = np.where(
        rng.random(ROWS) < 0.3, -3.0e38 / max(scale, 1.0), rng.standard_normal(ROWS)
    )
    return {"s": s, "bounds": bounds, "scale": scale, "reference": reference.astype(np.float32)}


def run_rows(kernel: Any, given_: dict[str, Any]) -> dict[str, Any]:
    stats = np.zeros((ROWS, 4), np.float32)
    stats[:, 0] = given_["reference"]
    p = np.zeros((ROWS, COLUMNS), np.float32)
    words = np.zeros((ROWS, COLUMNS // 2), np.uint32)
    scale = np.array([given_["scale"]], np.float32)
    launch(kernel, given_["s"], given_["bounds"], scale, p, words, stats)
    return {"p": p, "words": words, "stats": stats}


@pytest.mark.parametrize("number", range(len(ROW_SPECS)))
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.01, 1.0, 30.0, 1e4]),
    scale=st.sampled_from([0.01, 0.1275, 1.0, 3.0]),
)
def test_rows_against_definitions(number: int, seed: int, spread: float, scale: float) -> None:
    spec, kernel = compiled("rows", number)
    case = rows_case(np.random.default_rng(seed), spread, scale)
    assert row_errors(spec, case, run_rows(kernel, case)) == []


def test_a_wrong_row_is_seen() -> None:
    spec, kernel = compiled("rows", 0)
    case = rows_case(np.random.default_rng(0), 1.0, 0.1275)
    got = run_rows(kernel, case)
    emulated = spec.numerics.exp2.emulated_columns(COLUMNS).index(True)
    got["p"].view(np.uint32)[0, emulated] ^= 1
    assert "emulated exponentials, which must agree bit for bit" in row_errors(spec, case, got)
    got = run_rows(kernel, case)
    got["stats"][:, 1] += 1
    assert "reference maximum" in row_errors(spec, case, got)


def test_a_wrong_tile_is_seen() -> None:
    spec, kernel = compiled("tiles", 1)
    sizes = {"seqlen_q": 600, "seqlen_k": 700, "heads": 2, "group": 1, "batch": 2,
             "left": 0, "right": 0}  # fmt: skip
    out = np.zeros((ROWS, len(TILE_FIELDS)), np.int32)
    launch(kernel, sizes_array(sizes), out)
    assert tile_errors(spec, sizes, out) == []
    for field in ("block", "kv_stop", "whole_stop"):
        wrong = out.copy()
        wrong[0, TILE_FIELDS.index(field)] += -1 if field == "kv_stop" else 1
        assert tile_errors(spec, sizes, wrong)
