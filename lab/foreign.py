"""Where the foreign packages are, and how their kernels are imported where there is no GPU.

`make conformance` installs them; FA4_FOREIGN names another folder. Nothing here is imported before
it is used: collecting the tests needs neither torch nor CuTe-DSL.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from lab import ROOT

SITE = Path(os.environ.get("FA4_FOREIGN", ROOT / ".venv" / "foreign"))
EXAMPLES = SITE / "flashinfer/data/cutlass/examples/python/CuTeDSL"

# The examples are those of CuTe-DSL 4.7. Version 4.8 refuses a CLC response that the type does not
# align to its 16 bytes, which is the only change made to them.
_RESPONSE = "cute.struct.MemRange[cutlass.Int32, 4]"
REPLACED = {
    f"clc_response: {_RESPONSE}": f"clc_response: cute.struct.Align[{_RESPONSE}, 16]",
}


def missing() -> str:
    """Why the tests cannot run here; empty if they can."""
    for name in ("torch", "cutlass", "tvm_ffi"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (make conformance installs it)"
    return "" if EXAMPLES.is_dir() else f"no foreign packages in {SITE} (see make conformance)"


@lru_cache(maxsize=1)
def _changed_files() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fa4-conformance-")


def example(path: str) -> ModuleType:
    """One of NVIDIA's examples as a module, without running its main program.

    path: below EXAMPLES, such as "blackwell/dense_gemm.py".
    """
    file = EXAMPLES / path
    name = "foreign_" + path.removesuffix(".py").replace("/", "_")
    if name in sys.modules:
        return sys.modules[name]
    for folder in (file.parent, EXAMPLES / "blackwell", EXAMPLES):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    source = changed = file.read_text(encoding="utf-8")
    for old, new in REPLACED.items():
        changed = changed.replace(old, new)
    if changed != source:  # CuTe-DSL reads a function's source from its file
        file = Path(_changed_files().name) / file.name
        file.write_text(changed, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def flash_attention() -> Any:
    """flash_attn.cute.interface, without the parts of the package that need a GPU."""
    if "flash_attn" not in sys.modules:
        if str(SITE) not in sys.path:
            sys.path.append(str(SITE))
        package = types.ModuleType("flash_attn")
        package.__path__ = [str(SITE / "flash_attn")]
        sys.modules["flash_attn"] = package
    return importlib.import_module("flash_attn.cute.interface")


@contextlib.contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """The device answers that it has so many: persistent kernels start that many CTAs."""
    from fa4.emulator.host import device

    with (
        mock.patch.object(device, "MULTIPROCESSORS", count),
        mock.patch.dict(os.environ, FLASH_ATTENTION_NUM_SMS=str(count)),
    ):
        yield


_COMMON = {
    "minor": 0,
    "warp_size": 32,
    "shared_memory_per_block_optin": 232_448,
    "shared_memory_per_multiprocessor": 233_472,
    "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2048,
}
# What torch says of a GPU of each architecture.
_PROPERTIES = {
    "sm_100a": SimpleNamespace(
        name="NVIDIA B200", major=10, multi_processor_count=148, L2_cache_size=132_644_864,
        total_memory=180 * 10**9, **_COMMON,
    ),
    "sm_90a": SimpleNamespace(
        name="NVIDIA H200", major=9, multi_processor_count=132, L2_cache_size=62_914_560,
        total_memory=141 * 10**9, **_COMMON,
    ),
}  # fmt: skip


@contextlib.contextmanager
def cuda_is_cpu(arch: str = "sm_100a") -> Iterator[None]:
    """Inside, torch's device "cuda" is the CPU, and its tensors say that they are on a GPU."""
    import torch

    properties = _PROPERTIES[arch]
    arch_of = flash_attention()._get_device_arch
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, 0),
        "get_device_properties": lambda device=None: properties,
        "device": lambda device: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.dict(os.environ, FLASH_ATTENTION_ARCH=arch))
        stack.callback(arch_of.cache_clear)
        arch_of.cache_clear()
        stack.enter_context(_device_mode()())
        yield


@lru_cache(maxsize=1)
def _device_mode() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if isinstance(value, str) and value.split(":")[0] == "cuda":
            return "cpu"
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return value

    is_cuda = torch.Tensor.is_cuda.__get__

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                return args[0]
            if func == is_cuda:
                return True
            if getattr(func, "__name__", "") == "device":
                return func(*args, **kwargs)
            changed = {key: on_cpu(value) for key, value in kwargs.items()}
            return func(*map(on_cpu, args), **changed)

    return CudaIsCpu
