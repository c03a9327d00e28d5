"""The host half of a compiled function: what its two flavours have in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fa4.emulator.host.addresses import no_shift
from fa4.emulator.host.code import HostCode
from fa4.emulator.host.runtime import HostRuntime
from fa4.emulator.machine.launch_record import Launch


def readable_name(mangled: str) -> str:
    """The Python function's name, without the argument types that CuTe-DSL appends."""
    return re.split(r"_(?=Tensor|FakeTensor|Ptr|CUstream|FakeStream|\d)", mangled)[0].removeprefix(
        "cutlass_"
    )


class HostProgram(ABC):
    """The host half of a compiled function, loaded. `close` when it is not needed any more.

    compiled: what it was made of; kept, so that its identity stays taken. image: ELF object.
    shift_of: what is added to the addresses of an array that is an argument.
    """

    shift_of: Callable[[Any], int] = staticmethod(no_shift)

    def __init__(self, compiled: Any, ptx: str, image: bytes) -> None:
        self.compiled = compiled
        self.name = readable_name(compiled.function_name)
        self._runtime = HostRuntime(ptx)
        self._code = HostCode(image, self._runtime)

    @abstractmethod
    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises LaunchError if they do not fit the signature."""

    @abstractmethod
    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Launch]:
        """Runs the host code and returns the launches it made, in order."""

    def close(self) -> None:
        """Unloads the host code."""
        self._code.close()

    def _begin(self) -> None:
        self._runtime.launches = []
        self._runtime.error = None

    def _launches(self) -> list[Launch]:
        """The recorded launches. Raises what a callback raised."""
        launches, error = self._runtime.launches, self._runtime.error
        self._begin()
        if error is not None:
            raise error
        return launches
