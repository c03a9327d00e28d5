"""Programs that call the CUDA driver by its library's name, without one."""

from __future__ import annotations

import ctypes as C
import shutil
import subprocess
import sys

import numpy as np
import pytest

from fa4.emulator.errors import LaunchError
from fa4.emulator.execute import run
from fa4.emulator.host.arguments import array_allocation
from fa4.emulator.host.driver import EmulatedDriverCalls
from fa4.emulator.host.driver_library import NAME
from fa4.emulator.tma.im2col import Im2colMap
from tests.emulator.kernels import aligned, module_text

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cc") or shutil.which("gcc")),
    reason="needs Linux and a C compiler",
)
ADD = """mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.u64 %rd3, %rd3, %rd1;
ld.global.u32 %r2, [%rd3]; add.u32 %r2, %r2, 1; st.global.u32 [%rd3], %r2;"""


def open_driver() -> C.CDLL:
    """As a program does that was never told of the emulator."""
    try:
        return C.CDLL(NAME)
    except OSError:
        raise AssertionError("no library of that name") from None


def launch_by_driver(array: np.ndarray, shape: tuple[int, ...]) -> int:
    """Loads and launches ADD with the functions of the library."""
    driver, module, function = open_driver(), C.c_void_p(), C.c_void_p()
    text = C.create_string_buffer(module_text(ADD, 1).encode())
    if error := driver.cuModuleLoadData(C.byref(module), text):
        return int(error)
    assert driver.cuModuleGetFunction(C.byref(function), module, b"kernel") == 0
    values = (C.c_void_p * 1)(C.addressof(address := C.c_uint64(array.ctypes.data)))
    error = driver.cuLaunchKernel(function, *map(C.c_uint, shape), 0, None, values, None)
    assert address.value
    return int(error)


def test_a_launch_is_recorded_and_can_run() -> None:
    """The parameters' bytes are read out of the program's memory."""
    array = aligned(np.arange(64, dtype=np.uint32))
    calls = EmulatedDriverCalls()
    with calls.active():
        assert launch_by_driver(array, (1, 1, 1, 64, 1, 1)) == 0
        (launch,) = calls.take_launches()
        assert calls.take_launches() == []
    assert (launch.kernel, launch.grid, launch.block) == ("kernel", (1, 1, 1), (64, 1, 1))
    allocation = array_allocation("x", array)
    assert allocation is not None
    run([launch], [allocation])
    assert (array == np.arange(1, 65)).all()


def test_a_map_of_an_image_is_encoded() -> None:
    """cuTensorMapEncodeIm2col, with all of its arguments."""
    image = aligned(np.zeros((2, 6, 8, 16), np.float32))
    raw = (C.c_uint8 * 128)()
    dims, strides = (C.c_uint64 * 4)(16, 8, 6, 2), (C.c_uint64 * 3)(64, 512, 3072)
    lower, upper, steps = (C.c_int * 2)(-1, -2), (C.c_int * 2)(-1, 1), (C.c_uint32 * 4)(1, 2, 3, 1)
    with EmulatedDriverCalls().active():
        error = open_driver().cuTensorMapEncodeIm2col(
            raw, 7, 4, C.c_void_p(image.ctypes.data), dims, strides, lower, upper, 16, 24, steps,
            0, 2, 0, 0,
        )  # fmt: skip
    found = Im2colMap.decode(bytes(raw))
    assert error == 0
    assert (found.lower, found.upper, found.pixels) == ((-1, -2), (-1, 1), 24)
    assert found.tensor.box == (16, 1, 1, 1) and found.tensor.swizzle == 64
    assert found.tensor.dims == (16, 8, 6, 2) and found.steps == (2, 3)


def test_afterwards_there_is_no_driver() -> None:
    """Every function says so; also after an exception."""
    array = np.zeros(4, np.uint32)
    with pytest.raises(ZeroDivisionError), EmulatedDriverCalls().active():
        raise ZeroDivisionError
    assert launch_by_driver(array, (1, 1, 1, 32, 1, 1)) == 3  # CUDA_ERROR_NOT_INITIALIZED


def test_what_goes_wrong_inside_is_raised_outside() -> None:
    """A program gets an error code, its user the reason."""
    calls = EmulatedDriverCalls()
    with calls.active():
        driver, module = open_driver(), C.c_void_p()
        assert driver.cuModuleLoadData(C.byref(module), b"\x7fELF...") == 999
        with pytest.raises(LaunchError, match="machine code without PTX"):
            calls.take_launches()
        assert driver.cuModuleLoadData(C.byref(module), module_text(ADD, 1).encode()) == 0
        assert driver.cuModuleGetFunction(C.byref(C.c_void_p()), module, b"other") == 999
        with pytest.raises(LaunchError, match="no kernel 'other'"):
            calls.take_launches()
        count, name = C.c_int(), C.create_string_buffer(40)
        assert driver.cudaGetDeviceCount(C.byref(count)) == 0 and count.value == 1
        assert driver.cuDeviceGetName(name, 40, 0) == 0 and name.value == b"GPU emulated by fa4"
        assert driver.cuDeviceGetAttribute(C.byref(count), 75, 0) == 0 and count.value == 10


def test_a_process_ends_in_peace() -> None:
    """Programs call the driver when the interpreter is gone."""
    text = """
import atexit, ctypes
from fa4.emulator.host.driver import EmulatedDriverCalls
with EmulatedDriverCalls().active():
    library = ctypes.CDLL("libcuda.so.1")
ctypes.CDLL(None).on_exit(library.cuModuleUnload, None)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
