"""The emulator in place of a GPU's driver, for `lab.hardware.suite`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fa4.emulator import Allocation, Launch, Options, run
from lab.hardware.driver import Array, Geometry


class EmulatedGpu:
    """Memory of its own, launches at once. texts: the PTX of images that are none."""

    name = "the emulator"

    def __init__(self, texts: Mapping[bytes, str] | None = None, **options: Any) -> None:
        self._texts, self._options = dict(texts or {}), options
        self._memory: dict[int, Array] = {}
        self.launches = 0
        self.copied: list[int] = []

    def load(self, image: bytes, kernel_name: str, smem_bytes: int = 0) -> tuple[str, str]:
        """(PTX, name)"""
        text = self._texts.get(image) or image.rstrip(b"\0").decode()
        return text, kernel_name

    def allocate(self, size_bytes: int) -> int:
        """Memory with other contents each time, 256-byte aligned as a driver's."""
        raw = np.random.default_rng(len(self._memory)).integers(0, 256, size_bytes + 256, np.uint8)
        array = raw[-raw.ctypes.data % 256 :][:size_bytes]
        self._memory[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address: int) -> None:
        """Raises KeyError for what is no allocation."""
        del self._memory[address]

    def upload(self, array: Array) -> int:
        """As of Gpu."""
        address = self.allocate(array.nbytes)
        self._memory[address][:] = array.view(np.uint8).ravel()
        return address

    def read(self, address: int, size_bytes: int) -> Array:
        """As of Gpu."""
        return self._part(address, size_bytes).copy()

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """As of Gpu."""
        self.copied.append(size_bytes)
        self._part(target, size_bytes)[:] = self._part(source, size_bytes)

    def launch(self, kernel: Any, geometry: Geometry, parameters: Sequence[bytes]) -> None:
        """Runs a kernel to its end."""
        text, name = kernel
        launch = Launch(
            kernel=name, ptx=text, grid=tuple(geometry.grid), block=tuple(geometry.block),
            cluster=tuple(geometry.cluster),
            parameters=tuple(parameters), dynamic_smem_bytes=geometry.smem_bytes,
        )  # fmt: skip
        whole = [Allocation(f"a{i}", address, array.nbytes, True, array)
                 for i, (address, array) in enumerate(self._memory.items())]  # fmt: skip
        run([launch], whole, Options(checks=False, **self._options))
        self.launches += 1

    def wait(self, limit_s: float) -> None:
        """All is done."""

    def seconds(self, work: Callable[[], None]) -> float:
        """As many as its launches."""
        before = self.launches
        work()
        return 1.0 + self.launches - before

    def _part(self, address: int, size_bytes: int) -> Array:
        for start, array in self._memory.items():
            if start <= address and address + size_bytes <= start + array.nbytes:
                return array[address - start : address - start + size_bytes]
        raise ValueError(f"no memory at {address:#x}")
