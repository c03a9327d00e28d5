"""Triton, and Gluon, in the emulator: a driver for Triton's runtime whose GPU is emulated.

Triton compiles as for the GPU, which needs none; its launches are recorded here and run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fa4.emulator.errors import LaunchError
from fa4.emulator.execute import load_module
from fa4.emulator.host import device
from fa4.emulator.host.arguments import aside
from fa4.emulator.host.triton_arguments import PackedArguments, pack
from fa4.emulator.machine.launch_record import Launch

WARP_THREADS = 32
# Triton keeps compiled kernels by device; no real one has such a number.
_FIRST_DEVICE = 1_000_000
_TIMERS = ("do_bench", "do_bench_cudagraph")

_sessions: list[EmulatedDriver] = []


@contextlib.contextmanager
def redirected(target: Any, arch: str) -> Iterator[None]:
    """Triton's launches go to `target` (a `Session`); undone at the end.

    Nothing is done where a stand-in without a compiler takes Triton's name.
    """
    try:
        from triton import testing
        from triton.compiler import CompiledKernel
        from triton.runtime import driver
    except ImportError:
        yield
        return

    loading = CompiledKernel._init_handles
    before, emulated = driver._active, EmulatedDriver(target, arch)

    def init_handles(kernel: Any) -> None:
        emulated.kernel = kernel
        loading(kernel)

    timers = {name: vars(testing)[name] for name in _TIMERS if name in vars(testing)}
    CompiledKernel._init_handles = init_handles
    for name, timer in timers.items():
        setattr(testing, name, _untimed(timer))
    driver.set_active(emulated)
    _sessions.append(emulated)
    try:
        yield
    finally:
        _sessions.remove(emulated)
        driver._active = before
        CompiledKernel._init_handles = loading
        for name, timer in timers.items():
            setattr(testing, name, timer)


def _untimed(timer: Callable[..., Any]) -> Callable[..., Any]:
    """A timer of Triton's that does not time while something is emulated; whoever imports it
    inside may keep it."""

    @functools.wraps(timer)
    def bench(fn: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if not _sessions:
            return timer(fn, *args, **kwargs)
        times = _sessions[-1].get_benchmarker()(fn, kwargs.get("quantiles") or (0.5,))
        every = kwargs.get("return_mode") == "all"
        return times[0] if len(times) == 1 and not every else times

    return bench


class EmulatedDriver:
    """What Triton's runtime asks of a driver (`triton.backends.driver.DriverBase`).

    kernel: the one that is being loaded.
    """

    def __init__(self, target: Any, arch: str) -> None:
        self.target, self.utils, self.kernel = target, _Utilities(), None
        self.runs = True
        self._capability = 10 * device.COMPUTE_CAPABILITY[0] + device.COMPUTE_CAPABILITY[1]
        if arch.startswith("sm_103"):
            self._capability = 103

    def launcher_cls(self, source: Any, metadata: Any) -> EmulatedLauncher:
        """The launcher of the kernel that is being loaded."""
        return EmulatedLauncher(source, metadata, self.kernel)

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, WARP_THREADS)

    def get_current_device(self) -> int:
        """A number of its own for each architecture: kernels are kept by it."""
        return _FIRST_DEVICE + self._capability

    def set_current_device(self, number: int) -> None:
        """There is one."""

    def get_device_capability(self, number: int = 0) -> tuple[int, int]:
        """(major, minor)"""
        return divmod(self._capability, 10)

    def get_current_stream(self, number: int = 0) -> int:
        """The default stream; launches on it run one after the other."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Where torch's tensors are."""
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def get_device_interface(self) -> Any:
        """torch.cuda, which answers as far as `emulate` replaces it."""
        import torch

        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        """Only launchers in C need it."""
        raise LaunchError("the emulator compiles no launcher")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Times are unknown here: every configuration that can be launched takes equally long.

        Autotuning then keeps its first.
        """

        def benchmark(call: Callable[[], Any], quantiles: Any = (0.5,), **_: Any) -> list[float]:
            self.runs = False
            try:
                call()
            finally:
                self.runs = True
            return [1.0] * len(quantiles)

        return benchmark


class _Utilities:
    """The functions of a driver that Triton calls by name."""

    def get_device_properties(self, number: int) -> dict[str, int]:
        """Sizes of the GPU."""
        return {
            "max_shared_mem": device.MAX_SHARED_BYTES_PER_BLOCK,
            "max_num_regs": device.device_attribute(12),
            "multiprocessor_count": device.MULTIPROCESSORS,
            "warpSize": WARP_THREADS,
        }

    def load_binary(self, name: str, *_: Any) -> tuple[object, str, int, int, int]:
        """(module, function, registers, spills, threads at most)"""
        return object(), name, 0, 0, device.device_attribute(1)

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""


def without_inner_lines(ptx: str) -> str:
    """PTX without the .loc inside inline assembly.

    LLVM counts the lines of the assembly there from that of the statement on, so that they name
    lines below it; the one in front of the block is right. Numbers of PTX lines stay.
    """
    lines, inside = ptx.split("\n"), False
    for number, line in enumerate(lines):
        text = line.strip()
        if text in ("// begin inline asm", "// end inline asm"):
            inside = text == "// begin inline asm"
        elif inside and text.startswith(".loc"):
            lines[number] = ""
    return "\n".join(lines)


class EmulatedLauncher:
    """Launches one compiled kernel in the emulation that is active.

    source, metadata: as Triton's compiler gives them. kernel: Triton's CompiledKernel.
    """

    def __init__(self, source: Any, metadata: Any, kernel: Any) -> None:
        self.ptx, self._metadata = without_inner_lines(kernel.asm["ptx"]), metadata
        names = getattr(getattr(source, "fn", None), "arg_names", ())
        self._signature = [
            (str(key if isinstance(key, str) else names[key] if names else f"argument {key}"), kind)
            for key, kind in source.signature.items()
        ]

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        """Runs the kernel on a grid. Raises LaunchError outside of `emulate`.

        rest: packed metadata, metadata of the launch, a hook before and one after it, arguments.
        """
        _, launch_metadata, enter_hook, exit_hook, *values = rest
        if not _sessions:
            raise LaunchError(f"{function} was compiled inside emulate(), which has ended")
        driver = _sessions[-1]
        if not driver.runs or x * y * z == 0:
            return
        if enter_hook is not None:
            enter_hook(launch_metadata)
        target = driver.target
        maps = getattr(self._metadata, "tensordesc_meta", None) or ()
        with aside():
            packed = pack(self._signature, values, maps, target.tensors.address_of)
            launch = self._launch((x, y, z), packed, stream, target)
            target.run_launches([launch], packed.memory)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _launch(
        self, grid: tuple[int, int, int], packed: PackedArguments, stream: int, target: Any
    ) -> Launch:
        metadata = self._metadata
        entry = load_module(self.ptx).kernels[metadata.name]
        ctas = max(1, getattr(metadata, "num_ctas", 1))
        grid = (grid[0] * ctas, *grid[1:])
        threads = entry.directives.get("reqntid") or (WARP_THREADS * metadata.num_warps,)
        self._add_scratch(packed, entry, grid, target)
        return Launch(
            kernel=entry.name,
            ptx=self.ptx,
            grid=grid,
            block=(threads[0], 1, 1),
            cluster=(ctas, 1, 1),
            dynamic_smem_bytes=metadata.shared,
            parameters=tuple(packed.parameters),
            programmatic=bool(getattr(metadata, "launch_pdl", False)),
            cooperative=bool(getattr(metadata, "launch_cooperative_grid", False)),
            stream=stream,
        )

    def _add_scratch(
        self, packed: PackedArguments, entry: Any, grid: tuple[int, int, int], target: Any
    ) -> None:
        """The parameters that Triton adds: memory for each CTA to write, for it and a profiler."""
        left = len(entry.parameters) - len(packed.parameters)
        names = ("global_scratch", "profile_scratch")
        if not 0 <= left <= len(names):
            raise LaunchError(
                f"{entry.name} takes {len(entry.parameters)} parameters; the launch has "
                f"{len(packed.parameters)}"
            )
        for name in names[:left]:
            size_bytes = getattr(self._metadata, f"{name}_size", 0) or 0
            address = 0
            if size_bytes:
                memory = np.empty(size_bytes * grid[0] * grid[1] * grid[2], np.uint8)
                packed.memory[name] = memory
                address = target.tensors.address_of(memory)
            packed.parameters.append(address.to_bytes(8, "little"))
