"""What lab/benchmarks/host.py times are calls that reach a kernel."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a peer, as it is imported
def test_its_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that pass for a B200's; nothing is compiled or launched."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    for name in ("FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS"):
        monkeypatch.setenv(name, "")  # as they were, afterwards
    benchmark = importlib.import_module("lab.benchmarks.host")
    with benchmark.pretended_b200() as interface, torch.no_grad():
        for ours, _ in benchmark.cases(interface).values():
            out = ours()
            assert (out if isinstance(out, torch.Tensor) else out.out).dtype == torch.bfloat16
