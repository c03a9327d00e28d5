"""A back end in a process of its own, so that a crash or a hang is one failed case.

`isolate(backend)` gives a `Backend` of the same interface whose functions run in a worker process
(`fa4.testing.worker`), a fresh Python that loads the back end by its name; arrays go there and come
back through pipes. A call that ends the process, takes too long, raises SystemExit or leaves CUDA
unusable raises `BackendFailed` with exit code, signal or time limit, and the next call finds
another worker. After the first such call one is always kept ready, so that the search for the
smallest example is not spent on starting them.

A time limit needs isolation: nothing can end a call that runs in this process.
"""

from __future__ import annotations

import builtins
import inspect
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from fa4.testing.backends import Backend, is_loadable
from fa4.testing.refusals import BackendFailed, Breach, NoAnswer
from fa4.testing.worker import Facts, Reply, pack

CALL_SECONDS = 120.0  # a first call may compile a kernel
START_SECONDS = 300.0  # to import torch and a library from a cold disk
NOISE_LINES = 5  # of what the worker printed, in the message of a crash
_END_SECONDS = 10.0  # from the end of the pipe to the end of the process

_PROGRAM = """\
import sys
sys.path[:] = {path!r}
from fa4.testing.worker import main
main()
"""


def isolate(backend: Backend | str, timeout_s: float | None = None) -> Backend:
    """The same back end in a worker process; `close` ends it, at the latest with this process.

    timeout_s: seconds that one call may take (default 120). Raises ValueError for a back end that
    has no importable name, whose name leads nowhere, or that does not survive being loaded.
    """
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise ValueError(f"the timeout must be a number of seconds above 0; got {timeout_s!r}")
    if isinstance(backend, Backend) and backend.isolated:
        return backend
    name = backend if isinstance(backend, str) else backend.name
    if not is_loadable(name):
        raise ValueError(
            f"only a back end with an importable name can run in a process of its own; got {name!r}"
        )
    process = IsolatedProcess(name, CALL_SECONDS if timeout_s is None else timeout_s)
    facts = process.start()
    functions = {part: _Remote(process, part, *facts.parts[part]) for part in facts.parts}
    return Backend(
        name=name,
        fa4_dropout=facts.fa4_dropout,
        not_covered=facts.not_covered,
        claims=facts.claims,
        numerics=facts.numerics,
        uses_cuda=facts.uses_cuda,
        isolated=True,
        **functions,  # type: ignore[arg-type]
    )


class _Remote:
    """One function of the back end; calling it calls the worker's."""

    def __init__(
        self, process: IsolatedProcess, part: str, names: frozenset[str], takes_any: bool
    ) -> None:
        self.process, self.part = process, part
        kinds = inspect.Parameter
        parameters = [kinds("arrays", kinds.VAR_POSITIONAL)]
        parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in sorted(names)]
        parameters += [kinds("options", kinds.VAR_KEYWORD)] * takes_any
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *arrays: Any, kept_guard: Any = None, **options: Any) -> Any:
        session = None if kept_guard is None else id(kept_guard)
        return self.process.call(self.part, arrays, options, session)

    def close(self) -> None:
        """End the worker."""
        self.process.close()


class IsolatedProcess:
    """Calls one worker after another; `replaced` counts those that did not survive a call."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.replaced = 0
        self._current: _Worker | None = None
        self._spare: _Worker | None = None
        self._lock = threading.Lock()

    def start(self) -> Facts:
        """What the worker says of the back end; ValueError if it cannot be loaded there."""
        with self._lock:
            try:
                return self._ready().facts(self.name)
            except BaseException:
                self.close()
                raise

    def call(
        self,
        part: str,
        arrays: tuple[Any, ...],
        options: dict[str, Any],
        session: int | None = None,
    ) -> Any:
        """The function's result; raises what it raised, or BackendFailed.

        session: a number that calls on the same memory have in common.
        """
        try:
            frame = pickle.dumps((part, [pack(x) for x in arrays], options, session), protocol=5)
        except Exception as error:
            raise ValueError(self._unsendable(options, error)) from error
        with self._lock:
            worker = self._ready()
            try:
                worker.facts(self.name)
                reply = worker.ask(frame, self.timeout_s)
            except BaseException as error:
                if isinstance(error, BackendFailed):
                    self._replace()
                else:  # interrupted: its answer would be taken for that of the next call
                    self.close()
                raise
            if reply.poisoned:
                self._replace()
        if reply.kind == "result":
            return reply.value
        raise _exception(reply)

    def close(self) -> None:
        """End the processes; a later call starts another."""
        for worker in (self._current, self._spare):
            if worker is not None:
                worker.kill()
        self._current = self._spare = None

    def __del__(self) -> None:
        self.close()

    def _ready(self) -> _Worker:
        if self._current is None:
            self._current, self._spare = self._spare or _Worker(self.name), None
            if self.replaced:
                self._spare = _Worker(self.name)
        return self._current

    def _replace(self) -> None:
        if self._current is not None:
            self._current.kill()
        self._current = None
        self.replaced += 1
        if self._spare is None:
            self._spare = _Worker(self.name)

    def _unsendable(self, options: dict[str, Any], error: Exception) -> str:
        for option, value in options.items():
            if not _can_be_sent(value):
                return (
                    f"{option} cannot be sent to the process of {self.name!r}: {value!r} is no "
                    "function of a module or plain value; run without isolation"
                )
        return f"the call cannot be sent to the process of {self.name!r}: {error}"


class _Worker:
    """One process. A thread starts it and reads its answers, another keeps its last output.

    The thread that starts it lives as long as it does: Linux ends a child with the thread, not the
    process, that it was started by.
    """

    def __init__(self, name: str) -> None:
        self._replies: queue.Queue[Reply | BaseException | None] = queue.Queue()
        self._noise: deque[str] = deque(maxlen=NOISE_LINES)
        self._started = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._process: Any = None
        self._facts: Facts | None = None
        threading.Thread(target=self._serve, args=(name,), daemon=True).start()
        self._started.wait()
        self._finalizer = weakref.finalize(self, _kill, self._process)

    def facts(self, name: str) -> Facts:
        """What it says of the back end once it has loaded it."""
        if self._facts is None:
            try:
                reply = self._answer(START_SECONDS)
            except BackendFailed as error:
                raise ValueError(f"loading the back end {name!r}: {error}") from error
            if reply.kind != "result":
                raise ValueError(reply.value)
            self._facts = reply.value
        return self._facts

    def ask(self, frame: bytes, timeout_s: float) -> Reply:
        """The answer to a call; BackendFailed if none comes."""
        self._noise.clear()
        # In a thread, as a worker that has stopped reading would block the pipe.
        threading.Thread(target=self._write, args=(frame,), daemon=True).start()
        return self._answer(timeout_s)

    def kill(self) -> None:
        """End the process and what it started."""
        self._finalizer()

    def _serve(self, name: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=_search_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the worker
            )
        finally:
            self._started.set()
        self._listener.start()
        self._write(pickle.dumps((os.getpid(), name)))
        try:
            while True:
                self._replies.put(pickle.load(self._process.stdout))
        except EOFError:
            self._replies.put(None)
        except Exception as error:
            self._replies.put(error)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what could not be written any more
                pipe.close()

    def _listen(self) -> None:
        with self._process.stderr as pipe:
            for line in pipe:
                text = line.decode(errors="replace").strip()
                if text:
                    self._noise.append(text)

    def _write(self, frame: bytes) -> None:
        with suppress(OSError, ValueError):  # it has ended, which the other pipe tells
            self._process.stdin.write(frame)
            self._process.stdin.flush()

    def _answer(self, seconds: float) -> Reply:
        try:
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise NoAnswer(f"no answer within {seconds:g} s; killed{self._said()}") from None
        if isinstance(reply, Reply):
            return reply
        if reply is not None:
            raise BackendFailed(f"an answer that cannot be read: {reply}{self._said()}")
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise BackendFailed(f"closed its pipe; killed{self._said()}") from None
        self._listener.join(1.0)  # so that its last words are here
        end = _end(self._process.returncode)
        raise BackendFailed(f"ended its process with {end}{self._said()}")

    def _said(self) -> str:
        lines = list(self._noise)
        return f"; it printed: {' / '.join(lines)}" if lines else ""


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _search_path() -> list[str]:
    """Where this process finds modules; "" is where it is, and named modules are there too."""
    here = str(Path.cwd())
    return [here if folder == "" else folder for folder in sys.path]


def _kill(process: Any) -> None:
    """End a process and, where there are process groups, what it started."""
    if process is None or process.poll() is not None:
        return
    with suppress(OSError):  # it has ended
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _exception(reply: Reply) -> Exception:
    """What the function raised, as far as this process knows the type."""
    if reply.kind == "refused":
        return NotImplementedError(reply.value)
    found: Any = getattr(builtins, reply.name, None)
    for kind in (BackendFailed, Breach):
        if reply.name == kind.__name__:
            return kind(reply.value)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(reply.value)
        except TypeError:
            pass  # one whose constructor takes more than a message
    return BackendFailed(f"{reply.name}: {reply.value}")
