"""A configuration of any model in small: what it is by default, with its sizes reduced.

Sizes are known by the names of their fields. There are three ways, each a list of rules; where one
breaks a family (a rotary width that no longer fits its head), the next may not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from lab.benchmarks.models.families import GIVEN

VOCABULARY, LAYERS = 99, 2
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TOKENS = re.compile(r"(token_id|token_index|token_ids|(?<!per)_token|_id)$")
Rule = tuple[str, Callable[[int], int]]


def at_most(largest: int) -> Callable[[int], int]:
    """A rule: numbers above it become it."""
    return lambda value: min(value, largest)


# Name of a field, as a pattern -> its new value; the first that fits is taken.
COUNTS: tuple[Rule, ...] = (
    (r"vocab_size", at_most(VOCABULARY)),
    (r"feat_extract_layers|num_codebooks", at_most(99)),
    (r"shared_layers", at_most(0)),
    (r"experts_per_tok|top_k$|topk$|moe_k|num_selected", at_most(2)),
    (r"n_groups?$|topk_group|num_expert_group", at_most(1)),
    (r"experts", at_most(4)),
    (r"first_k_dense|num_nextn|num_dense", at_most(1)),
    (r"(^|_)(n_?layers?|layers|depth|num_blocks|n_block|num_layer)$|num_hidden_groups",
     at_most(LAYERS)),
    (r"sliding_window$|window_size|attention_window|attention_chunk_size", at_most(4)),
    (r"^(image|img)_size$", at_most(64)),
)  # fmt: skip
_WIDTHS = (
    r"hidden|embd|embed|d_model|model_dim|dim$|width|proj|intermediate|ffn|inner|d_ff|mlp|channels|"
    r"^dim|units|bottleneck|emb_|state_size"
)
SMALL = (
    *COUNTS,
    (r"(key_value|kv)_heads|multi_query_group_num|num_kv", at_most(2)),
    (r"head_dim|d_kv|head_width|attention_head_size|size_per_head|d_head|dim_head", at_most(8)),
    (r"lora|_rank$", at_most(16)),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", lambda n: 8),
    (r"heads?$|^num_head|n_heads?", at_most(4)),
    (_WIDTHS, lambda n: 32 if n >= 48 else n),
)
# Heads as wide as they are by default, for what is cut along them.
BROAD = (
    *COUNTS,
    (r"(key_value|kv)_heads|multi_query_group_num|num_kv", at_most(2)),
    (r"head_dim|d_kv|head_width|attention_head_size|size_per_head|d_head|dim_head|lora|_rank$|rotary",
     at_most(512)),
    (r"heads?$|^num_head|n_heads?", at_most(4)),
    (_WIDTHS, lambda n: 512 if n >= 512 else n),
)  # fmt: skip
WAYS: dict[str, tuple[Rule, ...]] = {"small": SMALL, "broad": BROAD, "few layers": COUNTS}


def small_config(config_class: Any, way: str) -> Any:
    """A configuration of that class; raises what the class raises."""
    return config_class(**shrink(config_class(), WAYS[way]))


def shrink(config: Any, rules: tuple[Rule, ...]) -> dict[str, Any]:
    """Keywords for the class of `config`; parts of it are given as dictionaries."""
    layers = dict(_cut_lists(vars(config)))
    depth = len(next(iter(layers.values()), ())) or LAYERS
    changed: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "architectures"):
            continue
        if hasattr(value, "to_dict"):
            changed[name] = _own(value) | shrink(value, rules)
        elif name in layers:
            changed[name] = layers[name]
        elif name in _COUNTS and isinstance(value, int):
            changed[name] = min(value, depth)
        else:
            new = _smaller(name, value, rules)
            if new != value:
                changed[name] = new
    heads, groups = "num_attention_heads", "num_key_value_heads"
    if heads in changed and vars(config)[heads] == vars(config).get(groups):
        changed[groups] = changed[heads]  # a latent attention knows no groups
    return changed | (GIVEN.get(config.model_type, {}) if rules is SMALL else {})


def _own(part: Any) -> dict[str, Any]:
    """The kind of a part, and the numbers that its class has otherwise by default."""
    usual = vars(type(part)())
    own = {
        name: value
        for name, value in vars(part).items()
        if type(value) is int and not name.startswith("_") and usual.get(name) != value
    }
    return own | ({"model_type": part.model_type} if part.model_type else {})


def _cut_lists(values: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Lists with an entry per layer, cut to the first layer of every kind, four at most."""
    count = next((values[name] for name in _COUNTS if name in values), 0)
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, list | tuple) and count and len(value) == count > LAYERS
    }
    kinds = [str(kind) for kind in zip(*lists.values(), strict=True)]
    chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:4]
    chosen += [i for i in range(len(kinds)) if i not in chosen][: max(0, LAYERS - len(chosen))]
    for name, value in lists.items():
        yield name, [value[i] for i in sorted(chosen)]


def _smaller(name: str, value: Any, rules: tuple[Rule, ...]) -> Any:
    """The value of one field; the same where no rule is about it."""
    if isinstance(value, list | tuple):
        return type(value)(_smaller(name, x, rules) for x in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _TOKENS.search(name):  # inside the vocabulary, one for each name
        return value if value < VOCABULARY else 50 + sum(map(ord, name)) % 40
    return next((rule(value) for pattern, rule in rules if re.search(pattern, name)), value)
