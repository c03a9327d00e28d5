"""What the default run covers, read from its report: the pairs are written down here again."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations, product

import pytest

from fa4.testing.design import combine, deal, list_cases
from fa4.testing.levels import levels_of, may_meet

# Features with their variants, as a user of attention would list them.
FEATURES = {
    "causal": ("causal",),
    "window": ("window_left", "window_right", "window_both"),
    "mask_mod": ("mask_mod",),
    "softcap": ("softcap",),
    "score_mod": ("score_mod",),
    "aux": ("aux_tensors",),
    "sink": ("sink",),
    "gqa": ("gqa_1", "gqa_2", "gqa_3", "gqa_4", "gqa_8"),
    "layout": ("dense", "varlen", "seqused", "paged"),
    "split": ("splits",),
    "dropout": ("dropout",),
    "lse": ("lse",),
    "gradients": ("gradients",),
}
CLASSES = {
    "dtype": ("fp32", "fp64", "bf16", "fp16"),
    "length": ("keys_1", "keys_edge", "keys_tiles", "keys_long"),
    "head_dim": ("dim_to_64", "dim_to_128", "dim_beyond_128", "dim_unequal"),
}
# mask_mod replaces causal and windows; softcap and score_mod exclude each other.
MEANINGLESS = {("causal", "mask_mod"), ("window", "mask_mod"), ("softcap", "score_mod")}


def required_pairs() -> set[tuple[str, str]]:
    """Every pair of variants of different features, and of a variant and a class."""
    pairs = set()
    for (a, first), (b, second) in combinations((FEATURES | CLASSES).items(), 2):
        if (a, b) not in MEANINGLESS and not {a, b} <= set(CLASSES):
            pairs |= {tuple(sorted(pair)) for pair in product(first, second)}
    return pairs


def verify_json(*arguments: str) -> tuple[int, dict]:
    """Exit code and report of `fa4 verify --json` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fa4.cli", "verify", "--json", *arguments],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_default_run_on_the_reference() -> None:
    """Everything passes; each pair 5 times, each mask x layout x modification at least once."""
    code, report = verify_json("--backend", "reference")
    bad = [row for row in report["properties"] if row["status"] != "passed"]
    assert code == 0 and not bad, bad[0]
    assert all(row["cases"] and not row["reason"] for row in report["properties"])
    counts = report["levels"]["pairs"]
    found = {pair: counts.get(" x ".join(pair), 0) for pair in required_pairs()}
    few = {pair: count for pair, count in found.items() if count < 5}
    assert len(found) > 400 and not few, few
    masks = ("causal", "window_left", "window_right", "window_both", "mask_mod")
    layouts, changes = ("dense", "varlen", "seqused", "paged"), ("softcap", "score_mod", "sink")
    triples = report["levels"]["triples"]
    missing = [x for x in map(" x ".join, product(masks, layouts, changes)) if not triples.get(x)]
    assert not missing, missing


@pytest.mark.slow
def test_the_default_run_on_torch() -> None:
    """torch's own attention passes; what it lacks is not covered."""
    pytest.importorskip("torch")
    code, report = verify_json("--backend", "torch-sdpa")
    assert code == 0 and report["counts"]["failed"] == 0 and report["counts"]["passed"] >= 40


@pytest.mark.slow
def test_the_default_run_on_a_plain_function() -> None:
    """The honest back end that faults are planted in: NumPy, every feature, exit code 0."""
    code, report = verify_json("--backend", "tests.testing.planted:honest")
    assert code == 0 and report["counts"]["passed"] >= 160, report["failures"]


def test_a_missing_pair_would_be_seen() -> None:
    """The report counts what was judged: without a property, its pair is gone."""
    _, report = verify_json("--only", "window", "--only", "softcap", "--max-examples", "4")
    assert not report["levels"]["pairs"].get("softcap x window_left")
    _, report = verify_json("--only", "window_with_softcap", "--max-examples", "4")
    assert report["levels"]["pairs"]["softcap x window_left"] >= 1


def test_designs_are_balanced_and_repeat() -> None:
    """Every combination equally often, every class within one; the same seed, the same cases."""
    levels = combine(("window", "gqa"))
    cases = list_cases("x", levels, ("fp32", "bf16"), repeats=5)
    assert len(levels) == 12 and len(cases) == 60
    assert cases == list_cases("x", levels, ("fp32", "bf16"), repeats=5)
    assert cases != list_cases("x", levels, ("fp32", "bf16"), repeats=5, seed=1)
    names = [levels_of(case) for case in cases]
    for level, least in (("gqa_3", 15), ("window_left", 20), ("bf16", 30), ("keys_long", 15)):
        assert sum(level in found for found in names) == least, level
    import random

    assert sorted(deal(random.Random(0), "abc", 7)) in (
        list("aaabbcc"), list("aabbbcc"), list("aabbccc"),
    )  # fmt: skip


def test_what_may_not_meet_is_refused_by_the_reference() -> None:
    """Pairs that the design leaves out have no meaning; all others build and run."""
    from fa4.testing import Case, build_inputs, load_backend

    for a, b in (("mask_mod", "causal"), ("softcap", "score_mod")):
        assert not may_meet(a, b) and not may_meet(b, a)
        fields = {"mask_mod": "stripes", "causal": True, "softcap": 1.0, "score_mod": "alibi"}
        case = Case(seqlen_q=2, seqlen_k=2, **{name: fields[name] for name in (a, b)})
        with pytest.raises(ValueError):
            load_backend("reference").forward(build_inputs(case))


def test_levels_of_windows() -> None:
    """-1 and None are unbounded; causal with a window of any right side is a pair of features."""
    from fa4.testing import Case

    for window, causal, level in (
        ((3, None), False, "window_left"),
        ((-1, 2), False, "window_right"),
        ((3, 2), True, "window_both"),
        ((0, -5), True, "window_both"),
    ):
        assert level in levels_of(Case(window_size=window, causal=causal))
