"""Several instructions on one line of PTX: findings name the right one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.execute import Report
from fa4.emulator.host.ptx_launch import run_ptx as run_arrays
from fa4.emulator.ptx.parser import parse
from fa4.emulator.tools.describe import describe_findings
from fa4.emulator.tools.faults import plant
from fa4.emulator.tools.trace import Recorder
from tests.emulator.kernels import module_text, run_ptx
from tests.emulator.tcgen05_patterns import PATTERNS, PROBLEM, kernel
from tests.emulator.tensor_kernels import DATA, DECLARATIONS, SHARED_START

RACE = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.lt.u32 %p1, %r1, 32; "
    "@%p1 st.shared.b32 [%r2], 7; @!%p1 ld.shared.b32 %r3, [%r2]; st.global.b32 [%rd1], %r3; "
)


def race(body: str, **options: object) -> Report:
    return run_ptx(
        body, [np.zeros(64, np.uint32)], block=(64, 1, 1), smem=64, collect=True, **options
    )


def test_a_finding_names_the_instruction_and_both_sides() -> None:
    text = module_text(RACE, 1)
    line = next(k for k, row in enumerate(text.split("\n"), 1) if "st.shared" in row)
    (found,) = [f for f in race(RACE).findings if "smem" in f.message or "shared" in f.message][:1]
    assert found.line == line
    assert found.instruction in ("@!%p1 ld.shared.b32 %r3, [%r2]", "@%p1 st.shared.b32 [%r2], 7")
    opcodes = re.findall(rf"PTX line {line}: ([\w.]+)", found.message)
    assert set(opcodes) == {"ld.shared.b32", "st.shared.b32"}
    assert f"at PTX line {line}: {found.instruction};" in str(found)
    (described,) = describe_findings([found], text)
    assert described["text"] == found.instruction and described["line"] == line


def split(body: str) -> str:
    """Each instruction on its own line."""
    return body.replace("; ", ";\n")


def test_two_findings_on_one_line_are_two() -> None:
    body = "mov.u32 %r2, smem; ld.shared.b32 %r3, [%r2]; ld.shared.b32 %r4, [%r2+8]; "
    report = run_ptx(body, smem=64, collect=True)
    assert [f.instruction.split()[-1] for f in report.findings] == ["[%r2]", "[%r2+8]"]
    assert len({f.line for f in report.findings}) == 1


def told(report: Report) -> Iterator[tuple[str, str]]:
    """Kind and message of each finding, with opcodes alone for places."""
    for finding in report.findings:
        message = re.sub(r"PTX line \d+(: )?", "", finding.message)
        yield finding.kind, re.sub(r"0x[0-9a-f]+", "", message)


STEPS = [(name, *place) for name, p in PATTERNS.items() for place in p.required()]


@settings(max_examples=6)
@given(place=st.sampled_from(STEPS), schedule=st.sampled_from(["fifo", "adversarial"]))
def test_findings_do_not_depend_on_the_line_breaks(place, schedule) -> None:
    """A kernel with a step left out, as it is and with all its instructions on one line."""
    name, warp, index = place
    body = kernel(PATTERNS[name].without(warp, index)).text()
    reports = []
    for text in (re.sub(r"[ \n]+", " ", body).replace("; ", ";\n"), re.sub(r"[ \n]+", " ", body)):
        image, out = PROBLEM.image.copy(), np.zeros((256, 16), np.uint32)
        report = run_ptx(
            text, [image, out, np.zeros((256, 8), np.uint32)], block=(256, 1, 1), collect=True,
            smem=DATA - SHARED_START + image.shape[1], declarations=DECLARATIONS,
            schedule=schedule,
        )  # fmt: skip
        reports.append(report)
    apart, together = reports
    assert [kind for kind, _ in told(apart)] == [kind for kind, _ in told(together)]
    assert [f.message.count("PTX line") for f in apart.findings] == [
        f.message.count("PTX line") for f in together.findings
    ]
    first, second = (
        re.findall(r"PTX line \d+(?:: )?([\w.]*)", str(r.findings[0])) for r in reports
    )
    opcodes = {opcode for opcode in first if "." in opcode}
    assert opcodes <= set(second)


def test_a_fatal_finding_on_a_shared_line() -> None:
    report = run_ptx("mov.u32 %r1, 4; st.shared.b32 [%r1], %r1; trap; ", collect=True)
    (found,) = report.findings
    assert found.instruction == "st.shared.b32 [%r1], %r1"


def test_counts_and_traces_tell_instructions_of_one_line_apart() -> None:
    source, target = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    body = """
  mov.u32 %r2, smem; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;
  mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+128], [%rd1], 256, [%r2];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
  fence.proxy.async; cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2+128], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
"""  # noqa: E501
    recorder = Recorder()
    report = run_ptx(body, [source, target], smem=1024, collect=True, events=recorder)
    assert report.ok, str(report)
    np.testing.assert_array_equal(source, target)
    (work,) = report.work
    assert set(work.copied_bytes.values()) == {256} and len(work.copied_bytes) == 2
    lines = module_text(body, 2).split("\n")
    for event in recorder.events:
        assert event.line == 0 or event.name.split()[0] in lines[event.line - 1]


def test_refused_instructions_have_their_line() -> None:
    text = module_text("mov.u32 %r1, 0; tcgen05.shift.cta_group::1 [%r1]; frob.b32 %r1; ", 0)
    line = next(k for k, row in enumerate(text.split("\n"), 1) if "frob" in row)
    with pytest.raises(Exception, match=rf"line {line}: tcgen05.*\n.*line {line}: frob"):
        run_arrays(text, {})


def test_lines_of_the_parser() -> None:
    text = module_text("mov.u32 %r1, 0; mov.u32 %r2, 1;\n mov.u32 %r3, 2; ", 0)
    instructions = parse(text).kernels["kernel"].instructions
    lines = [i.written_line for i in instructions]
    assert lines == [lines[0], lines[0], lines[0] + 1, lines[0] + 2]
    numbers = [i.line for i in instructions]
    assert len(set(numbers)) == len(numbers)
    assert numbers[1] > len(text.split("\n")) - 2 and numbers[2] == lines[2]
    assert [fault.line for fault in plant(text)] == []


def test_other_instructions_that_a_message_names() -> None:
    body = (
        "mov.u32 %r1, smem; mbarrier.init.shared::cta.b64 [%r1], 40; "
        "mbarrier.arrive.shared::cta.b64 _, [%r1], 50; "
    )
    (found,) = run_ptx(body, smem=64, collect=True).findings
    line = next(k for k, row in enumerate(module_text(body, 0).split("\n"), 1) if "init" in row)
    assert f"initialised at PTX line {line}: mbarrier.init.shared::cta.b64;" in found.message
    assert found.line == line and found.instruction.startswith("mbarrier.arrive")
