"""The plugin in real pytest processes: items, skips, failures, and no cost when it is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fa4.install import install_command

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "fa4.testing.pytest_plugin"
INSTALLED = any(entry.value == PLUGIN for entry in metadata.entry_points(group="pytest11"))


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """pytest in an empty project, with the plugin loaded as an installation does."""
    plugin = [] if INSTALLED else ["-p", PLUGIN]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *plugin, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_items_pass_and_skip(tmp_path: Path) -> None:
    """One item per property, chosen with -k; what is not covered is skipped with the reason."""
    done = run_pytest(
        tmp_path, "--fa4-backend=tests.testing.planted:minimal", "--fa4-max-examples=3",
        "-k", "fa4 and (plain or softcap) and not with", "-v", "-rs",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "::plain PASSED" in done.stdout and "::softcap SKIPPED" in done.stdout
    assert "not covered: softcap: its signature does not name softcap" in done.stdout


def test_failures_show_the_test_to_paste(tmp_path: Path) -> None:
    """The report has the example, and no traceback through Hypothesis."""
    done = run_pytest(
        tmp_path,
        "--fa4-backend=tests.testing.planted:top_left_causal",
        "-k",
        "fa4 and causal_prefix",
    )
    assert done.returncode == 1
    assert "def test_causal_prefix():" in done.stdout and "Case(" in done.stdout
    assert "site-packages/hypothesis" not in done.stdout


def test_fixture(tmp_path: Path) -> None:
    """`fa4_backend` is the loaded back end; without the option its tests are skipped."""
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(fa4_backend):\n    assert fa4_backend.name == 'reference'\n"
    )
    options = ("--fa4-max-examples=1", "-k", "test_mine")
    assert "1 passed" in run_pytest(tmp_path, "--fa4-backend=reference", *options).stdout
    assert "1 skipped" in run_pytest(tmp_path, *options).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fa4-backend=nothing"], "must be one of reference"),
        (["--fa4-backend=reference", "--fa4-max-examples=0"], "must be at least 1; got 0"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], message: str) -> None:
    """A usage error in one line."""
    done = run_pytest(tmp_path, *options)
    assert done.returncode == 4 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_unused_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    """Without the option: no hypothesis, no torch, no numba, no suite."""
    (tmp_path / "test_mine.py").write_text(
        "import sys\n"
        "def test_mine():\n"
        "    heavy = {'torch', 'numba', 'fa4.testing.runner', 'fa4.testing.backends'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path, "-p", "no:hypothesispytest")
    assert done.returncode == 0, done.stdout


def test_importing_the_kit_without_hypothesis() -> None:
    """`import fa4.testing` works for the plugin's sake; using it says what to install."""
    code = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError(f"No module named {name!r}", name="hypothesis")

sys.meta_path.insert(0, Blocker())
import fa4.testing, fa4.testing.pytest_plugin
from fa4.testing import Case, build_inputs, load_backend
try:
    from fa4.testing import verify
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said = f"fa4.testing.verify needs hypothesis: {install_command('test')}"
    assert done.stdout.strip() == said
