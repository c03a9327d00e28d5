"""What must work without any optional package: checked in a process that cannot import them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Runs first in the new process: importing one of these fails, as if it were not installed.
BLOCK_OPTIONAL = """
import sys

BLOCKED = {"torch", "cutlass", "cuda", "matplotlib", "hypothesis", "pytest",
           "safetensors", "tokenizers", "sentence_transformers"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")
        return None

sys.meta_path.insert(0, Blocker())
"""


def run_fresh(code: str, *, block: bool = True) -> str:
    """Run `code` in a new Python with the repository on its path; its stdout, or fail the test."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_OPTIONAL * block + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_blocker_blocks() -> None:
    """Otherwise the tests below would check nothing."""
    code = """
for name in sorted(BLOCKED):
    try:
        __import__(name)
    except ImportError as error:
        assert "blocked" in str(error), error
    else:
        raise AssertionError(name)
"""
    run_fresh(code)


def test_reference_and_tables_import() -> None:
    """The package, its tables and every module of the reference."""
    code = """
import importlib
import pkgutil

import fa4, fa4.config, fa4.hardware, fa4.dtypes, fa4.reference

for module in pkgutil.walk_packages(fa4.reference.__path__, "fa4.reference."):
    importlib.import_module(module.name)
"""
    run_fresh(code)


def test_attention_runs() -> None:
    """(1, 5, 2, 8) causal attention: right shapes, and row 0 sees only key 0."""
    code = """
import numpy as np

import fa4

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
out, lse = fa4.flash_attn_func(q, k, v, causal=True, return_lse=True)
assert out.shape == (1, 5, 2, 8) and lse.shape == (1, 2, 5), (out.shape, lse.shape)
assert out.dtype == np.float32 and lse.dtype == np.float32
np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)
assert fa4.flash_attn_func(q, k, v).shape == (1, 5, 2, 8)
"""
    run_fresh(code)


def documented_names() -> list[str]:
    """What docs/api.md calls fa4.NAME."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(r":: fa4\.(\w+)", page)))


@pytest.mark.parametrize("name", documented_names())
def test_a_documented_part_is_there_after_import(name: str) -> None:
    """`import fa4` alone offers it, whatever else was imported before: nothing was."""
    assert len(documented_names()) > 15
    assert run_fresh(f"import fa4\nprint(fa4.{name} is not None)", block=False) == "True\n"


def test_a_part_that_is_not_there_is_an_attribute_error() -> None:
    """As for any module; and what is documented is what `dir` shows."""
    code = "import fa4\nprint(hasattr(fa4, 'nothing'), *dir(fa4))"
    first, *shown = run_fresh(code, block=False).split()
    assert first == "False" and set(documented_names()) <= set(shown)


def test_flash_attn_2_runs_on_arrays() -> None:
    """Its names need no torch; what does says so, with the command."""
    code = """
import numpy as np

import fa4

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
slopes = np.ones(2, np.float32)
out = fa4.flash_attn.flash_attn_func(q, k, v, 0.0, None, True, alibi_slopes=slopes)
np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)
try:
    fa4.sdpa
except ImportError as error:
    assert str(error).startswith("fa4.sdpa needs torch: pip install"), error
else:
    raise AssertionError("fa4.sdpa without torch")
"""
    run_fresh(code)


def test_attention_and_plans_do_without_numba() -> None:
    """What needs no compiled code works where numba does not exist: as in a browser."""
    code = """
BLOCKED |= {"numba", "llvmlite"}

import numpy as np

import fa4
from fa4.config import ForwardPipeline
from fa4.hardware import B200
from fa4.plan import check_plan, forward_plan
from fa4.sim.machine import find_machine
from fa4.sim.roofline import roofline_terms

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 70, 2, 16))
exact, lse = fa4.flash_attn_func(q, k, v, causal=True, impl="oracle", return_lse=True)
np.testing.assert_allclose(fa4.flash_attn_func(q, k, v, causal=True), exact, atol=1e-12)
gradients = fa4.flash_attn_backward(q, q, k, v, exact, lse, causal=True)
assert gradients.dq.shape == q.shape
plan = forward_plan(ForwardPipeline(), B200)
assert check_plan(plan, B200) == []
assert roofline_terms(plan, find_machine("b200")).bound_by == "tensor"
try:
    import fa4.sim.predict
except ImportError as error:
    assert "numba" in str(error), error
else:
    raise AssertionError("the simulator's engine without numba")
"""
    run_fresh(code)


def test_doctor_runs() -> None:
    """`fa4 doctor` must not crash because something is missing."""
    code = """
import fa4.cli

fa4.cli.main(["doctor"])
"""
    assert "reference" in run_fresh(code)


def test_help_loads_nothing_heavy() -> None:
    """`fa4 --help` imports every command module, and none of them a large package."""
    code = """
import sys

import fa4.cli

fa4.cli.build_app()
heavy = {"torch", "cutlass", "matplotlib", "hypothesis", "pytest", "scipy", "tokenizers"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_fresh(code, block=False).strip() == "[]"
