"""`fa4 bench --from`: a report is believed value by value, and nothing is written before."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.commands.bench import BACKENDS
from fa4.commands.bench_report import checked_report
from lab.records import read_record, record_path
from tests.commands.support import call, refused

ROOT = Path(__file__).resolve().parents[2]
REPORT: dict[str, Any] = read_record("hopper_bench")
REPORT["rows"] = REPORT["rows"][:3]
SHOWN = ("device", "impl", "dtype", "pass", "rows")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values inside of one, objects and lists included."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*path, key))
        if isinstance(inner, (dict, list)):
            found += leaves(inner, (*path, key))
    return found


# What changes the picture; heads and batches may be others, and ratios are not read.
PLACES = [
    path
    for path in leaves({name: REPORT[name] for name in SHOWN}, ())
    if "ratio" not in path and not {"batch", "heads_q", "heads_k"} & set(path)
]
HOSTILE = st.sampled_from(
    [None, -1, -0.5, 0, math.nan, math.inf, -math.inf, True, "", "12", [], {}, [1], {"a": 1}, 1e300]
)


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The report with one value replaced."""
    report = copy.deepcopy(REPORT)
    inner = report
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return report


@settings(max_examples=300)
@given(st.sampled_from(PLACES), HOSTILE)
def test_what_is_read_can_be_shown(path: tuple[Any, ...], value: Any) -> None:
    """Whatever one value is: refused, or every number in what is shown is one that is measured."""
    try:
        found = checked_report(changed(path, value), BACKENDS)
    except ValueError as error:
        assert str(error)
        return
    for row in found["rows"]:
        speeds = [*row["tflops"].values(), *row["ratio"].values(), row["predicted_tflops"] or 1.0]
        assert all(type(x) is float and 0 < x < 1e7 for x in speeds)
        assert row["problem"]["seqlen_q"] > 0 and isinstance(row["problem"]["causal"], bool)
    assert found["rows"] and all(isinstance(found[name], str) for name in SHOWN[:-1])


@settings(max_examples=12)
@given(
    st.sampled_from([path for path in PLACES if "tflops" in path and len(path) == 4]),
    st.sampled_from([None, -1, 0, math.nan, "12"]),
)
def test_a_wrong_speed_leaves_no_picture(path: tuple[Any, ...], value: Any) -> None:
    """One line, exit code 2, and the folder is as empty as before."""
    with TemporaryDirectory() as folder:
        source, figure = Path(folder) / "in.json", Path(folder) / "out.svg"
        source.write_text(json.dumps(changed(path, value)))
        said = refused("bench", "--from", str(source), "--figure", str(figure))
        place = f"rows[{path[1]}].tflops.{path[3]} must be a number of TFLOP/s above 0; got"
        assert place in said and not figure.exists()


def test_ratios_follow_from_the_speeds(tmp_path: Path) -> None:
    """A file's own are not shown."""
    source = tmp_path / "in.json"
    source.write_text(json.dumps(changed(("rows", 0, "ratio", "cudnn"), -7)))
    code, out, _ = call("bench", "--from", str(source), "--json")
    row = json.loads(out)["rows"][0]
    assert code == 0 and row["ratio"]["cudnn"] == row["tflops"]["fa4"] / row["tflops"]["cudnn"]


@pytest.mark.parametrize("version", [None, True, 2, math.inf, "1"])
def test_a_report_of_another_version_is_refused(version: Any) -> None:
    """Its keys may mean something else."""
    with pytest.raises(ValueError, match=r"^schema_version must be 1; got "):
        checked_report(changed(("schema_version",), version), BACKENDS)


@pytest.mark.parametrize(
    ("beside", "value"),
    [
        (("--seqlens", "1k"), "'1k'"),
        (("--dtype", "bf16"), "'bf16'"),
        (("--masks", "full"), "'full'"),
        (("--repeats", "20"), "20"),
        (("--backward",), "True"),
        (("--backends", "fa4"), "'fa4'"),
        (("--head-dims", "64"), "'64'"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(beside: tuple[str, ...], value: str) -> None:
    """Also one that says what the report holds anyway."""
    source = str(record_path("hopper_bench"))
    said = refused("bench", "--from", source, *beside)
    assert f"{beside[0]} says what to measure" in said and f"got {value} beside it" in said
