"""A plan with counted instructions in place of its estimates."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fa4.config import ForwardConfig, ForwardPipeline
from fa4.hardware import B200
from fa4.plan.counted_math import PIPES, loop_math, with_measured_math
from fa4.plan.forward import forward_plan
from fa4.plan.schema import Math, PipelinePlan, Work, walk

PIPELINE = ForwardPipeline(causal=True, numerics=ForwardConfig.tuned("bf16", 128, True))
COUNTED = Math(mufu=113, fma=355, alu=177, other=22)


@pytest.fixture
def plan() -> PipelinePlan:
    """Head dim 128, causal."""
    return forward_plan(PIPELINE, B200)


def total(parts: dict[str, Math]) -> dict[str, float]:
    """Sums by pipe."""
    return {pipe: sum(getattr(part, pipe) for part in parts.values()) for pipe in PIPES}


def works(plan: PipelinePlan, role: str, what: str) -> list[Work]:
    """All steps of that name."""
    steps = walk(plan.role(role).program)
    return [step for step in steps if isinstance(step, Work) and step.what == what]


def test_sums_are_what_was_counted(plan: PipelinePlan) -> None:
    """Parts keep their proportions; other roles and dependent chains stay as they were."""
    changed = with_measured_math(plan, {"softmax0": COUNTED})
    parts, before = (loop_math(x.role("softmax0")) for x in (changed, plan))
    assert total(parts) == pytest.approx({pipe: getattr(COUNTED, pipe) for pipe in PIPES})
    ratios = [parts[what].alu / part.alu for what, part in before.items() if part.alu]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert [part.chain for part in parts.values()] == [part.chain for part in before.values()]
    assert changed.roles[1:] == plan.roles[1:] and changed.signals == plan.signals


def test_masked_tiles_change_alike(plan: PipelinePlan) -> None:
    """The same work in the loop over masked tiles; masking itself was not counted and stays."""
    changed = with_measured_math(plan, {"softmax1": COUNTED})
    masked, whole = works(changed, "softmax1", "row sum 1")
    assert masked == whole != works(plan, "softmax1", "row sum 1")[0]
    assert works(changed, "softmax1", "mask S1") == works(plan, "softmax1", "mask S1")


def test_a_pipe_the_plan_does_not_use(plan: PipelinePlan) -> None:
    """Correction votes use no FMA in the plan: what is counted goes to the first part."""
    changed = with_measured_math(plan, {"correction": Math(fma=7, alu=6, other=13)})
    assert [part.fma for part in loop_math(changed.role("correction")).values()] == [7, 0]
    assert works(changed, "correction", "rescale o0") == works(plan, "correction", "rescale o0")


def test_its_own_amounts_change_nothing(plan: PipelinePlan) -> None:
    """Measured equal to estimated gives the same plan."""
    own = Math(**total(loop_math(plan.role("softmax0"))))  # type: ignore[arg-type]
    changed = with_measured_math(plan, {"softmax0": own})
    for what, part in loop_math(plan.role("softmax0")).items():
        for item in fields(Math):
            mine = getattr(loop_math(changed.role("softmax0"))[what], item.name)
            assert mine == pytest.approx(getattr(part, item.name))


def test_refused(plan: PipelinePlan) -> None:
    """Roles that are not there, or have nothing to scale."""
    with pytest.raises(KeyError, match="nobody"):
        with_measured_math(plan, {"nobody": COUNTED})
    with pytest.raises(ValueError, match="mma has no arithmetic"):
        with_measured_math(plan, {"mma": COUNTED})
