"""The planter of faults, and what the checks make of its faults in a small pipeline."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fa4.emulator.ptx.parser import parse
from fa4.emulator.tools.faults import plant
from tests.emulator.kernels import module_text, run_ptx
from tests.emulator.test_barriers import PIPELINE, SCHEDULES, expected_pipeline

TEXT = module_text(PIPELINE, 1)
EXPECTED = Counter(
    {"init count + 1": 4, "init count - 1": 4, "wait removed": 2, "parity flipped": 2,
     "arrive removed": 2, "arrive twice": 2, "barrier removed": 1}
)  # fmt: skip


def test_every_synchronisation_instruction_is_altered() -> None:
    faults = plant(TEXT)
    assert Counter(fault.kind for fault in faults) == EXPECTED
    assert plant(TEXT, "another kernel") == []
    for fault in faults:
        changed = [
            (old, new)
            for old, new in zip(TEXT.split("\n"), fault.text.split("\n"), strict=True)
            if old != new
        ]
        assert len(changed) == 1 and fault.instruction in changed[0][0]
        parse(fault.text)


def caught(text: str) -> bool:
    """Whether any schedule shows a finding or a wrong result."""
    for schedule in SCHEDULES:
        for seed in range(3):
            out = np.zeros(64, np.uint32)
            report = run_ptx(
                text, [out], block=(64, 1, 1), smem=4096, collect=True, schedule=schedule, seed=seed
            )
            if report.findings or out[32:].tolist() != expected_pipeline():
                return True
    return False


def test_the_faults_of_a_pipeline_are_caught() -> None:
    assert not caught(TEXT)
    survivors = [f"{f.kind}: {f.instruction}" for f in plant(TEXT) if not caught(f.text)]
    assert survivors == []


def test_statements_in_inner_scopes_and_with_guards() -> None:
    body = """
  setp.eq.u32 %p1, 0, 0;
  { .reg .pred p; .reg .b32 a; mov.u32 a, smem;
    WAIT: @%p1 mbarrier.try_wait.parity.shared::cta.b64 p, [a], 0, 100;
    @p bra DONE; bra WAIT; DONE: }
  { .reg .pred p; .reg .b32 a; mov.u32 a, smem;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], 4096; bar.sync 0, 64; }
"""
    faults = {fault.kind: fault.text for fault in plant(module_text(body, 0))}
    assert "@%p1 setp.eq.u32 p, 0, 0;" in faults["wait removed"]
    assert (
        "@%p1 mbarrier.try_wait.parity.shared::cta.b64 p, [a], 1, 100;"
        in (faults["parity flipped"])
    )
    assert "[a], 4112;" in faults["16 bytes more expected"]
    assert "[a], 4080;" in faults["16 bytes fewer expected"]
    assert "bar.sync 0, 96;" in faults["32 threads more expected"]
    assert "expect_tx" not in faults["arrive.expect_tx removed"]
    for text in faults.values():
        parse(text)


def test_orders_and_their_scopes_are_altered() -> None:
    """What acquires or releases, and for whom; relaxed accesses have neither."""
    body = """
  ld.acquire.gpu.global.b32 %r1, [%rd1]; ld.relaxed.gpu.global.b32 %r2, [%rd1];
  red.release.gpu.global.add.u32 [%rd1], %r1; st.release.cta.global.b32 [%rd1], %r1;
"""
    faults = plant(module_text(body, 1))
    assert [(f.kind, f.instruction.split(" ")[0]) for f in faults] == [
        ("order removed", "ld.acquire.gpu.global.b32"),
        ("order within the CTA", "ld.acquire.gpu.global.b32"),
        ("order removed", "red.release.gpu.global.add.u32"),
        ("order within the CTA", "red.release.gpu.global.add.u32"),
        ("order removed", "st.release.cta.global.b32"),
    ]
    relaxed, narrow = faults[0].text, faults[1].text
    assert "ld.relaxed.gpu.global.b32 %r1," in relaxed and "ld.acquire.cta.global" in narrow
    parse(relaxed), parse(narrow)
