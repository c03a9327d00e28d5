"""`fa4 predict --gpus`: time of a call whose sequence is divided over GPUs, and its chain."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fa4.commands import emit
from fa4.config import require, require_int

if TYPE_CHECKING:
    from fa4.distributed.forecast import CallShape, PassForecast
    from fa4.distributed.plan import Spec
    from fa4.distributed.simulate import TimingModel
    from fa4.sim.links import Fabric

# Of the call's own settings; what is left goes to the simulation of each block.
_OF_THE_CALL = {
    "machine", "pass", "batch", "seqlen", "seqlen_q", "seqlen_k", "heads", "heads_q", "heads_k",
    "head_dim", "head_dim_v", "dtype", "causal", "window",
}  # fmt: skip
_REFUSED = ("lengths", "seqlen_q", "seqlen_k")
ACCURACY = (
    "within 5% of nine calls of two H200s; of 14 later ones 3% off in the mean, 13% at most; "
    "within 5 points of ring-flash-attention's rings on 8 H800; more GPUs, nodes and NVLink 5 "
    "were measured by nobody here"
)
_Option = tuple[str, Any, str, str]
ACROSS: Mapping[str, _Option] = {
    "gpus": ("N", int, "GPUs that the sequence is divided over.", "one, without links"),
    "method": (
        "NAME", str,
        "zigzag, contiguous, striped, ring, all_gather, ulysses, ring+ulysses, halo, pass_q; auto "
        "compares all.", "auto",
    ),
    "degree": ("N", int, "Ranks that share heads, of ring+ulysses.", "those of a node"),
    "link": ("NAME", str, "Inside a node: nvlink3, nvlink4, nvlink4-h800, nvlink5.",
             "the machine's"),
    "nodes": ("N", int, "Nodes, with as many GPUs each.", "1"),
    "node_link": ("NAME", str, "Between nodes: infiniband50, infiniband100.", "infiniband50"),
    "transport": (
        "NAME", str,
        "group (NCCL), peers (copy engines, one node), margin (NCCL, to which kernels leave SMs).",
        "group",
    ),
}  # fmt: skip


def with_options(into: str, table: Mapping[str, _Option]) -> Callable[..., Any]:
    """Give a command that takes a dict `into` one option per entry of a table instead."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        hints = get_type_hints(command, include_extras=True)
        named = inspect.Parameter.KEYWORD_ONLY
        kept = [x for x in signature.parameters.values() if x.name != into]
        last = [x for x in kept if x.kind is inspect.Parameter.VAR_KEYWORD]
        own = [x.replace(annotation=hints[x.name], kind=named) for x in kept if x not in last]
        added = [_parameter(name, *entry) for name, entry in table.items()]

        def run(**given: Any) -> None:
            chosen = {name: given.pop(_parameter_name(name)) for name in table}
            command(**{into: chosen}, **given)

        run.__doc__, run.__name__ = command.__doc__, command.__name__
        parameters = [*added, *own, *last]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return run

    return decorate


def _parameter(name: str, metavar: str, kind: Any, text: str, default: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        option = typer.Option(flag, help=text, show_default=False)
    else:
        option = typer.Option(flag, metavar=metavar, help=text, show_default=default)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        _parameter_name(name), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _parameter_name(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) else name


def refuse_without_gpus(across: Mapping[str, Any]) -> None:
    """ValueError for an option of links without --gpus."""
    for name, value in across.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} needs --gpus")


def predict_gpus(settings: Mapping[str, Any], across: Mapping[str, Any], as_json: bool) -> None:
    """The whole command."""
    emit(report_gpus(settings, across), as_json, render_gpus)


def read_call(settings: Mapping[str, Any]) -> tuple[CallShape, str, bool]:
    """(call, machine, with gradients) of settings of `fa4 predict`."""
    from fa4.distributed.forecast import CallShape
    from fa4.distributed.plan import Sizes
    from fa4.sim.options import DEFAULT_MACHINE, build

    for name in _REFUSED:
        require(settings.get(name) is None, f"{name} is not divided over GPUs; use seqlen",
                settings.get(name))  # fmt: skip
    request = build({k: v for k, v in settings.items() if k in _OF_THE_CALL and k != "pass"})
    problem = request.problem
    require(problem.dtype in ("bf16", "fp16"), "dtype must be bf16 or fp16 across GPUs",
            problem.dtype)  # fmt: skip
    sizes = Sizes(
        problem.heads_q, problem.heads_k, problem.head_dim, problem.head_dim_v, problem.batch, 2
    )
    left, right = problem.window_size
    shape = CallShape(problem.seqlen_q, sizes, problem.causal, (left, right))
    name = str(settings.get("machine") or DEFAULT_MACHINE)
    return shape, name, settings.get("pass") == "bwd"


def report_gpus(settings: Mapping[str, Any], across: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked, every method that fits, and the passes of the one that is taken."""
    from fa4.distributed.forecast import forecast_passes, make_model, own_fabric, say_chain

    given = {name: value for name, value in across.items() if value is not None}
    gpus = given["gpus"]
    require_int("gpus", gpus, 1, 1 << 14)
    shape, machine, backward = read_call(settings)
    fabric = own_fabric(
        gpus, machine, given.get("link"), given.get("nodes", 1),
        given.get("node_link", "infiniband50"), given.get("transport", "group"),
    )  # fmt: skip
    blocks = {k: v for k, v in settings.items() if k not in _OF_THE_CALL}
    model = make_model(shape.sizes, machine, fabric, **blocks)
    ranked = compare_methods(shape, fabric, model, given)
    name, spec, _ = ranked[0]
    passes = forecast_passes(spec, model, backward)
    sizes = shape.sizes
    return {
        "settings": {k: str(v) for k, v in settings.items()},
        "machine": machine, "gpus": gpus, "nodes": fabric.nodes,
        "links": {
            link.name: link.known
            for link in (fabric.inside, fabric.between)[: 1 + (fabric.nodes > 1)]
        },
        "transport": fabric.transport.name,
        "call": {**asdict(sizes), "seqlen": shape.seqlen, "causal": shape.causal,
                 "window": list(shape.window)},
        "method": name, "layout": spec.rows.name, "degree": spec.degree,
        "passes": [
            describe_pass(found) | {"why": say_chain(found, fabric.transport.why)}
            for found in passes
        ],
        "methods": [
            {"method": name, "degree": one.degree, "seconds": found.seconds,
             "efficiency": found.efficiency, "peak_bytes": found.peak_bytes,
             "sent_bytes": found.sent_bytes}
            for name, one, found in ranked
        ],
        "accuracy": ACCURACY,
    }  # fmt: skip


def compare_methods(
    shape: CallShape, fabric: Fabric, model: TimingModel, given: Mapping[str, Any]
) -> list[tuple[str, Spec, PassForecast]]:
    """(name, spec, forward pass) of the method, or of all that fit, the fastest first."""
    from fa4.distributed.forecast import SCHEMES, forecast, make_call_spec

    each = fabric.gpus // fabric.nodes
    degree = given.get("degree", each if fabric.nodes > 1 else 1)
    name = given.get("method", "auto")
    if name != "auto":
        spec = make_call_spec(shape, name, fabric.gpus, degree)
        return [(name, spec, forecast(spec, model))]
    found = []
    for name in SCHEMES:
        degrees = [1]
        if name == "ring+ulysses":
            degrees = [x for x in (2, 4, 8, 16) if fabric.gpus % x == 0 and x < fabric.gpus]
            degrees = [given["degree"]] if "degree" in given else degrees
        if name == "ring" or (name == "halo" and shape.window[0] is None):
            continue  # "ring" is one of zigzag and contiguous
        for one in degrees:
            try:
                spec = make_call_spec(shape, name, fabric.gpus, one)
            except ValueError:
                continue
            found.append((name, spec, forecast(spec, model)))
    return sorted(found, key=lambda x: x[2].seconds)


def describe_pass(found: PassForecast) -> dict[str, Any]:
    """One pass as plain data."""
    return {
        "pass": "bwd" if found.spec.backward else "fwd",
        "seconds": found.seconds,
        "one_gpu_seconds": found.one_gpu_seconds,
        "efficiency": found.efficiency,
        "peak_bytes": found.peak_bytes,
        "sent_bytes": found.sent_bytes,
        "chain": [part._asdict() for part in found.chain],
        "chain_ranks": list(found.chain_ranks),
    }


def render_gpus(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """One screen: the call, the links, each pass with its chain, the other methods."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    call, links = report["call"], report["links"]
    left, right = call["window"]
    mask = "causal" if call["causal"] else "no mask"
    mask = mask if (left, right) == (None, None) or left is None else f"window {left}, {right}"
    degree = f", {report['degree']} ranks share heads" if report["degree"] > 1 else ""
    parts: list[Any] = [
        f"{call['batch']} x {call['seqlen']} tokens over {report['gpus']} GPUs "
        f"({report['machine']}) of {report['nodes']} nodes, {call['heads_q']} heads on "
        f"{call['heads_k']} KV heads, head dim {call['head_dim']}, {mask}",
        f"method {report['method']}, layout {report['layout']}{degree}; transport "
        f"{report['transport']}",
        *(f"{name}: {known}" for name, known in links.items()),
        "",
    ]
    for one in report["passes"]:
        what = "backward" if one["pass"] == "bwd" else "forward"
        parts += [
            f"{what}: {one['seconds'] * 1e3:.2f} ms, efficiency {one['efficiency']:.1%} "
            f"(one GPU: {one['one_gpu_seconds'] * 1e3:.1f} ms); a rank's buffers "
            f"{one['peak_bytes'] / 2**30:.2f} GiB, it sends {one['sent_bytes'] / 2**30:.2f} GiB",
            f"  {one['why']}",
        ]
    if len(report["methods"]) > 1:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("method (forward)", "share heads", "ms", "efficiency", "buffers GiB",
                     "sends GiB"):  # fmt: skip
            table.add_column(name, justify="left" if name.startswith("method") else "right")
        for row in report["methods"]:
            table.add_row(
                row["method"], str(row["degree"]), f"{row['seconds'] * 1e3:.2f}",
                f"{row['efficiency']:.1%}", f"{row['peak_bytes'] / 2**30:.2f}",
                f"{row['sent_bytes'] / 2**30:.2f}",
            )  # fmt: skip
        parts.append(table)
    parts.append(f"model error: {report['accuracy']}")
    return tuple(parts)
