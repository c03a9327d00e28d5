"""The front door: `launch` for one call of a compiled function, `emulate` for a whole program."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from fa4.emulator.errors import EmulationFailed, KernelFinding, LaunchError
from fa4.emulator.host.addresses import no_shift, shift_of
from fa4.emulator.host.arguments import TensorBook, array_allocation, aside, collect, is_array
from fa4.emulator.host.compiled_program import PlainProgram, load
from fa4.emulator.host.front_ends import redirected
from fa4.emulator.host.program import HostProgram
from fa4.emulator.machine.coverage import KernelCoverage, merge_coverages
from fa4.emulator.machine.launch_record import Allocation, Launch, overlapping_groups

# (launches that may overlap, memory, options) -> report
Executor: TypeAlias = Callable[[Sequence[Launch], Sequence[Allocation], Any], Any]

_LOADED_PROGRAMS = 32


def launch(
    compiled: Any,
    *args: Any,
    executor: Executor | None = None,
    memory: Mapping[str, Any] | Iterable[Any] = (),
    **options: Any,
) -> list[Any]:
    """Calls a compiled CuTe-DSL function with CPU arguments; its kernels run in the emulator.

    compiled: what `cute.compile` returns, with the PTX kept, or an exported function (`Exported`).
    args: as for the compiled function; arrays are written in place. memory: further arrays that
    kernels reach through pointers.
    options: see `fa4.emulator.machine.options.Options`. executor: called instead of the emulator
    for every group of overlapping launches, as executor(launches, allocations, options).

    Returns one report for every group. Raises LaunchError before anything runs if the call is
    impossible, EmulationFailed if a check found something.
    """
    session = Session(executor, memory, options)
    try:
        session.call(compiled, args, {})
    finally:
        session.close()
    return session.reports


@contextlib.contextmanager
def emulate(
    executor: Executor | None = None,
    *,
    memory: Mapping[str, Any] | Iterable[Any] = (),
    arch: str = "sm_100a",
    cuda: bool = False,
    steer: int = 0,
    replay: Any = None,
    **options: Any,
) -> Iterator[Session]:
    """Inside this context every kernel that CuTe-DSL or Triton launches runs in the emulator.

    This holds for compiled functions, for `@cute.jit` functions called directly, and for Triton's
    and Gluon's `kernel[grid](...)`, whether they are imported before or inside. Device
    queries answer as a B200 would (for sm_90a: an H200), CPU tensors count as GPU memory,
    compilations are for `arch` and keep their PTX. cuda: torch says that it has that GPU, and that
    all tensors are on it; `device="cuda"` is the CPU. steer: in so many runs of each launch that
    has hazards an order is looked for that shows them. replay: a `Witness`, whose order each
    launch has. The other arguments are those of `launch`;
    not thread-safe, not nestable.
    """
    session = Session(executor, memory, options, steer, replay)
    session.arch = arch
    try:
        with redirected(session, arch, cuda):
            yield session
    finally:
        session.close()


class Session:
    """What happened inside one `emulate` context.

    reports: one for every group of launches that may overlap, in stream order. arch: of the
    emulated GPU, "" where there is none.
    """

    arch = ""

    def __init__(
        self,
        executor: Executor | None,
        memory: Mapping[str, Any] | Iterable[Any],
        options: Mapping[str, Any],
        steer: int = 0,
        replay: Any = None,
    ) -> None:
        self.reports: list[Any] = []
        # Another executor than the emulator may read the memory at the addresses it is given.
        self.tensors = TensorBook(shift_of if executor is None else no_shift)
        self._executor, self._options = _prepare(executor, options, steer, replay)
        self._memory = _named(memory)
        self._programs: OrderedDict[int, HostProgram] = OrderedDict()
        self._waiting: list[tuple[list[Launch], list[Allocation]]] | None = None

    def call(self, compiled: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Calls a compiled function."""
        with aside():
            program = self._program(compiled)
            allocations = self._allocations(program.arguments(args, kwargs))
            self._run(program.call(args, kwargs), allocations)

    def call_with_pointers(
        self, compiled: Any, pointers: Sequence[Any], arguments: Mapping[str, Any]
    ) -> None:
        """Calls a compiled function with marshalled arguments; `arguments` are the originals."""
        program = self._program(compiled)
        if not isinstance(program, PlainProgram):
            self.call(compiled, pointers, {})
            return
        with aside():
            allocations = self._allocations(arguments, strict=False)
            self._run(program.call_with_pointers(pointers), allocations)

    def run_launches(self, launches: list[Launch], memory: Mapping[str, Any]) -> None:
        """Runs launches that were made elsewhere. memory: the arrays they were given, by name."""
        with aside():
            self._run(launches, self._allocations(memory))

    @contextlib.contextmanager
    def back_to_back(self) -> Iterator[None]:
        """Kernels called inside run at its end, so that programmatic launches overlap across calls.

        On a GPU the calls return before the kernels run; results are there after this context.
        """
        if self._waiting is not None:
            raise LaunchError("back_to_back() is already active")
        self._waiting = []
        try:
            yield
            waiting = self._waiting
        finally:
            self._waiting = None
        launches = [launch for made, _ in waiting for launch in made]
        allocations = [allocation for _, held in waiting for allocation in held]
        self._run(launches, list(dict.fromkeys(allocations)))

    def findings(self) -> list[KernelFinding]:
        """Those of all launches."""
        return [finding for report in self.reports for finding in report.findings]

    def accepted(self) -> list[tuple[KernelFinding, str]]:
        """The findings that `Options.accepted` covers, with what covers each."""
        return [pair for report in self.reports for pair in report.accepted]

    def coverage(self) -> list[KernelCoverage]:
        """What all launches together have reached of each kernel."""
        return merge_coverages(one for report in self.reports for one in report.coverage)

    def close(self) -> None:
        """Unloads all host code."""
        while self._programs:
            self._programs.popitem()[1].close()

    def _program(self, compiled: Any) -> HostProgram:
        key = id(compiled)  # the program keeps `compiled` alive
        if key not in self._programs:
            self._programs[key] = load(compiled)
            self._programs[key].shift_of = self.tensors.shift_of
        self._programs.move_to_end(key)
        while len(self._programs) > _LOADED_PROGRAMS:
            self._programs.popitem(last=False)[1].close()
        return self._programs[key]

    def _allocations(self, arguments: Mapping[str, Any], strict: bool = True) -> list[Allocation]:
        tensors = self.tensors
        return collect(arguments, self._memory, tensors.find, strict, tensors.shift_of)

    def _run(self, launches: list[Launch], allocations: list[Allocation]) -> None:
        if self._waiting is not None:
            self._waiting.append((launches, allocations))
            return
        for group in overlapping_groups(launches):
            self._execute(group, allocations)

    def _execute(self, group: list[Launch], allocations: list[Allocation]) -> None:
        try:
            self.reports.append(self._executor(group, allocations, self._options))
        except EmulationFailed as failure:
            self.reports.append(failure.report)
            raise


def _prepare(
    executor: Executor | None, options: Mapping[str, Any], steer: int, replay: Any
) -> tuple[Executor, Any]:
    """The executor and its options. Raises LaunchError for options the emulator does not have."""
    if executor is not None:
        return executor, dict(options)
    from fa4.emulator import execute
    from fa4.emulator.machine.options import Options

    names = [field.name for field in fields(Options)]
    if unknown := [name for name in options if name not in names]:
        raise LaunchError(f"unknown option {', '.join(unknown)}; there are {', '.join(names)}")
    if replay is not None:
        return partial(_run_again, replay), Options(**options)
    if steer:
        from fa4.emulator.orders.steer import run_steered

        return partial(run_steered, runs=steer), Options(**options)
    return execute.run, Options(**options)


def _run_again(
    witness: Any, launches: Sequence[Launch], allocations: Sequence[Allocation], options: Any
) -> Any:
    """One run in the order of a witness."""
    from fa4.emulator import execute

    return execute.run(launches, allocations, replace(options, schedule=witness.schedule()))


def _named(memory: Mapping[str, Any] | Iterable[Any]) -> list[Allocation]:
    if is_array(memory):
        memory = [memory]
    if not isinstance(memory, Mapping):
        memory = {f"memory[{index}]": value for index, value in enumerate(memory)}
    arrays = {
        name: value if is_array(value) else np.frombuffer(value, np.uint8)
        for name, value in memory.items()
    }
    found = [array_allocation(name, value) for name, value in arrays.items()]
    return [allocation for allocation in found if allocation is not None]
