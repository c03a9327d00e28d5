"""Sizes are varied until what never ran has run: of functions, PTX and scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import cli, emulator
from fa4.commands.emulate_covered import choose_sizes, integers_of_script, with_integers
from fa4.emulator.host.until_covered import RunPlace, search
from fa4.emulator.machine.coverage import merge_coverages
from tests.emulator.kernels import aligned, run_ptx

# Four dot products of K numbers: a main loop over 64 of them (of which it takes the first), and
# one over what is left.
GEMM = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry gemm(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 k)
{
  .reg .pred %p; .reg .b32 %t, %n, %i, %left, %off; .reg .f32 %s, %x, %y; .reg .b64 %a, %b, %c, %o;
  ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u64 %c, [c]; ld.param.u32 %n, [k];
  mov.u32 %t, %tid.x; mov.f32 %s, 0f00000000;
  mul.lo.u32 %off, %t, %n; mul.wide.u32 %o, %off, 4; add.u64 %a, %a, %o;
  shr.u32 %i, %n, 6; and.b32 %left, %n, 63;
  setp.eq.u32 %p, %i, 0;
  @%p bra rest;
main:
  ld.global.f32 %x, [%a]; ld.global.f32 %y, [%b]; fma.rn.f32 %s, %x, %y, %s;
  add.u64 %a, %a, 256; add.u64 %b, %b, 256;
  sub.u32 %i, %i, 1; setp.ne.u32 %p, %i, 0; @%p bra main;
rest:
  setp.eq.u32 %p, %left, 0;
  @%p bra done;
last:
  ld.global.f32 %x, [%a]; ld.global.f32 %y, [%b]; fma.rn.f32 %s, %x, %y, %s;
  add.u64 %a, %a, 4; add.u64 %b, %b, 4;
  sub.u32 %left, %left, 1; setp.ne.u32 %p, %left, 0; @%p bra last;
done:
  mul.wide.u32 %o, %t, 4; add.u64 %c, %c, %o; st.global.f32 [%c], %s;
  ret;
}
"""
REMAINDER = GEMM[: GEMM.index("last:")].count("\n") + 2
# The same mistake in the loop that K = 1,024 does not enter.
WRONG = GEMM.replace("last:\n  ld.global.f32 %x, [%a];", "last:\n  ld.global.f32 %x, [%a+65536];")


def gemm(k: int, text: str = GEMM, **options: Any) -> emulator.Report:
    """Runs it on ones."""
    a, b, c = np.ones((4, k), np.float32), np.ones(k, np.float32), np.zeros(4, np.float32)
    return emulator.run_ptx(text, {"a": a, "b": b, "c": c, "k": k}, block=(4, 1, 1), **options)


def test_the_remainder_of_a_gemm_is_found() -> None:
    """K = 1,024 never runs it; another K is proposed, and together they run all."""
    (alone,) = gemm(1024).coverage
    assert not alone.reaches(REMAINDER)
    found = emulator.until_covered(gemm, {"k": 1024})
    assert found.ended == "covered" and not found.open and found.trials[0].sizes == {"k": 1024}
    news = [trial for trial in found.trials if RunPlace("gemm", "", REMAINDER) in trial.new]
    assert len(news) == 1 and news[0].sizes["k"] % 64
    again = [one for sizes in found.proposal for one in gemm(**sizes).coverage]
    (merged,) = merge_coverages(again)
    assert not merged.missed and not merged.one_way
    assert f"k={news[0].sizes['k']}: now gemm: " in str(found) and "all has run after" in str(found)


def test_a_fault_where_nothing_ran_is_found_with_its_sizes() -> None:
    """No finding for K = 1,024; the one of the remainder comes with the K that enters it."""
    assert gemm(1024, WRONG).ok
    found = emulator.until_covered(lambda k: gemm(k, WRONG, collect=True), {"k": 1024})
    ((sizes, finding),) = found.findings
    assert finding.kind == "out-of-bounds" and finding.line == REMAINDER and sizes["k"] % 64
    raising = emulator.until_covered(lambda k: gemm(k, WRONG), {"k": 1024})
    assert [one.kind for _, one in raising.findings] == ["out-of-bounds"]


def test_documented_call() -> None:
    """The example of docs/emulator.md, of a product of any numbers."""
    page = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")
    (example,) = (one for one in re.findall(r"```py\n(.*?)```", page, re.S) if "until_" in one)
    names = {"emulator": emulator, "run_gemm": lambda m, k: gemm(k)}
    exec(example, names)
    found = names["found"]
    assert not found.findings and len(found.proposal) > 1
    line = GEMM[: GEMM.index("@%p bra rest")].count("\n") + 1
    no_main_loop = RunPlace("gemm", "", line, "taken")
    assert found.open == (no_main_loop,), str(found)  # K is never below 64


# A condition on n or m, in PTX that leaves it in %p1, and in Python.
CONDITIONS = {
    "{x} > {c}": "setp.gt.u32 %p1, {x}, {c};",
    "{x} == {c}": "setp.eq.u32 %p1, {x}, {c};",
    "{x} % {c} == {c} - 1": "rem.u32 %r9, {x}, {c}; setp.eq.u32 %p1, %r9, {c}-1;",
    "{x} < {x}": "setp.lt.u32 %p1, {x}, {x};",
}
BODY = "ld.global.b32 %r1, [%rd1]; ld.global.b32 %r2, [%rd1+4];"


@settings(max_examples=25)
@given(
    conditions=st.lists(
        st.tuples(st.sampled_from(sorted(CONDITIONS)), st.sampled_from("nm"), st.integers(2, 90)),
        min_size=1, max_size=4, unique=True,
    ),
    runs=st.integers(1, 25),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_what_is_open_is_what_no_size_has_reached(
    conditions: list[tuple[str, str, int]], runs: int, seed: int
) -> None:
    """Beside the conditions computed in Python; and a run that is counted as new is one."""
    body, lines, ways = BODY, [], []
    for index, (form, name, c) in enumerate(conditions):
        register = {"n": "%r1", "m": "%r2"}[name]
        test = CONDITIONS[form].format(x=register, c=c).replace(f"{c}-1", str(c - 1))
        body += f"\n{test} @!%p1 bra past{index};\nadd.u32 %r5, %r5, {index + 1};\npast{index}:"
        ways.append(lambda sizes, f=form, x=name, c=c: bool(eval(f.format(x=sizes[x], c=c))))

    def function(n: int, m: int) -> emulator.Report:
        return run_ptx(body, [aligned(np.array([n, m, 0, 0], np.uint32))], block=(1, 1, 1))

    found = emulator.until_covered(function, {"n": 64, "m": range(50, 71, 2)}, runs=runs, seed=seed)
    text = function(1, 50).coverage[0].ptx.split("\n")
    lines = [1 + next(i for i, x in enumerate(text) if f"%r5, {k + 1};" in x)
             for k in range(len(conditions))]  # fmt: skip
    tried = [trial.sizes for trial in found.trials]
    assert len(tried) <= runs and len({tuple(one.values()) for one in tried}) == len(tried)
    assert all(1 <= one["n"] <= 128 and one["m"] in range(50, 71, 2) for one in tried)
    wanted = {line for line, way in zip(lines, ways, strict=True) if not any(map(way, tried))}
    assert {place.line for place in found.open if not place.way} == wanted
    always = [way for way in ways if all(map(way, tried))]
    assert (found.ended == "covered") == (not wanted and not always)
    assert found.ended in ("covered", "runs") or len(tried) == 128 * 11
    both = emulator.until_covered(
        lambda **sizes: function(**sizes), {"n": 64, "m": range(50, 71, 2)}, runs=runs, seed=seed
    )
    assert [trial.sizes for trial in both.trials] == tried  # a seed gives the same


def test_numbers_of_the_kernel_guide() -> None:
    """One size in 100,000: found at once, as the kernel compares with it."""
    body = BODY + "setp.ne.u32 %p1, %r1, 70123; @%p1 bra past; add.u32 %r5, %r5, 1; past:"

    def function(n: int) -> emulator.Report:
        return run_ptx(body, [aligned(np.array([n, 0, 0, 0], np.uint32))], block=(1, 1, 1))

    found = emulator.until_covered(function, {"n": range(1, 100_000)}, runs=8)
    assert found.ended == "covered" and found.proposal[-1] == {"n": 70123}


def test_limits() -> None:
    """Of runs, of time and of the sizes that are allowed; each is told."""
    body = BODY + "setp.lt.u32 %p1, %r1, %r1; @!%p1 bra past; add.u32 %r5, %r5, 1; past:"

    def function(n: int) -> emulator.Report:
        return run_ptx(body, [aligned(np.array([n, 0, 0, 0], np.uint32))], block=(1, 1, 1))

    runs = emulator.until_covered(function, {"n": 64}, runs=5)
    assert (runs.ended, len(runs.trials)) == ("runs", 5) and len(runs.open) == 2
    assert "never ran in 5 runs (the limit of runs): kernel: " in str(runs)
    sizes = emulator.until_covered(function, {"n": [7, 9, 8]}, runs=50)
    assert sizes.ended == "sizes" and sorted(one.sizes["n"] for one in sizes.trials) == [7, 8, 9]
    assert sizes.trials[0].sizes == {"n": 7} and "(all sizes that are allowed)" in str(sizes)
    seconds = emulator.until_covered(function, {"n": 64}, runs=50, seconds=1e-9)
    assert (seconds.ended, len(seconds.trials)) == ("seconds", 1)


def test_what_refuses_sizes_is_told() -> None:
    """Errors of the first run are raised; of others the first is in the report, nothing counts."""

    def even(k: int) -> emulator.Report:
        if k % 2:
            raise ValueError(f"k={k}: even numbers only\nas the text goes on")
        return gemm(k)

    found = emulator.until_covered(even, {"k": 1024}, runs=6)
    assert any(trial.refused for trial in found.trials)
    assert all(bool(trial.refused) == bool(trial.sizes["k"] % 2) for trial in found.trials)
    assert not any(trial.new for trial in found.trials if trial.refused)
    assert "k=1023: ValueError: k=1023: even numbers only" in str(found)
    with pytest.raises(ValueError, match="even numbers only"):
        emulator.until_covered(even, {"k": 1023})


@pytest.mark.parametrize(
    ("sizes", "limits", "message"),
    [
        ({"k": 0}, {}, "size k=0: 1 or more"),
        ({"k": "8"}, {}, "size k='8': expected an integer, a range or a list"),
        ({"k": [1, 2.5]}, {}, "expected an integer, a range or a list"),
        ({"k": range(0)}, {}, "size k: no value is allowed"),
        ({"k": 8}, {"runs": 0}, "runs 0, seconds 120.0: positive numbers"),
        ({"k": 8}, {"seconds": 0.0}, "runs 32, seconds 0.0: positive numbers"),
        ({"k": 8}, {"fast": 1}, "unknown option fast"),
    ],
)
def test_bad_sizes(sizes: Any, limits: Any, message: str) -> None:
    """One line each."""
    with pytest.raises(emulator.LaunchError, match=message):
        emulator.until_covered(gemm, sizes, **limits)


def test_compilations_of_a_kernel_count_together() -> None:
    """A line of a source is covered where any of them runs all of it; PTX without lines is not."""
    sourced = (
        GEMM.replace("last:\n", "last:\n.loc 1 9 0\n")
        .replace("main:\n", ".loc 1 5 0\nmain:\n").replace("done:\n", "done:\n.loc 1 12 0\n")
        .replace("rest:\n", "rest:\n.loc 1 7 0\n") + '.file 1 "gemm.py"\n'
    )  # fmt: skip
    other = sourced.replace("mov.f32 %s, 0f00000000;", "mov.f32 %s, 0f3f800000;")
    reports = {1024: gemm(1024, sourced), 1023: gemm(1023, other), 63: gemm(63, other)}

    def attempt(sizes: dict[str, int]) -> Any:
        return reports[sizes["k"]].coverage, []

    found = search(attempt, {"k": [1024, 1023, 63]})
    assert found.ended == "covered" and RunPlace("gemm", "gemm.py", 9) in found.trials[1].new
    assert "gemm (gemm.py): " in str(found)


def test_integers_of_arguments() -> None:
    """Options and places; other numbers stay."""
    arguments = ["7", "--k", "512", "--m=64", "name", "1.5", "0", "-3", "--flag", "x12"]
    found = integers_of_script(arguments)
    assert found == {"1": (0, 7), "k": (2, 512), "m": (3, 64)}
    places = {name: index for name, (index, _) in found.items()}
    changed = with_integers(arguments, places, {"1": 8, "k": 9, "m": 10})
    assert changed[:4] == ["8", "--k", "9", "--m=10"] and changed[4:] == arguments[4:]
    assert choose_sizes({"k": 4}, [], lambda n: n)["k"] == [4, 1, 2, 3]
    assert choose_sizes({"k": 4, "m": 1}, ["k=2:10:4"], lambda n: n) == {"k": [4, 2, 6, 10]}


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", *arguments])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


ARGUMENTS = ["gemm.ptx", "--block", "4", "--arg", "a:f32[4,1024]=ones", "--arg", "b:f32[1024]=ones",
             "--arg", "c:f32[4]=zeros", "--arg", "k:i32=1024"]  # fmt: skip


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel of PTX: its integers are lowered; a finding on the way fails the run."""
    monkeypatch.chdir(tmp_path)
    Path("gemm.ptx").write_text(GEMM)
    code, text, _ = command(capsys, *ARGUMENTS, "--until-covered", "20", "--coverage", "c.txt")
    assert code == 0 and "all has run after" in text and "k=1023: now gemm: " in text
    assert " 0 not" in Path("c.txt").read_text() and "wrote c.txt" in text
    code, text, _ = command(capsys, *ARGUMENTS, "--until-covered", "20", "--vary", "k=64:1024:64")
    assert code == 0 and "never ran in 16 runs (all sizes that are allowed)" in text
    Path("gemm.ptx").write_text(WRONG)
    assert command(capsys, *ARGUMENTS)[0] == 0
    code, text, _ = command(capsys, *ARGUMENTS, "--until-covered", "20", "--json")
    (finding,) = json.loads(text)["findings"]
    assert code == 1 and finding["kind"] == "out-of-bounds" and finding["sizes"]["k"] % 64
    assert json.loads(text)["ended"] == "runs"  # it never comes to the end of that loop


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vary", "k=1:9"], "--vary needs --until-covered RUNS"),
        (["--until-covered", "9", "--vary", "k"], "--vary k: expected NAME=FIRST:LAST"),
        (["--until-covered", "9", "--vary", "n=1:9"], "no integer of this name; there are k"),
        (["--until-covered", "9", "--vary", "k=9:1"], "FIRST is at most LAST"),
        (["--until-covered", "9", "--steer", "3"], "--steer cannot be used with --until-covered"),
        (["--until-covered", "9", "--seeds", "3"], "--seeds cannot be used with --until-covered"),
        (["--until-covered", "9", "--out", "c=c.npy"], "--out cannot be used"),
    ],
)
def test_bad_options(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One line, exit code 2."""
    monkeypatch.chdir(tmp_path)
    Path("gemm.ptx").write_text(GEMM)
    code, _, error = command(capsys, *ARGUMENTS, *more)
    assert code == 2 and message in error and error.count("\n") == 1


SCRIPT = """
import sys
import cutlass, numpy as np
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(c: cute.Tensor, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    if n % 7 == 3:
        c[thread] = n
    cute.arch.sync_threads()

@cute.jit
def launch(c: cute.Tensor, n: cutlass.Int32):
    kernel(c, n).launch(grid=(1, 1, 1), block=(32, 1, 1))

n = int(sys.argv[2])
print("begun with", n)
assert n != 351, f"{n}: not this one"
launch(from_dlpack(np.zeros(32, np.int32)), n)
"""


def test_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its integer arguments are varied; only the first run's output is shown."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    arguments = ["script.py", "--until-covered", "14", "--", "--size", "350"]
    code, text, error = command(capsys, *arguments)
    assert code == 0 and text.count("begun with") == 1, error
    assert "all has run after" in text
    assert "runs were refused, such as size=351: AssertionError: 351: not this one" in text
    code, _, error = command(capsys, "script.py", "--until-covered", "9", "--", "--size", "x")
    assert code == 2 and "there is no integer to vary among the arguments" in error
