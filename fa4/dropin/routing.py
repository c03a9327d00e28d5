"""Which classes of transformers send their attention through its attention interface?

What is registered there comes in two parts: a function that makes masks and one that attends. A
module that attends by itself takes the first without the second, and adds a boolean mask, or none
at all, to its scores. Which it is, is read off the compiled code of a class: its methods, the
functions of its file that they call, and the modules that it is made of.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

# What code that attends by itself uses: products and their softmax, or one function for all of it.
SOFTMAX = {"softmax", "Softmax"}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}
WHOLE = {"scaled_dot_product_attention", "multi_head_attention_forward"}
# Arguments that change what is attended to, which the attention function does not have.
UNKNOWN_KEYWORDS = frozenset({"block_indices"})


@dataclass(frozen=True)
class Uses:
    """What the code of one class refers to.

    routed: the attention interface. attends: products and a softmax, under a mask that it is given.
    masks: mask functions of the interface. modules: classes of modules. choices: keys of
    dictionaries of modules by the name of an implementation. unknown: of `UNKNOWN_KEYWORDS`.
    """

    routed: bool
    attends: bool
    masks: bool
    modules: tuple[type, ...]
    choices: tuple[tuple[str, ...], ...]
    unknown: frozenset[str]


@dataclass(frozen=True)
class Routing:
    """A model with the modules it is made of, but for parts that are models themselves.

    own: names of classes that attend by themselves under a mask; the other fields are those of
    `Uses`, of all of them.
    """

    own: tuple[str, ...]
    masks: bool
    choices: tuple[tuple[str, ...], ...]
    unknown: frozenset[str]


@cache
def read_model(model: type) -> Routing:
    """The routing of a subclass of transformers.PreTrainedModel."""
    from transformers import PreTrainedModel

    waiting, found = [model], {model: read_class(model)}
    while waiting:
        one = waiting.pop()
        for other in (*found[one].modules, *_bases(one)):
            if other not in found and (
                other in _bases(one) or not issubclass(other, PreTrainedModel)
            ):
                found[other] = read_class(other)
                waiting.append(other)
    return Routing(
        own=tuple(c.__name__ for c, uses in found.items() if uses.attends and not uses.routed),
        masks=any(uses.masks for uses in found.values()),
        choices=tuple(choice for uses in found.values() for choice in uses.choices),
        unknown=frozenset().union(*(uses.unknown for uses in found.values() if uses.routed)),
    )


def is_routed(cls: type) -> bool:
    """Does a class of modules, or one that it inherits from, use the attention interface?"""
    own = (c for c in (cls, *_bases(cls)) if not c.__module__.startswith("torch."))
    return any(read_class(c).routed for c in own)


@cache
def read_class(cls: type) -> Uses:
    """What one class of modules refers to, bases not included."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    waiting = list(_methods(cls))
    masked = any("mask" in name for function in waiting for name in _parameters(function))
    functions = dict.fromkeys(waiting)
    names: set[str] = set()
    globals_: list[Any] = []
    while waiting:
        function = waiting.pop()
        used = _names(function.__code__)
        names |= used
        for name in sorted(used & function.__globals__.keys()):
            value = _unwrap(function.__globals__[name])
            globals_.append(value)
            near = isinstance(value, FunctionType) and value.__module__ == function.__module__
            # A default that is handed to the interface is not called by the class.
            if near and value not in functions and "eager" not in name:
                functions[value] = None
                waiting.append(value)
    tables = [x for x in globals_ if isinstance(x, dict) and any(_is_module(y) for y in x.values())]
    return Uses(
        routed=any(isinstance(x, AttentionInterface) for x in globals_),
        attends=masked and bool(names & WHOLE or (names & SOFTMAX and names & PRODUCTS)),
        masks=any(isinstance(x, AttentionMaskInterface) or _makes_masks(x) for x in globals_),
        modules=tuple(
            x for y in globals_ for x in (y.values() if isinstance(y, dict) else [y])
            if _is_module(x)
        ),
        choices=tuple(tuple(x) for x in tables if "eager" in x),
        unknown=frozenset(x for f in functions for x in _strings(f.__code__)) & UNKNOWN_KEYWORDS,
    )  # fmt: skip


def _bases(cls: type) -> tuple[type, ...]:
    """Bases that are a model's own code: not torch's, and not what all models have."""
    from transformers import PreTrainedModel

    common = PreTrainedModel.__mro__
    return tuple(c for c in cls.__mro__[1:] if c not in common and _is_module(c))


def _is_module(value: Any) -> bool:
    from torch import nn
    from transformers import PreTrainedModel

    common = PreTrainedModel.__mro__
    return isinstance(value, type) and issubclass(value, nn.Module) and value not in common


def _makes_masks(value: Any) -> bool:
    """Is it one of the functions that ask the mask interface?"""
    return (
        isinstance(value, FunctionType)
        and value.__module__ == "transformers.masking_utils"
        and value.__name__.startswith("create_")
    )


def _methods(cls: type) -> Iterator[FunctionType]:
    """Functions of the class itself, but that which sets weights: it names what it may meet."""
    for name, value in vars(cls).items():
        function = _unwrap(value.fget if isinstance(value, property) else value)
        if isinstance(function, FunctionType) and name != "_init_weights":
            yield function


def _unwrap(value: Any) -> Any:
    """A function without its decorators."""
    value = getattr(value, "__func__", value)
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _parameters(function: FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Globals and attributes that code uses, functions inside it included; "@" for that product."""
    found = set(code.co_names)
    for step in dis.get_instructions(code):
        if step.argrepr == "@" or step.opname == "BINARY_MATRIX_MULTIPLY":  # the latter: 3.10
            found.add("@")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return frozenset(found)


def _strings(constants: Any) -> Iterator[str]:
    """Strings among constants, those of keywords of a call and of functions inside included."""
    for constant in constants.co_consts if isinstance(constants, CodeType) else constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType | tuple):
            yield from _strings(constant)
