"""A back end in a process of its own: crashes and hangs are failures of one case."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4.testing import Case, build_inputs, check_property, load_backend, verify, worker
from fa4.testing.isolation import IsolatedProcess, isolate
from fa4.testing.refusals import BackendFailed, NoAnswer, NotCovered
from fa4.testing.report import FAILED, NOT_COVERED, PASSED
from fa4.testing.reproduce import failing_test
from fa4.testing.worker import View, pack, unpack
from tests.testing import faulty

HERE = "tests.testing.faulty"
GOOD = Case(seqlen_k=3)
BAD = Case(seqlen_k=3, head_dim=faulty.BAD)


@pytest.fixture
def isolated():
    """`isolate`, with every worker ended after the test."""
    made = []

    def make(name, **options):
        made.append(isolate(name, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def alive(pid: int) -> bool:
    """Does the process run? A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_end(pid: int, seconds: float = 10.0) -> bool:
    """Does it end in time?"""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def process_of(backend) -> int:
    """The worker's process id; the back end must be `faulty.pid`."""
    return int(backend.forward(build_inputs(GOOD)).out.flat[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("killed", "ended its process with signal SIGSEGV"),
        ("exits", "exit code 3; it printed: the kernel says good-bye / to standard error too"),
        ("aborts", "ended its process with signal SIGABRT"),
        ("talks", "exit code 4; it printed: word 3 / word 4 / word 5 / word 6 / word 7$"),
        ("hangs", "no answer within 1 s; killed"),
        ("leaves", r"raised SystemExit\(3\)"),
    ],
)
def test_one_case_fails_and_the_rest_goes_on(isolated, name: str, message: str) -> None:
    """The message says how it ended; the next call finds a worker that answers rightly."""
    backend = isolated(f"{HERE}:{name}", timeout_s=1)
    good, bad = build_inputs(GOOD), build_inputs(BAD)
    expected = load_backend(f"{HERE}:{name}").forward(good).out
    for _ in range(2):
        with pytest.raises(BackendFailed, match=message):
            backend.forward(bad)
        assert np.array_equal(backend.forward(good).out, expected)
    assert backend.function.process.replaced == 2


def test_who_is_replaced_ends(isolated) -> None:
    """A process that answers, but whose answers are not trusted any more, does not stay."""
    backend = isolated(f"{HERE}:pid")
    before = process_of(backend)
    assert alive(before)
    backend.function.process._replace()
    wait_until = time.monotonic() + 10
    while alive(before) and time.monotonic() < wait_until:
        time.sleep(0.01)
    assert not alive(before) and process_of(backend) != before


@pytest.mark.parametrize(("name", "most"), [("hangs_always", 4), ("hangs_in_bf16", 3)])
def test_a_hang_costs_few_timeouts(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it offers is asked of two element types; then a case, and the plainest one. One type
    that hangs takes nothing from the others."""
    calls = []
    answer = IsolatedProcess.call

    def call(*arguments: Any) -> Any:
        try:
            return answer(*arguments)
        except NoAnswer:
            calls.append(arguments)
            raise

    monkeypatch.setattr(IsolatedProcess, "call", call)
    report = verify(f"{HERE}:{name}", only=("plain",), max_examples=5, timeout_s=1)
    (result,) = report.results
    assert result.status == FAILED and "no answer within 1 s; killed" in result.error
    assert 2 <= len(calls) <= most
    assert result.example == "Case()" if name == "hangs_always" else "'bf16'" in result.example


def test_threads_are_not_reached(isolated) -> None:
    """A worker takes one call at a time: what two at a time do is not said to hold."""
    (result,) = verify(isolated("tests.testing.planted:honest"), only=("second_thread",)).results
    assert result.status == NOT_COVERED and "not reached" in result.reason
    (result,) = verify("tests.testing.planted:honest", only=("second_thread",)).results
    assert result.status == PASSED


def test_a_poisoned_context_is_not_used_again(isolated) -> None:
    """In this process the fault would stay; a RuntimeError keeps its type and text."""
    backend = isolated(f"{HERE}:poisons")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        backend.forward(build_inputs(BAD))
    assert backend.forward(build_inputs(GOOD)).out.shape == (1, 1, 1, 8)


@pytest.mark.parametrize(
    ("error", "poisoned"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA: no stream of that name"), True),
        (RuntimeError("the shapes do not fit"), False),
        (ValueError("CUDA tensors only"), False),
    ],
    ids=str,
)
def test_after_which_errors_a_process_is_replaced(error: Exception, poisoned: bool) -> None:
    """Any RuntimeError that speaks of CUDA, unless the back end refuses a call so."""

    def fail(*arrays: Any, **options: Any) -> None:
        raise error

    call: Any = ([np.zeros(1)], {})
    reply = worker._run(fail, lambda error: False, call, None)
    assert (reply.kind, reply.poisoned) == ("error", poisoned)
    refused = worker._run(fail, lambda error: True, call, None)
    assert (refused.kind, refused.poisoned) == ("refused", False)


def test_a_search_goes_on_after_a_crash(isolated) -> None:
    """As Hypothesis and a shrinker call it: again and again, with bad and good cases in turn."""
    backend = isolated(f"{HERE}:killed")
    for case in (GOOD, BAD, BAD, GOOD, BAD, GOOD):
        expected = nullcontext() if case is GOOD else pytest.raises(BackendFailed, match="SIGSEGV")
        with expected:
            assert check_property("plain", backend, case) <= 1.0
    assert backend.function.process.replaced == 3


def test_the_pasted_test_survives_the_crash(isolated) -> None:
    """It runs the back end in a process of its own too, and fails with the same message."""
    source = failing_test("plain", isolated(f"{HERE}:killed"), BAD, "x")
    namespace: dict = {}
    exec(compile(source, "pasted", "exec"), namespace)
    with pytest.raises(BackendFailed, match="SIGSEGV"):
        namespace["test_plain"]()


def test_the_interface_is_the_same(isolated) -> None:
    """Facts of every function, without a call."""
    here = load_backend(f"{HERE}:complete_backend")
    there = isolated(f"{HERE}:complete_backend")
    assert there.isolated and not there.isolate_by_default
    assert (there.claims, there.fa4_dropout) == (frozenset({"robustness"}), True)
    for feature in ("causal", "softcap", "window_size", "lse", "varlen", "seqused", "paged",
                    "gradients", "dlse", "fp32", "bf16", "return_lse", "dropout"):  # fmt: skip
        assert there.reason_missing(feature) == here.reason_missing(feature), feature


@pytest.mark.parametrize("case", [
    Case(seqlen_q=9, seqlen_k=20, heads_k=2, group=2, dtype="bf16", causal=True, sink=0.5),
    Case(layout="paged", lengths=((3, 20), (1, 5)), dtype="fp16"),
    Case(seqlen_q=40, seqlen_k=70, score_mod="temper", dtype="fp64"),
    Case(seqlen_q=40, seqlen_k=70, mask_mod="stripes", sparse_block=(16, 32)),
    Case(seqlen_q=5, seqlen_k=6, tiles=(64, 64, 1), tau=0.0, dtype="bf16"),
])  # fmt: skip
def test_results_are_those_of_this_process(isolated, case: Case) -> None:
    """bf16, sinks, modifiers, block lists, page tables, configurations, LSE and gradients."""
    inputs = build_inputs(case)
    here, there = load_backend("reference"), isolated("reference")
    mine, other = here.forward(inputs), there.forward(inputs)
    if case.tiles is None and case.score_mod is None:
        mine, other = here.gradients(inputs, mine), there.gradients(inputs, other)
    for name in ("out", "lse", "dq", "dk", "dv", "dsink"):
        left, right = getattr(mine, name), getattr(other, name)
        assert (left is None) == (right is None)
        assert left is None or (left.dtype == right.dtype and left.tobytes() == right.tobytes())


def test_views_stay_views(isolated) -> None:
    """Strides are a feature: pickle alone would make every array contiguous."""
    case = Case(seqlen_q=3, seqlen_k=5, strided=8)
    inputs = build_inputs(case)
    assert load_backend(f"{HERE}:strides").forward(inputs).out.all()
    assert isolated(f"{HERE}:strides").forward(inputs).out.all()
    assert not isolated(f"{HERE}:strides").forward(build_inputs(GOOD)).out.any()


def test_noise_stays_away(isolated, capfd) -> None:
    """Neither stream reaches the terminal, and none of it is taken for an answer."""
    backend = isolated(f"{HERE}:noisy")
    for _ in range(3):
        backend.forward(build_inputs(GOOD))
    assert capfd.readouterr() == ("", "")


def test_results_that_cannot_be_sent(isolated) -> None:
    """One line, as for a function in this process."""
    with pytest.raises(AssertionError, match="out must be a NumPy array or a torch tensor; got"):
        isolated(f"{HERE}:writes").forward(build_inputs(GOOD))


def test_options_that_cannot_be_sent(isolated) -> None:
    """A function without a name is refused before anything is sent."""
    inputs = build_inputs(GOOD)
    inputs.options["score_mod"] = lambda *arguments: arguments[0]
    with pytest.raises(ValueError, match="score_mod cannot be sent to the process of 'reference'"):
        isolated("reference").forward(inputs)


def test_refused_shapes_are_not_covered(isolated) -> None:
    """The attribute `unsupported` is asked on the other side."""
    backend = isolated(f"{HERE}:shape_refused")
    with pytest.raises(NotCovered, match="head_dim 8 with head_dim_v 16 in fp32"):
        backend.forward(build_inputs(Case(head_dim_v=16)))
    assert backend.reason_missing("fp32") is None
    assert backend.function.process.replaced == 0


def test_one_worker_serves_the_run(isolated) -> None:
    """Calls share a process, and cost little: ten small ones well below a start."""
    backend = isolated(f"{HERE}:pid")
    pids = {process_of(backend) for _ in range(10)}
    assert len(pids) == 1 and pids != {os.getpid()}
    start = time.monotonic()
    for _ in range(100):
        process_of(backend)
    assert time.monotonic() - start < 5.0


def test_close_ends_the_worker_and_a_later_call_starts_another(isolated) -> None:
    """Nothing is left running."""
    backend = isolated(f"{HERE}:pid")
    pid = process_of(backend)
    backend.close()
    assert wait_for_end(pid)
    assert process_of(backend) != pid


PARENT = """
import os, signal, sys, threading
from fa4.testing import Case, build_inputs
from fa4.testing.isolation import isolate
pid = isolate("tests.testing.faulty:pid").forward(build_inputs(Case())).out.flat[0]
hanging = isolate("tests.testing.faulty:hangs")
busy = int(isolate("tests.testing.faulty:pid").forward(build_inputs(Case())).out.flat[0])
hanging_pid = hanging.function.process._current._process.pid
inputs = build_inputs(Case(head_dim=16))
threading.Thread(target=hanging.forward, args=(inputs,), daemon=True).start()
print(int(pid), hanging_pid, flush=True)
{end}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "end", ["pass", "raise SystemExit(1)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_nothing_outlives_the_parent(end: str) -> None:
    """However it ends, and also a worker in the middle of a call."""
    program = textwrap.dedent(PARENT).format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert all(wait_for_end(pid) for pid in pids)


def test_an_interrupted_call_leaves_no_answer_behind(isolated) -> None:
    """The late answer of a call that Ctrl-C ended is not taken for that of the next."""
    backend = isolated(f"{HERE}:hangs")
    expected = backend.forward(build_inputs(GOOD)).out

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            backend.forward(build_inputs(BAD))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert np.array_equal(backend.forward(build_inputs(GOOD)).out, expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os; os._exit(7)", "loading the back end .*: ended its process with exit code 7"),
        ("raise SystemExit(3)", r"cannot import 'ends': raised SystemExit\(3\)"),
        ("x = 1", "module 'ends' has no 'f'"),
        ("import nothing_of_the_kind", "cannot import 'ends'.* No module named"),
    ],
)
def test_names_that_cannot_be_loaded(tmp_path, monkeypatch, source: str, message: str) -> None:
    """One line, also for a module that ends the process that imports it."""
    (tmp_path / "ends.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message.replace("'ends'", "'ends'.*")) as caught:
        isolate("ends:f")
    assert "\n" not in str(caught.value)


def test_only_what_has_a_name() -> None:
    """A local function cannot be found again in another process."""

    def local(q, k, v):
        return v

    with pytest.raises(ValueError, match="only a back end with an importable name"):
        isolate(load_backend(local))
    for timeout_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the timeout must be a number of seconds above 0"):
            isolate("reference", timeout_s=timeout_s)


BUFFER = np.arange(48.0).reshape(2, 4, 6)


@pytest.mark.parametrize(
    "value",
    [3, [BUFFER], BUFFER, BUFFER[1], BUFFER[:, :0], BUFFER.view(np.float32)[..., ::2],
     np.asfortranarray(BUFFER)[:, ::2], np.ndarray((4,), np.uint8, bytearray(8), 0, (2,))],
    ids=["number", "list", "whole", "part", "nothing", "other type", "other order", "bytes"],
)  # fmt: skip
def test_what_is_sent_as_it_is(value: Any) -> None:
    """No view of a wider buffer of its own type: nothing else travels with it."""
    assert pack(value) is value
    assert unpack(value) is value


@pytest.mark.parametrize(
    "view",
    [BUFFER[:, ::2], BUFFER[..., 1:3], BUFFER.transpose(1, 0, 2), BUFFER[::-1, 1:, ::3],
     np.broadcast_to(BUFFER[:, :1], BUFFER.shape)],
    ids=["rows", "columns", "turned", "backwards", "stride 0"],
)  # fmt: skip
def test_a_view_is_a_view_on_the_other_side(view: np.ndarray) -> None:
    """The same numbers with the same strides, and two views of a buffer still share it."""
    sent = pickle.loads(pickle.dumps([pack(view), pack(BUFFER[:, 1::2])], protocol=5))
    found, other = (unpack(x) for x in sent)
    assert isinstance(sent[0], View) and found.dtype == view.dtype
    assert found.strides == view.strides and np.array_equal(found, view)
    assert np.may_share_memory(found, other)
