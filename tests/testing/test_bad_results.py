"""What is no result is named in one line, in this process and in a worker; the rest goes on."""

from __future__ import annotations

import os
import re

import pytest

from fa4.testing import Case, verify
from fa4.testing.forks import _returned, in_one_process
from fa4.testing.refusals import BackendFailed
from fa4.testing.report import FAILED
from tests.testing import bad_results

HERE = "tests.testing.bad_results"
ONLY = ("plain", "gradients_values_low")


# What goes another way through a worker process.
ISOLATED = ("on_another_device", "forks", "view_of_an_input", "as_list")


@pytest.mark.parametrize(
    ("name", "isolate"),
    [(name, False) for name in bad_results.SAID] + [(name, True) for name in ISOLATED],
)
def test_bad_results_are_named(name: str, isolate: bool) -> None:
    """The first failure has the message, on one line, and the run comes to its end."""
    report = verify(f"{HERE}:{name}", only=ONLY, quick=True, isolate=isolate)
    assert len(report.results) == len(ONLY)
    failed = report.with_status(FAILED)
    assert failed, report.results
    error = failed[0].error
    assert "\n" not in error and len(report.failures) == 1
    assert re.match(bad_results.SAID[name], error), error


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("name", ["forks_and_waits", "prints"])
def test_what_is_its_own_affair(name: str, isolate: bool) -> None:
    """Children that end by themselves, and words."""
    assert verify(f"{HERE}:{name}", only=("plain",), quick=True, isolate=isolate).passed


def test_a_child_that_says_its_number_came_back() -> None:
    """And is ended; an empty pipe, and one that is closed, say nothing."""
    for said, came in ((b"", False), ((2**22).to_bytes(8, "little"), True)):
        ours, theirs = os.pipe()
        os.write(theirs, said)
        assert _returned(ours, 0.0) is came
        os.close(theirs)
        assert _returned(ours, 0.0) is False
        os.close(ours)


def test_who_has_not_forked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that comes back may take its time; without one none is spent."""
    waited = []

    def returned(pipe: int, seconds: float) -> bool:
        waited.append(seconds > 0)
        return False

    monkeypatch.setattr("fa4.testing.forks._returned", returned)

    def fork() -> str:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        return "here"

    for call in (lambda: "here", fork, lambda: "here"):
        assert in_one_process(call) == "here"
    assert waited == [False, True, False]


def test_a_child_that_comes_back_is_ended() -> None:
    """Whether it returns, raises or leaves; nothing of it is left, and this process goes on."""

    children: list[int] = []

    def fork(end):
        def call():
            children.append(os.fork())
            return end() if children[-1] == 0 else "here"

        return call

    def leave():
        raise SystemExit(3)

    for end in (lambda: "there", leave, lambda: 1 / 0):
        with pytest.raises(BackendFailed, match="a child process came back"):
            in_one_process(fork(end))
    for child in children:
        with pytest.raises(ChildProcessError):  # it is there no more; others have children here
            os.waitpid(child, os.WNOHANG)
    assert len(children) == 3
    assert in_one_process(fork(lambda: os._exit(0))) == "here"
    os.waitpid(children[-1], 0)


def test_examples_are_the_smallest() -> None:
    """A result that is never right shows with the plainest case."""
    (result,) = verify(f"{HERE}:one_batch", only=("plain",), quick=True).results
    assert result.example == repr(Case())
