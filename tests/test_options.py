"""The table of options, and everything that is written out beside it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fa4
from fa4.call.call import ARGUMENTS, Call
from fa4.call.options import COUNT, COUNT_OR_NONE, FLAG, NUMBER, OPTIONS
from fa4.compiled.support import TABLES
from lab.pages.option_tables import PAGE, TABLES_OF_PAGE, in_kernels

ROOT = Path(__file__).resolve().parents[1]
NAMES = [option.name for option in OPTIONS]
FUNCTIONS = {fa4.flash_attn_func: False, fa4.flash_attn_varlen_func: True}

# Names that programs write of something else, too.
AMBIGUOUS = {"config"}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_are_those_of_the_table(function) -> None:
    """Names, defaults and order, which the signatures write out for readers and type checkers."""
    written = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("impl", "return_lse")
    }
    wanted = {x.name: x.default for x in OPTIONS if FUNCTIONS[function] or not x.varlen}
    assert list(written.items()) == list(wanted.items())


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_docstrings_name_every_option(option) -> None:
    """In the Args of the function whose it is, alone or beside its likes."""
    function = fa4.flash_attn_varlen_func if option.varlen else fa4.flash_attn_func
    arguments = (function.__doc__ or "").partition("Args:")[2]
    assert re.search(rf"\b{option.name}\b[\w, ]*:", arguments), option.name


def test_the_record_carries_every_option() -> None:
    """And the operators' schema, made from it, nothing else but the tensors and what is derived."""
    carried = {field for option in OPTIONS for field in option.carried_by}
    assert carried | {"q", "k", "v", "varlen"} == set(ARGUMENTS)
    assert set(Call._fields) - set(ARGUMENTS) == {"form"}


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_the_kernels_have_or_refuse_every_option(option) -> None:
    """A row of the forward or the backward tables, of both machines alike."""
    for machine in ("sm100", "sm90"):
        rows = {row.name for table in (machine, f"{machine} backward") for row in TABLES[table]}
        assert option.support_row in rows


WRONG_KINDS = {NUMBER: "1", COUNT: 1.5, COUNT_OR_NONE: 1.5, FLAG: 1}
WRONG = {
    "max_seqlen_q": 1.5, "max_seqlen_k": "8", "softmax_scale": "1", "causal": 1,
    "window_size": (1,), "learnable_sink": np.zeros(2), "softcap": -1.0, "num_splits": 257,
    "pack_gqa": 2, "deterministic": None, "score_mod": 1, "score_mod_bwd": 1, "mask_mod": 1,
    "aux_tensors": 1, "block_sparse_tensors": 1, "dropout_p": 1.0, "dropout_seed": 2**64,
    "config": 1, "page_table": np.zeros(2), "q_descale": np.ones((1, 1)),
    "k_descale": np.ones((1, 1)), "v_descale": np.ones((1, 1)), "cu_seqlens_q": np.zeros(2),
    "cu_seqlens_k": np.zeros(2), "seqused_q": np.zeros(1), "seqused_k": np.zeros((1, 1), np.int32),
}  # fmt: skip


def wrong_value(name: str) -> object:
    """What the rule of an option rules out, else its kind."""
    kind = next(option.kind for option in OPTIONS if option.name == name)
    return WRONG.get(name, WRONG_KINDS.get(kind, object()))


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_checked(name: str) -> None:
    """A value that the table rules out is refused in one line that names the option."""
    q, k, v = (np.zeros((1, 4, 1, 8), np.float32) for _ in range(3))
    if name == "cu_seqlens_q":
        q = q[0]
    elif name == "cu_seqlens_k":
        k, v = k[0], v[0]
    with pytest.raises((TypeError, ValueError), match=name.partition("_tensors")[0][:12]) as wrong:
        fa4.flash_attn_varlen_func(q, k, v, **{name: wrong_value(name)})
    assert "\n" not in str(wrong.value)


def named(paths: Iterator[Path]) -> set[str]:
    """Option names that programs write as strings, keywords or fields."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return found & set(NAMES)


def test_drop_ins_map_every_option() -> None:
    """Or the table says why not."""
    folders = [(ROOT / "fa4" / name).rglob("*.py") for name in ("flash_attn", "dropin")]
    paths = [ROOT / "fa4/transformers.py", *(path for folder in folders for path in folder)]
    unmapped = set(NAMES) - named(iter(paths)) | AMBIGUOUS
    assert unmapped == {option.name for option in OPTIONS if option.no_drop_in}


def test_the_kit_draws_every_option() -> None:
    """Or the table says why not."""
    testing = ROOT / "fa4/testing"
    paths = (path for path in testing.rglob("*.py") if path.parent.name != "adapters")
    assert set(NAMES) - named(paths) == {option.name for option in OPTIONS if option.not_drawn}


def test_the_page_is_that_of_the_table() -> None:
    """If not: python -m lab.pages.option_tables."""
    assert list(TABLES_OF_PAGE.stale(PAGE.read_text("utf-8"))) == []
    states = {x.name: in_kernels(x, TABLES["sm100"]) for x in OPTIONS}
    assert states["softcap"] == "yes" and states["dropout_p"] == "no"
    assert states["deterministic"] == "-"
