"""The hardware tables: derived figures, sources, and what a Gpu refuses."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from fa4.hardware import B200, B300, GPUS, H100, H200, Gpu, Source, find_gpu, numeric_fields


def test_peaks_are_the_published_ones() -> None:
    """B200 2.24 PFLOP/s (the paper rounds to 2.25), Hopper 989 TFLOP/s, dense bf16."""
    assert B200.peak_bf16_flops == 148 * 8192 * 1.85e9
    assert B200.peak_bf16_flops == pytest.approx(2.25e15, rel=0.005)
    assert H100.peak_bf16_flops == pytest.approx(989e12, rel=0.001)
    assert H200.peak_bf16_flops == H100.peak_bf16_flops


def test_what_the_paper_builds_on() -> None:
    """Per clock, Blackwell doubled the tensor cores and neither exponentials nor shared memory."""
    assert B200.mma_flops_per_clk == 2 * H100.mma_flops_per_clk
    assert B200.exp_per_clk == H100.exp_per_clk
    assert B200.smem_bytes_per_clk == H100.smem_bytes_per_clk
    assert B300.exp_per_clk == 2 * B200.exp_per_clk


def test_cycle_budget_of_one_tile() -> None:
    """A 128 x 128 x 128 tile: 1024 cycles of products, 1024 of exponentials (paper, forward)."""
    assert 2 * 2 * 128**3 / B200.mma_flops_per_clk == 1024
    assert 128 * 128 / B200.exp_per_clk == 1024


def test_whole_chip_rates() -> None:
    """Exponentials and shared memory of B300: 9.22e12/s and 36 TB/s measured, within 5%."""
    assert 148 * 32 * B300.clock_hz == B300.peak_exp_per_s
    assert B300.peak_exp_per_s == pytest.approx(9.22e12, rel=0.05)
    assert B300.smem_bytes_per_s == pytest.approx(36e12, rel=0.05)
    assert B200.ridge_flops_per_byte == pytest.approx(280, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_number_has_a_source(gpu: Gpu) -> None:
    """Exactly the numeric fields have sources, and memory limits are whole kilobytes."""
    assert set(gpu.sources) == set(numeric_fields())
    assert all(math.isfinite(getattr(gpu, name)) for name in numeric_fields())
    assert gpu.smem_bytes_per_sm - gpu.smem_bytes_per_cta == 1024
    assert (gpu.tmem_cols > 0) == (gpu.arch != "sm_90a")


def test_a_number_without_a_source_is_refused() -> None:
    """Leave one out, or add one for a number that does not exist."""
    sources = dict(B200.sources)
    del sources["sm_count"]
    with pytest.raises(ValueError, match=r"every number of B200 needs a source.*sm_count"):
        replace(B200, sources=sources)
    with pytest.raises(ValueError, match=r"does not hold.*warp_count"):
        replace(B200, sources={**B200.sources, "warp_count": Source("a guess")})
    with pytest.raises(ValueError, match="must say where"):
        Source(" ")
    with pytest.raises(ValueError, match="confidence"):
        Source("somewhere", "certain")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_80"}, "arch must be one of"),
        ({"sm_count": 0}, "sm_count must be at least 1"),
        ({"tmem_cols": -1}, "tmem_cols must be at least 0"),
        ({"clock_hz": math.nan}, "clock_hz must be finite"),
        ({"hbm_bytes_per_s": 0.0}, "hbm_bytes_per_s must be positive"),
        ({"clock_hz": 3e9}, "clock_hz must not exceed max_clock_hz"),
        ({"smem_bytes_per_cta": 2**20}, "smem_bytes_per_cta must not exceed smem_bytes_per_sm"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, object], message: str) -> None:
    """Each with the rule and the value."""
    with pytest.raises(ValueError, match=message):
        replace(B200, **changes)


def test_counts_are_integers() -> None:
    """148.0 SMs would make every product a float."""
    with pytest.raises(TypeError, match=r"sm_count must be an integer; got 148\.0"):
        replace(B200, sm_count=148.0)


def test_find_gpu() -> None:
    """By name in any case; an unknown name lists the known ones."""
    assert find_gpu("B200") is find_gpu("b200") is B200
    with pytest.raises(ValueError, match="one of b200, b300, gb300, rubin, h100, h200; got 'a100'"):
        find_gpu("a100")


def test_tables_are_frozen_and_hashable() -> None:
    """A Gpu may be a cache key; neither it nor its sources can be changed."""
    assert len({B200, B300, H100, H200, find_gpu("h200")}) == 4
    with pytest.raises(FrozenInstanceError):
        B200.sm_count = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        B200.sources["sm_count"] = Source("a guess")  # type: ignore[index]


def test_a_gpu_can_be_sent_to_another_process() -> None:
    """With its sources, which nobody can change there either."""
    sent = pickle.loads(pickle.dumps(B300))
    assert sent == B300 and sent.sources == B300.sources and hash(sent) == hash(B300)
    with pytest.raises(TypeError):
        sent.sources["sm_count"] = Source("a guess")
