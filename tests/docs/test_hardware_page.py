"""lab/hardware/README.md: the machines and result files that it names are those on record."""

from __future__ import annotations

import re

from lab.hardware import RESULTS
from lab.records import read_record

FOLDER = RESULTS.parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def unlike_the_records(page: str) -> list[str]:
    """Rows of the table whose result file names no such GPU, and result files without a row;
    a table of numbers goes with the JSON file of its name."""
    rows = re.findall(r"^\| `[^|]*\|[^|]*\| ([^|]+) \| `(results/[^`]+)` \|$", page, re.MULTILINE)
    wrong = [name for gpu, name in rows if gpu not in (FOLDER / name).read_text(encoding="utf-8")]
    listed = [FOLDER / name for _, name in rows]
    files = {path for path in RESULTS.iterdir() if path.with_suffix(".json") not in listed}
    return wrong + sorted(path.name for path in files if path not in listed)


def test_machines_and_result_files_are_those_on_record() -> None:
    """Every result file has its row; another GPU, or a row left out, would be seen."""
    assert unlike_the_records(PAGE) == []
    assert unlike_the_records(PAGE.replace("NVIDIA H100", "NVIDIA B200", 1)) != []
    assert unlike_the_records(re.sub(r"(?m)^.*results/h200_exp2.*\n", "", PAGE)) != []


def test_the_files_it_names_exist() -> None:
    """Suites, scripts and modules of the commands."""
    named = set(re.findall(r"`([a-z0-9_]+(?:\.py|/(?:\w+\.py)?))`", PAGE))
    named = {f"lab/hardware/{name}" for name in named}
    named |= set(re.findall(r"\b(?:lab|docs|fa4)/[\w/]+\.(?:py|md)\b", PAGE))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m ([\w.]+)", PAGE)}
    root = FOLDER.parents[1]
    assert len(named) > 10
    assert [name for name in sorted(named) if not (root / name).exists()] == []


def numbers_of(page: str) -> dict[str, list[str]]:
    """Numbers that the rows of the Hopper kernel's suites say, by the suite's result file."""
    rows = {name: row for row in page.splitlines()
            for name in re.findall(r"`results/(\w+)\.json` \|$", row)}  # fmt: skip
    patterns = {
        "hopper_launches": r"([\d,]+) random calls .* by (\d+) kernels",
        "hopper_sweep": r"(\d+) calls, each",
        "first_tensor_h100": r"(\d+) calls with",
        "outside_boxes_h100": r"(\d+) programs",
        "guarded_calls_h100": r"([\d,]+) random calls .* by (\d+) kernels",
        "guarded_calls_h200": r"([\d,]+) other calls by (\d+) kernels",
        "warpgroup_bits": r"(\d+) calls .* launched (\d+) times.* in ([\d.]+)% of O's elements "
        r"and (\d+)% of LSE's",
    }
    found = {name: re.search(pattern, rows[name]) for name, pattern in patterns.items()}
    return {name: list(match.groups()) if match else [] for name, match in found.items()}


def test_numbers_are_those_on_record() -> None:
    """Calls, kernels, launches, points of the sweep and equal shares; another one would be seen."""
    launches, sweep, bits = (
        read_record(name) for name in ("hopper_launches", "hopper_sweep", "warpgroup_bits")
    )
    boxes = read_record("outside_boxes_h100")
    guarded = {gpu: read_record(f"guarded_calls_{gpu}") for gpu in ("h100", "h200")}
    firsts = {gpu: read_record(f"first_tensor_{gpu}") for gpu in ("h100", "h200")}
    assert not any(found["wrong"] for found in (*guarded.values(), *firsts.values()))
    assert len(firsts["h100"]["calls"]) == len(firsts["h200"]["calls"])
    share = bits["equal_share"]
    recorded = {
        "hopper_launches": [f"{launches['launches']:,}", str(launches["kernels"])],
        "hopper_sweep": [str(sweep["points"])],
        "first_tensor_h100": [str(len(firsts["h100"]["calls"]))],
        "outside_boxes_h100": [str(len(boxes["verdicts"]))],
        **{
            f"guarded_calls_{gpu}": [f"{found['calls']:,}", str(found["kernels"])]
            for gpu, found in guarded.items()
        },
        "warpgroup_bits": [str(len(bits["calls"])), str(bits["launches"]),
                           f"{100 * share['compiled o']:.1f}",
                           f"{100 * share['compiled lse']:.0f}"],
    }  # fmt: skip
    assert numbers_of(PAGE) == recorded
    assert numbers_of(PAGE.replace(f"{sweep['points']} calls", "1 calls")) != recorded
    kernels = guarded["h200"]["kernels"]
    assert (
        numbers_of(PAGE.replace(f"by {kernels} kernels", f"by {kernels + 1} kernels")) != recorded
    )
