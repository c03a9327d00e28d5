"""A check in front of models of transformers that are to run with a registered implementation.

transformers asks a model's class whether it supports "sdpa" or "flash_attention_2", but takes any
other name unseen. Three methods of its PreTrainedModel, which creation and
`set_attn_implementation` pass, ask here as well. A model that nothing of would be computed by the
implementation is refused; one that also has attention of its own, or whose masks are no sdpa
masks, gets the implementation under a second name, whose masks are those of "eager".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from typing import Any

from fa4.dropin.routing import is_routed, read_model

ADDITIVE = "_additive"  # appended to the name where masks must be those of "eager"
_names: set[str] = set()


def guard(name: str) -> None:
    """Check every model that asks for the implementation `name` from now on."""
    from transformers import PreTrainedModel

    if not _names:
        PreTrainedModel.get_correct_attn_implementation = _checked_choice(
            PreTrainedModel.get_correct_attn_implementation
        )
        PreTrainedModel.post_init = _checked_creation(PreTrainedModel.post_init)
        PreTrainedModel.set_attn_implementation = _checked_setting(
            PreTrainedModel.set_attn_implementation
        )
    _names.update((name, name + ADDITIVE))


def adapt(model: type, name: str) -> str:
    """The name under which a class gets the implementation. Raises ValueError, one line."""
    routing = read_model(model)
    for known in routing.choices:
        if name not in known:
            raise _refusal(model, name, "looks its attention up by that name", known)
    if routing.unknown:
        unknown = " and ".join(sorted(routing.unknown))
        raise _refusal(model, name, f"hands its attention {unknown}, which fa4 does not have")
    foreign = routing.own and routing.masks
    if foreign or not _supports_others(model):
        return name.removesuffix(ADDITIVE) + ADDITIVE
    return name


def _supports_others(model: Any) -> bool:
    """Does transformers itself vouch for masks and attention of another implementation?"""
    return model._supports_sdpa or (
        model._supports_attention_backend
        and (model._supports_flash_attn or model._supports_flex_attn)
    )


def _refusal(model: Any, name: str, why: str, known: tuple[str, ...] = ()) -> ValueError:
    """One line: the model, what was asked for, why not, and what is allowed."""
    allowed = known or (("eager", "sdpa") if model._supports_sdpa else ("eager",))
    return ValueError(
        f'{model.__name__} cannot run with attn_implementation="{name.removesuffix(ADDITIVE)}": '
        f"it {why}; use {' or '.join(allowed)}"
    )


def _require_service(model: Any, name: str) -> None:
    """Raises ValueError if nothing of a model would be computed by an implementation."""
    served = (m for m in _models(model) if m.config._attn_implementation in _names)
    if not any(is_routed(type(x)) for m in served for x in m.modules()):
        why = "has no attention that goes through transformers' attention interface"
        raise _refusal(type(model), name, why)


def _models(model: Any) -> Iterator[Any]:
    """The model and those inside it."""
    from transformers import PreTrainedModel

    return (m for m in model.modules() if isinstance(m, PreTrainedModel))


def _is_part(model: Any) -> bool:
    """Is it made while another model is, as a part of that?"""
    from transformers import PreTrainedModel

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        maker = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(maker, PreTrainedModel) and maker is not model:
            return True
    return False


def _checked_choice(original: Any) -> Any:
    @wraps(original)
    def get_correct_attn_implementation(
        self: Any, requested_attention: Any, *given: Any, **options: Any
    ) -> Any:
        found = original(self, requested_attention, *given, **options)
        return adapt(type(self), found) if found in _names else found

    return get_correct_attn_implementation


def _checked_creation(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Any) -> None:
        asked = {m.config._attn_implementation for m in _models(self)} & _names
        if asked and not _is_part(self):
            _require_service(self, min(asked))
        original(self)

    return post_init


def _checked_setting(original: Any) -> Any:
    @wraps(original)
    def set_attn_implementation(
        self: Any, attn_implementation: Any, *given: Any, **options: Any
    ) -> None:
        asked = _values(attn_implementation) & _names
        if not asked:
            return original(self, attn_implementation, *given, **options)
        before = [(c, c._attn_implementation) for m in _models(self) for c in _configs(m.config)]
        try:
            original(self, attn_implementation, *given, **options)
            for model in _models(self):  # one configuration may be that of several classes
                if model.config._attn_implementation in _names:
                    chosen = adapt(type(model), model.config._attn_implementation)
                    model.config._attn_implementation_internal = chosen
            _require_service(self, min(asked))
        except Exception:
            for config, name in before:
                config._attn_implementation_internal = name
            raise
        return None

    return set_attn_implementation


def _values(implementation: Any) -> set[str]:
    """Names in what `set_attn_implementation` takes: one, or names by part, nested."""
    if isinstance(implementation, dict):
        return set().union(*(_values(x) for x in implementation.values()))
    return {implementation}


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)
