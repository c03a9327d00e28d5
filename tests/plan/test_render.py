"""Plans as Markdown, ASCII and Mermaid, and `fa4 explain`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from fa4 import cli
from fa4.hardware import B200
from fa4.plan import (
    backward_plan,
    forward_plan,
    render_graph,
    render_memory,
    render_plan,
    render_program,
    render_roles,
    render_signals,
)
from fa4.plan.render import span
from tests.plan.plans import BACKWARD, FORWARD, PUBLISHED, backward, forward, with_buffer

ONE, PAIR = FORWARD["one CTA"], BACKWARD["pair"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, stdout, stderr) of `fa4 explain <arguments>`, on 80 columns."""
    monkeypatch.setattr(cli, "COMMANDS", ("explain",))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["explain", *arguments])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run


def test_rendering_is_deterministic() -> None:
    """The same choices give the same text."""
    assert render_plan(forward()) == render_plan(ONE)
    assert render_plan(backward(cta_group=2)) == render_plan(PAIR)


def test_a_whole_plan() -> None:
    """Every role, signal and buffer is there, and every Markdown table is rectangular."""
    for plan in (*FORWARD.values(), *BACKWARD.values()):
        text = render_plan(plan)
        for item in (*plan.roles, *plan.signals, *plan.buffers):  # type: ignore[attr-defined]
            assert f"| {item.name} |" in text
        for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
            rows = [line for line in table.splitlines() if line.startswith("| ")]
            assert len({line.count(" | ") for line in rows}) == 1
        assert text.count("```") % 2 == 0


def test_roles() -> None:
    """Warps, threads, registers, waits and arrives."""
    assert (
        "| epilogue | 13 | 32 | 64 | epi0_full, epi1_full | epi0_empty, epi1_empty |"
        in render_roles(ONE).splitlines()
    )
    assert span((0, 1, 2, 3)) == "0-3"
    assert span((1, 3)) == "1, 3"


def test_signals() -> None:
    """Kind, stages, counts, bytes, waiters and free phases."""
    lines = render_signals(PAIR).splitlines()
    assert "| q_full | mbarrier | 1 | load 1 | 1 | 32768 (first +65536) | mma | 0 |" in lines
    assert "| p_full | mbarrier, both CTAs | 1 | compute 16 | 16 | - | mma | 0 |" in lines
    assert "| dq_slot_empty | group | 1 | reduce 1 | 1 | - | reduce | 2 |" in lines


def test_memory() -> None:
    """The buffers with what they share, and the maps drawn to scale."""
    text = render_memory(ONE)
    assert (
        "| p0 | tmem | 64 | 128 | 64 | 1 | s0: softmax has read S; products run in order |" in text
    )
    assert f"s0 [  0, 128) |{'#' * 8}{'=' * 8}{' ' * 48}|" in text
    assert f"p0 [ 64, 128) |{' ' * 8}{'=' * 8}{' ' * 48}|" in text
    assert f"o1 [384, 512) |{' ' * 48}{'#' * 16}|" in text
    assert "barriers  [231424, 231728)" in text
    assert all(len(line) < 100 for line in text.splitlines() if not line.startswith("|"))


def test_what_holds_others_comes_before_them() -> None:
    """Regions in the order of their places; of those that begin together the larger first."""
    together = 0
    for plan in (*FORWARD.values(), *BACKWARD.values()):
        for space in ("smem", "tmem"):
            lines = render_memory(plan).partition(f"\n{space}: ")[2].partition("```")[0]
            places = [re.search(r"\[ *(\d+), *(\d+)\)", line) for line in lines.splitlines()]
            found = [(int(place[1]), -int(place[2])) for place in places if place]
            assert found == sorted(found)
            together += len(found) - len({start for start, _ in found})
    assert together > 0


def test_only_what_overlaps_is_drawn_as_shared() -> None:
    """Buffers that touch share nothing, also where both lie in one character."""
    for plan in (*FORWARD.values(), *BACKWARD.values()):
        for space in ("smem", "tmem"):
            lines = render_memory(plan).partition(f"\n{space}: ")[2].partition("```")[0]
            places = re.findall(r"^\S+ +\[ *(\d+), *(\d+)\) \|(.*)\|$", lines, re.MULTILINE)
            spans = [(int(start), int(stop)) for start, stop, _ in places]
            for number, (start, stop, bar) in enumerate(places):
                others = spans[:number] + spans[number + 1 :]
                shares = any(low < int(stop) and int(start) < high for low, high in others)
                assert shares or "=" not in bar, (plan.name, lines)


def test_thin_buffers_are_drawn() -> None:
    """A buffer below half a character still has a mark."""
    line = next(x for x in render_memory(ONE).splitlines() if x.startswith("barriers "))
    assert line.endswith("||")


def test_graph() -> None:
    """One node per role, one edge per pair of roles with all of its signals."""
    lines = render_graph(ONE).splitlines()
    assert lines[0] == "flowchart LR"
    assert '    softmax0["softmax0<br/>warps 0-3"]' in lines
    assert '    load -->|"kv_full<br/>q0_full<br/>q1_full"| mma' in lines
    assert '    softmax0 -->|"p0_full_o0_scaled<br/>p0_last"| mma' in lines
    assert sum("-->" in line for line in lines) == 14


def test_program() -> None:
    """Waits, arrives, work with amounts, loops with offsets, what is before and after them."""
    text = render_program(ONE.role("correction"))
    assert text.startswith("correction (warps 8-11, 80 registers)\n  once per CTA:\n")
    assert "\n    repeat kv_tiles - 1:\n      wait stats0_full\n" in text
    assert "read o0: tmem load 128 columns, reads o0, writes o0, times rescale_rate" in text
    mma = render_program(ONE.role("mma"))
    assert "QK0: mma 128 x 128 x 128, reads q0 kv:K, writes s0, asynchronous" in mma
    assert "arrive s0_full after tensor" in mma
    load = render_program(ONE.role("load"))
    assert "load K: load 32768 B from HBM, writes kv:K" in load
    waits = 3 * "    wait kv_empty\n" + "    wait q0_empty\n    wait q1_empty"
    assert load.endswith("\n  at the end:\n" + waits)
    reduce = render_program(BACKWARD["deterministic pair"].role("reduce"))
    assert "wait for turn: poll a counter" in reduce
    reduce = render_program(PUBLISHED["deterministic pair"].role("reduce"))
    assert "sync reduce: barrier" in reduce


def test_explain_prints_the_plan(explain: Run) -> None:
    """Memory use, both tables, both maps, the verdict, within the width of the terminal."""
    code, out, _ = explain("--cta-group", "1", "--causal")
    assert code == 0
    assert " ".join(out.split()).startswith(
        "forward d128x128 cta_group 1 on B200: 16 warps, 148 CTAs resident, 231728 of 232448 bytes "
        "of shared memory, 512 of 512 columns of tensor memory"
    )
    assert "The static checks find nothing." in out
    assert all(signal.name in out for signal in ONE.signals)
    assert "per work tile:" not in out
    assert max(len(line) for line in out.splitlines()) <= 100


def test_explain_chooses_as_flash_attention_does(explain: Run) -> None:
    """Pairs without a mask at head dim 128, one CTA with one; what is given wins."""
    chosen = {}
    for arguments in ((), ("--causal",), ("--head-dim", "64"), ("--pass", "backward"),
                      ("--pass", "backward", "--cta-group", "1")):  # fmt: skip
        code, out, _ = explain("--json", *arguments)
        assert code == 0
        chosen[arguments] = json.loads(out)["cta_group"]
    assert list(chosen.values()) == [2, 1, 1, 2, 1]


def test_explain_json(explain: Run) -> None:
    """The report for machines."""
    code, out, _ = explain("--json", "--q-tiles", "1", "--tile-n", "64", "--kv-stages", "4")
    report = json.loads(out)
    assert (code, report["schema_version"], report["findings"]) == (0, 1, [])
    assert report["memory"]["smem_bytes_limit"] == B200.smem_bytes_per_cta
    ring = next(row for row in report["buffers"] if row["buffer"] == "kv")
    assert (ring["stages"], ring["size"]) == (4, 64 * 128 * 2 // report["cta_group"])
    assert set(report["programs"]) == {row["role"] for row in report["roles"]}


def test_explain_programs_and_mermaid(explain: Run) -> None:
    """What the roles do, or the graph alone."""
    assert "per work tile:" in explain("--programs")[1]
    assert explain("--mermaid", "--cta-group", "1", "--causal")[1] == render_graph(ONE) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pass sideways", "--pass must be one of forward, backward; got 'sideways'"),
        ("--head-dim-v 192 --q-tiles 2", "TMEM plan needs 640 columns"),
        ("--machine b100", "machine must be a .toml file or one of b200"),
        ("--machine h200 --kernel blackwell", "needs tensor memory"),
        ("--head-dim 0", "head_dim must be between"),
        ("--cta-group 3", "cta_group must be between 1 and 2; got 3"),
        ("--kv-stages 1", "kv_stages must be between 2 and 32; got 1"),
        ("--pass backward --tile-n 64", "--tile-n is an option of the forward pass; got 64"),
        ("--pass backward --head-dim 192", "head_dim must be at most 128"),
        (
            "--pass backward --head-dim 192 --head-dim-v 128 --kernel published",
            "TMEM plan needs 576 columns",
        ),
        ("--deterministic", "--deterministic is an option of the backward pass; got True"),
        ("--kernel x", "no forward of x is modelled; machine B200"),
        ("--json --mermaid", "--mermaid and --json exclude each other"),
    ],
)
def test_explain_refuses_bad_input(explain: Run, arguments: str, message: str) -> None:
    """One line on stderr, exit code 2."""
    code, out, err = explain(*arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_explain_fails_with_findings(explain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsound plan is shown with what is wrong, exit code 1."""
    broken = with_buffer(ONE, "p0", overlaps={})
    monkeypatch.setattr("fa4.commands.explain.build", lambda *_: broken)
    code, out, _ = explain()
    assert code == 1
    assert "declared_overlaps: s0, p0: share 64 of tmem undeclared" in out


def test_module_names_stay_importable() -> None:
    """The package exports functions whose modules keep their names."""
    import fa4.plan.backward
    import fa4.plan.forward

    assert fa4.plan.forward.forward_plan is forward_plan
    assert fa4.plan.backward.backward_plan is backward_plan
