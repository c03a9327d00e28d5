"""Ablations: what each of FlashAttention-4's ideas is worth, by the model.

Each idea is switched off alone, everything else as it was; its speedup is the time without it over
the time with it. Ideas interact, so the speedups do not multiply up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa4.designs import design_of
from fa4.designs.ideas import Idea

if TYPE_CHECKING:
    from fa4.sim.ensemble import Interval
    from fa4.sim.options import SimulationRequest
    from fa4.sim.predict import Prediction

OFF_RESCALE_RATE = 1.0  # without a threshold nearly every warp sees its maximum rise in every tile


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An idea switched off. `prediction` is None, and `note` says why, where that cannot run.

    interval: of the speedup, by all sets of constants; None where there are none or not asked for.
    """

    idea: Idea
    prediction: Prediction | None
    speedup: float | None
    note: str
    interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The call as asked for, and without each idea."""

    request: SimulationRequest
    base: Prediction
    outcomes: tuple[Outcome, ...]


def ablate(
    settings: Mapping[str, object],
    *,
    off_rescale_rate: float = OFF_RESCALE_RATE,
    intervals: bool = False,
) -> Ablation:
    """Predict a call with and without each idea; `intervals`: by all sets of constants, too.

    Raises ValueError if the call itself cannot run, or the machine has no FlashAttention-4 kernel.
    """
    from fa4.sim.ensemble import seconds_of
    from fa4.sim.options import build

    if not 0.0 <= off_rescale_rate <= 1.0:
        raise ValueError(f"off_rescale_rate must be between 0 and 1; got {off_rescale_rate}")
    request = build(settings)
    ideas = design_of(request.pipeline).ideas
    if not ideas:
        raise ValueError(f"FlashAttention-4's ideas need tensor memory; {request.machine.name} "
                         "has none")  # fmt: skip
    base, times = request.predict(), seconds_of(request) if intervals else ()
    outcomes = []
    for idea in ideas:
        changes: dict[str, object] = dict(idea.settings)
        if "tau" in changes:
            changes["rescale_rate"] = off_rescale_rate
        outcomes.append(_switch_off(idea, request, (base, times), dict(settings) | changes))
    return Ablation(request=request, base=base, outcomes=tuple(outcomes))


def _switch_off(
    idea: Idea,
    request: SimulationRequest,
    known: tuple[Prediction, Sequence[float]],
    settings: Mapping[str, object],
) -> Outcome:
    from fa4.sim.ensemble import seconds_of, speedup_interval
    from fa4.sim.options import build

    base, times = known

    if not idea.used(request.pipeline):
        return Outcome(idea=idea, prediction=None, speedup=None, note="not used here")
    try:
        changed = build(settings)
        without = changed.predict()
    except (ValueError, RuntimeError) as error:  # RuntimeError: a deadlock
        reason = " ".join(str(error).split())
        return Outcome(idea=idea, prediction=None, speedup=None, note=f"cannot run: {reason}")
    interval = speedup_interval(seconds_of(changed), times) if times else None
    return Outcome(idea=idea, prediction=without, speedup=without.seconds / base.seconds, note="",
                   interval=interval)  # fmt: skip
