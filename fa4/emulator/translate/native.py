"""Compiles LLVM text to machine code for this CPU and keeps the result for the whole process."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from fa4.emulator.translate.lanes import SegmentBuilder

# run(registers, mask, parameters) -> result: addresses of the warp's register file and of the
# parameter block, the active lanes; the result is the segment's scalar (0 unless it branches).
SegmentFunction = Callable[[int, int, int], int]

_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
_compiled: dict[str, SegmentFunction] = {}
_engines: list[Any] = []


@cache
def _target_machine() -> Any:
    """Code generation at level 0: it is five times faster to compile and half as fast to run."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=0
    )


def function_text(name: str, builder: SegmentBuilder, result: str = "0") -> str:
    """The LLVM text of a segment: `result` is a scalar i32 SSA name or constant."""
    body = "\n".join(builder.lines)
    return (
        f"define i32 @{name}(ptr %registers, i32 %mask, ptr %parameters) {{\n"
        f"{body}\n  ret i32 {result}\n}}\n"
    )


def compile_functions(
    bodies: Mapping[str, tuple[str, frozenset[str]]],
) -> dict[str, SegmentFunction]:
    """Compiles functions that were not seen before in this process.

    bodies: key -> (LLVM text of a function named @SEGMENT, declarations it needs). Equal texts
    share one compilation, so that a kernel with one line changed compiles one segment. Returns
    key -> callable.
    """
    digests = {
        key: "s" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        for key, (text, _) in bodies.items()
    }
    missing: dict[str, str] = {}
    declarations: set[str] = set()
    for key, (text, needs) in bodies.items():
        digest = digests[key]
        if digest not in _compiled and digest not in missing:
            missing[digest] = text.replace("@SEGMENT(", f"@{digest}(", 1)
            declarations |= needs
    if missing:
        _compile_module("\n".join([*sorted(declarations), *missing.values()]), list(missing))
    return {key: _compiled[digest] for key, digest in digests.items()}


def _compile_module(text: str, names: list[str]) -> None:
    machine = _target_machine()
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    for name in names:
        _compiled[name] = _PROTOTYPE(engine.get_function_address(name))
