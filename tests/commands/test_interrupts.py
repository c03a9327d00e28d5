"""Ctrl-C ends a command with one line and exit code 130, wherever it strikes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A shell's background jobs, these tests among them perhaps, ignore SIGINT and hand that on.
HEARD, IGNORED = "default_int_handler", "SIG_IGN"
HEARING = f"import signal; signal.signal(signal.SIGINT, signal.{HEARD})"

# `fa4` in a process that gets SIGINT when a module is imported, or some seconds after.
DRIVER = """
import signal
import sys

handler, moment, seconds, *arguments = sys.argv[1:]
signal.signal(signal.SIGINT, getattr(signal, handler))

class Striker:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, float(seconds) or 1e-6)
        return None

sys.meta_path.insert(0, Striker())
sys.argv = ["fa4", *arguments]
from fa4.cli import main
main()
"""


def strike(
    moment: str, seconds: float, *arguments: str, handler: str = HEARD
) -> subprocess.CompletedProcess[str]:
    """`fa4 <arguments>`, interrupted `seconds` after it begins to import the module `moment`."""
    return subprocess.run(
        [sys.executable, "-c", DRIVER, handler, moment, str(seconds), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={"FA4_CACHE": "0", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "seconds", "command"),
    [
        ("typer", 0.0, "doctor"),
        ("numpy", 0.0, "predict"),
        ("numba", 0.05, "predict"),
        ("cutlass", 0.1, "compile"),
        ("fa4.compiled.forward", 0.3, "compile"),
        ("fa4.compiled.forward", 0.7, "compile"),
    ],
)
def test_ctrl_c_is_one_line(moment: str, seconds: float, command: str) -> None:
    """At import, and while the compiler's own code runs."""
    done = strike(moment, seconds, command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fa4: interrupted\n")


def test_a_background_job_goes_on() -> None:
    """It ignores SIGINT, as its shell wants."""
    done = strike("typer", 0.0, "doctor", handler=IGNORED)
    assert done.returncode == 0 and done.stdout.startswith("fa4 ")


def test_ctrl_c_lets_files_be_cleaned_up(tmp_path: Path) -> None:
    """What is being written is removed: the exception is raised where code can handle it."""
    code = f"""
{HEARING}
import sys
from pathlib import Path
from fa4 import cli
from fa4.commands import doctor
from fa4.base.files import write_whole

def trial(**_):
    def strike(*_):
        signal.raise_signal(signal.SIGINT)
    Path.replace = strike
    write_whole(Path({str(tmp_path)!r}) / "x.json", b"content")

doctor.diagnose = trial
sys.argv = ["fa4", "doctor"]
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "fa4: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_a_destructor_is_not_forgotten() -> None:
    """Python prints such exceptions and goes on."""
    code = f"""
{HEARING}
import sys
from fa4 import cli
from fa4.commands import doctor

class Left:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

doctor.diagnose = lambda: Left() and dict()
doctor.render = lambda report: "went on"
sys.argv = ["fa4", "doctor"]
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fa4: interrupted\n")
