"""Nothing that this package loads may keep a process group alive."""

from __future__ import annotations

import inspect
import sys

import torch.distributed


def keep_no_default_group() -> None:
    """Leave `torch.distributed.nn` as it is when loaded before `init_process_group`.

    torch's compiler loads it (torch 2.13), and its functions take the default group of that moment
    as their own default, beyond `destroy_process_group`: a thread of that group then meets the
    interpreter's end, and now and then aborts the process. Without one their default is None,
    which is the default group of each call. To be called behind whatever loads the compiler; what
    that has not loaded keeps nothing.
    """
    functions = sys.modules.get("torch.distributed.nn.functional")
    if functions is None or not torch.distributed.is_initialized():
        return
    kept = torch.distributed.group.WORLD
    for function in vars(functions).values():
        if inspect.isfunction(function) and function.__defaults__:
            function.__defaults__ = tuple(
                None if default is kept else default for default in function.__defaults__
            )
