"""The tables and numbers of docs/design.md: what the searches found, what an H200 made of one.

`python -m lab.pages.design_tables` writes the tables between their markers in that page; its
numbers are claims (`python -m lab.pages.claims`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fa4.plan.counted_math import PIPES
from fa4.plan.render import markdown_table
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "design.md"
SHOWN = 3  # leaders of a call, beside the best of other shapes
OTHERS = 3


def calls() -> dict[str, Any]:
    """Report of each search."""
    found: dict[str, Any] = read_record("design")["calls"]
    return found


def problems() -> dict[str, Any]:
    """What was measured of the search's Hopper designs, by head dim."""
    return {f"d{x['problem']['head_dim']}": x for x in read_record("hopper_designs")["problems"]}


def words(settings: Mapping[str, Any]) -> str:
    """A design in words."""
    buffers = f", {settings['buffers']} buffers each" if settings["buffers"] > 1 else ""
    scores = "one product for both" if settings["joint_scores"] else "a product for each"
    groups = settings["groups"]
    parts = [
        f"{settings['q_tiles']} Q tiles" if settings["q_tiles"] > 1 else "1 Q tile",
        f"{groups} groups, {scores}" if groups > 1 else "1 group",
        f"pieces of {settings['piece']} of {settings['tile_n']} keys{buffers}",
        "pair" if settings["cta_group"] == 2 else "one CTA",
        "inline" if settings["correction"] == "inline" else "correction warps",
        f"{settings['maximum']} maximum",
        f"sums {settings['row_sums']}",
        f"P from {settings['split_p']:g}",
        "no polynomial" if not settings["exp2"] else f"polynomial {settings['exp2']}",
    ]
    if settings["softmax"] == "interleaved":
        parts.append("interleaved")
    if not settings["ping_pong"]:
        parts.append("scores last")
    return "; ".join(parts)


def render_found() -> str:
    """The leaders of each search."""
    rows = []
    for name, report in calls().items():
        today = report["today"]
        power = today["sustained_least_tflops"]
        rows.append((name, "today's", span(today), "", said(power), ""))
        chosen = [*report["leaders"][:SHOWN], *report["other_shapes"][:OTHERS]]
        for row in chosen:
            low, high = row["gain_interval"]
            power = row["sustained_least_tflops"]
            rows.append(
                ("", words(row["settings"]), span(row), f"{low:.2f} to {high:.2f}", said(power),
                 f"{row['often_rescaled_tflops']:.0f}")
            )  # fmt: skip
    titles = ("call", "design", "TFLOP/s by all sets", "times today's", "at its power, least",
              "often rescaled")  # fmt: skip
    return markdown_table(titles, rows)


def span(row: Mapping[str, Any]) -> str:
    """From the least to the most."""
    return f"{row['least_tflops']:.0f} to {row['most_tflops']:.0f}"


def said(power: float | None) -> str:
    """A rate; nothing where nobody knows what operations take."""
    return "" if power is None else f"{power:.0f}"


def render_pruned() -> str:
    """What was looked at, and why most is no design."""
    rows = []
    for name, report in calls().items():
        pruned = {kind: row["count"] for kind, row in report["pruned"].items()}
        rows.append(
            (name, str(report["judged"]), str(report["can_run"]), f"{report['cpu_seconds']:.0f}",
             ", ".join(f"{kind} {count}" for kind, count in pruned.items()), report["ended"])
        )  # fmt: skip
    titles = ("call", "designs", "can run", "CPU s", "pruned", "ended by")
    return markdown_table(titles, rows)


def render_why() -> str:
    """Why the first leads, and what would decide."""
    rows = []
    for name, report in calls().items():
        chain = "; ".join(f"{x['role']} {x['what']} {x['cycles']:.0f}"
                          for x in report["why"]["chain"][:3])  # fmt: skip
        figure = report["deciding"]
        at_ends = ", ".join(f"{ratio:.3f} at {end:g}" for ratio, end in zip(
            figure["first_over_second"], figure["ends"], strict=True))  # fmt: skip
        rows.append(
            (name, report["why"]["limited_by"], f"{report['why']['step_cycles']:.0f}", chain,
             f"`{figure['figure']}`: {at_ends}")
        )  # fmt: skip
    titles = ("call", "depends most on", "cycles of a step", "most of its chain",
              "first over the next shape")  # fmt: skip
    return markdown_table(titles, rows)


def render_hopper() -> str:
    """Predicted and measured on an H200, the predicted order."""
    parts = []
    for name, found in problems().items():
        rows = []
        named = sorted((x for x in found["rows"] if x["predicted"]),
                       key=lambda x: -x["predicted"]["least"])  # fmt: skip
        for row in named:
            fields, said_of = row["fields"], row["predicted"]
            kind = "best" if " best " in row["name"] else "random"
            tile = f"{64 * fields['consumers']} x {fields['tile_n']}"
            extras = [f"{fields['kv_stages']} stages", f"P from {fields['p_source']}",
                      "overlap" if fields["overlap"] else "serial",
                      *(["turns"] if fields["ping_pong"] else []),
                      *(["ahead"] if fields["ahead"] else []), fields["scheduler"]]  # fmt: skip
            error = said_of["tflops"] / row["tflops"] - 1
            rows.append((kind, f"{tile}, {', '.join(extras)}", f"{said_of['least']:.0f}",
                         f"{row['tflops']:.0f}", f"{error:+.0%}"))  # fmt: skip
        rows.append(("today", "what a call gets", "", f"{found['today_tflops']:.0f}", ""))
        table = markdown_table(("", f"{name}, 16k keys", "predicted, least", "measured", "error"),
                               rows)  # fmt: skip
        parts.append(table)
    return "\n\n".join(parts)


def code() -> dict[str, Any]:
    """What was compiled: case -> kernel -> figures."""
    found: dict[str, Any] = read_record("halves_code")["cases"]
    return found


def issued(amounts: Mapping[str, float]) -> float:
    """Issue slots of instructions by pipe, of which packed ones count 2."""
    return sum(amounts.values()) - amounts["fma"] / 2


def render_code() -> str:
    """The kernel with halves beside the other one: registers, and a softmax thread's loop."""
    rows = []
    for case, kernels in code().items():
        for kernel, found in kernels.items():
            plan, made = found["planned"], found["amounts"]
            pipes = ", ".join(f"{pipe} {made[pipe]:.0f} ({plan[pipe]:.0f})" for pipe in PIPES)
            rows.append(
                (case, kernel, " / ".join(map(str, found["budgets"])), str(found["spills"]),
                 f"{found['slots'] / found['elements']:.2f}", f"{found['highest_register'] + 1}",
                 f"{issued(made):.0f} ({issued(plan):.0f})", pipes)
            )  # fmt: skip
    titles = ("call", "kernel", "registers", "spills", "slots a score", "used", "arithmetic (plan)",
              "by pipe (plan)")  # fmt: skip
    return markdown_table(titles, rows)


def render_compiled() -> str:
    """What the simulator says with the plan's amounts, and with the compiled ones."""
    found = read_record("halves_code")["predictions"]
    rows = []
    for way in ("planned", "compiled"):
        low, high = found[f"gain, {way}"]
        for kernel, gain in (("blackwell", ""), ("halves", f"{low:.2f} to {high:.2f}")):
            row = found[f"{kernel}, {way}"]
            rows.append((way, kernel, span(row), gain, said(row["sustained_least_tflops"])))
    titles = ("amounts", "kernel", "TFLOP/s by all sets", "times", "at its power, least")
    return markdown_table(titles, rows)


def compiled_claims() -> dict[str, Callable[[], str]]:
    """Numbers of the text on the kernel."""

    def of(key: str, field: str) -> float:
        found: float = read_record("halves_code")["predictions"][key][field]
        return found

    def apart(pipes: Callable[[Mapping[str, float]], float]) -> str:
        one = code()["d128"]["halves"]
        return f"{pipes(one['amounts']) / pipes(one['planned']) - 1:+.1%}"

    def peer(name: str) -> str:
        cases = read_record("codegen")["cases"]
        case = next(x for x in cases if (x["head_dim"], x["mask"]) == (128, "full"))
        kernel = next(x for x in case["kernels"] if x["name"] == name)
        return f"{kernel['figures']['softmax_slots'] / 128:.2f}"

    return {
        "halves_code: least": lambda: f"{of('halves, compiled', 'least_tflops'):.0f}",
        "halves_code: most": lambda: f"{of('halves, compiled', 'most_tflops'):.0f}",
        "halves_code: at its power": lambda: (
            f"{of('halves, compiled', 'sustained_least_tflops'):.0f}"
        ),
        "halves_code: gain, least": lambda: (
            f"{read_record('halves_code')['predictions']['gain, compiled'][0]:.2f}"
        ),
        "halves_code: gain, most": lambda: (
            f"{read_record('halves_code')['predictions']['gain, compiled'][1]:.2f}"
        ),
        "halves_code: arithmetic": lambda: apart(issued),
        **{
            f"halves_code: {pipe}": lambda pipe=pipe: apart(lambda found: found[pipe])
            for pipe in PIPES
        },
        "codegen: a score, flash-attn-4": lambda: peer("flash-attn-4"),
        "codegen: a score, cuDNN": lambda: peer("cudnn"),
        "halves_faults: executed": lambda: str(read_record("halves_faults")["executed"]),
        "halves_faults: caught": lambda: str(read_record("halves_faults")["caught"]),
        "halves_faults: equivalent": lambda: str(read_record("halves_faults")["equivalent"]),
        "halves_faults: survived": lambda: str(read_record("halves_faults")["survived"]),
    }


TABLES = MarkedTables(
    "python -m lab.pages.design_tables",
    {
        "found": render_found,
        "pruned": render_pruned,
        "why": render_why,
        "code": render_code,
        "compiled": render_compiled,
        "hopper": render_hopper,
    },
)


def first(call: str) -> dict[str, Any]:
    """The leader of a search."""
    found: dict[str, Any] = calls()[call]["leaders"][0]
    return found


def designs_a_minute(call: str) -> str:
    """That two cores judge, in hundreds."""
    report = calls()[call]
    return str(int(2 * 60 * report["judged"] / report["cpu_seconds"] / 100) * 100)


def of_call(call: str, which: str) -> dict[str, Callable[[], str]]:
    """Claims of a search's leader: rates and gains."""
    return {
        f"design: {which}, least": lambda: f"{first(call)['least_tflops']:.0f}",
        f"design: {which}, most": lambda: f"{first(call)['most_tflops']:.0f}",
        f"design: {which}, gain, least": lambda: f"{first(call)['gain_interval'][0]:.2f}",
        f"design: {which}, gain, most": lambda: f"{first(call)['gain_interval'][1]:.2f}",
    }


CLAIMS: dict[str, Callable[[], str]] = {
    **compiled_claims(),
    **of_call("d128", "d128"),
    **{name: said for name, said in of_call("d64", "d64").items() if "gain" in name},
    **of_call("d128 causal", "d128 causal"),
    "design: d128, at its power": lambda: f"{first('d128')['sustained_least_tflops']:.0f}",
    "design: today, at its power": lambda: (
        f"{calls()['d128']['today']['sustained_least_tflops']:.0f}"
    ),
    "design: d128, often rescaled": lambda: f"{first('d128')['often_rescaled_tflops']:.0f}",
    "design: today, least": lambda: f"{calls()['d128']['today']['least_tflops']:.0f}",
    "design: today, most": lambda: f"{calls()['d128']['today']['most_tflops']:.0f}",
    "design: designs a minute": lambda: designs_a_minute("d128"),
    "design: causal designs a minute": lambda: designs_a_minute("d128 causal"),
    **{
        f"hopper_designs: {name}, {what}": lambda name=name, key=key, form=form: format(
            problems()[name][key], form
        )
        for what, key, form in (
            ("rank", "rank_correlation", ".2f"),
            ("regret", "regret", ".1%"),
            ("regret to today", "regret_to_today", ".1%"),
            ("bias of the best", "bias_of_best", ".0%"),
        )
        for name in (("d128", "d64") if what in ("rank", "regret") else ("d128",))
    },
}


if __name__ == "__main__":
    TABLES.write(PAGE)
