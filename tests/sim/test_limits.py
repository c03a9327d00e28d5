"""What would never end, and settings that mean nothing, are refused at once and in one line."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.config import (
    BackwardConfig,
    BackwardPipeline,
    Exp2Split,
    ForwardPipeline,
    Problem,
    WarpgroupPipeline,
)
from fa4.designs.tiles import Lengths, backward_tiles, forward_tiles, warpgroup_tiles
from fa4.sim.limits import count_tiles
from fa4.sim.machine import find_machine
from fa4.sim.options import build
from fa4.sim.sweep import make_sweep


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": "1000000000"}, r"at most 4194304 work tiles; .* make 1024000000000"),
        ({"seqlen": "99999999999999999999"}, "seqlen must be a whole number .* at most 92233"),
        ({"seqlen_k": "9223372036854775807"}, "seqlen_k must be at most 2147483647"),
        ({"seqlen": "0", "batch": "1000000000"}, "at most 4194304 work tiles"),
        ({"heads": "1000000000000", "seqlen": "0"}, "at most 4194304 work tiles"),
        ({"exact": "yes", "seqlen": "1000000"}, "steps are simulated one by one, .* 6601985"),
        ({"pass": "bwd", "deterministic": "yes", "seqlen": "8m", "heads": "1"}, "put in order"),
        ({"gpu.sm_count": "99999999"}, "sm_count must be at most 4096"),
        ({"clock_ghz": "1e9"}, r"clock_ghz must be between 0\.1 and 10\.0; got 1e\+09"),
        ({"gpu.clock_hz": "1e18"}, "clock_hz must be between 1e8 and 1e10"),
        ({"exp2_residue": "100", "exp2_frequency": "10"}, "exp2_residue must be .*got 100"),
        ({"exp2_residue": "11", "exp2_frequency": "10"}, "exp2_residue must be at most the exp2_f"),
        ({"exp2_frequency": "99"}, "exp2_frequency must be between 0 and 32"),
        ({"exp2_start": "99"}, "exp2_start must be between 0 and 8"),
        ({"exp2_start": "4"}, "exp2_start must be below 4, the fragments of 128 keys"),
        ({"tau": "-1"}, "tau must be at least 0"),
        ({"kernel": "hopper"}, "kernel hopper needs wgmma, which only sm_90a has; machine B200"),
        ({"heads": "8", "heads_q": "16"}, "heads and heads_q are the same"),
        ({"pass": "bwd", "tau": "3"}, "tau does not apply to pass bwd of kernel blackwell"),
        ({"machine": "h200", "tau": "3"}, "tau does not apply to pass fwd of kernel hopper"),
    ],
    ids=str,
)
def test_refused_at_once(settings: dict[str, str], message: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        build(settings).predict()
    assert time.perf_counter() - started < 30


def test_loops_without_a_period_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shortcut cannot extend a loop it simulates it, up to the limit."""
    settings = {"seqlen": "32k", "causal": "yes", "scheduler": "static"}
    assert build(settings).predict().seconds > 0
    monkeypatch.setattr("fa4.sim.limits.MOST_STEPS", 1000)
    with pytest.raises(ValueError, match="at most 1000 steps are simulated one by one"):
        build(settings).predict()


def test_what_is_large_but_possible() -> None:
    """The limits leave room: a million tokens, thousands of sequences, a pair of small numbers."""
    assert build({"seqlen": "1m", "window": "128,0"}).predict().seconds > 0
    assert build({"seqlen": "256", "batch": "8k"}).predict().work_tiles == 8192 * 16
    assert build({"exp2_frequency": "2", "exp2_residue": "1"}).predict().seconds > 0
    assert build({"machine": "h200", "kernel": "hopper"}).predict().seconds > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine=b200,nope", "got 'nope'"),
        ("machine=b200,missing.toml", "No such file"),
        ("lengths=/dev/zero", "/dev/zero must be a regular file"),
        ("gpu.nope=1,2", "unknown field gpu.nope"),
    ],
)
def test_a_sweep_over_names_that_mean_nothing(text: str, message: str) -> None:
    """Not rows that cannot run, but mistakes."""
    with pytest.raises((ValueError, OSError), match=message):
        make_sweep([text])


def test_files_that_never_end(tmp_path: Path) -> None:
    """Devices, pipes and folders in place of a text."""
    import os

    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("pipe.toml", "folder.toml"):
        with pytest.raises((ValueError, OSError), match=name) as caught:
            find_machine(str(tmp_path / name))
        assert name in str(caught.value)
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"huge\.toml must be at most 67108864 bytes"):
        find_machine(str(tmp_path / "huge.toml"))


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.none() | st.integers(-30, 50),
    st.none() | st.integers(0, 50),
)
def test_visible_pairs_are_counted_without_a_loop(
    rows: int, keys: int, left: int | None, width: int | None
) -> None:
    """The same as counting them, also where the window begins behind the diagonal."""
    left = None if left == -1 else left
    right = width if left is None or width is None else width - left
    right = None if right == -1 else right
    sizes = {"heads_q": 1, "heads_k": 1, "head_dim": 8, "window_size": (left, right)}
    problem = Problem(seqlen_q=rows, seqlen_k=keys, **sizes)  # type: ignore[arg-type]
    offset = np.arange(keys)[None, :] - np.arange(rows)[:, None] - keys + rows
    seen = np.ones((rows, keys), bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    assert problem.visible_pairs == seen.sum()


def test_tiles_of_a_batch_are_those_of_its_sequences() -> None:
    """Made at once for equal lengths, one by one for listed ones: the same tiles."""
    request = build({"batch": "3", "heads": "4", "heads_k": "2", "seqlen": "700", "causal": "yes"})
    whole = forward_tiles(request.problem, request.pipeline)
    listed = forward_tiles(request.problem, request.pipeline, [Lengths(700, 700)] * 3)
    for name in ("trips", "batch", "head", "block"):
        assert np.array_equal(getattr(whole, name), getattr(listed, name)), name


def test_a_split_that_would_emulate_every_pair() -> None:
    with pytest.raises(ValueError, match="residue must be at most the frequency, 3; got 4"):
        Exp2Split(frequency=3)


@given(st.integers(0, 700), st.integers(0, 700), st.sampled_from(((4, 4), (6, 2))), st.booleans())
def test_work_tiles_are_counted_without_making_them(
    rows: int, keys: int, heads: tuple[int, int], causal: bool
) -> None:
    """As many as there are, and one per head where there are none."""
    problem = Problem(seqlen_q=rows, seqlen_k=keys, heads_q=heads[0], heads_k=heads[1],
                      head_dim=64, causal=causal)  # fmt: skip
    backward = BackwardPipeline(head_dim=64, numerics=BackwardConfig(cta_group=2))
    published = replace(backward, published=True)
    found = [count_tiles(problem, one, rows, keys) for one in (backward, published)]
    blocks = max(1, -(-keys // 256))
    assert found == [heads[1] * blocks, heads[0] * blocks]
    if rows and keys:
        assert len(backward_tiles(problem, backward).trips) == found[0]
        made = forward_tiles(problem, ForwardPipeline(head_dim=64)).trips
        assert len(made) == count_tiles(problem, ForwardPipeline(head_dim=64), rows, keys)
        packed = WarpgroupPipeline(head_dim=64)
        made = warpgroup_tiles(problem, packed).trips
        assert len(made) == count_tiles(problem, packed, rows, keys)
