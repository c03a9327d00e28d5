"""`fa4 bench`: our forward kernel beside torch's and FlashAttention-4's, on a B200 or B300."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.config import Problem

# The grid of the FlashAttention-4 paper: 32k tokens, hidden size 2048, bf16.
TOTAL_TOKENS, HIDDEN = 32 * 1024, 2048
HEAD_DIMS = "64,128,192:128"
SEQLENS = "1k,2k,4k,8k,16k,32k"

OURS = "fa4"
BACKENDS = (OURS, "cudnn", "flash", "flash-attn-4")

Attention = Callable[..., Any]


def bench(
    head_dims: Annotated[str, typer.Option(help="d, or d:dv, with commas.")] = HEAD_DIMS,
    seqlens: Annotated[str, typer.Option(help="Lengths, with commas.")] = SEQLENS,
    masks: Annotated[str, typer.Option(help="full, causal or both.")] = "full,causal",
    backends: Annotated[str, typer.Option(help="Of these.")] = ",".join(BACKENDS),
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls per point.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Time the forward kernel on a B200 or B300 against torch SDPA and flash-attn-4.

    The paper's grid: 32k tokens in sequences of 1k to 32k, 2048 / d heads. Prints TFLOP/s, beside
    the simulator's prediction, and how many times as fast as each other one ours is. Exit code 2,
    and nothing measured, where there is no such GPU.

    Example: fa4 bench --head-dims 128 --seqlens 8k,32k --masks causal
    """
    from fa4.choose import find_gpu

    problems = list(make_grid(head_dims, seqlens, masks, dtype))
    names = read_names("backends", backends, BACKENDS)
    device, why = find_gpu()
    if not device:
        raise ValueError(f"fa4 bench needs a B200 or B300: {why}")
    from fa4.commands.verify import progress_bar

    with progress_bar() as update:
        rows = measure(problems, names, functools.partial(time_call, device, repeats), update)
    emit({"device": device_name(device), "dtype": dtype, "rows": rows}, as_json, render)


def read_names(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """The words of a list with commas. Raises ValueError for one that is not allowed."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in allowed:
            raise ValueError(f"--{option} must be of {', '.join(allowed)}; got {name!r}")
    if not names:
        raise ValueError(f"--{option} must name at least one of {', '.join(allowed)}; got {text!r}")
    return names


def read_count(option: str, text: str) -> int:
    """A whole number. Raises ValueError that names the option."""
    from fa4.sim.fields import parse_count

    try:
        return parse_count(text)
    except ValueError as error:
        raise ValueError(f"{option} {error}; got {text!r}") from None


def make_grid(head_dims: str, seqlens: str, masks: str, dtype: str) -> Iterator[Problem]:
    """A problem for every combination; heads are as many as make the hidden size."""
    from fa4.config import Problem, require

    require(dtype in ("bf16", "fp16"), "--dtype must be bf16 or fp16", dtype)
    kinds = read_names("masks", masks, ("full", "causal"))
    for text in head_dims.split(","):
        dims = [read_count("--head-dims", part) for part in text.split(":")]
        require(len(dims) <= 2, "--head-dims must be d or d:dv, with commas", text)
        for kind in kinds:
            for length in (read_count("--seqlens", part) for part in seqlens.split(",")):
                require(1 <= length <= TOTAL_TOKENS, "--seqlens must be 1 to 32k", length)
                heads = max(1, HIDDEN // dims[-1])
                yield Problem(
                    batch=TOTAL_TOKENS // length, seqlen_q=length, seqlen_k=length,
                    heads_q=heads, heads_k=heads, head_dim=dims[0], head_dim_v=dims[-1],
                    dtype=dtype, causal=kind == "causal",
                )  # fmt: skip


def measure(
    problems: Sequence[Problem],
    backends: Sequence[str],
    timer: Callable[[str, Problem], float],
    update: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[dict[str, Any]]:
    """A row per problem: TFLOP/s by back end, the prediction, and why something is missing.

    timer: (back end, problem) -> seconds; what it raises is the reason for a gap.
    """
    from fa4.commands.run import predict

    rows: list[dict[str, Any]] = []
    total = len(problems) * len(backends)
    for problem in problems:
        tflops: dict[str, float] = {}
        missing: dict[str, str] = {}
        for name in backends:
            update(len(rows) * len(backends) + len(tflops) + len(missing), total, name)
            try:
                tflops[name] = problem.forward_flops / timer(name, problem) / 1e12
            except Exception as error:  # another's kernel may refuse in any way
                missing[name] = " ".join(str(error).split())[:200] or type(error).__name__
        ours, found = tflops.get(OURS), predict(problem)
        rows.append(
            {
                "problem": problem.__dict__,
                "tflops": tflops,
                "predicted_tflops": None if found is None else found["tflops"],
                "ratio": {n: ours / x for n, x in tflops.items() if ours and n != OURS},
                "missing": missing,
            }
        )
    return rows


def time_call(device: str, repeats: int, name: str, problem: Problem) -> float:
    """Seconds of one call of a back end on random tensors."""
    import torch

    from fa4.commands.job import time_on_gpu

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    p = problem
    shapes = (
        (p.batch, p.seqlen_q, p.heads_q, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_k, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_k, p.head_dim_v),
    )
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    with torch.no_grad(), torch.cuda.device(device), selected(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a back end refuses
        function = find_backend(name)
        return time_on_gpu(lambda: function(q, k, v, p.causal), repeats)


def find_backend(name: str) -> Attention:
    """(q, k, v, causal) -> out, in FlashAttention's layout. Raises ImportError if not installed."""
    if name == OURS:
        import fa4

        return lambda q, k, v, causal: fa4.flash_attn_func(q, k, v, causal=causal, impl="sm100")
    if name == "flash-attn-4":
        try:
            from flash_attn.cute import flash_attn_func
        except ImportError:
            raise ImportError("flash-attn-4 is not installed: pip install flash-attn-4") from None
        return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return sdpa


@contextmanager
def selected(name: str) -> Iterator[None]:
    """Inside, torch's SDPA uses the back end of that name alone; nothing for others."""
    if name not in ("cudnn", "flash"):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(kernel):
        yield


def device_name(device: str) -> str:
    """As torch calls it."""
    import torch

    return str(torch.cuda.get_device_name(device))


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A table with a row per problem, then why something is missing."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = report["rows"]
    names = list(dict.fromkeys(n for row in rows for n in (*row["tflops"], *row["missing"])))
    others = [name for name in names if any(name in row["ratio"] for row in rows)]
    table = Table("d", "mask", "length", box=SIMPLE_HEAD, pad_edge=False)
    for name in (*names, "predicted", *(f"{OURS} / {name}" for name in others)):
        table.add_column(name, justify="right")
    for row in rows:
        p = row["problem"]
        dims = f"{p['head_dim']}" + (
            f", {p['head_dim_v']}" if p["head_dim_v"] != p["head_dim"] else ""
        )
        cells = [_number(row["tflops"].get(name), ".0f") for name in names]
        cells.append(_number(row["predicted_tflops"], ".0f"))
        cells += [_number(row["ratio"].get(name), ".2f") for name in others]
        mask = "causal" if p["causal"] else "full"
        table.add_row(dims, mask, str(p["seqlen_q"]), *cells)
    gaps = dict.fromkeys((name, why) for row in rows for name, why in row["missing"].items())
    return (
        f"{report['device']}: forward pass, {report['dtype']}, TFLOP/s",
        table,
        *(f"{name}: {why}" for name, why in gaps),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
