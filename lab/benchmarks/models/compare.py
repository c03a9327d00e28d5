"""One class: built in small, run by "eager" and by fa4 with the same weights, and compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch

import fa4
from lab.benchmarks.models.inputs import (
    CASES,
    ROWS,
    TOKENS,
    NotBuildableError,
    make_inputs,
    mask_of,
    takes_text,
)
from lab.benchmarks.models.shrink import WAYS, small_config

TOLERANCE = 1e-5  # float32; of the largest value where that is above 1
LARGEST = 60e6  # parameters of a model that is run
REFUSAL = "cannot run with attn_implementation"
Outputs = list[torch.Tensor]


@dataclass
class Finding:
    """What came of one class.

    status: equal, equal without a call, refused, raised, wrong or not buildable; reason: the line
    of an error. calls: of fa4, for whole rows. errors: largest distance from "eager", by case.
    power: what padding changes by "eager", and the last token for those before it: what a dropped
    mask would cost. masks: "eager" where the class gets these.
    """

    name: str
    status: str = "not buildable"
    reason: str = ""
    calls: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)
    masks: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a result file: without what is empty, errors to two digits."""
        found = asdict(self)
        for name in ("errors", "power"):
            found[name] = {case: float(f"{x:.1e}") for case, x in found[name].items()}
        return {name: value for name, value in found.items() if value}


def compare(cls: Any, name: str = "fa4") -> Finding:
    """The finding for one class of transformers; every error of it is in the finding."""
    found = Finding(cls.__name__)
    try:
        eager = build(cls)
        expected = {
            case: run(eager, case) for case in CASES if case == "whole" or takes_text(eager)
        }
        if not any(x.isfinite().all() and x.numel() for x in expected["whole"]):
            raise NotBuildableError("no finite output")
    except Exception as error:  # of any kind: the code of any model
        found.reason = one_line(error)
        return found
    found.status = "raised"
    try:
        ours = twin(eager, name)
        found.masks = "eager" if ours.config._attn_implementation != name else ""
        results = _run_counted(ours, expected, found)
        _measure(found, eager, results, expected)
        _check_setting(found, eager, name, expected["whole"])
    except Exception as error:
        found.reason = one_line(error)
        refused = isinstance(error, ValueError) and REFUSAL in str(error)
        if refused and "\n" not in str(error):
            found.status = "refused"
            _check_refused_setting(found, eager, name, expected["whole"])
    return found


def build(cls: Any) -> Any:
    """A small model that runs with "eager". Raises NotBuildableError, with a reason of each way."""
    reasons = {}
    for way in WAYS:
        reason, model = _build_one(cls, way)
        if model is not None:
            return model
        reasons[reason] = way
    raise NotBuildableError("; ".join(f"{way}: {text}" for text, way in reasons.items()))


def _build_one(cls: Any, way: str) -> tuple[str, Any]:
    try:
        config = small_config(cls.config_class, way)
        with torch.device("meta"):
            empty = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
        size = sum(p.numel() for p in empty.parameters())
        if size > LARGEST:
            return f"{size / 1e6:.0f} million parameters", None
        torch.manual_seed(0)
        model = _prepare(cls._from_config(config, attn_implementation="eager"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.std() < 0.1:
                    parameter.mul_(4)  # so that attention matters
        run(model, "whole")
    except Exception as error:
        return one_line(error), None
    return "", model


def _prepare(model: Any) -> Any:
    if hasattr(model, "set_experts_implementation"):
        with suppress(Exception):  # "eager" is not there in every class
            model.set_experts_implementation("eager")
    return model.eval()


def twin(model: Any, name: str) -> Any:
    """The same model by another implementation."""
    config = copy.deepcopy(model.config)
    other = _prepare(type(model)._from_config(config, attn_implementation=name))
    other.load_state_dict(model.state_dict())
    buffers = dict(model.named_buffers())
    for key, buffer in other.named_buffers():
        if buffer.shape == buffers[key].shape:
            buffer.copy_(buffers[key])
    return other


def run(model: Any, case: str, filler: int = 1) -> Outputs:
    """All floating outputs."""
    inputs = make_inputs(model, case, filler)
    torch.manual_seed(1)  # of models that draw
    with torch.no_grad():
        return list(flatten(model(**inputs)))


def flatten(outputs: Any) -> Iterator[torch.Tensor]:
    """The floating tensors in what a model gives, caches left out."""
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif hasattr(outputs, "items"):
        for name, value in outputs.items():
            if "past_key" not in name and "cache" not in name:
                yield from flatten(value)
    elif isinstance(outputs, tuple | list):
        for value in outputs:
            yield from flatten(value)


def one_line(error: BaseException) -> str:
    """An error's type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def _run_counted(model: Any, cases: Any, found: Finding) -> dict[str, Outputs]:
    results = {}
    with mock.patch("fa4.transformers.attend", side_effect=fa4.transformers.attend) as attend:
        for case in cases:
            results[case] = run(model, case)
            found.calls = found.calls or attend.call_count
    return results


def _measure(found: Finding, eager: Any, results: Any, expected: dict[str, Outputs]) -> None:
    """Errors and power of all cases, and the status that follows."""
    for case, values in results.items():
        pairs = list(zip(values, expected[case], strict=True))
        if case in ("left", "right"):
            # What depends on the token that stands for padding is no function of the others.
            other = run(eager, case, filler=3)
            steady = [
                distance(x, y, case) < 1e-6 for x, y in zip(other, expected[case], strict=True)
            ]
            pairs = [pair for pair, same in zip(pairs, steady, strict=True) if same]
        if pairs:
            found.errors[case] = max(distance(x, y, case) for x, y in pairs)
    for case in found.errors.keys() - {"whole"}:
        found.power[case] = max(
            distance(x, y, case) for x, y in zip(expected[case], expected["whole"], strict=True)
        )
    worst = max(found.errors.values())
    found.status = "wrong" if not worst <= TOLERANCE else "equal"
    found.reason = f"{worst:.1e} from eager" if found.status == "wrong" else ""
    if found.status == "equal" and not found.calls:
        found.status = "equal without a call"


def distance(x: torch.Tensor, y: torch.Tensor, case: str) -> float:
    """Largest difference where there are tokens, of the largest value where that is above 1."""
    if x.shape != y.shape:
        return float("inf")
    if x.dim() >= 2 and x.shape[:2] == (ROWS, TOKENS):
        x, y = x[mask_of(case)], y[mask_of(case)]
    if not x.numel():
        return 0.0
    same = (x == y) | (x.isnan() & y.isnan())
    size = y.where(y.isfinite(), 0.0).abs().max().clamp(min=1.0)
    worst = ((x - y).abs() / size).masked_fill(same, 0.0).max().item()
    return worst if worst == worst else float("inf")


def _check_setting(found: Finding, eager: Any, name: str, expected: Outputs) -> None:
    """`set_attn_implementation` gives what creation gives."""
    eager.set_attn_implementation(name)
    for x, y in zip(run(eager, "whole"), expected, strict=True):
        if not distance(x, y, "whole") <= TOLERANCE:
            found.status, found.reason = "wrong", "set_attn_implementation gives another result"


def _check_refused_setting(found: Finding, eager: Any, name: str, expected: Outputs) -> None:
    """What creation refuses, `set_attn_implementation` refuses, and leaves the model as it was."""
    try:
        eager.set_attn_implementation(name)
    except ValueError as error:
        if REFUSAL in str(error) and all(map(torch.equal, run(eager, "whole"), expected)):
            return
    found.status, found.reason = "wrong", "set_attn_implementation does not refuse"
