"""torch beside an emulated GPU: streams that are always finished, and, if asked, a pretended GPU.

Where torch is to say that it has a GPU, every CPU tensor counts as one there: its `device` is
"cuda:0", `device="cuda"` allocates on the CPU, `.cuda()` and `.cpu()` copy. Which tensors a program
forgot to move is not noticed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host import device
from fa4.emulator.host.arguments import aside
from fa4.emulator.host.patches import Replacements, Target, replaced
from fa4.emulator.host.torch_dispatch import autocasts, registrations
from fa4.emulator.host.torch_empty import empties
from fa4.emulator.host.torch_random import drawn_from, generators

# As large as a B200's; nothing is allocated there.
TOTAL_BYTES = 180_000_000_000
NAME = "GPU emulated by fa4"


@contextlib.contextmanager
def redirected(target: Target, cuda: bool) -> Iterator[None]:
    """Streams and addresses of torch, and with `cuda` its GPU; undone at the end.

    Raises LaunchError where torch has a GPU of its own and another is to be pretended.
    """
    import torch

    own = bool(torch.version.cuda and torch.cuda.is_available())
    if own and cuda:
        raise LaunchError(
            "emulate(cuda=True) pretends a GPU; torch has one here: hide it (CUDA_VISIBLE_DEVICES=)"
        )
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            *_addresses(target, torch),
            *empties(torch),
            *(() if own else _streams(torch)),
            *((*_answers(torch), *autocasts(torch), *generators(torch)) if cuda else ()),
        ):
            stack.enter_context(replaced(owner, name, value))
        if cuda:
            pretended = _pretending(torch)
            stack.enter_context(registrations(torch, pretended))
            stack.enter_context(pretended)
        yield


class _Stream:
    """Stands for torch.cuda.Stream: a handle, with all work on it finished."""

    _handles = itertools.count(1)

    def __init__(self, *_: Any, handle: int | None = None, **__: Any) -> None:
        self.cuda_stream = next(self._handles) if handle is None else handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is ever pending."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or _Event()

    def query(self) -> bool:
        """Whether all work is done."""
        return True


class _Event:
    """Stands for torch.cuda.Event: it has happened. Times are unknown here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """As torch's, without any effect."""

    def record(self, stream: Any = None) -> None:
        """Nothing is ever pending."""

    wait = record

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Nobody knows."""
        raise LaunchError("times are unknown in the emulator: torch.cuda.Event.elapsed_time")


def _streams(torch: Any) -> Replacements:
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "current_stream", lambda device=None: _Stream(handle=0)
    yield torch.cuda, "default_stream", lambda device=None: _Stream(handle=0)
    yield torch.cuda, "synchronize", lambda device=None: None
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):  # for profilers
        yield torch.cuda.nvtx, name, lambda *_, **__: 0
    # Torch refuses a stream that is not its own before it asks anybody.
    yield torch.Tensor, "record_stream", lambda self, stream: None


def _addresses(target: Target, torch: Any) -> Replacements:
    """Whoever asks a tensor for its address may make a pointer of it: it is remembered."""
    original = torch.Tensor.data_ptr

    def data_ptr(self: Any) -> int:
        with aside():
            if self.device.type == "cpu":
                # Of a temporary view only the tensor it was made from may live on.
                for tensor in (self._base, self):
                    if tensor is not None:
                        target.tensors.note(tensor, tensor)
            address: int = original(self)
            return address

    yield torch.Tensor, "data_ptr", data_ptr


def _answers(torch: Any) -> Replacements:
    """What torch.cuda says of its GPU."""
    major, minor = device.COMPUTE_CAPABILITY
    properties = SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=TOTAL_BYTES,
        multi_processor_count=device.MULTIPROCESSORS,
        warp_size=device.device_attribute(10),
        max_threads_per_multi_processor=device.device_attribute(39),
        regs_per_multiprocessor=device.device_attribute(82),
        shared_memory_per_block=device.device_attribute(8),
        shared_memory_per_block_optin=device.MAX_SHARED_BYTES_PER_BLOCK,
        shared_memory_per_multiprocessor=device.device_attribute(81),
        L2_cache_size=device.L2_BYTES,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "device": lambda device: contextlib.nullcontext(device),
        "Event": _Event,
    }
    silent = ("set_device", "set_stream", "init", "_lazy_init", "empty_cache",
              "reset_peak_memory_stats")  # fmt: skip
    answers |= {name: lambda *_, **__: None for name in silent}
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        answers[name] = lambda device=None: 0
    for name, answer in answers.items():
        yield torch.cuda, name, answer
    if hasattr(torch, "accelerator"):  # torch 2.6
        yield from _accelerator(torch)


def _accelerator(torch: Any) -> Replacements:
    """The same where torch asks for any kind of accelerator."""
    gpu = torch.device("cuda")
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: gpu,
        "current_stream": lambda device=None: _Stream(handle=0),
        "device_index": lambda index=0: contextlib.nullcontext(),
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda device=None: 0),
    }
    silent = ("set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache")
    answers |= {name: lambda *_, **__: None for name in silent}
    for name, answer in answers.items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, answer


def is_there(x: Any) -> bool:
    """Whether a tensor is known to have been made on the pretended GPU, or moved to it."""
    return getattr(x, "_fa4_on_gpu", False)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbered(torch: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments with the GPU's name where a device is said by its number."""
    place = {torch.device: 0, torch.Tensor.to: 1, torch.Tensor.cuda: 1}.get(func)
    if place is not None and len(args) > place and _is_number(args[place]):
        args = (*args[:place], f"cuda:{args[place]}", *args[place + 1 :])
    if _is_number(kwargs.get("device")):
        kwargs = {**kwargs, "device": f"cuda:{kwargs['device']}"}
    return args, kwargs


def _mover(torch: Any) -> Callable[[Any], Any]:
    """What a device or a generator that was given is on the CPU; anything else is itself."""
    here = torch.device("cpu")

    def moved(value: Any) -> Any:
        if not isinstance(value, (str, torch.device)):
            return drawn_from(value)
        kind, _, number = str(value).partition(":")
        if kind == "cuda" and number not in ("", "0"):
            raise LaunchError(f"device {value}: the pretended GPU is cuda:0, and there is no other")
        return here if kind == "cuda" else value

    return moved


def _pretending(torch: Any) -> Any:
    """The mode in which every CPU tensor is said to be on the GPU."""
    gpu, tensor, moved = torch.device("cuda", 0), torch.Tensor, _mover(torch)
    device_of = tensor.device.__get__

    def seen(x: Any) -> Any:
        """Where a tensor is said to be; those without memory, of "meta", stay where they are."""
        where = device_of(x)
        return gpu if where.type == "cpu" else where

    def there(x: Any) -> Any:
        """A tensor that was made on the GPU, or moved to it."""
        if isinstance(x, tensor):
            x._fa4_on_gpu = True
        return x

    def to_gpu(x: Any, device: Any = None, *_: Any, **__: Any) -> Any:
        moved(device)
        return x if is_there(x) else there(x.clone())

    answers = {
        device_of: seen,
        tensor.is_cuda.__get__: lambda x: seen(x).type == "cuda",
        tensor.is_cpu.__get__: lambda x: False,
        tensor.get_device: lambda x: 0,
        tensor.is_pinned: lambda x, *_: False,
        tensor.pin_memory: lambda x, *_: x,
        tensor.cuda: to_gpu,
        tensor.cpu: lambda x, *_, **__: x.clone(),
    }

    def names_device(value: Any) -> bool:
        return isinstance(value, torch.device) or value in ("cpu", "cuda", "cuda:0")

    class PretendedGpu(torch.overrides.TorchFunctionMode):
        """Functions run on the CPU; where a tensor is said to be is asked of this."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            args, given = _numbered(torch, func, args, kwargs or {})
            if func is torch.device:
                return func(*args, **given)
            if func in answers:
                return answers[func](*args, **given)
            kwargs = {n: moved(value) for n, value in given.items()}
            goes = any(moved(x) is not x for x in (*args[1:], *given.values()))
            if func is tensor.to and any(
                isinstance(x, (str, torch.device)) and names_device(x)
                for x in (*args[1:], given.get("device"))
            ):
                # A copy as between CPU and GPU, unless it is known to be there.
                kwargs["copy"] = given.get("copy", False) or not (goes and is_there(args[0]))
                result = func(*map(moved, args), **kwargs)
                return there(result) if goes else result
            result = func(*map(moved, args), **kwargs)
            return there(result) if goes or any(map(is_there, args)) else result

    return PretendedGpu()
