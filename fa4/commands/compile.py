"""`fa4 compile`: a kernel for Blackwell or Hopper, compiled without a GPU, and what came of it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import emit
from fa4.commands.specs import (
    file_stem,
    find_spec,
    passes,
    take_own,
    take_tiles,
    window_features,
)

if TYPE_CHECKING:
    from fa4.compiled.build import Spec

ARCH_HELP = "sm_100a (B200), sm_103a (B300) or sm_90a (H100, H200)."
SCHEDULER_HELP = "static, lpt or clc; sm_90a: static, snake, queue, lpt, naive. Default: the tuned."
TILE_HELP = "sm_90a, 0 for the tuned:"
FLAVOUR_HELP = "Compiler: cu12 or cu13. Default: cu13 where it is installed."
ANY_ORDER_HELP = "Backward, not deterministic: dQ is summed in any order."
LSE_HELP = "Backward: with a gradient of the LSE."
RESIDUAL_HELP = "Backward: with what rounding took from O."
TOP_OPCODES = 8  # named of a loop
SHORTEST_PTX_LOOP = 32  # instructions
SUFFIXES = {"ptx": ".ptx", "cubin": ".cubin", "host_object": ".o", "sass": ".sass"}

HeadDimV = Annotated[int | None, typer.Option(help="Of a value; default: head dim.")]
Group = Annotated[int, typer.Option(help="Query heads that share a tile's rows (packed GQA).")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write PTX, cubin, host object and SASS there.")
]


def compile(
    kernel: Annotated[str, typer.Argument(help="forward, backward, or a kernel.")] = "forward",
    head_dim: Annotated[int, typer.Option(help="Elements of a query and key.")] = 128,
    head_dim_v: HeadDimV = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16; on sm_90a e4m3, e5m2.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys.")] = False,
    window: Annotated[str, typer.Option(help="Sliding window: left, right or both.")] = "",
    group: Group = 1,
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences.")] = False,
    used: Annotated[bool, typer.Option("--used", help="seqused: parts of sequences.")] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="With a soft cap.")] = False,
    sink: Annotated[bool, typer.Option("--sink", help="With attention sinks.")] = False,
    no_lse: Annotated[bool, typer.Option("--no-lse", help="Without LSE.")] = False,
    cta_group: Annotated[int, typer.Option(help="1, or 2 for CTA pairs.")] = 1,
    scheduler: Annotated[str, typer.Option(help=SCHEDULER_HELP)] = "",
    tile_m: Annotated[int, typer.Option(help=f"{TILE_HELP} rows, 64 to 192.")] = 0,
    tile_n: Annotated[int, typer.Option(help=f"{TILE_HELP} keys.")] = 0,
    stages: Annotated[int, typer.Option(help=f"{TILE_HELP} stages of K and V.")] = 0,
    any_order: Annotated[bool, typer.Option("--any-order", help=ANY_ORDER_HELP)] = False,
    lse_gradient: Annotated[bool, typer.Option("--lse-gradient", help=LSE_HELP)] = False,
    out_residual: Annotated[bool, typer.Option("--out-residual", help=RESIDUAL_HELP)] = False,
    arch: Annotated[str, typer.Option(help=ARCH_HELP)] = "sm_100a",
    flavour: Annotated[str, typer.Option(help=FLAVOUR_HELP)] = "",
    out: Out = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile in any case.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compile a kernel without a GPU; show its registers, spills, memory and loops.

    The backward pass is three kernels or four in one module. The result stays in the cache of
    compiled kernels (fa4 cache). docs/compile.md explains the report.

    Example: fa4 compile --arch sm_90a --head-dim 128 --causal --out kernels
    """
    from fa4.config import require

    known = passes()
    require(kernel in known, f"the kernel must be one of {', '.join(known)}", kernel)
    which = known[kernel]
    features: dict[str, Any] = {
        "dtype": dtype,
        "causal": causal,
        **window_features(window, causal),
        **dict.fromkeys(("packed_q", "packed_k"), varlen),
        **dict.fromkeys(("used_q", "used_k"), used),
        "softcap": softcap,
        "sink": sink,
        "cta_group": cta_group,
    }
    own = {"group": group, "lse": not no_lse, "scheduler": scheduler,
           "deterministic": not any_order, "lse_gradient": lse_gradient,
           "out_residual": out_residual}  # fmt: skip
    features |= take_own(which, own) | take_tiles(which, arch, tile_m, tile_n, stages)
    spec = find_spec(kernel, arch, head_dim, head_dim_v or head_dim, features)
    if out is not None:
        check_folder(out)
    report, files = make(spec, arch, flavour, no_cache)
    report["files"] = [] if out is None else write(out, file_stem(kernel, spec, arch), files)
    emit(report, as_json, render)


def make(
    spec: Spec, arch: str, flavour: str, no_cache: bool
) -> tuple[dict[str, Any], dict[str, str | bytes]]:
    """(report, content of the files) of a spec, compiled now or found in the cache."""
    from fa4.compiled.artifact import compile_artifact
    from fa4.compiled.build import build, compile_kernel
    from fa4.compiled.toolchain import find_toolchain, select_flavour
    from fa4.inspect.codegen import read_kernels
    from fa4.inspect.cubin import disassemble
    from fa4.inspect.products import read_products

    toolchain = select_flavour(flavour) if flavour else find_toolchain()
    started, start = time.time(), time.perf_counter()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        artifact = compile_artifact(spec, arch, compile_kernel) if no_cache else build(spec, arch)
    seconds = time.perf_counter() - start
    kernels = read_kernels(artifact.cubin, artifact.ptx)
    products = read_products(artifact.cubin, artifact.ptx)
    smem = artifact.metadata["dynamic_smem_bytes"]
    text, _ = disassemble(artifact.cubin)
    files: dict[str, str | bytes] = {
        "ptx": artifact.ptx,
        "cubin": artifact.cubin,
        "host_object": artifact.host_object,
        **({"sass": text} if text else {}),
    }
    report = {
        "spec": artifact.metadata["spec"],
        "arch": arch,
        "compiler": {"version": toolchain.version, "flavour": toolchain.flavour},
        "label": toolchain.label,
        "key": artifact.key or None,
        "seconds": seconds,
        "from_cache": artifact.metadata["created"] < started,
        "compile_seconds": artifact.metadata["compile_seconds"],
        "bytes": {name: len(content) for name, content in files.items()},
        "plan": describe_plan(spec),
        "kernels": in_launch_order(
            [
                {
                    **one.with_smem(smem).describe(),
                    "wgmma": products[one.resources.name].instructions,
                    "wgmma_wait": products[one.resources.name].wait,
                    "late_exponentials": products[one.resources.name].late,
                    "uniform_moves": products[one.resources.name].moves,
                    "descriptors_by_threads": products[one.resources.name].by_threads,
                }
                for one in kernels
            ],
            smem,
            titles_of(spec),
        ),
        "notes": [str(note.message) for note in notes],
    }
    return report, files


def in_launch_order(
    kernels: Sequence[Mapping[str, Any]], launched: Iterable[str], titles: Sequence[str]
) -> list[dict[str, Any]]:
    """The kernels of a module in the order of their launches.

    launched: their names in that order. titles: what they do, or nothing. Each says that, and if it
    is the one that the plan is of: that with most shared memory.
    """
    order = list(launched)
    most = max((kernel["dynamic_smem_bytes"] or 0 for kernel in kernels), default=0)
    found = sorted(
        kernels,
        key=lambda one: order.index(one["kernel"]) if one["kernel"] in order else len(order),
    )
    return [
        {**kernel, "does": title, "planned": (kernel["dynamic_smem_bytes"] or 0) == most}
        for kernel, title in zip(found, titles or [""] * len(found), strict=False)
    ]


def titles_of(spec: Spec) -> Sequence[str]:
    """What the kernels of a backward pass do; of a forward pass, which is one, nothing is said."""
    from fa4.compiled.build import how_compiled

    return how_compiled(spec).launches


def describe_plan(spec: Spec) -> dict[str, Any]:
    """What the plan budgets, to hold beside what the compiler used."""
    plan, gpu = spec.plan, spec.gpu
    return {
        "roles": [
            {"role": role.name, "warps": role.warps, "registers": role.registers}
            for role in plan.roles
        ],
        "smem_bytes": plan.bytes_used("smem"),
        "smem_bytes_limit": gpu.smem_bytes_per_cta,
        "tmem_columns": plan.bytes_used("tmem"),
        "tmem_columns_limit": gpu.tmem_cols,
    }


def write(folder: Path, stem: str, files: Mapping[str, str | bytes]) -> list[Path]:
    """Writes each file and returns where."""

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in files.items():
        path = folder / f"{stem}{SUFFIXES[name]}"
        write_whole(path, content.encode() if isinstance(content, str) else content)
        written.append(path)
    return written


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: what was compiled and how, roles, memory, loops, files."""
    from fa4.compiled.identity import spec_text

    found = "found in the cache" if report["from_cache"] else "compiled"
    parts: list[Any] = [
        f"{spec_text(report['spec'])}, for {report['arch']}: "
        f"{found} in {report['seconds']:.2f} s with {report['label']}",
        render_roles(report["plan"]["roles"]),
    ]
    for kernel in report["kernels"]:
        if kernel["does"]:
            parts.append(kernel["does"])
        parts += render_memory(kernel, report["plan"])
        if kernel["problem"]:
            parts.append(f"loops of the PTX, since there is {kernel['problem']}")
            parts.append(render_ptx_loops((kernel["ptx"] or {}).get("loops", ())))
        else:
            parts.append(render_loops(kernel["loops"]))
    parts += [f"note: {note}" for note in report["notes"]]
    parts += [f"wrote {path}" for path in report["files"]]
    return tuple(parts)


def render_roles(roles: Any) -> Any:
    """Warps and registers of each role."""
    rows = (
        (row["role"], ", ".join(map(str, row["warps"])), str(row["registers"])) for row in roles
    )
    return table(("role", "warps", "registers"), rows)


def render_memory(kernel: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[str]:
    """Registers, spills, shared and tensor memory of a kernel, one line each."""
    ptx = kernel["ptx"] or {}
    budgets = [f"{registers} ({kind})" for kind, registers in ptx.get("budgets", ())]
    ignored = ", ".join(map(str, kernel["ignored_budgets"]))
    yield (
        f"registers per thread at launch: {kernel['registers_at_launch']}; "
        f"setmaxnreg: {', '.join(dict.fromkeys(budgets)) or 'none'}"
        + (f"; the compiler IGNORES {ignored}" if ignored else "")
    )
    spilled = f"{kernel['frame_bytes']} bytes of local memory"
    if kernel["instructions"] is not None:
        spilled += (
            f", {kernel['spill_loads']} loads and {kernel['spill_stores']} stores; "
            f"{kernel['instructions']} instructions"
        )
    yield f"spills: {spilled}"
    if kernel["wgmma_wait"]:
        yield (
            f"the compiler WAITS for each of {kernel['wgmma']} wgmma: registers do not suffice "
            "for all products that are under way"
        )
    if kernel["late_exponentials"]:
        yield (
            f"the compiler has MOVED {kernel['late_exponentials']} exponentials of the code behind "
            "the wait for the products beside which they were to be"
        )
    if kernel["descriptors_by_threads"]:
        yield (
            f"threads COMPUTE descriptors: {kernel['uniform_moves']} moves to uniform registers "
            f"for {kernel['wgmma']} wgmma"
        )
    dynamic = kernel["dynamic_smem_bytes"]
    smem, tmem = "", ""
    if kernel["planned"]:
        smem = f"; the plan needs {plan['smem_bytes']} of {plan['smem_bytes_limit']}"
        tmem = f"; the plan needs {plan['tmem_columns']}"
    yield (
        f"shared memory: {'unknown' if dynamic is None else dynamic} bytes dynamic, "
        f"{kernel['static_smem_bytes']} static{smem}"
    )
    if plan["tmem_columns_limit"]:  # Hopper has none
        columns = ", ".join(map(str, ptx.get("tmem_columns", ()))) or "none"
        yield f"tensor memory: {columns} columns{tmem}"


def render_loops(loops: Any) -> Any:
    """Length, slots of a row of scores, registers, spills and mix of each loop."""
    rows = []
    for loop in loops:
        mix = sorted(loop["columns"].items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {count}" for name, count in mix[:TOP_OPCODES])
        budget = "-" if loop["registers"] is None else str(loop["registers"])
        per_row = f"{loop['per_row']:g}" if loop["elements"] else "-"
        rows.append(
            (loop["kind"], str(loop["length"]), per_row, budget, str(loop["spills"]), named)
        )
    return table(("loop", "instructions", "per row", "registers", "spills", "mix"), rows)


def render_ptx_loops(loops: Any) -> Any:
    """The same of the loops in the PTX, as far as it tells; the shortest are waits."""
    rows = []
    for loop in loops:
        if loop["length"] >= SHORTEST_PTX_LOOP:
            mix = sorted(loop["opcodes"].items(), key=lambda item: -item[1])
            named = ", ".join(f"{name} {count}" for name, count in mix[:TOP_OPCODES])
            budget = "-" if loop["registers"] is None else str(loop["registers"])
            rows.append((str(loop["line"]), str(loop["length"]), budget, named))
    return table(("loop at", "instructions", "registers", "mix"), rows)


def table(headings: tuple[str, ...], rows: Any) -> Any:
    """A plain table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        found.add_column(heading, overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found
