"""Steps of a session as a value: what fails, what is made smaller, what is printed as code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fa4.testing.case import Case

Step = tuple[Any, ...]  # name of a method of the session, its arguments

_SIMPLER: dict[str, tuple[Any, ...]] = {
    "window_size": ((None, None),),
    "dtype": ("fp32", "bf16"),
    "group": (1,),
    "heads_k": (1,),
    "head_dim": (8,),
    "head_dim_v": (8,),
    "seed": (0,),
}


@dataclass(frozen=True, repr=False)
class Walk:
    """What a session did: its name in `SESSIONS`, the case of its sizes and types, its steps."""

    session: str
    case: Case
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        """The expression that rebuilds it."""
        return f"Walk({self.session!r}, {self.case!r}, {self.steps!r})"

    def simpler(self) -> Iterator[Walk]:
        """Walks with fewer steps, then with smaller arguments, then of a simpler case."""
        count = len(self.steps)
        size = count // 2
        while size:
            for start in range(0, count, size):
                kept = self.steps[:start] + self.steps[start + size :]
                if kept:
                    yield replace(self, steps=kept)
            size //= 2
        for at, step in enumerate(self.steps):
            for place, value in enumerate(step):
                for less in _smaller(value) if place else ():
                    changed = (*step[:place], less, *step[place + 1 :])
                    yield replace(self, steps=(*self.steps[:at], changed, *self.steps[at + 1 :]))
        for name, values in _SIMPLER.items():
            for value in values:
                if getattr(self.case, name) == value:
                    break
                yield replace(self, case=replace(self.case, **{name: value}))

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of steps behind the first, once each: what it takes to fail."""
        return tuple(dict.fromkeys(str(name) for name, *_ in self.steps[1:]))

    def source(self, loaded: str) -> tuple[str, ...]:
        """Lines of Python that take the steps; loaded: the expression of the back end."""
        lines = [f"session = open_session({self.session!r}, {loaded}, {self.case!r})"]
        for name, *arguments in self.steps:
            lines.append(f"session.{name}({', '.join(map(repr, arguments))})")
        return tuple(lines)


def _smaller(value: Any) -> tuple[Any, ...]:
    """Simpler values of an argument: a number, or a tuple of them."""
    if isinstance(value, tuple):
        return tuple(
            (*value[:at], less, *value[at + 1 :])
            for at, part in enumerate(value)
            for less in _smaller(part)
        )
    if isinstance(value, bool) or not isinstance(value, int):
        return ()
    return tuple(dict.fromkeys(x for x in (0, 1, value // 2, value - 1) if 0 <= x < value))
