"""The recorded verdicts name steps of the plans, and count as the campaigns' results do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa4 import designs
from fa4.explore import verdicts
from fa4.explore.verdicts import VERDICTS, read_verdicts
from fa4.plan.schema import Arrive, PipelinePlan, Wait, walk
from fa4.sim.options import build
from lab.records import read_record

KERNELS = read_verdicts()["kernels"]
NAMES = [kernel["kernel"] for kernel in KERNELS]


@pytest.fixture(params=KERNELS, ids=NAMES)
def kernel(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def plan_of(kernel: dict[str, Any]) -> PipelinePlan:
    settings = {"machine": kernel["machine"], "pass": kernel["pass"],
                "causal": "yes" if kernel["causal"] else "no"}  # fmt: skip
    own = ("cta_group",) if kernel["machine"] == "b200" else ("tile_m", "tile_n", "ping_pong")
    settings |= {name: str(kernel[name]) for name in own}
    if kernel["machine"] != "b200":  # nothing was removed of what draws work tiles
        settings["scheduler"] = "lpt"
    request = build(settings)
    return designs.plan_of(request.pipeline, request.machine.gpu)


def campaigns() -> Iterator[dict[str, Any]]:
    for name in ("forward_faults", "backward_faults", "warpgroup_faults"):
        yield from read_record(name)["kernels"]


def test_verdicts_are_those_of_the_campaigns(kernel: dict[str, Any]) -> None:
    """By what was removed and what came of it, as often as the result files say."""
    (campaign,) = (one for one in campaigns() if one["kernel"] == kernel["kernel"])
    expected = Counter({
        (kind, how): count
        for kind, row in campaign["table"].items() if kind.endswith("removed")
        for how, count in row.items()
    })  # fmt: skip
    assert Counter((row["kind"], row["verdict"]) for row in kernel["removals"]) == expected
    assert expected.total() > 50


def test_steps_are_the_plans(kernel: dict[str, Any]) -> None:
    """Every wait and arrival of the plan's mbarriers was removed, and nothing else is named."""
    plan = plan_of(kernel)
    assert plan.name == kernel["plan"]
    recorded = {tuple(step) for row in kernel["removals"] for step in row["steps"]}
    roles = {role.name for role in plan.roles}
    known = {signal.name for signal in plan.signals}
    assert {role for role, _, _ in recorded} == roles
    assert {verb for _, verb, _ in recorded} == {"wait", "arrive", "fence"}
    others = {what for _, verb, what in recorded if verb != "fence"} - known
    assert others <= {"all warps", "its own warps"}
    missing = {
        (role.name, "wait" if isinstance(step, Wait) else "arrive", step.signal)
        for role in plan.roles
        for step in walk(role.steps)
        if isinstance(step, (Wait, Arrive))
        and plan.signal(step.signal).kind in ("mbarrier", "named")
    } - recorded
    # What a copy or a store completes is no instruction of its own.
    assert all(verb == "arrive" for _, verb, _ in missing), missing
    assert len(missing) <= 2, missing


def test_every_verdict_says_why(kernel: dict[str, Any]) -> None:
    roles = {role.name for role in plan_of(kernel).roles} | {"idle"}
    for row in kernel["removals"]:
        assert row["steps"] and row["message"] and row["verdict"] in VERDICTS, row
        assert 0 < row["ptx_line"] <= kernel["ptx_lines"]
        assert bool(row["waits"]) == (row["verdict"] == "deadlock"), row
        assert bool(row["schedule"]) == (row["verdict"] not in ("equivalent", "survived"))
        if row["verdict"] == "race":
            assert len(row["sides"]) == 2, row
        for side in row["sides"]:
            assert side["roles"] and set(side["roles"]) <= roles, row
        for wait in row["waits"]:
            assert wait["role"] in roles and wait["missing"]


def test_a_file_of_another_schema_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / verdicts.FILE).write_text('{"schema_version": 9, "kernels": []}')
    monkeypatch.setattr(verdicts.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="schema_version must be 1; got 9"):
        read_verdicts()
