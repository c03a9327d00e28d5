"""What a planted fault is: methods of the honest back end that are replaced, and its right name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.testing.planted.calls import Call, make_attention
from tests.testing.planted.gradients import GradientKernel

Method = Callable[..., Any]

# Alternatives that name a fault of everything, of the rows that see no key, of the statistics.
EVERYWHERE = ("plain", "lengths", "long", "head_dim", "dtype")
ROUNDING = ("error_rms", "rms", "rounding_bias", "bias", "accumulation", "plain")
MEMORY = ("repeat", "determin", "second", "again", "stale", "unchanged", "in_place", "inputs")


@dataclass(frozen=True)
class Fault:
    """A back end with one thing wrong.

    named_by: alternatives, each a string of words that must all occur in the name of the property
    that catches it. kernel, call: methods of `GradientKernel` and of `Call` that are replaced.
    declares: attributes of the back end, such as `numerics`.
    """

    name: str
    group: str
    description: str
    named_by: tuple[str, ...]
    kernel: Mapping[str, Method] = field(default_factory=dict)
    call: Mapping[str, Method] = field(default_factory=dict)
    declares: Mapping[str, Any] = field(default_factory=dict)

    def is_named_by(self, property_name: str) -> bool:
        """Does the name of a property say what is wrong?"""
        return any(all(word in property_name for word in text.split()) for text in self.named_by)

    def attention(self) -> Callable[..., Any]:
        """The back end; ValueError for a method that the honest one does not have."""
        for base, methods in ((GradientKernel, self.kernel), (Call, self.call)):
            for method in methods:
                if not hasattr(base, method):
                    raise ValueError(f"{base.__name__} has no method {method}")
        kernel = type(f"{self.name}_kernel", (GradientKernel,), dict(self.kernel))
        attention = make_attention(type(self.name, (Call,), {**self.call, "kernel": kernel}))
        for name, value in self.declares.items():
            setattr(attention, name, value)
        return attention


def replaced(method: str, condition: Callable[[Any], bool], value: Any) -> dict[str, Method]:
    """`method` of the kernel, which takes no argument, returns `value` where the condition holds.

    A callable `value` is called with the kernel and the honest answer.
    """
    honest = getattr(GradientKernel, method)

    def wrong(kernel: Any) -> Any:
        answer = honest(kernel)
        if not condition(kernel):
            return answer
        return value(kernel, answer) if callable(value) else value

    return {method: wrong}


def is_windowed(kernel: Any) -> bool:
    """A window_size is given."""
    return kernel.options.is_windowed


def is_grouped(kernel: Any) -> bool:
    """More query heads than KV heads."""
    return kernel.group > 1


def is_split(kernel: Any) -> bool:
    """num_splits is given."""
    return kernel.options.num_splits > 1


def lengths_differ(kernel: Any) -> bool:
    """Sq and Sk."""
    return kernel.rows != kernel.keys


def laid_out(*layouts: str) -> Callable[[Any], bool]:
    """The call has one of these layouts."""
    return lambda kernel: kernel.options.layout in layouts


def of_type(dtype: Any) -> Callable[[Any], bool]:
    """The element type."""
    return lambda kernel: kernel.dtype == dtype
