"""`fa4 bench`: our kernels beside torch's and FlashAttention-4's, on a B200 or B300."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.config import Problem

# The grid of the FlashAttention-4 paper: 32k tokens, hidden size 2048, bf16.
TOTAL_TOKENS, HIDDEN = 32 * 1024, 2048
HEAD_DIMS = "64,128,192:128"
SEQLENS = "1k,2k,4k,8k,16k,32k"

ORDER_HELP = "With --backward: sums in a fixed order, of those that can."
OURS = "fa4"
BACKENDS = (OURS, "cudnn", "flash", "flash-attn-4")

Attention = Callable[..., Any]


class Pass(NamedTuple):
    """What is timed: the forward pass or, of a call that was made, the backward pass."""

    backward: bool = False
    deterministic: bool = False

    @property
    def label(self) -> str:
        """For people."""
        order = ", deterministic" if self.deterministic else ""
        return f"backward pass{order}" if self.backward else "forward pass"


FORWARD_PASS = Pass()


def bench(
    head_dims: Annotated[str, typer.Option(help="d, or d:dv, with commas.")] = HEAD_DIMS,
    seqlens: Annotated[str, typer.Option(help="Lengths, with commas.")] = SEQLENS,
    masks: Annotated[str, typer.Option(help="full, causal or both.")] = "full,causal",
    backends: Annotated[str, typer.Option(help="Of these.")] = ",".join(BACKENDS),
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    backward: Annotated[bool, typer.Option("--backward", help="Time gradients instead.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help=ORDER_HELP)] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls per point.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Time the kernels on a B200 or B300 against torch SDPA and flash-attn-4.

    The paper's grid: 32k tokens in sequences of 1k to 32k, 2048 / d heads. Prints TFLOP/s, beside
    the simulator's prediction, and how many times as fast as each other one ours is. Exit code 2,
    and nothing measured, where there is no such GPU.

    Example: fa4 bench --head-dims 128 --seqlens 8k,32k --masks causal
    """
    from fa4.choose import find_gpu

    if deterministic and not backward:
        raise ValueError("--deterministic is an option of --backward; got it without")
    timed = Pass(backward, deterministic)
    problems = list(make_grid(head_dims, seqlens, masks, dtype))
    names = read_names("backends", backends, BACKENDS)
    device, why = find_gpu()
    if not device:
        raise ValueError(f"fa4 bench needs a B200 or B300: {why}")
    from fa4.commands.verify import progress_bar

    with progress_bar() as update:
        timer = functools.partial(time_call, device, repeats, timed)
        rows = measure(problems, names, timer, update, timed)
    report = {"device": device_name(device), "dtype": dtype, "pass": timed.label, "rows": rows}
    emit(report, as_json, render)


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
    timed: Pass = FORWARD_PASS,
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
                flops = problem.backward_flops if timed.backward else problem.forward_flops
                tflops[name] = flops / timer(name, problem) / 1e12
            except Exception as error:  # another's kernel may refuse in any way
                missing[name] = " ".join(str(error).split())[:200] or type(error).__name__
        ours, found = tflops.get(OURS), predict(problem, backward=timed.backward)
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


def time_call(device: str, repeats: int, timed: Pass, name: str, problem: Problem) -> float:
    """Seconds of one pass of a back end on random tensors."""
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
    with torch.cuda.device(device), selected(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a back end refuses
        function = find_backend(name, timed)
        if timed.backward:
            return time_on_gpu(gradient_of(function, (q, k, v), p.causal), repeats)
        with torch.no_grad():
            return time_on_gpu(lambda: function(q, k, v, p.causal), repeats)


def gradient_of(
    function: Attention, tensors: tuple[Any, Any, Any], causal: bool
) -> Callable[[], Any]:
    """The backward pass of one call, to be run again and again."""
    import torch

    inputs = [x.requires_grad_() for x in tensors]
    result = function(*inputs, causal)
    out = result[0] if isinstance(result, tuple) else result
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def find_backend(name: str, timed: Pass = FORWARD_PASS) -> Attention:
    """(q, k, v, causal) -> out, in FlashAttention's layout.

    Raises ImportError if it is not installed, ValueError if it cannot be asked for a fixed order.
    """
    given: dict[str, Any] = {"deterministic": timed.deterministic}
    if name == OURS:
        import fa4

        return lambda q, k, v, causal: fa4.flash_attn_func(
            q, k, v, causal=causal, **given, impl="sm100"
        )
    if name == "flash-attn-4":
        try:
            from flash_attn.cute import flash_attn_func
        except ImportError:
            raise ImportError("flash-attn-4 is not installed: pip install flash-attn-4") from None
        return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal, **given)
    if timed.deterministic:
        raise ValueError("torch's SDPA has no argument for the order of sums")
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
        f"{report['device']}: {report['pass']}, {report['dtype']}, TFLOP/s",
        table,
        *(f"{name}: {why}" for name, why in gaps),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
