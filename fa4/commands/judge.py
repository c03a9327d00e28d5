"""What `fa4 run` says of its results: errors against the oracle, for people and machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fa4.backends import EMULATED

if TYPE_CHECKING:
    import numpy as np

    from fa4.testing.budget import Check
    from fa4.testing.inputs import Inputs

MOST_SCORES = 2**24  # rows x keys that the oracle looks at, of one head
MOST_HEADS = 8
LABELS = {"out": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}


def compare(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    options: Mapping[str, Any],
    outputs: tuple[np.ndarray, np.ndarray],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Errors of O and LSE against the float64 oracle, and their budget.

    Of large problems the last rows (which mean the same without the others, as masks are aligned
    bottom-right) of the first heads are looked at: `checked` says how many.
    """
    from fa4.call.checked import DENSE_DEFAULTS
    from fa4.testing.budget import check_output, expect_forward
    from fa4.testing.inputs import dense_inputs

    (q, k, v), (out, lse) = arrays, outputs
    group = q.shape[2] // k.shape[2]
    rows = min(q.shape[1], max(1, MOST_SCORES // max(k.shape[1], 1)))
    pairs = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[2])][:MOST_HEADS]
    meant = {name: x for name, x in options.items() if x != DENSE_DEFAULTS[name]}
    worst: dict[str, Any] = {}
    for number, (b, h) in enumerate(pairs):
        say(f"checking head {number + 1} of {len(pairs)} against the oracle")
        head, last = slice(h // group, h // group + 1), slice(q.shape[1] - rows, None)
        inputs = dense_inputs(
            q[b : b + 1, last, h : h + 1], k[b : b + 1, :, head], v[b : b + 1, :, head], **meant
        )
        expected = expect_forward(inputs)
        got = {"out": out[b, last, h : h + 1], "lse": lse[b, h : h + 1, last]}
        for name, part in got.items():
            check = check_output(name, [part], expected[name])
            keep_worst(worst, name, check)
    return {
        "checks": worst,
        "checked": {"rows": rows, "heads": len(pairs),
                    "of_rows": q.shape[1], "of_heads": q.shape[0] * q.shape[2]},
        "within_budget": all(check["share"] <= 1.0 for check in worst.values()),
    }  # fmt: skip


def keep_worst(worst: dict[str, Any], name: str, check: Check) -> None:
    """Keeps the check of an output that used most of its budget."""
    if name not in worst or check.share > worst[name]["share"]:
        worst[name] = {"error": check.error, "budget": check.allowed, "share": check.share}


def compare_gradients(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    dout: np.ndarray,
    options: Mapping[str, Any],
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Errors of dQ, dK and dV against the float64 oracle, and their budget.

    Of the first KV heads, each with its query heads; of none where a head has too many scores, as
    every row has a part in dK and dV.
    """
    from fa4.testing.budget import check_output, expect_gradients

    q, k, v = arrays
    group = q.shape[2] // k.shape[2]
    fits = group * q.shape[1] * k.shape[1] <= MOST_SCORES
    pairs = [(b, h) for b in range(q.shape[0]) for h in range(k.shape[2])]
    pairs = pairs[: max(1, MOST_HEADS // group)] if fits else []
    worst: dict[str, Any] = {}
    for number, (b, h) in enumerate(pairs):
        say(f"checking the gradients of KV head {number + 1} of {len(pairs)} against the oracle")
        one, rows, head = slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1)
        inputs = _with_dout(
            (q[one, :, rows], k[one, :, head], v[one, :, head]), dout[one, :, rows], options
        )
        expected = expect_gradients(inputs)
        for name, x, part in zip(("dq", "dk", "dv"), gradients, (rows, head, head), strict=True):
            keep_worst(worst, name, check_output(name, [x[b][:, part]], expected[name]))
    return {
        "checks": worst,
        "checked": {"kv_heads": len(pairs), "of_kv_heads": q.shape[0] * k.shape[2]},
        "within_budget": all(check["share"] <= 1.0 for check in worst.values()),
    }


def _with_dout(
    arrays: tuple[np.ndarray, ...], dout: np.ndarray, options: Mapping[str, Any]
) -> Inputs:
    """The testing kit's inputs of a dense call and its dO, of one sequence."""
    from dataclasses import replace

    from fa4.call.checked import DENSE_DEFAULTS
    from fa4.testing.inputs import dense_inputs

    q, k, v = arrays
    meant = {name: x for name, x in options.items() if x != DENSE_DEFAULTS[name]}
    inputs = dense_inputs(q, k, v, **meant)
    (sequence,) = inputs.sequences
    return replace(inputs, dout=dout, sequences=(sequence._replace(dout=dout[0]),))


def render(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The report for people: what ran, its error, its speed, what was found."""
    p = report["problem"]
    mask = "causal" if p["causal"] else "window " + ", ".join(map(str, p["window_size"]))
    mask = "no mask" if p["window_size"] == (None, None) else mask
    heads = f"{p['heads_q']} heads" + (
        f" on {p['heads_k']} KV heads" if p["heads_k"] != p["heads_q"] else ""
    )
    lines = [
        f"{report['impl']}: batch {p['batch']}, {p['seqlen_q']} queries x {p['seqlen_k']} keys, "
        f"{heads}, d {p['head_dim']}, dv {p['head_dim_v']}, {p['dtype']}, {mask}"
    ]
    lines += render_pass(report)
    if report["backward"] is not None:
        lines += ["backward:", *render_pass(report["backward"])]
    if report["impl"] in EMULATED:
        passes = [report] + ([report["backward"]] if report["backward"] else [])
        findings = [str(finding) for one in passes for finding in one["findings"]]
        lines += [*findings, f"emulator: {len(findings) or 'no'} findings"]
    if report["out"]:
        lines.append(f"wrote {report['out']}")
    return tuple(lines)


def render_pass(report: Mapping[str, Any]) -> Iterator[str]:
    """Errors and time of the forward or the backward pass."""
    for name, check in report.get("checks", {}).items():
        verdict = "ok" if check["share"] <= 1 else "OVER"
        yield (
            f"{LABELS[name]:4} error {check['error']:.2e}, budget {check['budget']:.2e}: {verdict}"
        )
    c = report.get("checked", {})
    if "rows" in c:
        yield (
            f"     the worst of {c['rows']} of {c['of_rows']} rows in {c['heads']} of "
            f"{c['of_heads']} heads, against the float64 oracle"
        )
    elif c:
        yield (
            f"     the worst of {c['kv_heads']} of {c['of_kv_heads']} KV heads, against the "
            "float64 oracle"
            if c["kv_heads"]
            else "     too many scores for the float64 oracle: not checked"
        )
    yield _speed(report)


def _speed(report: Mapping[str, Any]) -> str:
    text = f"time {report['seconds'] * 1e3:.4g} ms"
    if report["tflops"] is not None:
        text += f", {report['tflops']:.0f} TFLOP/s"
    if report["compile_seconds"] is not None:
        text += f" (and {report['compile_seconds']:.2f} s to get the kernel)"
    found = report["prediction"]
    if found is not None and math.isfinite(found["tflops"]):
        text += (
            f"; predicted on a {found['machine']}: {found['seconds'] * 1e3:.4g} ms, "
            f"{found['tflops']:.0f} TFLOP/s"
        )
    return text
