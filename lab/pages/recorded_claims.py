"""Numbers of sentences that are read from records; each claim begins with its record's name.

Records: lab/benchmarks/results, lab/hardware/results, fa4/measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from fa4.commands.bench_random import best_ratio, summarize
from fa4.figures.accuracy import B200_FILE
from fa4.hardware import B200
from fa4.sim.measurements import read_measurements
from fa4.sim.options import build
from lab.pages.design_tables import CLAIMS as DESIGN_CLAIMS
from lab.pages.hopper_speed import SpeedPoint, bench_points, kernel_points
from lab.records import making_of, read_record

BY_COUNTS = "no mask, 32k"  # the call of forward_prediction.json that most pages speak of
ALIKE = 0.03  # predictions that differ by less are called equal (docs/simulator.md)


@cache
def record(name: str) -> Any:
    """What a result file holds. Raises ValueError if there is none of that name."""
    return read_record(name)


def unit(name: str, file: str = "hopper_units") -> float:
    """A measured figure of a Hopper SM by its name."""
    (found,) = (x["value"] for x in record(file)["figures"] if x["name"] == name)
    value: float = found
    return value


def load(name: str, key: str, file: str = "hopper_units", seconds: float | None = None) -> float:
    """A figure of a load of the whole GPU, by the load's name."""
    rows = [x for x in record(file)["loads"] if x["load"] == name]
    (row,) = (x for x in rows if seconds is None or x["seconds"] == seconds)
    value: float = row[key]
    return value


def emulated_gemms(how: str) -> list[float]:
    """Millions of thread-instructions of a CPU second, of each GEMM of the emulator's benchmark.

    how: with_checks or without_checks.
    """
    return [x[how] / 1e6 for x in record("emulator")["kernels"] if "gemm" in x["kernel"]]


def times_as_fast(peer: str) -> float:
    """As a peer: the geometric mean over whole calls."""
    ratios = [point.ours / point.peers[peer] for point in bench_points() if peer in point.peers]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def kernel_point(dims: str, causal: bool, seqlen: int) -> SpeedPoint:
    """The kernel by itself."""
    wanted = (dims, causal, seqlen)
    (found,) = (x for x in kernel_points() if (x.dims, x.causal, x.seqlen) == wanted)
    return found


def headline() -> float:
    """TFLOP/s that FlashAttention-4's authors measured of what `fa4 predict` asks by itself."""
    problem = build({}).problem
    (found,) = (row.tflops for row in read_measurements(B200_FILE)
                if row.problem == problem and row.direction == "fwd")  # fmt: skip
    return found


def claimed(beginning: str) -> list[float]:
    """What was predicted of the paper's claim that begins so."""
    (found,) = (x for x in record("claims")["claims"] if x["claim"].startswith(beginning))
    return [float(value) for value in found["predicted"]]


def own(part: str, key: str) -> float:
    """Of the validation against this package's sweep."""
    value: float = record("validation")["own h200"][part][key]
    return value


def spill_error() -> float:
    """Percent of mean error of kernels that spill: of all points without those that do not."""
    count = own("all", "points") - own("without spills", "points")
    total = own("all", "points") * own("all", "mape_percent")
    return (total - own("without spills", "points") * own("without spills", "mape_percent")) / count


def alike_columns() -> list[int]:
    """Shares of emulated columns that are as good as the shipped kernel's, for its call."""
    rows = [x for x in record("forward_prediction")["predictions"] if x["call"] == BY_COUNTS]
    (shipped,) = (x for x in rows if x["shipped"])
    return sorted(
        x["emulated_columns"] for x in rows
        if x["cta_group"] == shipped["cta_group"] and x["tflops"] >= (1 - ALIKE) * shipped["tflops"]
    )  # fmt: skip


def counted(cta_group: int, columns: int = 24) -> float:
    """Predicted TFLOP/s of that call by counted instructions."""
    (found,) = (
        x["tflops"] for x in record("forward_prediction")["predictions"]
        if (x["call"], x["cta_group"], x["emulated_columns"]) == (BY_COUNTS, cta_group, columns)
    )  # fmt: skip
    value: float = found
    return value


def pair_cycles(kernel: str = "d 128, pair") -> float:
    """Of the shared-memory port, by the bytes that a backward CTA of a pair moves for a tile."""
    kinds = ("products", "stores", "stores from a peer", "bulk reductions")
    counts = record("backward_traffic")[kernel]["counted"][0]
    return sum(counts.get(kind, 0) for kind in kinds) / B200.smem_bytes_per_clk


def ends(
    name: str, values: Callable[[], Iterable[float]], form: str
) -> dict[str, Callable[[], str]]:
    """Two claims: the least and the most of some values."""
    return {
        f"{name}, least": lambda: format(min(values()), form),
        f"{name}, most": lambda: format(max(values()), form),
    }


def energy(name: str) -> float:
    """Watts that a load takes beyond the idle GPU."""
    idle = load("idle loop", "steady_w", "hopper_starts")
    return load(name, "steady_w", "hopper_starts") - idle


def cudnn_ahead() -> list[float]:
    """By how much cuDNN's kernel is faster with 512 tokens and head dim 256, by masks."""
    points = [kernel_point("256", causal, 512) for causal in (False, True)]
    return [point.peers["cudnn"] / point.ours - 1 for point in points]


def choices() -> list[float]:
    """Percent that each choice of the simulator loses against the fastest measured one."""
    return [x["lost_percent"] for x in record("validation")["own h200"]["choices"]]


def ratio_of(number: str, key: str) -> list[float]:
    """Of a pull request's ratio, at each length."""
    found = record("validation")["b200"]["ratios"]
    (ratio,) = (x for name, x in found.items() if f"#{number}" in name)
    return [x[key] for x in ratio["calls"].values()]


def staying(group: str) -> str:
    """Mean error on points that were kept out if CTAs that stay take more."""
    found = record("validation")["b200"]["staying"]["kept out"][group]
    return f"{found['mape_percent']:.1f}%"


def l2_rates(memory: str) -> list[float]:
    """Bytes per cycle and SM from L2 or HBM, all SMs loading."""
    names = (x["name"] for x in record("hopper_units")["figures"])
    start = f"curve {memory}/132 SMs"
    return [unit(name) for name in names if name.startswith(start) and name.endswith("rate")]


def port(access: str, products: str) -> str:
    """Cycles of accesses of shared memory beside products."""
    return f"{unit(f'ports/{access}, beside {products}, time', 'hopper_ports'):.0f}"


def cta_set_up() -> list[float]:
    """Cycles of a CTA's barriers, tensor maps and registers in later rounds, by its kind."""
    ended = ", barriers, later rounds"
    names = [x["name"] for x in record("hopper_starts")["figures"] if x["name"].endswith(ended)]
    starts = [name.removesuffix(ended) for name in names]
    parts = ("barriers", "registers")
    return [sum(unit(f"{x}, {y}, later rounds", "hopper_starts") for y in parts) for x in starts]


def beside(what: str) -> list[float]:
    """How many times as long something takes while another warpgroup multiplies."""
    figures = {x["name"]: x["value"] for x in record("hopper_steps")["figures"]}
    alone = {name.removesuffix("nothing"): value for name, value in figures.items()
             if name.startswith(f"beside/{what}") and name.endswith("nothing")}  # fmt: skip
    return [
        value / base for start, base in alone.items() for name, value in figures.items()
        if name.startswith(start) and not name.endswith("nothing")
    ]  # fmt: skip


def skeletons(products: bool) -> list[int]:
    """Launches of each kernel that ran on an H100 with plain products, or without any."""
    cases = record("forward_skeleton_hopper")["cases"].items()
    return [x["launches"] for name, x in cases if name.startswith("products") == products]


def saved_by_a_pair() -> float:
    """Share of the cycles of a lone backward CTA's shared memory that a pair does not need."""
    return 1 - pair_cycles() / pair_cycles("d 128")


def slower_than(peer: str) -> int:
    """In how many whole calls."""
    return sum(p.ours < p.peers[peer] for p in bench_points() if peer in p.peers)


def random_calls(name: str = "hopper_random") -> dict[str, Any]:
    """All random calls against the fastest of the others in each."""
    return summarize(record(name)["rows"])[0]


def far_slower(name: str, limit: float) -> int:
    """In how many random calls less than this share of the speed of the fastest of the others."""
    ratios = map(best_ratio, record(name)["rows"])
    return sum(ratio is not None and ratio < limit for ratio in ratios)


def furthest_losses() -> float:
    """Of the models, fa4's distance from the nearest of torch's back ends, of theirs."""
    models = record("small_transformer")["models"].values()
    return max(max(model["nearest"].values()) / model["torch_apart"] for model in models)


def guarded_gradients() -> int:
    """Guarded calls of both passes."""
    works = record("guarded_calls_h200")["works"]
    return sum(count for name, count in works.items() if name.startswith("gradients"))


def gradients(name: str, *, in_order: bool = False) -> float:
    """Gradients beside flash-attn-4's with sums in any order, in the geometric mean."""
    ratios = [
        rate / row["tflops"]["flash-attn-4"]
        for row in record(name)["rows"]
        for kernel, rate in row["tflops"].items()
        if kernel.startswith("d") and kernel.endswith("deterministic") == in_order
    ]
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def verify_rows(part: str) -> list[dict[str, Any]]:
    """Of the kit's own record: "faults", "styles" or "correct"."""
    rows: list[dict[str, Any]] = record("verify")[part]["rows"]
    return rows


def gpu_number(name: str) -> str:
    """What stands behind its H."""
    return gpu_of(name).removeprefix("H")


ON_A_GPU = (
    "hopper_bench", "hopper_launches", "hopper_random", "hopper_random_gradients",
    "repeated_launches", "sanitized", "small_transformer", "verify_gpu", "warpgroup_backward",
    "warpgroup_bits",
)  # fmt: skip


def halves_step(way: str, q_tiles: int) -> str:
    """Cycles of a step with 104 registers, on every SM, of those of whole rows with as many as they
    want."""
    (whole,) = (x for x in record("halves_step")["ways"] if x["limit"] is None and not x["ctas"]
                and (x["way"], x["q_tiles"]) == ("whole", q_tiles))  # fmt: skip
    (found,) = (x for x in record("halves_step")["ways"] if x["limit"] == 104 and not x["ctas"]
                and (x["way"], x["q_tiles"]) == (way, q_tiles))  # fmt: skip
    return f"{found['cycles_a_step'] / whole['cycles_a_step']:.2f}"


def gpu_of(name: str) -> str:
    """What a record was made on: "H100", "H200"."""
    machine = making_of(name).machine or ""
    (found,) = (gpu for gpu in ("H100", "H200") if gpu in machine)
    return found


RESCALES = "rescales: times fewer with tau 8, scores of std "
ATTENTION = "products of random numbers, softmax arithmetic, boxes from L2"
LOAD = "beside/loads every 2048 cycles, sums {}, latency"
FULL_PORT = "m64n64k16, A from shared memory, warpgroups 2"
HALF_PORT = "m64n64k16, A from registers, across rows, warpgroups 2"
STARTED = "start/384 threads, 16 KiB from L2, replaced"
DETERMINISTIC = "deterministic backward's share of the speed, d128"
LPT = "LPT over naive, causal"


def gains(claim: str) -> Callable[[], list[float]]:
    """Gains of a claim of the paper, as predicted, as shares of 1."""
    return lambda: [value - 1 for value in claimed(claim)]


RECORDED: dict[str, Callable[[], str]] = {
    "b200_published: headline": lambda: f"{headline():.0f}",
    "backward_traffic: cycles of a pair": lambda: f"{pair_cycles():,.0f}",
    "backward_traffic: saved by a pair": lambda: f"{saved_by_a_pair():.0%}",
    **{
        f"first_launch: {name}": lambda name=name: (
            f"{record('first_launch')['launches'][name]['cpu_s']:.1f}"
        )
        for name in ("first", "after", "without_checks")
    },
    **ends("emulator: GEMMs", lambda: emulated_gemms("with_checks"), ".1f"),
    **ends("emulator: GEMMs without checks", lambda: emulated_gemms("without_checks"), ".1f"),
    "hopper_launches: launches": lambda: f"{record('hopper_launches')['launches']:,}",
    "hopper_launches: kernels": lambda: f"{record('hopper_launches')['kernels']}",
    "guarded_calls_h200: calls": lambda: f"{record('guarded_calls_h200')['calls']:,}",
    "guarded_calls_h200: kernels": lambda: f"{record('guarded_calls_h200')['kernels']}",
    "guarded_calls_h100: kernels": lambda: f"{record('guarded_calls_h100')['kernels']}",
    "guarded_calls_h200: gradients": lambda: f"{guarded_gradients()}",
    **{
        f"{of}: {name}": lambda of=of, name=name: f"{record(of)[name]}"
        for of in ("gradient_faults", "wide_gradient_faults")
        for name in ("executed", "caught", "equivalent", "survived")
    },
    "warpgroup_backward: in order, times as fast as flash-attn-4": lambda: (
        f"{gradients('warpgroup_backward', in_order=True):.2f}"
    ),
    "warpgroup_backward: times as fast as flash-attn-4": lambda: (
        f"{gradients('warpgroup_backward'):.2f}"
    ),
    "warpgroup_backward_wide: times as fast as flash-attn-4": lambda: (
        f"{gradients('warpgroup_backward_wide'):.2f}"
    ),
    "repeated_launches: launches": lambda: f"{record('repeated_launches')['launches']}",
    "repeated_launches: calls": lambda: f"{len(record('repeated_launches')['calls'])}",
    "small_transformer: as far": lambda: f"{furthest_losses():.2f}",
    "small_transformer: steps": lambda: f"{record('small_transformer')['steps']}",
    **{f"{name}: GPU": partial(gpu_number, name) for name in ON_A_GPU},
    "halves_step: alone, of whole rows": partial(halves_step, "halves", 1),
    "halves_step: both, of whole rows": partial(halves_step, "halves", 2),
    "halves_step: alone, apart": partial(halves_step, "apart", 1),
    "halves_step: both, apart": partial(halves_step, "apart", 2),
    "verify: faults": lambda: f"{len(verify_rows('faults'))}",
    "verify: named": lambda: f"{sum(row['named'] for row in verify_rows('faults'))}",
    "verify: seconds at most": lambda: (
        f"{max(row['cpu_seconds'] for row in verify_rows('faults')):.0f}"
    ),
    "verify: styles": lambda: f"{len(verify_rows('styles'))}",
    "verify: seeds of a style": lambda: f"{min(row['seeds'] for row in verify_rows('styles'))}",
    "verify: rejected": lambda: f"{sum(len(row['rejected']) for row in verify_rows('styles'))}",
    "verify: cases": lambda: f"{sum(row['cases'] for row in verify_rows('correct')):,}",
    "verify: false alarms": lambda: (
        f"{sum(len(row['false_alarms']) for row in verify_rows('correct'))}"
    ),
    "verify_gpu: seconds of each": lambda: f"{record('verify_gpu')['options']['seconds']:.0f}",
    "warpgroup_bits: calls": lambda: f"{len(record('warpgroup_bits')['calls'])}",
    "warpgroup_bits: launches": lambda: f"{record('warpgroup_bits')['launches']}",
    "warpgroup_bits: elements of O": lambda: (
        f"{record('warpgroup_bits')['equal_share']['compiled o']:.1%}"
    ),
    "forward_skeleton_hopper: kernels without products": lambda: f"{len(skeletons(False))}",
    "forward_skeleton_hopper: launches without products": lambda: f"{max(skeletons(False))}",
    "forward_skeleton_hopper: kernels": lambda: f"{len(skeletons(True))}",
    "forward_skeleton_hopper: launches": lambda: f"{max(skeletons(True))}",
    "hopper_random: calls": lambda: f"{random_calls()['calls']}",
    "hopper_random: times as fast": lambda: f"{random_calls()['mean']:.2f}",
    "hopper_random: slower": lambda: f"{random_calls()['slower']}",
    "hopper_random: worst": lambda: f"{random_calls()['worst']:.2f}",
    "hopper_random_gradients: calls": lambda: f"{random_calls('hopper_random_gradients')['calls']}",
    "hopper_random_gradients: times as fast": lambda: (
        f"{random_calls('hopper_random_gradients')['mean']:.2f}"
    ),
    "hopper_random_gradients: slower": lambda: (
        f"{random_calls('hopper_random_gradients')['slower']}"
    ),
    "hopper_random_gradients: below 0.95": lambda: f"{far_slower('hopper_random_gradients', 0.95)}",
    "hopper_random_gradients_h100: calls": lambda: (
        f"{random_calls('hopper_random_gradients_h100')['calls']}"
    ),
    "hopper_random_gradients_h100: below 0.95": lambda: (
        f"{far_slower('hopper_random_gradients_h100', 0.95)}"
    ),
    "hopper_random_gradients: worst": lambda: (
        f"{random_calls('hopper_random_gradients')['worst']:.2f}"
    ),
    "hopper_bench: calls": lambda: f"{len(list(bench_points()))}",
    "hopper_bench: times as fast as flash-attn-4": lambda: f"{times_as_fast('flash-attn-4'):.2f}",
    "hopper_bench: slower than flash-attn-4": lambda: f"{slower_than('flash-attn-4')}",
    "hopper_bench: slower than cuDNN": lambda: f"{slower_than('cudnn')}",
    "hopper_bench: times as fast as cuDNN": lambda: f"{times_as_fast('cudnn'):.2f}",
    **ends("warpgroup_forward: cuDNN ahead", cudnn_ahead, ".0%"),
    "warpgroup_forward: d64 causal, 512": lambda: f"{kernel_point('64', True, 512).ours:.0f}",
    "warpgroup_forward: d64 causal, 1k": lambda: f"{kernel_point('64', True, 1024).ours:.0f}",
    "warpgroup_forward: d64 causal, 512, cuDNN": lambda: (
        f"{kernel_point('64', True, 512).peers['cudnn']:.0f}"
    ),
    "warpgroup_forward: d64 causal, 1k, cuDNN": lambda: (
        f"{kernel_point('64', True, 1024).peers['cudnn']:.0f}"
    ),
    "forward_prediction: no mask, 32k": lambda: f"{counted(2):.0f}",
    "forward_prediction: no mask, 32k, one CTA": lambda: f"{counted(1):.0f}",
    **ends("forward_prediction: columns alike", alike_columns, ".0f"),
    "claims: headline TFLOP/s": lambda: f"{claimed('forward TFLOP/s')[0]:.0f}",
    "claims: headline share of peak": lambda: f"{claimed('share of peak')[0]:.0%}",
    "claims: times fewer rescales at 3": lambda: f"{claimed(RESCALES + '3')[0]:.0f}",
    "claims: times fewer rescales at 6": lambda: f"{claimed(RESCALES + '6')[0]:.0f}",
    "claims: backward pairs": lambda: f"{claimed('backward pairs')[0] - 1:.0%}",
    **ends("claims: deterministic, no mask", lambda: claimed(f"{DETERMINISTIC}, no mask"), ".0%"),
    **ends("claims: deterministic, causal", lambda: claimed(f"{DETERMINISTIC}, causal"), ".0%"),
    **ends("claims: LPT, MHA, 16k", gains(f"{LPT} MHA, 16k tokens, H200"), ".0%"),
    "claims: LPT, MHA, 32k": lambda: f"{max(gains(f'{LPT} MHA, 32k tokens, H200')()):.0%}",
    **ends("claims: LPT, MQA, 16k", gains(f"{LPT} MQA-8, 16k tokens, H200"), ".0%"),
    **ends("claims: LPT, MQA, 32k", gains(f"{LPT} MQA-8, 32k tokens, H200"), ".0%"),
    "validation: points": lambda: f"{own('all', 'points')}",
    "validation: mean error": lambda: f"{own('all', 'mape_percent'):.1f}%",
    "validation: mean error without spills": lambda: (
        f"{own('without spills', 'mape_percent'):.1f}%"
    ),
    "validation: mean error of spills": lambda: f"{spill_error():.0f}%",
    "validation: misjudged spills": lambda: f"{own('spills', 'misjudged')}",
    "validation: worst": lambda: f"{own('all', 'worst_percent'):.0f}%",
    "validation: good choices": lambda: f"{sum(lost <= 2 for lost in choices())}",
    "validation: choices": lambda: f"{len(choices())}",
    "validation: 2738, least": lambda: f"{min(ratio_of('2738', 'least')):.2f}",
    "validation: 2738, most": lambda: f"{max(ratio_of('2738', 'most')):.2f}",
    "validation: 2738, short": lambda: f"{max(ratio_of('2738', 'short_us')):.1f}",
    "validation: staying, us": lambda: f"{record('validation')['b200']['staying']['more_us']:.1f}",
    **{f"validation: staying, {x}": partial(staying, x) for x in ("all", "B200", "GB300")},
    "validation: kept out, all": lambda: (
        f"{record('validation')['b200']['kept out']['all']['simulator']['mape_percent']:.1f}%"
    ),
    "validation: most lost": lambda: f"{max(choices()):.0f}%",
    "hopper_units: turn by named barriers": lambda: (
        f"{unit('bar.arrive to bar.sync/2 groups of 128'):.0f}"
    ),
    "hopper_units: turn by mbarriers": lambda: f"{unit('mbarrier/one way, two warpgroups'):.0f}",
    "hopper_units: 8 KiB from L2": lambda: (
        f"{unit('load L2/8 KiB, 1 SM, one in flight, latency'):.0f}"
    ),
    "hopper_units: 32 KiB from L2": lambda: (
        f"{unit('load L2/32 KiB, 1 SM, one in flight, latency'):.0f}"
    ),
    "hopper_units: most from L2": lambda: f"{max(l2_rates('L2')):.0f}",
    "hopper_units: most from HBM": lambda: f"{max(l2_rates('HBM')):.0f}",
    "hopper_units: MHz idle": lambda: f"{load('idle loop', 'steady_mhz'):.0f}",
    "hopper_units: MHz, zeros": lambda: f"{load('products of zeros', 'burst_mhz'):.0f}",
    "hopper_units: MHz, random": lambda: (
        f"{load('products of random numbers', 'burst_mhz', seconds=1):.0f}"
    ),
    "hopper_units: MHz, attention": lambda: f"{load(ATTENTION, 'burst_mhz'):.0f}",
    "hopper_units: MHz, attention at the limit": lambda: f"{load(ATTENTION, 'steady_mhz'):.0f}",
    "hopper_beside: a load": lambda: f"{unit(LOAD.format('none'), 'hopper_beside'):.0f}",
    "hopper_beside: a load behind a sum": lambda: (
        f"{unit(LOAD.format('every 2048 cycles'), 'hopper_beside'):.0f}"
    ),
    "hopper_ports: stores alone": lambda: port("16-byte stores, warps 4", "nothing"),
    "hopper_ports: stores beside 64": lambda: port("16-byte stores, warps 4", HALF_PORT),
    "hopper_ports: stores beside 128": lambda: port("16-byte stores, warps 4", FULL_PORT),
    "hopper_ports: sums alone": lambda: port("bulk sums of all SMs, warps 1", "nothing"),
    "hopper_ports: sums beside 128": lambda: port("bulk sums of all SMs, warps 1", FULL_PORT),
    "hopper_starts: replaced": lambda: f"{unit(STARTED, 'hopper_starts'):.0f}",
    **ends("hopper_starts: set up", cta_set_up, ".0f"),
    "hopper_starts: W of zeros": lambda: f"{energy('products of zeros'):.0f}",
    "hopper_starts: W of random numbers": lambda: f"{energy('products'):.0f}",
    "hopper_steps: most of the ALU": lambda: f"{max(beside('fmnmx')):.1f}",
    "hopper_steps: most of exponentials": lambda: f"{max(beside('ex2')):.1f}",
    **ends("hopper_steps: a softmax", lambda: beside("softmax"), ".1f"),
    **DESIGN_CLAIMS,
    **ends("hopper_steps: a softmax, more", lambda: [x - 1 for x in beside("softmax")], ".1f"),
}
