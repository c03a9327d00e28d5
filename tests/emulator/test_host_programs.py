"""The front door with CuTe-DSL: compiled host code runs, its launches and memory arrive right."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from fa4.emulator.errors import EmulationFailed, LaunchError
from fa4.emulator.host import Allocation, Launch, emulate, launch
from fa4.emulator.host import program as program_module
from fa4.emulator.host.dlpack import DeviceView
from fa4.emulator.host.runtime import HostRuntime

torch = pytest.importorskip("torch", reason="torch is not installed")
cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
cuda = pytest.importorskip("cuda.bindings.driver")
cute = pytest.importorskip("cutlass.cute")
runtime = pytest.importorskip("cutlass.cute.runtime")
host_kernels = pytest.importorskip("tests.emulator.host_kernels")
from_dlpack, make_ptr = runtime.from_dlpack, runtime.make_ptr

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

N = 300
STREAM = cuda.CUstream(7)


def f32_at(address: int) -> np.ndarray:
    """The floats at a real address, as a GPU would see them."""
    return np.ctypeslib.as_array((ctypes.c_float * N).from_address(address))


def pointer(value: bytes) -> int:
    return int(struct.unpack_from("<Q", value)[0])


class FakeGpu:
    """An executor that keeps what it gets and does each kernel's arithmetic with NumPy."""

    def __init__(self) -> None:
        self.groups: list[list[Launch]] = []
        self.allocations: list[Allocation] = []
        self.options: object = None

    @property
    def launches(self) -> list[Launch]:
        return [launch for group in self.groups for launch in group]

    def __call__(self, launches, allocations, options):
        self.groups.append(list(launches))
        self.allocations = list(allocations)
        self.options = options
        for record in launches:
            data = record.parameters
            if "add_kernel" in record.kernel:
                a, b, c = (f32_at(pointer(value)) for value in data[:3])
                c[:] = a + b
            elif "double_kernel" in record.kernel:
                f32_at(pointer(data[0]))[:] *= 2
            elif "scale_kernel" in record.kernel:
                f32_at(pointer(data[0]))[:] *= struct.unpack("<f", data[1][:4])[0]
        return f"report {len(self.groups)}"


def fake():
    return runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=4)


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, N), np.float32)
    return a, b, np.zeros(N, np.float32)


@pytest.fixture(scope="module")
def chain():
    """`host_kernels.chain` compiled for CuTe-DSL's own calls and for TVM-FFI's."""
    stream = runtime.make_fake_stream()
    arguments = (host_kernels.chain, fake(), fake(), fake(), cutlass.Float32(1), stream)
    with emulate():
        return {
            "plain": cute.compile(*arguments),
            "tvm-ffi": cute.compile(*arguments, options="--enable-tvm-ffi"),
        }


@pytest.fixture(scope="module")
def add():
    with emulate():
        return cute.compile(host_kernels.add, fake(), fake(), fake())


FLAVOURS = ("plain", "tvm-ffi")
CONVERSIONS = {
    "numpy": lambda array, flavour: array,
    "torch": lambda array, flavour: torch.from_numpy(array),
    "cute": lambda array, flavour: from_dlpack(
        torch.from_numpy(array), enable_tvm_ffi=flavour == "tvm-ffi"
    ).mark_layout_dynamic(),
}


# What arrives


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_launches_arrive_as_the_host_code_makes_them(chain, flavour, convert):
    a, b, c = operands()
    values = [CONVERSIONS[convert](array, flavour) for array in (a, b, c)]
    gpu = FakeGpu()
    reports = launch(chain[flavour], *values, 1.5, STREAM, executor=gpu, speed=3)

    np.testing.assert_allclose(c, (a + b) * 2 * 1.5, rtol=1e-6)
    assert [len(group) for group in gpu.groups] == [1, 2]
    assert reports == ["report 1", "report 2"]
    assert gpu.options == {"speed": 3}
    first, second, third = gpu.launches
    assert [one.grid for one in gpu.launches] == [(3, 1, 1), (3, 2, 5), (4, 1, 1)]
    assert [one.block for one in gpu.launches] == [(128, 1, 1), (32, 2, 2), (128, 1, 1)]
    assert [one.cluster for one in gpu.launches] == [(1, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert [one.dynamic_smem_bytes for one in gpu.launches] == [0, 0, 512]
    assert [one.programmatic for one in gpu.launches] == [False, False, True]
    assert [one.cooperative for one in gpu.launches] == [False, False, True]
    assert {one.stream for one in gpu.launches} == {7}
    assert [pointer(value) for value in first.parameters] == [x.ctypes.data for x in (a, b, c)]
    assert third.parameters[1] == struct.pack("<f", 1.5)
    assert f".entry {second.kernel}(" in second.ptx


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_arguments_become_named_allocations(chain, flavour):
    a, b, c = operands()
    a.flags.writeable = False
    gpu = FakeGpu()
    launch(chain[flavour], a, b, c, 1.0, STREAM, executor=gpu)
    found = {one.name: one for one in gpu.allocations}
    assert list(found) == ["a", "b", "c"]
    for name, array in zip("abc", (a, b, c), strict=True):
        assert found[name].address == array.ctypes.data
        assert found[name].size_bytes == array.nbytes
        assert found[name].writable == (name != "a")


def test_tma_descriptors_arrive_inline():
    """Fields read off by hand from the layout of the tiled tensor map."""
    gpu = FakeGpu()
    tensor = torch.zeros(96, 256, dtype=torch.bfloat16)
    with emulate(gpu):
        host_kernels.fetch(from_dlpack(tensor, assumed_align=16))
    (descriptor,) = gpu.launches[0].parameters
    assert len(descriptor) == 128
    words = struct.unpack("<8Q", descriptor[:64])
    assert words[0] == tensor.data_ptr()
    assert (words[1] >> 4 & 7) + 1 == 2  # rank
    assert words[1] >> 7 & 15 == 10  # bf16
    assert words[1] >> 13 & 3 == 3  # 128-byte swizzle
    assert (words[1] >> 32) * 16 == 256 * 2  # stride of dimension 1
    assert (words[4] & 0xFFFFFFFF) + 1 == 256 and (words[4] >> 32) + 1 == 96
    assert (words[6] >> 56) + 1 == 64 and (words[7] & 0xFF) + 1 == 32  # box


# Pointers


@pytest.fixture(scope="module")
def double_behind():
    example = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    with emulate():
        return cute.compile(host_kernels.double_behind, example, cutlass.Int32(N))


def address_of(array: np.ndarray):
    return make_ptr(cutlass.Float32, array.ctypes.data, cute.AddressSpace.gmem, assumed_align=4)


@pytest.mark.parametrize("memory", [lambda x: [x], lambda x: {"it": x}, lambda x: x])
def test_pointers_need_their_memory_named(double_behind, memory):
    array = np.ones(N, np.float32)
    with pytest.raises(LaunchError, match=r"pointer points to 0x.*memory=\[\.\.\.\]"):
        launch(double_behind, address_of(array), N, executor=FakeGpu())
    gpu = FakeGpu()
    launch(double_behind, address_of(array), N, executor=gpu, memory=memory(array))
    assert array.tolist() == [2.0] * N
    assert [(one.address, one.size_bytes) for one in gpu.allocations] == [
        (array.ctypes.data, array.nbytes)
    ]


def test_pointers_into_tensors_of_the_session_are_found(double_behind):
    tensor = torch.ones(N)
    gpu = FakeGpu()
    with emulate(gpu) as session:
        double_behind(from_dlpack(tensor, assumed_align=4).iterator, N)
    assert tensor.tolist() == [2.0] * N
    assert [(one.name, one.address) for one in gpu.allocations] == [("pointer", tensor.data_ptr())]
    assert session.reports == ["report 1"]


def test_addresses_that_the_program_asked_for_are_found(double_behind):
    tensor = torch.ones(2, N)
    gpu = FakeGpu()
    with emulate(gpu):
        address = tensor[1].data_ptr()  # of a view that does not live on
        double_behind(make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem), N)
    assert tensor.tolist() == [[1.0] * N, [2.0] * N]
    assert [(one.address, one.size_bytes) for one in gpu.allocations] == [
        (tensor.data_ptr(), 4 * 2 * N)
    ]


@pytest.mark.parametrize("noted", [True, False])
def test_pointers_inside_integer_arrays_are_followed(noted):
    target, other, outputs = torch.zeros(8), torch.zeros(8), torch.zeros(N)
    gpu = FakeGpu()
    with emulate(gpu):
        address = target.data_ptr() if noted else target.numpy().ctypes.data
        table = torch.tensor([0, address + 4, 12345], dtype=torch.int64)
        other.data_ptr()
        host_kernels.double(from_dlpack(outputs).mark_layout_dynamic(), from_dlpack(table))
    found = [(one.name, one.address) for one in gpu.allocations]
    expected = [("c", outputs.data_ptr()), ("table", table.data_ptr())]
    assert found == expected + [("*table", target.data_ptr())] * noted


# Refusals


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda good: good[:3], "missing"),
        (lambda good: [*good, 1], "too many|positional|parameters"),
        (lambda good: [5, *good[1:]], "not a tensor|expected Tensor"),
        (lambda good: ["text", *good[1:]], "str|expected Tensor"),
        (lambda good: [None, *good[1:]], "not a tensor|expected Tensor"),
        (lambda good: [object(), *good[1:]], "object"),
        (lambda good: [good[0][::-1], *good[1:]], "negative"),
        (lambda good: [good[0].astype(">f4"), *good[1:]], "byte order"),
        (lambda good: [torch.zeros(N, device="meta"), *good[1:]], "meta.*only CPU"),
        (lambda good: [torch.zeros(N).to_sparse(), *good[1:]], "sparse"),
        (lambda good: [*good[:3], "fast", good[4]], "str|factor|float"),
        (lambda good: [*good[:4], "zero"], "str|stream|handle"),
    ],
)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_impossible_arguments_are_refused_before_anything_runs(chain, flavour, change, says):
    gpu = FakeGpu()
    with pytest.raises(LaunchError, match=says):
        launch(chain[flavour], *change([*operands(), 1.0, STREAM]), executor=gpu)
    assert gpu.launches == []


def test_functions_without_ptx_and_other_objects_are_refused(double_behind):
    without = cute.compile(host_kernels.double_behind, address_of(np.zeros(4, "f4")), N)
    with pytest.raises(LaunchError, match=r"double_behind was compiled without its PTX.*KeepPTX"):
        launch(without, 1)
    with pytest.raises(LaunchError, match="function is not a compiled function"):
        launch(lambda: None)
    with pytest.raises(LaunchError, match="unknown option shedule; there are schedule"):
        launch(double_behind, shedule="fifo")


def test_too_much_shared_memory_is_refused(capfd):
    with emulate(FakeGpu()), pytest.raises(LaunchError, match="232449 bytes of shared memory"):
        host_kernels.too_much_smem(from_dlpack(torch.zeros(N)))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_exceptions_come_out_as_themselves(chain, flavour, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("inside")

    arguments = (*operands(), 1.0, STREAM)
    with pytest.raises(ZeroDivisionError, match="inside"):
        launch(chain[flavour], *arguments, executor=broken)
    for method in ("_get_kernel", "_launch_with_attributes"):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError, match="inside"):
            patch.setattr(HostRuntime, method, broken)
            launch(chain[flavour], *arguments, executor=FakeGpu())


def test_a_failed_emulation_leaves_its_report(add):
    class Report:
        findings = ()

    def failing(*_):
        raise EmulationFailed(Report())

    with emulate(failing) as session, pytest.raises(EmulationFailed):
        add(*operands())
    assert [type(report) for report in session.reports] == [Report]


# Programs


def test_emulate_redirects_compiled_and_direct_calls(chain, add):
    gpu = FakeGpu()
    a, b, c = operands()
    with emulate(gpu) as session:
        add(a, b, c)
        np.testing.assert_array_equal(c, a + b)
        chain["plain"](a, b, c, 1.0, stream=STREAM)
        chain["tvm-ffi"](a, b, c, factor=2.0, stream=STREAM)
        np.testing.assert_allclose(c, (a + b) * 4, rtol=1e-6)
        for _ in range(2):  # the second time from CuTe-DSL's cache
            c[:] = 0
            host_kernels.add(*(from_dlpack(x).mark_layout_dynamic() for x in (a, b, c)))
            np.testing.assert_array_equal(c, a + b)
    assert session.reports == [f"report {i + 1}" for i in range(7)]
    assert {one.name for one in gpu.allocations} == {"a", "b", "c"}


def test_back_to_back_calls_may_overlap(chain):
    a, b, c = operands()
    gpu = FakeGpu()
    with emulate(gpu) as session:
        with session.back_to_back():
            chain["plain"](a, b, c, 1.0, STREAM)
            chain["plain"](a, b, c, 3.0, STREAM)
            assert gpu.launches == [] and not c.any()
        np.testing.assert_allclose(c, (a + b) * 6, rtol=1e-6)
    assert [len(group) for group in gpu.groups] == [1, 2, 1, 2]


def test_compilations_inside_see_a_b200_and_global_memory():
    with emulate(FakeGpu()):
        info = cutlass.utils.HardwareInfo()
        assert info.get_max_active_clusters(2) == 74
        assert info.get_device_multiprocessor_count() == 148
        assert info.get_l2_cache_size_in_bytes() == 132_644_864
        assert from_dlpack(torch.zeros(4)).memspace == cute.AddressSpace.gmem
        assert from_dlpack(np.zeros(4)).memspace == cute.AddressSpace.gmem
        assert torch.cuda.current_stream().cuda_stream == 0
        assert torch.cuda.Stream().cuda_stream != torch.cuda.Stream().cuda_stream
        cutlass.cuda.initialize_cuda_context()
        with pytest.raises(LaunchError, match="cannot be nested"), emulate():
            pass
    assert from_dlpack(torch.zeros(4)).memspace == cute.AddressSpace.generic


def test_emulate_undoes_everything(add):
    def state():
        dsl = sys.modules["cutlass.base_dsl.dsl"]
        compiler = sys.modules["cutlass.base_dsl.compiler"]
        owners = [compiler.CompileOptions, dsl.BaseDSL, runtime._Tensor, torch.cuda, cutlass.cuda]
        owners += [cutlass.utils.HardwareInfo, *type(add).__mro__[:-1]]
        owners += [singleton.envar for singleton in dsl.DSLSingletonMeta._instances.values()]
        options = cute.compile._compile_options.options.values()
        return [dict(vars(owner)) for owner in owners], [option.value for option in options]

    before = state()
    with pytest.raises(KeyError), emulate():
        cute.compile(host_kernels.add, fake(), fake(), fake())
        assert state()[0] != before[0] and state()[1] != before[1]
        raise KeyError
    assert state() == before


def test_host_code_is_released(add, monkeypatch):
    alive = []

    class Watched(program_module.HostCode):
        def __init__(self, *args):
            super().__init__(*args)
            alive.append(weakref.ref(self))
            alive.extend(weakref.ref(callback) for callback in args[1]._callbacks)

    monkeypatch.setattr(program_module, "HostCode", Watched)
    for _ in range(3):
        launch(add, *operands(), executor=FakeGpu())
    with emulate(FakeGpu()):
        add(*operands())
        add(*operands())
    gc.collect()
    assert len(alive) > 4 and not any(reference() for reference in alive)


# DLPack


@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        (np.float32, cutlass.Float32),
        (np.float16, cutlass.Float16),
        (np.int64, cutlass.Int64),
        (ml_dtypes.bfloat16, cutlass.BFloat16),
        (ml_dtypes.float8_e4m3fn, cutlass.Float8E4M3FN),
        (ml_dtypes.float8_e5m2, cutlass.Float8E5M2),
    ],
)
@pytest.mark.parametrize("writeable", [True, False])
def test_device_views_keep_type_and_address(dtype, element, writeable):
    array = np.zeros((4, 8), dtype)
    array.flags.writeable = writeable
    tensor = from_dlpack(DeviceView(array))
    assert tensor.element_type is element
    assert tensor.data_ptr == array.ctypes.data
    assert tensor.shape == (4, 8) and tensor.stride == (8, 1)
    assert tensor.memspace == cute.AddressSpace.gmem


def test_device_views_accept_tensors_with_gradients():
    tensor = torch.zeros(4, requires_grad=True)
    assert from_dlpack(DeviceView(tensor)).data_ptr == tensor.data_ptr()
