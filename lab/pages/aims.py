"""What the simulator is meant to reach beside what it does by the records: a table of its page."""

from __future__ import annotations

from collections.abc import Mapping
from operator import ge, lt
from typing import Any

from fa4.plan.render import markdown_table
from lab.pages.design_tables import code, issued
from lab.records import read_record


def render_aims() -> str:
    """What the model is meant to reach, and what it does by the records."""
    found = read_record("validation")
    kept, left = found["b200"]["kept out"], found["own h200"]
    errors = {group: models["simulator"]["mape_percent"] for group, models in kept.items()}
    ahead = {
        key: sum(better(models["simulator"][key], models[other][key])
                 for models in kept.values() for other in ("formula", "forest"))
        for key, better in (("mape_percent", lt), ("rank_correlation", ge))
    }  # fmt: skip
    compared, peer = 2 * len(kept), found["h200"]["all, by the shipped constants"]
    kinds = {group: error for group, error in errors.items() if " " in group}
    worst = max(kinds, key=lambda group: kinds[group])
    speeds = read_record("sim")
    minute = min(120 * x["judged"] / x["cpu_seconds"]
                 for x in read_record("design")["calls"].values())  # fmt: skip
    rows = (
        ("kept out, B200: mean error", "3%", f"{errors['B200']:.1f}%", errors["B200"] <= 3),
        ("kept out, GB300: mean error", "3%", f"{errors['GB300']:.1f}%", errors["GB300"] <= 3),
        ("kept out, worst kind", "4%", f"{kinds[worst]:.1f}% ({worst})", kinds[worst] <= 4),
        ("kept out, (192, 128): bias", "2%",
         f"{kept['(192, 128)']['simulator']['bias_percent']:+.1f}%",
         abs(kept["(192, 128)"]["simulator"]["bias_percent"]) <= 2),
        *(_aim_of_ratio(name, one) for name, one in found["b200"]["ratios"].items()),
        ("less error than formula and forest", "everywhere",
         f"{ahead['mape_percent']} of {compared}", ahead["mape_percent"] == compared),
        ("rank no worse than theirs", "everywhere",
         f"{ahead['rank_correlation']} of {compared}", ahead["rank_correlation"] == compared),
        ("the other kernel's sweep on an H200: error, rank", "5%, 0.98",
         f"{peer['mape_percent']:.1f}%, {peer['rank_correlation']:.3f}",
         peer["mape_percent"] <= 5 and peer["rank_correlation"] >= 0.98),
        _aim_of_choices("the other kernel's sweep", found["h200"]["choices"]),
        _aim_of_choices("this kernel's sweep", left["choices"]),
        _aim_of_moves(found["h200"]),
        *_aims_of_halves(),
        ("`fa4 design`: designs a minute on two cores", "1000", f"{minute:.0f}", minute >= 1000),
        ("engine: events a second", "2e7",
         f"{min(x['events_per_s'] for x in speeds['engines']):.1e}",
         all(x["events_per_s"] >= 2e7 for x in speeds["engines"])),
        ("`fa4 predict` from a cold start", "2 s",
         f"{speeds['startup_seconds']['fa4 predict']:.1f} s",
         speeds["startup_seconds"]["fa4 predict"] <= 2),
    )  # fmt: skip
    titles = ("what", "aim", "now", "reached")
    return markdown_table(titles, [(*row[:3], "yes" if row[3] else "no") for row in rows])


def _aim_of_choices(what: str, choices: list[dict[str, Any]]) -> tuple[str, str, str, bool]:
    lost = [row["lost_percent"] for row in choices]
    above = sum(x > 2 for x in lost)
    said = f"{max(lost):.1f}%" + (f", above 2% in {above} of {len(lost)}" if above else "")
    return f"{what}: what a chosen tile loses at most", "2%", said, not above


def _aim_of_moves(peer: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    """What the choices lose with each constant a tenth more and less."""
    lost, worst = peer["moved"]["lost_percent"], peer["moved"]["worst"]
    unmoved = max(row["lost_percent"] for row in peer["choices"])
    said = f"{lost[worst]:.1f}%, " + (f"`{worst}`" if lost[worst] > unmoved else "as with none")
    what = "the other kernel's sweep: the same with any constant a tenth off"
    return what, "3%", said, lost[worst] <= 3


def _aims_of_halves() -> tuple[tuple[str, str, str, bool], ...]:
    """Of the kernel that the search found: its speed, its compiled counts, faults planted in it."""
    one, faults = code()["d128"]["halves"], read_record("halves_faults")
    speed = read_record("halves_code")["predictions"]["halves, compiled"]
    held, free = speed["sustained_least_tflops"], speed["least_tflops"]
    made, plan = one["amounts"], one["planned"]
    apart = 100 * (issued(made) / issued(plan) - 1)
    pipes = {pipe: 100 * (made[pipe] / plan[pipe] - 1) for pipe in made}
    found, noticed = faults["executed"] - faults["equivalent"], faults["caught"]
    return (
        ("`halves`, d128, 16k keys: least by all sets, at its power", "1700 TFLOP/s",
         f"{held:.0f} TFLOP/s, {free:.0f} at full clock", held >= 1700),
        ("`halves`, d128: compiled arithmetic over the plan's", "3%", f"{apart:+.1f}%",
         abs(apart) <= 3),
        ("`halves`, d128: the same by pipe", "3%",
         ", ".join(f"{pipe} {x:+.0f}%" for pipe, x in pipes.items()),
         all(abs(x) <= 3 for x in pipes.values())),
        ("`halves`: planted faults that the emulator notices", "95%",
         f"{noticed} of {found} that change an order of events", noticed >= 0.95 * found),
    )  # fmt: skip


def _aim_of_ratio(name: str, ratio: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    """By every set of constants at every length."""
    calls, aim = ratio["calls"].values(), ratio["at_least"]
    least, most = min(x["least"] for x in calls), max(x["most"] for x in calls)
    said = f"{least:.2f} to {most:.2f}, published {ratio['published']:g}"
    return name, f"at least {aim:g}", said, least >= aim
