"""Compiles LLVM text to machine code for this CPU and keeps the result for the whole process.

And for others, where `kept_code` is asked to.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from fa4.emulator.translate.lanes import SegmentBuilder
from fa4.emulator.translate.machine_code_file import keep, kept_objects

# run(registers, mask, parameters) -> result: addresses of the warp's register file and of the
# parameter block, the active lanes; the result is the segment's scalar (0 unless it branches).
SegmentFunction = Callable[[int, int, int], int]

_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
# Code generation at level 0 is five times faster to compile, and half as fast to run.
CODE_LEVEL, PASSES_LEVEL = 0, 1
_compiled: dict[str, SegmentFunction] = {}
_engines: list[Any] = []


@cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=CODE_LEVEL,
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
    _load_kept([digest for digest in dict.fromkeys(digests.values()) if digest not in _compiled])
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
    options = llvm.create_pipeline_tuning_options(speed_level=PASSES_LEVEL)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.set_object_cache(lambda _, data: keep(data, names, _target()))
    _enter(engine, names)


def _load_kept(names: Sequence[str]) -> None:
    """Enters those of the functions that another process has compiled."""
    for data, mine in kept_objects(names, _target()):
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        _enter(engine, mine)


def _enter(engine: Any, names: Sequence[str]) -> None:
    # Before anything can interrupt: an engine that dies takes the target machine with it.
    _engines.append(engine)
    engine.finalize_object()
    for name in names:
        _compiled[name] = _PROTOTYPE(engine.get_function_address(name))


@cache
def _target() -> str:
    """What machine code depends on beside its text: this CPU, and what compiles for it."""
    known = (_target_machine().triple, llvm.get_host_cpu_name(), llvm.llvm_version_info,
             llvm.get_host_cpu_features().flatten(), CODE_LEVEL, PASSES_LEVEL)  # fmt: skip
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()
