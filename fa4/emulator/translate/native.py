"""Compiles LLVM text to machine code for this CPU and keeps the result for the whole process.

And for others, where `machine_code_file` is asked to.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm

from fa4.emulator.translate.lanes import SegmentBuilder
from fa4.emulator.translate.machine_code_file import keep, kept_objects

# run(registers, mask, parameters) -> result: addresses of the warp's register file and of the
# parameter block, the active lanes; the result is the segment's scalar (0 unless it branches).
SegmentFunction = Callable[[int, int, int], int]

# The address of the table with the places of registers comes first.
_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p
)
# Code generation at level 0 is five times faster to compile, and half as fast to run.
CODE_LEVEL, PASSES_LEVEL = 0, 1
_compiled: dict[str, Callable[[int, int, int, int], int]] = {}
_engines: list[Any] = []
_tables: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True)
class SegmentText:
    """A function in LLVM's language, named @SEGMENT.

    declarations: what it needs. places: byte offsets of its registers in the register file, which
    its table is to hold; the text speaks of entries of the table.
    """

    text: str
    declarations: frozenset[str]
    places: tuple[int, ...]


@cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=CODE_LEVEL,
    )


def function_text(builder: SegmentBuilder, result: str = "0") -> SegmentText:
    """The function of a segment. `result` is a scalar i32 SSA name or constant."""
    body = "\n".join(builder.lines)
    text = (
        "define i32 @SEGMENT(ptr %places, ptr %registers, i32 %mask, ptr %parameters) {\n"
        f"{body}\n  ret i32 {result}\n}}\n"
    )
    return SegmentText(text, frozenset(builder.declarations), tuple(builder.places))


def compile_functions(segments: Mapping[str, SegmentText]) -> dict[str, SegmentFunction]:
    """Compiles functions that were not seen before in this process; key -> callable.

    Equal texts share one compilation: a kernel with one line changed compiles one segment, and
    segments that differ in nothing but their registers are one.
    """
    digests = {
        key: "s" + hashlib.blake2b(segment.text.encode(), digest_size=16).hexdigest()
        for key, segment in segments.items()
    }
    _load_kept([digest for digest in dict.fromkeys(digests.values()) if digest not in _compiled])
    missing: dict[str, str] = {}
    declarations: set[str] = set()
    for key, segment in segments.items():
        digest = digests[key]
        if digest not in _compiled and digest not in missing:
            missing[digest] = segment.text.replace("@SEGMENT(", f"@{digest}(", 1)
            declarations |= segment.declarations
    if missing:
        _compile_module("\n".join([*sorted(declarations), *missing.values()]), list(missing))
    return {
        key: partial(_compiled[digest], _table(segments[key].places))
        for key, digest in digests.items()
    }


def _table(places: tuple[int, ...]) -> int:
    """The address of a table with these places, which stays."""
    if places not in _tables:
        _tables[places] = (ctypes.c_int64 * max(len(places), 1))(*places)
    return ctypes.addressof(_tables[places])


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
