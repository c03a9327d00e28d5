"""The explorer in a browser, from the disk: what is changed changes what is shown, and is right."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fa4 import cli
from fa4.sim.options import build
from lab.pages.browser import Tab, open_tab
from tests.web.conftest import (
    NARROW,
    PICTURES,
    WIDE,
    Explorer,
    Open,
    what_is_wrong,
)

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]

# What may show only in the numbers: a step looks the same whatever the length and launch order.
NUMBERS_ONLY = ("seqlen", "mask", "scheduler", "order")
MEMORY_ONLY = ("kv_pairs",)  # more places for loads that nobody waits for: the memory shows them
STATES = {
    "plain": "t=1300",
    "backward": "pass=bwd&t=2000&role=compute",
    "hopper": "machine=h200&kernel=auto&t=900",
    "causal": "mask=causal&t=400",
    "compared": "compare=1&b.q_tiles=1&t=700",
    "removed": "off=mma/wait/p0_full_o0_scaled&t=1200",
    "refused": "tile_n=256",
}


def figures(tab: Tab) -> str:
    """Everything below the controls."""
    found: str = tab.page.locator("#main").inner_html()
    return found


def test_it_opens_from_the_disk(opened: Open, explorer: Explorer) -> None:
    tab = opened()
    assert tab.page.title() == "fa4 explore" and tab.tflops is not None
    assert tab.page.locator("#timeline svg [data-event]").count() > 150
    for name in ("timeline", "memory", "barriers", "program", "verdict", "roofline", "chain",
                 "levers"):  # fmt: skip
        assert len(tab.text(f"#{name}")) > 40, name


def test_what_hardly_differs_is_undecided(opened: Open) -> None:
    """Of two selections less than 3% apart, and of no others."""
    for change, expected in (("exp2=off", True), ("q_tiles=1", False)):
        said = opened(f"compare=1&b.{change}").text("p.ratio")
        ratio = float(said.split()[2])
        assert (abs(ratio - 1) < 0.03) == expected == ("undecided" in said), said


def test_a_page_that_asks_or_complains_is_noticed(browser: Any, tmp_path: Path) -> None:
    """Planted: an error, a request to the disk, and one elsewhere."""
    file = tmp_path / "page.html"
    for text, message in (
        ("<script>throw new Error('planted')</script>", "planted"),
        ("<script>console.error('planted')</script>", "error: planted"),
        ("<img src='other.png'>", "other.png"),
        ("<script src='http://127.0.0.1:9/x.js'></script>", "http://127.0.0.1:9/x.js"),
    ):
        file.write_text(f"<link rel=icon href='data:,'>{text}")
        tab = open_tab(browser, file, width=WIDE)
        tab.page.wait_for_timeout(50)
        tab.page.close()
        assert any(message in one for one in what_is_wrong(tab, file)), text
    file.write_text("<link rel=icon href='data:,'><p>calm</p>")
    assert what_is_wrong(open_tab(browser, file, width=WIDE), file) == []


def test_every_control_changes_picture_and_numbers(opened: Open, explorer: Explorer) -> None:
    """From points that have them: forward, backward, and Hopper for what only they have."""
    seen = set()
    for fragment in ("", "pass=bwd", "machine=h200"):
        tab = opened(fragment)
        for control in explorer.head["controls"]:
            key = control["key"]
            if tab.page.locator(f"#set-{key}").evaluate("one => one.disabled"):
                continue
            pictures, numbers = set(), set()
            before = tab.page.evaluate("location.hash")
            for choice in control["choices"]:
                tab.choose(key, choice["key"])
                if tab.tflops is not None:
                    memory = tab.page.locator("#memory").inner_html()
                    pictures.add(memory if key in MEMORY_ONLY else tab.picture)
                    numbers.add(tab.tflops)
                else:
                    numbers.add(0.0)
                    assert tab.page.locator("#refusal").is_visible()
            assert len(numbers) > 1, key
            if len(numbers - {0.0}) > 1 and key not in NUMBERS_ONLY:
                assert len(pictures) > 1, key
            seen.add(key)
            tab.page.evaluate("(hash) => { location.hash = hash || '#'; }", before)
            tab.page.wait_for_timeout(30)
    assert seen == {control["key"] for control in explorer.head["controls"]}


@pytest.mark.parametrize(
    "fragment",
    ["", "seqlen=1k&mask=causal", "q_tiles=1&tile_n=256", "pass=bwd&order=fixed&mask=causal",
     "machine=h200", "machine=h200&seqlen=1k&warpgroups=2-turns",
     "cta_group=1&rescale_rate=1&exp2=off", "mask=causal&scheduler=lpt"],
)  # fmt: skip
def test_numbers_are_those_of_the_command(
    fragment: str, opened: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page names a command; what that prints is what it shows."""
    tab = opened(fragment)
    command = shlex.split(tab.text(".command code"))
    assert command[:2] == ["fa4", "predict"]
    with pytest.raises(SystemExit) as left:
        cli.main([*command[1:], "--json"])
    assert left.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert tab.tflops == pytest.approx(report["tflops"], rel=1e-6)
    assert tab.text("[data-tflops]") == f"{report['tflops']:,.0f}"
    cells = tab.page.locator(".cells .cell b").all_inner_texts()
    assert cells[0] == f"{report['peak_share']:.1%}"
    us = report["seconds"] * 1e6
    assert cells[1] == (f"{us:,.1f} µs" if us < 1000 else f"{us / 1000:,.2f} ms")
    assert cells[2] == f"{max(report['unit_busy'].values()):.0%}"
    assert cells[-1] == f"{report['imbalance']:.1%}"
    with pytest.raises(SystemExit):
        cli.main(["trace", *command[2:], "--out", "/dev/null/x.json"])
    assert "Not a directory" in capsys.readouterr().err  # it takes the same options


@pytest.mark.parametrize(
    ("fragment", "name"),
    [
        ("", "dense causal d128"),
        ("pass=bwd", "backward, d128 pair"),
        ("pass=bwd&cta_group=1", "backward, dense d128"),
        ("machine=h200", "Hopper, three warpgroups"),
        ("machine=h200&warpgroups=2-turns", "Hopper, two in turns"),
    ],
)
def test_removing_a_barrier_shows_its_verdict(
    fragment: str, name: str, opened: Open, explorer: Explorer
) -> None:
    """Every switch of every role, against the recorded file."""
    tab = opened(fragment)
    kernel = next(x for x in explorer.head["verdicts"]["kernels"] if x["kernel"] == name)
    recorded: dict[str, list[list[Any]]] = {}
    for row in kernel["removals"]:
        for step in row["steps"]:
            recorded.setdefault("/".join(step), []).append([row["verdict"], str(row["ptx_line"])])
    tried = set()
    for name in tab.page.locator(".tabs button").evaluate_all("all => all.map((one) => one.id)"):
        tab.page.locator(f"#{name}").click()
        keys = tab.page.locator(".switch").evaluate_all("all => all.map((one) => one.dataset.key)")
        for key in dict.fromkeys(keys):
            tab.page.locator(f'.switch[data-key="{key}"]').first.click()
            shown = tab.page.locator(".removal").evaluate_all(
                "all => all.map((one) => [one.dataset.verdict, one.dataset.line])"
            )
            assert shown == recorded[key], key
            tab.page.get_by_role("button", name="put it back").click()
            assert tab.page.locator(".removal").count() == 0
            tried.add(key)
    assert tried == set(recorded)


def test_a_race_and_a_deadlock_in_words(opened: Open) -> None:
    race = opened("off=mma/wait/p0_full_o0_scaled").text("#verdict")
    assert "race" in race and "tcgen05.st" in race and "nothing orders the write" in race
    dead = opened("off=load/arrive/kv_full").text("#verdict")
    assert "deadlock" in dead and re.search(r"mma waits for kv_full phase \d+ of", dead)
    turns = opened("machine=h200&warpgroups=2-turns&off=consumer1/arrive/turn0").text("#verdict")
    assert "deadlock" in turns and "consumer0 waits for turn0" in turns
    same = opened("off=load/wait/kv_empty").text("#verdict")
    assert "the same program" in same


def test_the_address_holds_the_state(opened: Open) -> None:
    tab = opened()
    tab.choose("cta_group", "1")
    tab.choose("mask", "causal")
    tab.page.keyboard.press("b")
    tab.choose("q_tiles", "1")
    tab.page.get_by_role("button", name="side by side").click()
    tab.page.locator("#role-softmax0").click()
    tab.page.locator(".switch").first.click()
    tab.page.locator("#cycle").evaluate(
        "one => { one.value = 1234; one.dispatchEvent(new Event('input')); }"
    )
    tab.until("location.hash.includes('t=1234')")
    hash_ = tab.page.evaluate("location.hash.slice(1)")
    assert "b.q_tiles=1" in hash_ and "on=b" in hash_
    again = opened(hash_)
    assert figures(again) == figures(tab)
    checked = "all => all.map((one) => one.id)"
    assert again.page.locator("input:checked").evaluate_all(checked) == tab.page.locator(
        "input:checked"
    ).evaluate_all(checked)


def test_an_address_of_nonsense_is_ignored(opened: Open) -> None:
    plain = opened()
    for fragment in ("machine=b100&t=abc&role=zzz&off=a/b/c", "t=1e99", "b.x=1&theme=pink", "%%%"):
        assert opened(fragment).tflops == plain.tflops


def test_keys_and_playing(opened: Open) -> None:
    tab = opened()
    cycle = "Number(document.getElementById('cycle').value)"
    tab.page.keyboard.press("ArrowRight")
    first = tab.page.evaluate(cycle)
    assert first > 0 and tab.text("#said").startswith("Cycle")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate(cycle) < first
    tab.page.keyboard.press("Space")
    tab.until(f"{cycle} > 60")
    tab.page.keyboard.press("Space")
    still = tab.page.evaluate(cycle)
    tab.page.wait_for_timeout(120)
    assert tab.page.evaluate(cycle) == still
    tab.page.keyboard.press("c")
    assert tab.page.locator("#timeline svg").count() == 2
    role = tab.page.locator(".tabs [aria-selected=true]").get_attribute("id")
    tab.page.keyboard.press("]")
    assert tab.page.locator(".tabs [aria-selected=true]").get_attribute("id") != role
    tab.page.keyboard.press("?")
    assert tab.page.locator("#help").is_visible()
    for word in ("CTA", "TMEM", "MUFU", "TMA", "mbarrier", "p0_full_o0_scaled", "S, P, O"):
        assert word in tab.text("#help"), word
    tab.page.keyboard.press("Escape")
    tab.until("!document.getElementById('help').open")
    tab.page.keyboard.press("t")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_line_at_the_cursor_is_the_roles(opened: Open) -> None:
    """Dragging in the timeline moves the line, the tabs and the phases."""
    tab = opened("role=softmax0")
    lines = set()
    for t in range(0, 2800, 400):
        tab.page.evaluate("(t) => { location.hash = `role=softmax0&t=${t}`; }", t)
        tab.until(f"document.getElementById('cycle').value == '{t}'")
        here = tab.page.locator(".line.here .what").all_inner_texts()
        assert len(here) == 1
        now = tab.text("#role-softmax0 .now")
        assert now in (here[0], "·")
        lines.add(here[0])
    assert len(lines) > 3


def test_phases_go_on_by_one_a_step(opened: Open, explorer: Explorer) -> None:
    """What the barriers show at the start and two steps later."""
    counts = "all => Object.fromEntries(all.map((one) => [one.querySelector('.name').textContent," \
        " parseInt(one.querySelector('.count').textContent)]))"  # fmt: skip
    tab = opened("t=600")
    length = float(tab.page.locator("#cycle").get_attribute("max"))
    first = tab.page.locator(".signal").evaluate_all(counts)
    tab.page.evaluate("(t) => { location.hash = `t=${t}`; }", round(600 + length / 2))
    tab.page.wait_for_timeout(50)
    later = tab.page.locator(".signal").evaluate_all(counts)
    steps = {name: later[name] - first[name] for name in first}
    assert steps["s0_full"] == steps["p0_full_o0_scaled"] == 1
    assert steps["kv_full"] == 2  # a K and a V
    assert steps["q0_full"] == steps["epi0_full"] == 0


def test_what_is_refused_says_why(opened: Open) -> None:
    tab = opened("tile_n=256")
    with pytest.raises(ValueError) as refused:
        build({"tile_n": "256", "seqlen": "8k", "batch": "4"}).predict()
    assert tab.text("#refusal .reason") == str(refused.value)
    assert not tab.page.locator("#figures").is_visible()
    tab.page.locator(".ways button").first.click()
    assert tab.tflops is not None and tab.page.locator("#figures").is_visible()


def test_levers_do_what_they_say(opened: Open) -> None:
    tab = opened()
    before, lever = tab.tflops, tab.page.locator(".lever").first
    gain, tflops = lever.locator(".gain").inner_text(), lever.locator(".cycles").inner_text()
    lever.click()
    assert tab.tflops and before and f"{tab.tflops:,.0f}" == tflops
    assert f"{tab.tflops / before - 1:+.1%}".replace("-", "\N{MINUS SIGN}") == gain


def test_every_figure_has_its_table(opened: Open) -> None:
    tab = opened()
    tables = tab.page.locator("details.table")
    for number in range(tables.count()):
        tables.nth(number).locator("summary").click()
        tables.nth(number).locator("tbody tr").first.wait_for(state="attached")
        assert tables.nth(number).locator("tbody tr").count() > 5
    for figure in ("timeline", "memory", "barriers", "roofline"):
        assert tab.page.locator(f"#{figure} details.table").count() == 1


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("look", ["light", "dark", "narrow"])
def test_accessible_and_not_too_wide(name: str, look: str, opened: Open, axe: str) -> None:
    """axe finds nothing serious; nothing is wider than the window; a picture to look at."""
    scheme = "dark" if look == "dark" else "light"
    tab = opened(
        STATES[name], color_scheme=scheme, **({"width": NARROW} if look == "narrow" else {})
    )
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab.page.screenshot(path=PICTURES / f"{name}-{look}.png", full_page=True)
    tab.page.evaluate(axe)
    found = tab.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        (one["id"], [node["html"][:120] for node in one["nodes"]][:3])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
