"""From a failing case to its causes: for each output that is wrong, the features that it takes.

Delta debugging over the features of the case: one after another is set to its plain level, and
stays there if the same output is still wrong; then sizes get smaller. What is left is needed. A
failure that a cause found earlier in the run explains, since it is there with that cause's features
alone, costs one call.
"""

from __future__ import annotations

import time
from dataclasses import replace

from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.causes import SESSION, Symptom, describe_needs
from fa4.testing.programs import numpy_program, torch_program
from fa4.testing.property import Property
from fa4.testing.refusals import BackendFailed, NoAnswer, NotCovered
from fa4.testing.reproduce import failing_test
from fa4.testing.shrink import (
    EVERYTHING,
    SIZE_FIELDS,
    drop_features,
    field_of,
    keep_only,
    needed_features,
    one_longer,
    plainest,
    shrink,
    shrink_in_time,
)
from fa4.testing.symptoms import is_output, observe, one_line, with_levels
from fa4.testing.walk import Walk

SHRINK_SECONDS = 3.0  # of a property; after that the smallest failure so far is reported
PATIENCE = 10.0  # times as long where other processes have the machine: the answer is the same
SHRINK_SECONDS_ISOLATED = 20.0  # where a failing call may cost the start of a process
LEAST_SECONDS = 1.0  # of each further output of a case
GENERAL = {"out": "plain", "lse": "plain", "dq": "gradients", "dk": "gradients",
           "dv": "gradients", "dsink": "gradients"}  # fmt: skip
_FLAKY = " (only sometimes: the back end is not deterministic)"


class Doctor:
    """Finds the causes of failures of one back end, and remembers them during a run."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._known: dict[str, list[Symptom]] = {}

    def diagnose(self, prop: Property, case: Case, error: Exception) -> tuple[Symptom, ...]:
        """The symptoms of a case that failed with this error, the first of them first."""
        if isinstance(case, Walk):
            return (self._last_call(prop, case, error),)
        case = with_levels(prop, case)
        if isinstance(error, NoAnswer):  # each try costs a timeout: there is one
            return (self._silent(prop, case, error),)
        case, found = self._observe(prop, case)
        if not found:
            return (self._symptom(prop, prop.name, case, one_line(error) + _FLAKY),)
        symptoms = []
        seconds = SHRINK_SECONDS_ISOLATED if self.backend.isolated else SHRINK_SECONDS
        end = time.thread_time() + seconds
        for what, message in found.items():
            left = max(LEAST_SECONDS, end - time.thread_time())
            symptoms.append(self._explain(prop, what, case, message, left))
        return tuple(symptoms)

    def _observe(self, prop: Property, case: Case) -> tuple[Case, dict[str, str]]:
        """The case and what is wrong with it; one of the property's variants, where that is wrong
        by itself, in shapes that no call has had."""
        found = observe(prop, self.backend, case)
        if prop.name in found:
            longer = case
            for fields in prop.variants:
                longer = one_longer(longer)
                other = one_longer(replace(longer, **fields))
                alone = observe(prop, self.backend, other, outputs_alone=True)
                if any(map(is_output, alone)):
                    return other, alone
        return case, found

    def _explain(
        self, prop: Property, what: str, case: Case, message: str, seconds: float
    ) -> Symptom:
        """The cause of one symptom: one that is known, or the smallest case that shows it."""
        messages = {case: message}

        def shows(other: Case) -> bool:
            text = observe(prop, self.backend, other, outputs_alone=is_output(what)).get(what)
            if text is not None:
                messages[other] = text
            return text is not None

        allowed = prop.shrinks
        if is_output(what):  # that an output is wrong has a meaning without the property
            allowed = EVERYTHING
            for known in self._known.get(what, ()):
                least = keep_only(case, known.needs)
                if least is not None and (least == case or shows(least)):
                    return known
            case = drop_features(case, shows, seconds=seconds)
        patience = 1.0 if self.backend.isolated else PATIENCE
        smallest, finished = shrink_in_time(
            case, shows, allowed=allowed, seconds=seconds, patience=patience
        )
        found = self._symptom(prop, what, smallest, messages[smallest], sizes=finished)
        self._known.setdefault(what, []).append(found)
        self._known[what].sort(key=lambda symptom: len(symptom.needs))
        return found

    def _last_call(self, prop: Property, walk: Walk, error: Exception) -> Symptom:
        """Of calls that follow one another: the fewest steps after which the last is wrong."""
        messages = {walk: one_line(error)}

        def fails(other: Walk) -> bool:
            try:
                prop.check(self.backend, other)  # type: ignore[arg-type]
            except NotCovered:
                return False
            except Exception as found:
                if type(found) is not type(error):
                    return False
                messages[other] = one_line(found)
                return True
            return False

        if not isinstance(error, NoAnswer):  # each try costs a timeout
            if fails(walk):
                isolated = self.backend.isolated
                walk = shrink(
                    walk,  # type: ignore[arg-type]
                    fails,  # type: ignore[arg-type]
                    seconds=SHRINK_SECONDS_ISOLATED if isolated else SHRINK_SECONDS,
                    patience=1.0 if isolated else PATIENCE,
                )  # type: ignore[assignment]
            else:
                messages[walk] += _FLAKY
        message = messages[walk]
        return Symptom(
            what=walk.session + SESSION,  # whichever property took these steps
            needs=walk.needs,
            words=" then ".join(need.replace("_", " ") for need in walk.needs),
            example=repr(walk),
            error=message,
            test=failing_test(prop.name, self.backend, walk, message),  # type: ignore[arg-type]
        )

    def _silent(self, prop: Property, case: Case, error: Exception) -> Symptom:
        least = plainest(case, prop.shrinks)
        try:
            prop.check(self.backend, least)
        except NoAnswer as other:
            case, error = least, other
        except Exception:
            pass
        return self._symptom(prop, "no answer", case, one_line(error))

    def _symptom(
        self, prop: Property, what: str, case: Case, error: str, *, sizes: bool = True
    ) -> Symptom:
        """sizes: they are as small as can be, so that large ones are needed."""
        name = prop.name
        if is_output(what) and not self._breaks(prop, case):
            name = GENERAL[what]
        needs = needed_features(case)
        if not is_output(what):  # what the property itself is about is none of them
            needs = tuple(need for need in needs if field_of(need) in prop.shrinks)
        if not sizes:
            needs = tuple(need for need in needs if field_of(need) not in SIZE_FIELDS)
        return Symptom(
            what=what,
            needs=needs,
            words=describe_needs(case, needs),
            example=repr(case),
            error=error,
            test=failing_test(prop.name, self.backend, case, error, check=name),
            numpy=numpy_program(self.backend.name, case, what, error),
            torch=torch_program(self.backend.name, case, what, error),
        )

    def _breaks(self, prop: Property, case: Case) -> bool:
        try:
            prop.check(self.backend, case)
        except BackendFailed:
            raise
        except Exception as error:
            return isinstance(error, AssertionError)
        return False
