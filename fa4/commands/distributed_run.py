"""`fa4 distributed run` and `bench`: a group carries plans out, and says whether and how fast.

Under torchrun each process is a rank. Started alone, the command starts the ranks itself, on this
host; what rank 0 prints is printed. A rank that fails or does not answer ends all of them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit
from fa4.config import require, require_finite, require_int

if TYPE_CHECKING:
    import torch

MOST_STARTED = 16  # ranks that this command starts by itself
MOST_COMPARED, MOST_TIMED = 1 << 13, 1 << 24  # rows
METHODS = "zigzag,all_gather,ulysses,pass_q"
Gpus = Annotated[
    int, typer.Option("--gpus", metavar="N", help="Ranks to start, if torchrun started none.")
]
Methods = Annotated[
    str, typer.Option("--method", metavar="NAMES", help="As of `fa4 distributed predict`.")
]
Seqlen = Annotated[str, typer.Option("--seqlen", metavar="N", help="Rows of all ranks together.")]
Heads = Annotated[str, typer.Option("--heads", metavar="Q,K", help="Query and KV heads.")]
Impl = Annotated[str, typer.Option("--impl", help="Of `fa4.flash_attn_func`.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="Until a rank is missed.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def run(
    gpus: Gpus = 2,
    method: Methods = METHODS,
    seqlen: Seqlen = "512",
    heads: Heads = "4,2",
    impl: Impl = "auto",
    timeout: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Carry plans out, forward and backward, and compare with one process; exit code 1 if wrong.

    Causal, head dim 64, bf16 on GPUs over NCCL, fp32 on CPUs over gloo. Errors are against float64;
    allowed is twice that of the same kernel in one process.

    Example: fa4 distributed run --gpus 2 --method zigzag,ulysses
    """
    given = read(method, seqlen, heads, impl)
    require_int("--seqlen", given["seqlen"], 1, MOST_COMPARED)
    words = words_of("run", method, seqlen, heads, impl, timeout, as_json)
    with group_of(gpus, timeout, words) as rank:
        if rank is None:
            return
        report = {
            **given,
            **about_group(),
            "rows": [compare(name, given) for name in given["method"]],
        }
        if rank == 0:
            emit(report, as_json, render_run)
    if not all(row["right"] for row in report["rows"]):
        raise typer.Exit(1)


def bench(
    gpus: Gpus = 2,
    method: Methods = METHODS,
    seqlen: Seqlen = "2k",
    heads: Heads = "4,2",
    impl: Impl = "auto",
    timeout: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Time the forward pass of methods on a group, and one process beside it.

    Efficiency is one process's time over the number of ranks times theirs: the slowest rank's
    median of five rounds. On a CPU whose cores the ranks share it says nothing about GPUs.

    Example: torchrun --nproc_per_node 8 -m fa4 distributed bench --seqlen 128k --heads 32,8
    """
    given = read(method, seqlen, heads, impl)
    require_int("--seqlen", given["seqlen"], 1, MOST_TIMED)
    words = words_of("bench", method, seqlen, heads, impl, timeout, as_json)
    with group_of(gpus, timeout, words) as rank:
        if rank is None:
            return
        alone = measure("", given)
        rows = [{"method": name, "seconds": measure(name, given)} for name in given["method"]]
        for row in rows:
            row["efficiency"] = alone / (about_group()["gpus"] * row["seconds"])
        report = {**given, **about_group(), "one_gpu_seconds": alone, "rows": rows}
        if rank == 0:
            emit(report, as_json, render_bench)


def words_of(
    name: str, method: str, seqlen: str, heads: str, impl: str, timeout: float, as_json: bool
) -> list[str]:
    """The command line that each rank is started with."""
    options = {"method": method, "seqlen": seqlen, "heads": heads, "impl": impl}
    given = [f"--{option}={value}" for option, value in options.items()]
    return ["distributed", name, *given, f"--timeout={timeout}", *["--json"] * as_json]


def read(method: str, seqlen: str, heads: str, impl: str) -> dict[str, Any]:
    """The options, checked before a process is started."""
    from fa4.distributed.forecast import SCHEMES
    from fa4.sim.fields import FIELDS

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ranks need torch ({error}): pip install torch") from None
    names = [name.strip() for name in method.split(",")]
    for name in names:
        require(name in SCHEMES, f"--method must be of {', '.join(SCHEMES)}", name)
    counts = [FIELDS["heads"].read(text) for text in heads.split(",")]
    require(len(counts) in (1, 2), "--heads must be Q or Q,K", heads)
    return {
        "method": names, "seqlen": FIELDS["seqlen"].read(seqlen),
        "heads": counts[0], "heads_k": counts[-1], "impl": impl,
    }  # fmt: skip


@contextmanager
def group_of(gpus: int, timeout: float, words: Sequence[str]) -> Iterator[int | None]:
    """This process's rank in a group; None in the process that started all ranks and saw them end.

    Raises ValueError in that process for ranks that ended badly.
    """
    require_int("--gpus", gpus, 1, MOST_STARTED)
    require_finite("--timeout", timeout, 1.0)
    require(timeout <= 86400, "--timeout must be at most 86400", timeout)
    if "RANK" not in os.environ:
        start_ranks(gpus, words)
        yield None
        return
    import torch
    import torch.distributed as dist

    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def start_ranks(gpus: int, words: Sequence[str]) -> None:
    """A process of this command for each rank; returns when all have ended well."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ,
        "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, "-m", "fa4", *words]
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(gpus)]
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=errors[rank],
            )
            for rank in range(gpus)
        ]
        try:
            _wait_for(ranks, errors)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]]) -> None:
    """Until all have ended, or one badly: its last line is the error."""
    codes = [process.poll() for process in ranks]
    while None in codes and all(code in (None, 0, 1) for code in codes):
        time.sleep(0.05)
        codes = [process.poll() for process in ranks]
    for rank, code in enumerate(codes):
        if code in (None, 0, 1):
            continue
        errors[rank].seek(0)
        said = errors[rank].read().decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"ended with code {code}"
        raise ValueError(f"rank {rank}: {last.removeprefix('fa4: error: ')}")
    if 1 in codes:
        raise typer.Exit(1)


def about_group() -> dict[str, Any]:
    """Ranks, back end and GPU."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"gpus": dist.get_world_size(), "backend": dist.get_backend(), "gpu": gpu}


def tensors(given: Mapping[str, Any]) -> list[torch.Tensor]:
    """q, k, v, dout, the same on every rank."""
    import torch

    made = torch.Generator().manual_seed(0)
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    heads = (given["heads"], given["heads_k"], given["heads_k"], given["heads"])
    shapes = ((1, given["seqlen"], count, 64) for count in heads)
    return [torch.randn(x, generator=made).to(device, dtype) for x in shapes]


def scheme_of(name: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """(options of `attention`, layout) of a method."""
    import torch.distributed as dist

    from fa4.distributed.forecast import SCHEMES
    from fa4.distributed.layout import make_layout

    method, layout = SCHEMES[name]
    made = make_layout(layout or "zigzag", given["seqlen"], dist.get_world_size())
    options = {"method": method, "layout": made, "impl": given["impl"]}
    if name == "halo":
        return options | {"window_size": (given["seqlen"] // 8, 0)}, made
    return options | {"causal": True}, made


def compare(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of O, dQ, dK, dV of a method, over all ranks, and those of one process."""
    import torch
    import torch.distributed as dist

    import fa4
    from fa4 import distributed
    from fa4.oracle import attend_batch, differentiate_batch

    options, layout = scheme_of(name, given)
    q, k, v, dout = tensors(given)
    rank = dist.get_rank()
    mine = [layout.shard(x, rank).contiguous().requires_grad_() for x in (q, k, v)]
    out = distributed.attention(*mine, **options)
    out.backward(layout.shard(dout, rank))
    mask = {"window_size": options.get("window_size", (None, 0))}
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    alone = fa4.flash_attn_func(*whole, **mask, impl=given["impl"])
    alone.backward(dout)
    arrays = [x[0].double().cpu().numpy() for x in (q, k, v, dout)]
    offsets = {"cu_seqlens_q": [0, given["seqlen"]], "cu_seqlens_k": [0, given["seqlen"]]}
    a, b, c, upstream = arrays
    exact, _ = attend_batch(a, b, c, {**offsets, **mask})
    grads = differentiate_batch((a, b, c), upstream, None, {**offsets, **mask})
    found = {}
    rows = torch.from_numpy(layout.positions(rank))
    values = zip(("o", "dq", "dk", "dv"), (out, *(x.grad for x in mine)),
                 (alone, *(x.grad for x in whole)), (exact, *grads[:3]), strict=True)  # fmt: skip
    for kind, sharded, one, truth in values:
        wanted = torch.from_numpy(truth)
        error = (sharded[0].detach().double().cpu() - wanted[rows]).abs().max()
        budget = 2 * (one[0].detach().double().cpu() - wanted).abs().max() + 1e-6
        both = torch.stack([error, budget]).to(q.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        found[kind] = {"error": float(both[0]), "allowed": float(both[1])}
    right = all(x["error"] <= x["allowed"] for x in found.values())
    return {"method": name, "right": right, **found}


def measure(name: str, given: Mapping[str, Any]) -> float:
    """Seconds of a forward pass: of a method on the group, or of one process ("")."""
    import statistics

    import torch
    import torch.distributed as dist

    import fa4
    from fa4 import distributed

    q, k, v, _ = tensors(given)
    options: dict[str, Any] = {"causal": True, "impl": given["impl"]}
    call: Any = fa4.flash_attn_func
    mine = [q, k, v]
    if name:
        options, layout = scheme_of(name, given)
        mine = [layout.shard(x, dist.get_rank()).contiguous() for x in mine]
        call = distributed.attention
    rounds = []
    for _ in range(6):
        dist.barrier()
        begin = time.perf_counter()
        call(*mine, **options)
        if q.is_cuda:
            torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - begin], device=q.device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        rounds.append(float(spent))
    return statistics.median(rounds[1:])  # the first one compiles


def render_run(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A line for each method: errors over what is allowed."""
    lines = [_headline(report)]
    for row in report["rows"]:
        errors = ", ".join(
            f"{kind} {row[kind]['error']:.1e} of {row[kind]['allowed']:.1e}"
            for kind in ("o", "dq", "dk", "dv")
        )
        lines.append(f"{'right' if row['right'] else 'WRONG'}: {row['method']}: {errors}")
    return ("\n".join(lines),)


def render_bench(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A line for each method."""
    lines = [_headline(report), f"one process: {report['one_gpu_seconds'] * 1e3:.2f} ms"]
    lines += [
        f"{row['method']}: {row['seconds'] * 1e3:.2f} ms, efficiency {row['efficiency']:.0%}"
        for row in report["rows"]
    ]
    return ("\n".join(lines),)


def _headline(report: Mapping[str, Any]) -> str:
    return (
        f"{report['gpus']} ranks ({report['gpu']}, {report['backend']}), {report['seqlen']} rows, "
        f"{report['heads']} heads on {report['heads_k']}, causal, impl {report['impl']}"
    )
