"""What the default run covers, read from its report: the pairs are written down here again."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product

import pytest

from fa4.testing import PROPERTIES, runner, verify
from fa4.testing.coverage import DECLARED, listed_cases, listed_counts
from fa4.testing.design import combine, deal, list_cases
from fa4.testing.levels import FEATURES as REGISTERED
from fa4.testing.levels import levels_of, may_meet
from fa4.testing.properties import find_properties

# Features with their variants, as a user of attention would list them.
FEATURES = {
    "causal": ("causal",),
    "window": ("window_left", "window_right", "window_both"),
    "mask_mod": ("mask_mod",),
    "softcap": ("softcap",),
    "score_mod": ("score_mod",),
    "aux": ("aux_tensors",),
    "sink": ("sink",),
    "gqa": ("gqa_1", "gqa_2", "gqa_3", "gqa_4", "gqa_5", "gqa_6", "gqa_7", "gqa_8", "gqa_16"),
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


def check_all_passed(report: dict) -> None:
    """Every property that a reference without gaps can be asked for was judged, and holds."""
    declared = {prop.name for prop in PROPERTIES if prop.needs & DECLARED}
    rows = [row for row in report["properties"] if row["name"] not in declared]
    bad = [row for row in rows if row["status"] != "passed"]
    assert not bad, bad[0]
    assert all(row["cases"] and not row["reason"] for row in rows)


def check_coverage(report: dict) -> None:
    """Each pair 3 times, for each output, and each mask x layout x modification at least once."""
    counts = report["levels"]["pairs"]
    found = {pair: counts.get(" x ".join(pair), 0) for pair in required_pairs()}
    few = {pair: count for pair, count in found.items() if count < 3}
    assert len(found) > 400 and not few, few
    masks = ("causal", "window_left", "window_right", "window_both", "mask_mod")
    layouts, changes = ("dense", "varlen", "seqused", "paged"), ("softcap", "score_mod", "sink")
    triples = report["levels"]["triples"]
    missing = [x for x in map(" x ".join, product(masks, layouts, changes)) if not triples.get(x)]
    assert not missing, missing
    check_every_output(report["coverage"])


def test_a_quick_run_on_the_reference() -> None:
    """The first look at every property, by the command."""
    code, report = verify_json("--backend", "reference", "--quick")
    assert code == 0
    check_all_passed(report)


@pytest.mark.slow
def test_the_default_run_on_the_reference() -> None:
    """Everything passes, and covers all that it must."""
    code, report = verify_json("--backend", "reference")
    assert code == 0
    check_all_passed(report)
    check_coverage(report)


def test_the_default_run_covers_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its report; the cases are those of the run above, and nobody computes them."""
    idle = tuple(replace(prop, check=lambda *_: 0.0, machine=None) for prop in PROPERTIES)
    monkeypatch.setattr(runner, "find_properties", lambda only: idle)
    check_coverage(verify("reference").as_dict())


def check_every_output(coverage: dict) -> None:
    """Each meaningful pair of levels, as a user would count them, three times for each output."""
    features = {a: b for a, b in FEATURES.items() if a not in ("lse", "gradients", "layout")}
    features |= {name: (name,) for name in ("softmax_scale", "varlen", "seqused", "paged")}
    features["gqa"] = tuple(x for x in FEATURES["gqa"] if x != "gqa_1")
    features["aux_tensors"] = features.pop("aux")
    features["splits"] = features.pop("split")
    apart = MEANINGLESS | set(combinations(("varlen", "seqused", "paged"), 2))
    pairs = [
        (x, y)
        for (a, first), (b, second) in combinations(features.items(), 2)
        if not {(a, b), (b, a)} & apart
        for x, y in product(first, second)
    ]
    assert list(coverage) == ["out", "lse", "dq", "dk", "dv", "dsink"]
    for output, row in coverage.items():
        wanted = [pair for pair in pairs if output != "dsink" or "sink" in pair]
        assert row["pairs"] == len(wanted) and not row["few"] and row["least"] >= 3, row


@pytest.mark.parametrize("seed", [0, 1, 77, 2**40])
def test_the_lists_alone_cover_every_pair_and_axis(seed: int) -> None:
    """With any seed: pairs of features, three-way ones with gradients, and each stride, extent,
    kind of slack, class of head dims and length, and gradient of the LSE, with every feature."""
    counts = listed_counts(seed=seed)
    assert all(not row.few for row in counts.coverage())
    masks = ("causal", "window_left", "window_right", "window_both", "mask_mod")
    layouts, changes = ("dense", "varlen", "seqused", "paged"), ("softcap", "score_mod", "sink")
    for output in ("dq", "dk", "dv"):
        for triple in product(masks, layouts, (*changes, "gqa")):
            assert counts.counts[output][triple], (output, triple)
    features = [level for levels in REGISTERED.values() for level in levels]
    for output in ("out", "dq"):
        for axis, without in AXES.items():
            for level in features:
                if level in without or (output == "out" and axis in ("dlse", "values_low")):
                    continue
                pair = tuple(sorted((axis, level)))
                assert counts.counts[output][pair], (output, *pair)
    assert counts.counts["dq"]["behind_an_empty_one", "varlen"] >= 20
    assert counts.counts["dq"]["rows_and_keys", "values_normal"] >= 1


_LAYOUTS = {"varlen", "seqused", "paged"}
AXES: dict[str, set[str]] = {
    "strides_fused": set(),
    "strides_heads_first": set(),
    "strides_expanded_kv": set(),
    "slack_buffer": _LAYOUTS - {"varlen"},
    "slack_max_seqlen": _LAYOUTS - {"varlen"},
    "slack_seqused": _LAYOUTS - {"varlen"},
    "many_heads": set(),
    "many_batch": _LAYOUTS,
    "many_sequences": _LAYOUTS - {"varlen"},
    "pages_shared": _LAYOUTS - {"paged"},
    "dim_odd": set(),
    "dim_unequal": set(),
    "dim_beyond_128": set(),
    "seed_of_64_bits": set(),
    "keys_long": set(),
    "dlse": set(),
    "values_low": set(),
}


def test_a_missing_output_would_be_seen() -> None:
    """A run without gradients covers none of theirs, and its report says so."""
    report = verify("reference", only=["window_with_softcap"], max_examples=20)
    rows = {row.output: row for row in report.coverage}
    few = {name: set(row.few) for name, row in rows.items()}
    assert "softcap x window_left" not in few["out"] and "softcap x window_left" in few["dq"]
    assert rows["dq"].least == 0 and len(rows["dq"].few) == rows["dq"].pairs


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
    assert len(levels) == 24 and len(cases) == 120
    assert cases == list_cases("x", levels, ("fp32", "bf16"), repeats=5)
    assert cases != list_cases("x", levels, ("fp32", "bf16"), repeats=5, seed=1)
    names = [levels_of(case) for case in cases]
    for level, least in (("gqa_3", 15), ("window_left", 40), ("bf16", 60), ("keys_long", 30)):
        assert sum(level in found for found in names) == least, level
    import random

    assert sorted(deal(random.Random(0), "abc", 7)) in (
        list("aaabbcc"), list("aabbbcc"), list("aabbccc"),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 5])
def test_a_first_look_at_a_pair_is_a_clear_one(seed: int) -> None:
    """Its first case has several rows in a sequence of several tiles, and values of which none
    hides the others: a first look may take no more."""
    names = [f"{kind}{a}_{word}_{b}" for a, b in combinations(REGISTERED, 2) if may_meet(a, b)
             for kind, word in (("", "with"), ("gradients_with_", "and"))]  # fmt: skip
    firsts = {prop.name: listed_cases(prop, seed=seed)[0] for prop in find_properties(names)}
    assert len(firsts) == len(names) > 150
    for name, case in firsts.items():
        rows, keys = max(case.sequences, key=lambda lengths: lengths[1])
        assert case.values == "normal" and rows >= 9 and keys > 128, (name, case)


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
