"""The programs of a failing case print what the kit saw."""

from __future__ import annotations

import re

import pytest

from fa4.testing import Case, build_inputs, load_backend, verify
from fa4.testing.programs import is_plain, numpy_program, torch_program

PLANTED = "tests.testing.planted"
TORCH = "torch:tests.testing.torch_functions"


def printed(source: str, capsys) -> tuple[str, float, float]:
    """(element, value, what it must be) as a program prints them."""
    exec(compile(source, "program", "exec"), {})
    words = re.fullmatch(r"(.*) is (\S+) and must be (\S+)\n", capsys.readouterr().out)
    assert words, source
    return words[1], float(words[2]), float(words[3])


@pytest.mark.parametrize(
    ("name", "only"),
    [
        (f"{PLANTED}:top_left_causal", "causal"),
        (f"{PLANTED}:sink_of_kv_head", "sink_with_gqa"),
        (f"{PLANTED}:dk_causal_gqa", "gradients_with_causal_and_gqa"),
        (f"{PLANTED}:dlse_ignored", "gradients_lse"),
        (f"{PLANTED}:key_beyond_full_page", "paged"),
        (f"{PLANTED}:o_truncated_to_bf16", "rounding_bias"),
    ],
)
def test_numpy_programs_show_the_fault(name: str, only: str, capsys) -> None:
    """The same element, the same value."""
    report = verify(name, only=[only], quick=True)
    for symptom in (x for x in report.results[0].symptoms if x.is_output):
        element, value, oracle = printed(symptom.numpy, capsys)
        said = re.match(r"(.*) = (\S+), oracle (\S+):", symptom.error)
        assert said and said[1] == element
        assert (value, oracle) == (pytest.approx(float(said[2])), float(said[3]))


@pytest.mark.parametrize("what", ["out", "lse", "dk", "dsink"])
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_torch_programs_compute_the_case(what: str, dtype: str, capsys) -> None:
    """A right function gives the oracle's value, from values drawn by the program or by fa4."""
    for more in ({}, {"values": "grid"}):
        case = Case(batch=2, seqlen_q=3, seqlen_k=5, group=2, causal=True, sink=0.5, dtype=dtype,
                    seed=7, **more)  # fmt: skip
        assert is_plain(case) == (not more)
        backend = load_backend("oracle")
        inputs = build_inputs(case)
        saved = backend.forward(inputs)
        outputs = backend.gradients(inputs, saved)
        at = {"out": (1, 2, 1, 3), "lse": (1, 1, 2), "dk": (1, 4, 0, 3), "dsink": (1,)}[what]
        right = float(getattr(outputs, what)[at])
        error = f"{what}[{', '.join(map(str, at))}] = 0, oracle {right:.9g}: x"
        source = torch_program(f"{TORCH}:attention", case, what, error)
        value = printed(source, capsys)[1]
        assert value == pytest.approx(right, rel=0.05 if dtype == "bf16" else 1e-6)


def test_what_is_no_output_is_a_comment() -> None:
    """And a function without a name is the reader's own."""
    source = numpy_program("lambda", Case(), "q was changed", "q was changed in place; twice")
    assert "load_backend(your_function)" in source and source.endswith("# q was changed in place\n")
    assert "from your_module import attention" in torch_program("reference", Case(), "out", "")
