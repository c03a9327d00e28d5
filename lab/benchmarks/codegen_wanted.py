"""What is compiled to be compared, and how a compilation is timed and done without a GPU."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

SMS = 148  # of a B200
KEEP = " --keep-ptx --keep-cubin"
OURS, FLASH, CUDNN, EXAMPLE = "ours", "flash-attn-4", "cudnn", "example"


@dataclass(frozen=True)
class Wanted:
    """One kernel. exp2: "tuned" for the maker's own share of emulated exponentials, "mufu" for
    none. cta_group, deterministic: of ours only; the others choose the first themselves, and add
    in any order."""

    maker: str
    head_dim: int
    head_dim_v: int
    causal: bool
    exp2: str = "tuned"
    cta_group: int = 1
    backward: bool = False
    deterministic: bool = False

    def argument(self) -> str:
        """As this program takes it."""
        return json.dumps(asdict(self))


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """CuTe-DSL asks no driver for the machine: it is a B200."""
    import cutlass.utils

    answers = {
        "__init__": lambda self, *_: None,
        "get_max_active_clusters": lambda self, size, **_: SMS // size,
        "get_device_multiprocessor_count": lambda self: SMS,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(cutlass.utils.HardwareInfo, name, answer))
        yield


class Timed:
    """Stands in for `cute.compile`: compiles several times, and keeps the last result.

    Of several kernels, as of a backward pass, the largest is kept; seconds are their sum.
    """

    def __init__(self, compiles: int) -> None:
        from cutlass import cute

        self._compile: Any = cute.compile
        self._compiles = compiles
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.compiled: Any = None

    def __call__(self, function: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
        for name in ("cache_key", "symbol"):  # of cuDNN's own cache
            kwargs.pop(name, None)
        self.run(lambda: self._compile(function, *args, options=(options or "") + KEEP, **kwargs))
        return self.compiled

    def run(self, make: Callable[[], Any]) -> None:
        """Times make() and keeps what it returns."""
        before = list(zip(self.seconds, self.cpu_seconds, strict=True))
        self.seconds, self.cpu_seconds = [], []
        for number in range(self._compiles):
            start, cpu_start = time.perf_counter(), time.process_time()
            compiled = make()
            wall, cpu = before[number] if before else (0.0, 0.0)
            self.seconds.append(wall + time.perf_counter() - start)
            self.cpu_seconds.append(cpu + time.process_time() - cpu_start)
        if self.compiled is None or _size(compiled) > _size(self.compiled):
            self.compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)


def compile_whole(spec: Any, compiler: Callable[[Any, str], Any]) -> Any:
    """What a compiler of ours returns, exported as well, which makes it a kernel to call."""
    from fa4.compiled.artifact import compile_artifact

    kept: list[Any] = []

    def compiled(*given: Any) -> Any:
        kept.append(compiler(*given))
        return kept[-1]

    compile_artifact(spec, "sm_100a", compiled)
    return kept[-1]


def _size(compiled: Any) -> int:
    return len(compiled.artifacts.CUBIN)
