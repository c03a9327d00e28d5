"""Who can launch kernels: CuTe-DSL, Triton, torch. Each is redirected once it is imported."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host import device, patches, tilelang_driver, torch_cuda, triton_driver

_active = False


@contextlib.contextmanager
def redirected(target: patches.Target, arch: str, cuda: bool) -> Iterator[None]:
    """Launches of every front end go to `target`; all changes are undone at the end.

    cuda: torch says that it has a GPU. Raises LaunchError inside another one.
    """
    global _active
    if _active:
        raise LaunchError("emulate() is already active; it cannot be nested")
    with contextlib.ExitStack() as stack:
        _active = True
        stack.callback(_deactivate)
        for name, value in device.answers_of(arch).items():
            stack.enter_context(patches.replaced(device, name, value))
        front_ends: dict[str, Callable[[], Any]] = {
            "cutlass": lambda: patches.redirected(target, arch),
            "torch": lambda: torch_cuda.redirected(target, cuda),
            "triton": lambda: triton_driver.redirected(target, arch),
            "tilelang": lambda: tilelang_driver.redirected(target),
        }
        for module, redirect in front_ends.items():
            if sys.modules.get(module) is not None:
                stack.enter_context(redirect())
        waiting = {
            module: partial(_enter, stack, redirect)
            for module, redirect in front_ends.items()
            if module not in sys.modules
        }
        stack.enter_context(_on_import(waiting))
        yield


def _enter(stack: contextlib.ExitStack, redirect: Callable[[], Any]) -> None:
    stack.enter_context(redirect())


def _deactivate() -> None:
    global _active
    _active = False


@contextlib.contextmanager
def _on_import(actions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Runs an action right after the module of its name is imported for the first time."""
    finder = _Finder(actions)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the others do, and loads those that an action waits for with a `_Loader`."""

    def __init__(self, actions: Mapping[str, Callable[[], None]]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for every module that no action waits for."""
        if fullname not in self._actions:
            return None
        action = self._actions.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, action)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as another loader does, then acts."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the other does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the other does; then the action."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()
