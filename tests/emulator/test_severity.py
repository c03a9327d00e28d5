"""Severities of findings, and which of them fail a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import cli, emulator
from fa4.commands.emulate_choices import SEVERITIES as COMMAND_SEVERITIES
from fa4.emulator.errors import SEVERITIES, KernelFinding
from fa4.emulator.execute import failures
from fa4.emulator.kinds import EXCUSES
from tests.emulator.kernels import aligned, run_ptx

# Thread 0 makes a barrier, {fence}, and copies 16 bytes that {wait}.
COPY = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry copy(.param .u64 source, .param .u64 target)
{{
  .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %rd<4>;
  .shared .align 128 .b8 tile[256];
  ld.param.u64 %rd1, [source]; ld.param.u64 %rd2, [target];
  mov.u32 %r1, tile;
  mbarrier.init.shared.b64 [%r1], 1;
  {fence}
  mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+16], [%rd1], 16, [%r1];
again:
  mbarrier.try_wait.parity.shared.b64 %p, [%r1], 0;
  @!%p bra again;
  ld.shared.b32 %r2, [%r1+{offset}];
  st.global.b32 [%rd2], %r2;
  ret;
}}
"""
FENCE = "fence.mbarrier_init.release.cluster;"


def run(text: str, **options: Any) -> emulator.Report:
    """The copy by one thread."""
    source, target = np.arange(4, dtype=np.uint32), np.zeros(1, np.uint32)
    return emulator.run_ptx(text, [source, target], block=(1, 1, 1), **options)


def test_what_only_the_manual_asks_for_fails_no_run() -> None:
    """An mbarrier's initialisation without its fence is in the report, and fails if asked to."""
    text = COPY.format(fence="", offset=16)
    (finding,) = run(text).findings
    assert (finding.kind, finding.severity) == ("missing-proxy-fence", "formal")
    assert str(finding).startswith("missing-proxy-fence (formal): a copy signals")
    with pytest.raises(emulator.EmulationFailed, match="signals mbarrier"):
        run(text, fail_on="formal")
    assert run(COPY.format(fence=FENCE, offset=16), fail_on="formal").ok


def test_hazards_fail_unless_only_errors_do() -> None:
    """A read of what nothing has written."""
    text = COPY.format(fence=FENCE, offset=32)
    with pytest.raises(emulator.EmulationFailed, match="uninitialised"):
        run(text)
    (finding,) = run(text, fail_on="error").findings
    assert finding.severity == "hazard"


def test_least_severity() -> None:
    """Each severity fails itself and what is worse; there are no others."""
    findings = [
        KernelFinding("race", "", excuse="same-value"),
        KernelFinding("missing-proxy-fence", "", excuse="unfenced-init"),
        KernelFinding("race", ""),
        KernelFinding("deadlock", ""),
    ]
    for index, severity in enumerate(SEVERITIES):
        assert [f.severity for f in failures(findings, severity)] == list(SEVERITIES[index:])
    with pytest.raises(
        emulator.LaunchError, match="fail_on 'all': allowed are style, formal, hazard"
    ):
        emulator.Options(fail_on="all")
    assert COMMAND_SEVERITIES == SEVERITIES


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--fail-on decides about the exit code, not about what is shown."""
    monkeypatch.chdir(tmp_path)
    Path("copy.ptx").write_text(COPY.format(fence="", offset=16))
    arguments = ["emulate", "copy.ptx", "--block", "1", "--json"]
    arguments += ["--arg", "u32[4]=arange", "--arg", "u32[1]=zeros"]
    for severity, code in (("hazard", 0), ("formal", 1)):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--fail-on", severity])
        assert (stop.value.code or 0) == code
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert finding["severity"] == "formal"


SAME_PLACE = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry store(.param .u64 values, .param .u64 target)
{
  .reg .b32 %t, %v, %a; .reg .b64 %x, %o;
  .shared .align 16 .b8 tile[16];
  mov.u32 %t, %tid.x;
  ld.param.u64 %x, [values];
  mul.wide.u32 %o, %t, 4;
  add.u64 %x, %x, %o;
  ld.global.b32 %v, [%x];
  mov.u32 %a, tile;
  st.shared.b32 [%a], %v;
  ret;
}
"""


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        (np.full(32, 3.1, np.float32), None),
        (np.where(np.arange(32) % 2, np.float32(3.1), np.nextafter(np.float32(3.1), 4)), "formal"),
        (np.where(np.arange(32) % 2, np.float32(3.1), np.float32(3.11)), "hazard"),
        (np.where(np.arange(32) % 2, np.float32(3.1), np.float32(-3.1)), "hazard"),
        (np.where(np.arange(32) % 2, np.float32(3.1), np.float32("nan")), "hazard"),
        (np.arange(32, dtype=np.uint32), "hazard"),
        (np.arange(2**31, 2**31 + 32, dtype=np.uint32), "hazard"),
    ],
    ids=["equal", "rounded", "far", "sign", "nan", "integers", "negative subnormals"],
)
def test_lanes_that_store_to_one_place(values: Any, severity: str | None) -> None:
    """One of them wins; sums that differ by rounding alone are a formal race, no other values."""
    report = emulator.run_ptx(SAME_PLACE, [values, 0], block=(32, 1, 1), collect=True)
    assert [finding.severity for finding in report.findings] == [severity] * (severity is not None)


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(
    ("second", "severities"),
    [(0x3F800000, {"style"}), (0x3F800001, {"formal"}), (0x40000000, {"hazard"})],
)
def test_two_warps_store_to_one_place(space: str, second: int, severities: set[str]) -> None:
    """The same value is style, one that differs by rounding formal."""
    place = "%rd1" if space == "global" else "%r2"
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.lt.u32 %p1, %r1, 32;
selp.b32 %r3, 0x3f800000, {second:#x}, %p1; st.{space}.b32 [{place}], %r3;"""
    report = run_ptx(body, [aligned(np.zeros(4, np.uint32))], block=(64, 1, 1), smem=64,
                     collect=True)  # fmt: skip
    assert {finding.severity for finding in report.findings} == severities


STORES = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.lt.u32 %p1, %r1, 32;
@%p1 st.{space}.{first} [{place}], {a}; @!%p1 st.{space}.{second} [{place}], {b};"""


def two_stores(space: str, types: tuple[str, str], values: tuple[int, int], **options: Any) -> Any:
    """A report, and what is at the place in the end; two warps store there, in no order."""
    place = "%rd1" if space == "global" else "%r2"
    first, second = types
    body = STORES.format(space=space, place=place, first=first, second=second,
                         a=values[0], b=values[1])  # fmt: skip
    kept = aligned(np.zeros(4, np.uint32))
    if space == "shared":
        begin = (
            "mov.u32 %r2, smem; setp.eq.u32 %p2, %r1, 0; @%p2 st.shared.b32 [%r2], 0; bar.sync 0;"
        )
        end = "bar.sync 0; @%p2 ld.shared.b32 %r3, [%r2]; @%p2 st.global.b32 [%rd1], %r3;"
        body = f"mov.u32 %r1, %tid.x; {begin} {body} {end}"
    report = run_ptx(body, [kept], block=(64, 1, 1), smem=64, collect=True, **options)
    return report, int(kept[0])


@given(
    space=st.sampled_from(["shared", "global"]),
    types=st.tuples(*[st.sampled_from(["b32", "u32", "b16", "u8"])] * 2),
    values=st.tuples(*[st.sampled_from([0, 1, 7])] * 2),
)
@settings(max_examples=40)
def test_style_is_what_no_order_can_change(
    space: str, types: tuple[str, str], values: tuple[int, int]
) -> None:
    """Of two stores of one size, of the same value; with two sizes it is formal at most."""
    report, _ = two_stores(space, types, values)
    races = {finding.severity for finding in report.findings}
    alike, sizes = values[0] == values[1], {int(name[1:]) for name in types}
    if alike and len(sizes) == 1:
        assert races == {"style"} and report.ok
        ends = {two_stores(space, types, values, schedule="random", seed=n)[1] for n in range(3)}
        assert ends == {values[0]}
    elif not alike:
        assert "hazard" in races and not report.ok
    else:
        assert "style" not in races


@given(
    space=st.sampled_from(["shared", "global"]),
    words=st.sampled_from([1, 2, 4]),
    shift=st.integers(0, 40),
    different=st.none() | st.integers(0, 31),
)
@settings(max_examples=40)
def test_stores_that_overlap_in_part_are_compared_where_they_do(
    space: str, words: int, shift: int, different: int | None
) -> None:
    """The second warp's elements begin `shift` behind those of the first, and one may differ."""
    place = "%rd4" if space == "global" else "%r6"
    vector = f".v{words}" if words > 1 else ""
    value = "{" + ", ".join(["%r5"] * words) + "}" if words > 1 else "%r5"
    body = f"""mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.ge.u32 %p1, %r1, 32;
add.u32 %r3, %r2, {shift}; selp.b32 %r3, %r3, %r2, %p1; add.u32 %r5, %r3, 100;
setp.eq.and.u32 %p2, %r2, {32 if different is None else different}, %p1; @%p2 mov.b32 %r5, 7;
mad.wide.u32 %rd4, %r3, {4 * words}, %rd1; mov.u32 %r6, smem;
mad.lo.u32 %r6, %r3, {4 * words}, %r6; st.{space}{vector}.b32 [{place}], {value};"""
    kept = aligned(np.arange(72 * words, dtype=np.uint32))
    report = run_ptx(body, [kept], block=(64, 1, 1), smem=1200, collect=True)
    overlap = 32 - shift  # the first elements of the second warp
    expected = set()
    if overlap > 0:
        expected = {"hazard" if different is not None and different < overlap else "style"}
    assert {finding.severity for finding in report.findings} == expected


def test_style_says_why_and_fails_only_if_asked() -> None:
    """The section is that of races of one size."""
    report, _ = two_stores("shared", ("b32", "b32"), (7, 7), fail_on="formal")
    (finding,) = report.findings
    assert str(finding).startswith("race (style): ") and "both store the same" in str(finding)
    assert finding.why.startswith("PTX ISA 8.7.2: either order is allowed, and leaves the same")
    options = {"collect": False, "fail_on": "style"}
    with pytest.raises(emulator.EmulationFailed, match="both store the same"):
        run_ptx(STORES.format(space="global", place="%rd1", first="b32", second="b32", a=7, b=7),
                [aligned(np.zeros(4, np.uint32))], block=(64, 1, 1), **options)  # fmt: skip


def test_style_takes_no_room_from_findings() -> None:
    """A limit on findings is one on those that matter: the race behind is still found."""
    body = STORES.format(space="global", place="%rd1", first="b32", second="b32", a=7, b=7)
    body += "bar.sync 0; st.global.b32 [%rd1+4], %r1;"
    report = run_ptx(body, [aligned(np.zeros(4, np.uint32))], block=(64, 1, 1), collect=True,
                     max_findings=1)  # fmt: skip
    assert [f.severity for f in report.findings] == ["style", "hazard"]


def test_excuses_are_lesser_severities_with_sections() -> None:
    """Each says why in one sentence, without an end of its own, as kinds do."""
    for excuse in EXCUSES.values():
        assert excuse.severity in SEVERITIES[:2] and excuse.section
        assert excuse.why and not excuse.why.endswith(".")


def test_style_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code, JSON, SARIF and --ignore know the severity."""
    monkeypatch.chdir(tmp_path)
    text = SAME_PLACE.replace("ld.global.b32 %v, [%x];", "mov.b32 %v, 5;")
    Path("store.ptx").write_text(text)
    arguments = ["emulate", "store.ptx", "--block", "64", "--json", "--sarif", "s.sarif"]
    arguments += ["--arg", "u32[64]=arange", "--arg", "u32[1]=zeros"]
    for more, code in (
        ([], 0),
        (["--fail-on", "formal"], 0),
        (["--fail-on", "style"], 1),
        (["--fail-on", "style", "--ignore", "style"], 0),
        (["--fail-on", "style", "--ignore", "formal"], 1),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, *more])
        assert (stop.value.code or 0) == code, more
        report = json.loads(capsys.readouterr().out)
        accepted = "style" in more[2:]
        (finding,) = report["accepted" if accepted else "findings"]
        assert (finding["kind"], finding["severity"]) == ("race", "style")
        (result,) = json.loads(Path("s.sarif").read_text())["runs"][0]["results"]
        assert result["level"] == "note" and ("suppressions" in result) == accepted


@pytest.mark.parametrize(("step", "severities"), [(0, {"style"}), (1, {"hazard"})])
def test_two_warps_store_one_matrix(step: int, severities: set[str]) -> None:
    """As Triton does with tiles smaller than its warps: equal rows are style, others a race."""
    body = f"""mov.u32 %r1, %tid.x; shr.u32 %r3, %r1, 5; mul.lo.u32 %r3, %r3, {step};
mov.u32 %r2, smem; and.b32 %r4, %r1, 7; mad.lo.u32 %r2, %r4, 16, %r2;
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {{%r3}};"""
    report = run_ptx(body, [], block=(64, 1, 1), smem=128, collect=True)
    assert {finding.severity for finding in report.findings} == severities
