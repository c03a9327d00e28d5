"""A compiled kernel as data: what the cache keeps, what a GPU and the emulator are handed.

`CompiledKernel` holds the PTX, the cubin, and the host code: the object file that checks the
arguments, builds TMA descriptors and launches the kernel, or one after the other those of a
backward pass. The host code is bound to a CUDA runtime
when it is loaded, so that the same bytes run on a GPU (`CompiledKernel.__call__`) and under
`fa4.emulator.launch`. Neither needs cutlass's compiler.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fa4.compiled.identity import describe
from fa4.compiled.toolchain import find_toolchain
from fa4.inspect.codegen import launch_smem_bytes
from fa4.kit.features import BackwardFeatures

MAGIC = b"fa4 kernel 1\n"
SECTIONS = ("ptx", "cubin", "host_object")

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32

# (spec, arch) -> what cute.compile returns, PTX and cubin kept.
Compiler = Callable[[Any, str], Any]


class DamagedArtifact(ValueError):
    """Bytes that are no artefact of this version, or not all of one; the message says which."""


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """The compiled kernel, or kernels, of a spec, callable on a GPU of its architecture.

    key: its name in the cache, "" if it has none. host_object: an ELF object for this machine with
    TVM-FFI's calling convention. function_name: what it exports. parameters: names of the host
    function's arguments. metadata: plain data for people and reports
    (spec, compiler, seconds, dynamic shared memory of each kernel's launch by the kernel's name).
    """

    spec: Any
    key: str
    arch: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    host_object: bytes = field(repr=False)
    function_name: str
    parameters: tuple[str, ...]
    metadata: Mapping[str, Any] = field(repr=False, default_factory=dict)

    def __call__(self, *arguments: Any) -> None:
        """Launches the kernel on the GPU that the tensors are on, on the current stream.

        arguments: positional, as `parameters` names them. Raises ImportError if a package is
        missing, OSError without a CUDA driver; TVM-FFI's errors name arguments that do not fit.
        """
        self._function(*arguments)

    @cached_property
    def _function(self) -> Callable[..., None]:
        from fa4.compiled.native import load_function

        return load_function(self.host_object, self.function_name)


def kind_of(spec: Any) -> str:
    """ "forward" or "backward", by the type of a spec."""
    return "backward" if isinstance(spec, BackwardFeatures) else "forward"


def compile_artifact(spec: Any, arch: str, compiler: Compiler, key: str = "") -> CompiledKernel:
    """Compiles a spec and exports the result."""
    from fa4.compiled.host_code import export_host, host_function

    toolchain = find_toolchain()
    function = f"fa4_{kind_of(spec)}"
    start = time.perf_counter()
    compiled = compiler(spec, arch)
    seconds = time.perf_counter() - start
    artifacts = compiled.artifacts
    if not artifacts.PTX or not isinstance(artifacts.CUBIN, bytes):
        raise ValueError("no PTX or no cubin was kept: compile with KeepPTX and KeepCUBIN")
    metadata = {
        "spec": describe(spec),
        "compiler": {"version": toolchain.version, "flavour": toolchain.flavour},
        "dynamic_smem_bytes": launch_smem_bytes(host_function(compiled)),
        "compile_seconds": seconds,
        "created": time.time(),
    }
    return CompiledKernel(
        spec=spec,
        key=key,
        arch=arch,
        ptx=artifacts.PTX,
        cubin=artifacts.CUBIN,
        host_object=export_host(compiled, function),
        function_name=function,
        parameters=tuple(compiled.execution_args.signature.parameters),
        metadata=metadata,
    )


def to_bytes(artifact: CompiledKernel) -> bytes:
    """One file: magic, header (JSON), sections, SHA-256 of all that comes before it."""
    sections = [artifact.ptx.encode(), artifact.cubin, artifact.host_object]
    header = json.dumps(
        {
            "key": artifact.key,
            "arch": artifact.arch,
            "function_name": artifact.function_name,
            "parameters": artifact.parameters,
            "metadata": artifact.metadata,
            "sections": [len(section) for section in sections],
        }
    ).encode()
    body = b"".join([MAGIC, _LENGTH.pack(len(header)), header, *sections])
    return body + hashlib.sha256(body).digest()


def from_bytes(data: bytes, spec: Any = None) -> CompiledKernel:
    """The artefact in a file's bytes. Raises DamagedArtifact if a byte is not as written."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    header, start = read_header(data)
    if hashlib.sha256(body).digest() != digest:
        raise DamagedArtifact("its checksum does not fit its content")
    found = {}
    for name, length in zip(SECTIONS, header["sections"], strict=True):
        found[name] = body[start : start + length]
        start += length
    return CompiledKernel(
        spec=spec,
        key=header["key"],
        arch=header["arch"],
        ptx=found["ptx"].decode(),
        cubin=found["cubin"],
        host_object=found["host_object"],
        function_name=header["function_name"],
        parameters=tuple(header["parameters"]),
        metadata=header["metadata"],
    )


def read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """Header and where the sections begin, of a file's first bytes; its checksum is not looked at.

    Raises DamagedArtifact if there is no header.
    """
    if not data.startswith(MAGIC):
        raise DamagedArtifact("it does not begin as a kernel of this version")
    start = len(MAGIC) + _LENGTH.size
    if len(data) < start:
        raise DamagedArtifact("it is cut off in its header")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    try:
        header = json.loads(data[start : start + length])
    except ValueError:
        raise DamagedArtifact("its header is not readable") from None
    if not isinstance(header, dict):
        raise DamagedArtifact("its header is not readable")
    return header, start + length
