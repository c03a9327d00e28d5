"""The plugin in real pytest processes: items, skips, failures, and no cost when it is not used."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from fa4.testing import find_properties

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "fa4.testing.pytest_plugin"
INSTALLED = any(entry.value == PLUGIN for entry in metadata.entry_points(group="pytest11"))


# Several runs in one process, which imports everything once; a mark ends what each has written.
MARK = "the end of a run"
RUNS = f"""
import json, sys, pytest
for arguments in json.loads(sys.argv[1]):
    code = int(pytest.main(arguments))
    for stream in (sys.stdout, sys.stderr):
        print(code, {MARK!r}, file=stream, flush=True)
"""


class Run(NamedTuple):
    """What one run of pytest left."""

    returncode: int
    stdout: str
    stderr: str


def run_pytest(folder: Path, *runs: Sequence[str]) -> list[Run]:
    """pytest in an empty project, with the plugin loaded as an installation does."""
    always = ["-p", "no:cacheprovider", "-n", "0", *([] if INSTALLED else ["-p", PLUGIN])]
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps([[*always, *arguments] for arguments in runs])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    parts = [
        [part.rpartition("\n") for part in text.split(f" {MARK}\n")[:-1]]
        for text in (done.stdout, done.stderr)
    ]
    return [Run(int(out[2]), out[0], err[0]) for out, err in zip(*parts, strict=True)]


def test_items_pass_and_skip(tmp_path: Path) -> None:
    """One item per property, chosen with -k; what is not covered is skipped with the reason. Other
    plugins see the items, those that come later, too."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    print(sum(item.nodeid.startswith('fa4::') for item in items) > 100, 'seen')\n"
    )
    options = ["--fa4-backend=tests.testing.planted:minimal", "--fa4-max-examples=3", "-v", "-rs"]
    (done,) = run_pytest(tmp_path, [*options, "-k", "fa4 and (plain or softcap) and not with"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "True seen" in done.stdout
    assert "::plain PASSED" in done.stdout and "::softcap SKIPPED" in done.stdout
    assert "not covered: softcap: its signature does not name softcap" in done.stdout


def test_options_and_marker(tmp_path: Path) -> None:
    """Those of the command: chosen properties in one type, strict, with a time limit, by marker."""
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    options = ["--fa4-backend=tests.testing.planted:reads_masked_keys", "--fa4-quick", "-v"]
    options += ["--fa4-only=masked_nan", "--fa4-only=plain", "--fa4-dtype=bf16", "-m", "fa4"]
    strict = [*options, "--fa4-strict", "--fa4-seed=3", "--strict-markers"]
    hangs = ["--fa4-backend=tests.testing.faulty:hangs_always", "--fa4-only=plain", "-m", "fa4",
             "--fa4-timeout=0.5", "--junitxml=junit.xml"]  # fmt: skip
    first, second, third = run_pytest(tmp_path, options, strict, hangs)
    assert "1 passed, 1 skipped, 1 deselected" in first.stdout, first.stdout
    assert "1 failed, 1 passed, 1 deselected" in second.stdout, second.stdout
    assert "O NaN with values 'masked nan' x window" in second.stdout
    assert "no answer within 0.5 s; killed" in third.stdout, third.stdout
    assert "<failure" in (tmp_path / "junit.xml").read_text()


def test_a_first_look_is_fewer_cases(tmp_path: Path) -> None:
    """As the report of the run says, which names them."""
    always = ["--fa4-backend=reference", "--fa4-only=window_with_softcap", "-m", "fa4"]
    runs = [[*always, *more, f"--junitxml={n}.xml"] for n, more in enumerate(([], ["--fa4-quick"]))]
    assert [done.returncode for done in run_pytest(tmp_path, *runs)] == [0, 0]
    texts = [(tmp_path / f"{n}.xml").read_text() for n in range(2)]
    whole, quick = (int(re.search('"fa4 cases" value="(\\d+)"', x).group(1)) for x in texts)  # type: ignore[union-attr]
    (prop,) = find_properties(["window_with_softcap"])
    assert quick == prop.first_look < whole


def test_every_option_of_the_command_is_one_of_the_plugin() -> None:
    """But for what pytest has itself, and what shows something else."""
    from fa4.commands.verify import verify
    from fa4.testing.pytest_plugin import _OPTIONS

    own = {"exitfirst", "jobs", "junit", "html", "badge", "as_json", "corpus", "list_only",
           "list_adapters"}  # fmt: skip
    names = set(inspect.signature(verify).parameters) - own
    renamed = {"isolated": "isolate"}
    assert {renamed.get(name, name) for name in names} == {
        name.replace("-", "_") for name in _OPTIONS
    } - {"no_isolate"}


def test_failures_show_the_test_to_paste(tmp_path: Path) -> None:
    """The report has the example, and no traceback through Hypothesis."""
    options = ["--fa4-backend=tests.testing.planted:top_left_causal"]
    (done,) = run_pytest(tmp_path, [*options, "-k", "fa4 and causal_prefix"])
    assert done.returncode == 1
    assert "def test_causal_prefix():" in done.stdout and "Case(" in done.stdout
    assert "site-packages/hypothesis" not in done.stdout


def test_fixture(tmp_path: Path) -> None:
    """`fa4_backend` is the loaded back end; without the option its tests are skipped."""
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(fa4_backend):\n    assert fa4_backend.name == 'reference'\n"
    )
    options = ["--fa4-max-examples=1", "-k", "test_mine"]
    given, without = run_pytest(tmp_path, ["--fa4-backend=reference", *options], options)
    assert "1 passed" in given.stdout and "1 skipped" in without.stdout


BAD_OPTIONS = {
    "--fa4-backend=nothing": "must be one of reference",
    "--fa4-max-examples=0": "max_examples must be between 1",
    "--fa4-only=other": "no property matches 'other'",
    "--fa4-dtype=int8": "dtype must be one of fp32",
    "--fa4-timeout=0": "timeout must be above 0 seconds; got 0",
}


def test_bad_options(tmp_path: Path) -> None:
    """A usage error in one line."""
    runs = [["--fa4-backend=reference", option] for option in BAD_OPTIONS]
    for done, message in zip(run_pytest(tmp_path, *runs), BAD_OPTIONS.values(), strict=True):
        assert done.returncode == 4 and message in done.stderr, done
        assert "Traceback" not in done.stderr


def test_unused_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    """Without the option: no hypothesis, no torch, no numba, no suite."""
    (tmp_path / "test_mine.py").write_text(
        "import sys\n"
        "def test_mine():\n"
        "    heavy = {'torch', 'numba', 'fa4.testing.runner', 'fa4.testing.backends'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    (done,) = run_pytest(tmp_path, ["-p", "no:hypothesispytest"])
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
    said = "fa4.testing.verify needs hypothesis: pip install 'hypothesis>=6.112'"
    assert done.stdout.strip() == said
