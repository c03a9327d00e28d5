"""Settings by name: every one is read, changes what it says, and bad ones are refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.config import BackwardPipeline, ForwardPipeline, WarpgroupPipeline
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sim.fields import FIELDS, parse_count, parse_flag, parse_window
from fa4.sim.machine import find_machine
from fa4.sim.options import build, read_lengths
from fa4.sim.predict import predict
from tests.sim.choices import default_backward, default_forward, default_hopper


def test_without_settings_it_is_the_papers_headline() -> None:
    """Forward, 32k tokens, 16 heads of 128, bf16, B200, with FlashAttention-4's choices."""
    request = build({})
    problem = request.problem
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (1, 32768, 32768)
    assert (problem.heads_q, problem.heads_k, problem.head_dim) == (16, 16, 128)
    assert (problem.dtype, problem.causal) == ("bf16", False)
    assert request.machine == find_machine("b200")
    assert request.pipeline == default_forward(problem, request.machine.gpu)
    assert request.simulation.rescale_rate == pytest.approx(0.0, abs=1e-6)
    assert request.predict() == predict(problem, request.pipeline, request.machine)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_described(name: str) -> None:
    """A sentence of help, and beside it the default, which is among the choices."""
    field = FIELDS[name]
    assert field.name == name and bool(field.metavar) == (not field.is_flag)
    assert field.help.endswith(".") and len(field.help) > 8
    assert field.default and not field.default.endswith(".")
    if field.choices:
        assert field.default.partition(" ")[0] in (*field.choices, "FA4's")


@pytest.mark.parametrize(
    ("text", "value"), [("8k", 8192), ("1.5K", 1536), ("2m", 2 * 1024**2), (" 7 ", 7), ("0", 0)]
)
def test_counts(text: str, value: int) -> None:
    """k is 1024, m is 1024 k."""
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.3k", "-1", "1e3", "8kb", "nan", "0.5"])
def test_bad_counts(text: str) -> None:
    """What is no whole number is refused."""
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


def test_the_largest_count() -> None:
    """What an array of 64-bit integers holds, and not one more; the message says so."""
    assert parse_count("9223372036854775807") == 2**63 - 1
    with pytest.raises(ValueError, match=r"at most 9223372036854775807$"):
        parse_count("9223372036854775808")


def test_flags_and_windows() -> None:
    """Spellings of yes and no; open sides of a window."""
    assert [parse_flag(x) for x in ("yes", "On", "1", "true")] == [True] * 4
    assert [parse_flag(x) for x in ("no", "off", "0", "False")] == [False] * 4
    assert parse_window("1k,none") == (1024, None)
    assert parse_window("(-1, 0)") == (-1, 0)
    assert build({"window": (64, None)}).problem.window_size == (64, None)
    assert build({"window": "-1,0"}).problem.window_size == (None, 0)


# One value per setting that differs from the default, and where it must arrive.
ARRIVES = [
    ("batch", "3", "problem.batch", 3),
    ("seqlen", "2k", "problem.seqlen_q", 2048),
    ("seqlen", "2k", "problem.seqlen_k", 2048),
    ("seqlen_q", 1, "problem.seqlen_q", 1),
    ("seqlen_q", 1, "problem.seqlen_k", 32768),
    ("seqlen_k", "1k", "problem.seqlen_k", 1024),
    ("heads", "4", "problem.heads_k", 4),
    ("heads_q", "32", "problem.heads_q", 32),
    ("heads_k", "2", "problem.heads_k", 2),
    ("head_dim", "64", "problem.head_dim_v", 64),
    ("head_dim_v", "64", "pipeline.head_dim_v", 64),
    ("dtype", "fp16", "problem.dtype", "fp16"),
    ("dtype", "e4m3", "pipeline.element_bytes", 1),
    ("causal", "yes", "problem.causal", True),
    ("window", "128,0", "problem.window_size", (128, 0)),
    ("cta_group", "1", "pipeline.cta_group", 1),
    ("kv_stages", "2", "pipeline.kv_stages", 2),
    ("tile_n", "64", "pipeline.numerics.tile_n", 64),
    ("q_tiles", "1", "pipeline.numerics.q_tiles", 1),
    ("num_splits", "4", "pipeline.numerics.num_splits", 4),
    ("ping_pong", "no", "pipeline.ping_pong", False),
    ("correction", "inline", "pipeline.correction", "inline"),
    ("p_space", "smem", "pipeline.p_space", "smem"),
    ("scheduler", "clc", "pipeline.scheduler", "clc"),
    ("split_p", "1", "pipeline.split_p", 1.0),
    ("exp2_frequency", "0", "pipeline.numerics.exp2.frequency", 0),
    ("exp2_residue", "2", "pipeline.numerics.exp2.residue", 2),
    ("exp2_start", "2", "pipeline.numerics.exp2.start_fragment", 2),
    ("exp2_degree", "5", "pipeline.numerics.exp2.degree", 5),
    ("tau", "2", "pipeline.numerics.rescale_threshold_log2", 2.0),
    ("rescale_rate", "0.5", "simulation.rescale_rate", 0.5),
    ("clock_ghz", "2.1", "machine.clock_hz", 2.1e9),
    ("exact", "yes", "simulation.exact", True),
    ("machine", "b300", "machine.name", "B300"),
]


@pytest.mark.parametrize(("name", "value", "path", "expected"), ARRIVES, ids=lambda x: str(x)[:20])
def test_every_setting_arrives(name: str, value: object, path: str, expected: object) -> None:
    """A setting changes the one thing it names."""
    found: object = build({name: value})
    for part in path.split("."):
        found = getattr(found, part)
    assert found == expected


def test_no_setting_is_forgotten_here() -> None:
    """The table above and the tests below cover every field."""
    elsewhere = {"pass", "kernel", "lengths", "deterministic"}
    elsewhere |= {"tile_m", "overlap", "p_source"}  # of Hopper
    assert {row[0] for row in ARRIVES} | elsewhere == set(FIELDS)


def test_backward() -> None:
    """Its pipeline is the backward's, deterministic or not."""
    request = build({"pass": "bwd", "deterministic": True, "cta_group": "1", "causal": True})
    assert isinstance(request.pipeline, BackwardPipeline)
    assert (request.pipeline.deterministic, request.pipeline.scheduler) == (True, "spt")
    assert request.pipeline.numerics.cta_group == 1
    assert build({"pass": "bwd"}).pipeline == default_backward(build({}).problem)


def test_designs() -> None:
    """This package's kernel unless the published one is asked for; each with its own choices."""

    def chosen(**settings: object) -> tuple[object, ...]:
        pipeline = build({"pass": "bwd", **settings}).pipeline
        assert isinstance(pipeline, BackwardPipeline)
        return pipeline.published, pipeline.numerics.cta_group, pipeline.scheduler

    published = {"kernel": "published"}
    assert chosen() == (False, 2, "naive")
    assert chosen(**published) == (True, 2, "naive")
    assert chosen(head_dim_v=64) == (False, 1, "naive")
    assert chosen(head_dim_v=64, **published) == (True, 2, "naive")
    left = {"window": "64,none", "deterministic": True}
    assert chosen(**left) == (False, 2, "naive")
    assert chosen(**left, **published) == (True, 2, "spt")


def test_other_kernels() -> None:
    """FlashAttention-3 where there is no tensor memory; 2 on request."""
    choices = {"machine": "h200", "overlap": "no", "tile_m": 192, "p_source": "smem"}
    own = build(choices).pipeline
    assert isinstance(own, WarpgroupPipeline)
    assert (own.published, own.consumers, own.scheduler) == (False, 3, "static")
    hopper = build(choices | {"kernel": "published"})
    assert isinstance(hopper.pipeline, WarpgroupPipeline)
    assert (hopper.pipeline.overlap, hopper.pipeline.consumers) == (False, 3)
    assert hopper.pipeline.p_source == "smem" and hopper.pipeline.scheduler == "naive"
    serial = build({"machine": "h200", "kernel": "fa2"}).pipeline
    assert isinstance(serial, WarpgroupPipeline) and not serial.takes_turns


def test_without_threshold_o_is_rescaled_in_most_steps() -> None:
    """tau 0 is standard online softmax, unless a rate is given; FP8 kernels run with it."""
    call = {"tau": 0, "seqlen": "4k"}
    rate = build(call).simulation.rescale_rate
    assert rate is not None and 0.66 < rate < 0.99  # the reference's counts
    assert build({**call, "tau": 0.001}).simulation.rescale_rate == pytest.approx(rate, rel=0.01)
    assert build({"dtype": "e4m3", "seqlen": "4k"}).simulation.rescale_rate == rate
    assert build({"tau": 0, "rescale_rate": 0.3}).simulation.rescale_rate == 0.3


def test_figures_of_the_machine() -> None:
    """gpu.X and costs.X change a figure, and its source says so."""
    machine = build({"gpu.exp_per_clk": "32", "costs.launch_ns": 0.0}).machine
    assert (machine.gpu.exp_per_clk, machine.costs.launch_ns) == (32, 0.0)
    assert machine.gpu.sources["exp_per_clk"].confidence == "low"
    faster = build({"gpu.hbm_bytes_per_s": "16e12"}).machine.gpu
    assert faster.hbm_bytes_per_s == 16e12


def test_clock_is_the_one_that_kernels_run_at() -> None:
    """Also on a machine whose power limit lowers it."""
    assert build({"machine": "h200", "clock_ghz": 1.9}).machine.clock_hz == pytest.approx(1.9e9)


def test_lengths(tmp_path: Path) -> None:
    """One sequence per line; the problem is as long as the longest."""
    path = tmp_path / "lengths.txt"
    path.write_text("# two sequences\n1k 2k\n\n300  # queries and keys\n4,8\n")
    assert read_lengths(path) == ((1024, 2048), (300, 300), (4, 8))
    request = build({"lengths": str(path), "causal": True})
    problem = request.problem
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (3, 1024, 2048)
    assert request.simulation.lengths == ((1024, 2048), (300, 300), (4, 8))
    assert build({"lengths": ((8, 8),)}).simulation.lengths == ((8, 8),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1k\n12x\n", "line 2: must be a whole number"),
        (b"1 2 3\n", "line 1: expected Q K"),
        (b"# nothing\n", "no sequence lengths"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_bad_lengths(content: bytes, message: str, tmp_path: Path) -> None:
    """The file and the line are named."""
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        build({"lengths": str(path)})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tile": 64}, r"unknown field 'tile'; allowed: machine, pass, .*, exact, gpu.FIGURE"),
        ({"gpu.sm": 64}, r"unknown field gpu.sm; allowed: .*sm_count"),
        ({"costs.x": 64}, r"unknown field costs.x; allowed: .*launch_ns"),
        ({"gpu.sm_count": "many"}, r"gpu.sm_count must be a finite number; got 'many'"),
        ({"machine": "b100"}, "b200, b300, gb300, rubin, h100, h200; got 'b100'"),
        ({"dtype": "fp64"}, "dtype must be one of bf16, fp16, e4m3, e5m2; got 'fp64'"),
        ({"causal": "maybe"}, "causal must be yes or no; got 'maybe'"),
        ({"window": "128"}, "window must be LEFT,RIGHT"),
        ({"tau": "inf"}, "tau must be a finite number"),
        ({"tau": 2, "pass": "bwd"}, "tau does not apply to pass bwd"),
        ({"deterministic": "yes"}, "deterministic does not apply to pass fwd"),
        ({"overlap": "yes"}, "overlap does not apply to pass fwd"),
        ({"tile_m": "64"}, "tile_m does not apply to pass fwd of kernel blackwell"),
        ({"tile_m": "96", "machine": "h200"}, "tile_m must be one of 64, 128, 192; got 96"),
        ({"tile_n": "72", "machine": "h200"}, "tile_n must be a multiple of 16"),
        ({"kernel": "x"}, "must be one of blackwell, hopper, halves, published, fa2; got 'x'"),
        ({"kernel": "fa3"}, "kernel fa3 is called hopper now"),
        ({"kernel": "fa4"}, "kernel fa4 is called blackwell now"),
        ({"design": "flash_attn.cute"}, "design is kernel now: kernel=published"),
        ({"pass": "bwd", "machine": "h200"}, "no backward of hopper"),
        ({"pass": "bwd", "dtype": "e4m3"}, "dtype e4m3 has no kernel for pass bwd"),
        ({"rescale_rate": "2"}, "rescale_rate must be between 0 and 1"),
        ({"heads_k": "3"}, "heads_q must be a multiple of heads_k"),
        (
            {"q_tiles": "3"},
            r"3 x \(S 128 \+ O 128\) = 768 columns of tensor memory, and B200 has 512",
        ),
        ({"q_tiles": "3", "head_dim": 64, "machine": "rubin"}, "has 576, but no kernel has warps"),
        ({"kernel": "published", "head_dim": 256}, "to 192, as its one for 256 is another"),
        ({"dtype": "e4m3", "tau": "4"}, "largest e4m3"),
        ({"lengths": ((1, 1),), "batch": 2}, "lengths replaces batch"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    """One sentence that names the setting and what is allowed."""
    with pytest.raises(ValueError, match=message):
        build(settings)


def test_none_means_not_given() -> None:
    """Commands pass what the user left out as None."""
    assert build(dict.fromkeys(FIELDS)).pipeline == build({}).pipeline
    assert isinstance(build({}).pipeline, ForwardPipeline)


@pytest.mark.parametrize(
    ("dims", "rows", "group"),
    [((128, 128), 4096, 2), ((112, 128), 4096, 2), ((192, 128), 4096, 2), ((64, 128), 4096, 1),
     ((96, 128), 4096, 1), ((128, 64), 4096, 1), ((128, 128), 256, 1)],
)  # fmt: skip
def test_who_works_in_pairs(dims: tuple[int, int], rows: int, group: int) -> None:
    """Head dims that are padded to 128, and 192 with 128, if there is a second block of rows."""
    d, dv = dims
    call = build({"head_dim": d, "head_dim_v": dv, "seqlen": rows}).problem
    assert default_forward(call, find_machine("b200").gpu).cta_group == group
    masked = build({"head_dim": d, "head_dim_v": dv, "seqlen": rows, "causal": "yes"}).problem
    assert default_forward(masked, find_machine("b200").gpu).cta_group == 1


@pytest.mark.parametrize("causal", ["no", "yes"])
@pytest.mark.parametrize(
    ("head_dim", "rows"), [(16, 192), (64, 192), (96, 192), (112, 128), (192, 128), (256, 128)]
)
def test_published_tiles_of_hopper(head_dim: int, rows: int, causal: str) -> None:
    """Three warpgroups of rows to head dim 96, then two; no kernel spills registers."""
    dims = {"head_dim": head_dim, "head_dim_v": 128 if head_dim == 192 else head_dim}
    request = build({"machine": "h200", "causal": causal, **dims})
    found = default_hopper(request.problem, published=True)
    assert found.block_rows == rows
    plan = warpgroup_plan(found, request.machine.gpu)
    assert not any(role.spilled_registers for role in plan.roles)


@pytest.mark.parametrize("first", ["kv_stages", "tile_n"])
def test_a_forced_tile_keeps_what_is_asked_beside_it(first: str) -> None:
    """In whatever order; stages of the tuned tile are those of no other."""
    asked = {"machine": "h200", "seqlen": "8k", "batch": "4"}  # tuned: four stages
    tile = {"tile_n": "80", "kv_stages": "3"}
    named = dict(sorted(tile.items(), key=lambda one: one[0] != first))
    assert build(asked | named).pipeline.kv_stages == 3
    assert build(asked | {"tile_n": "80"}).pipeline.kv_stages == 2
    assert build(asked | {"tile_m": "128", "tile_n": "128"}).predict().tflops > 0


@given(
    st.sampled_from([64, 128, 192]), st.sampled_from([40, 64, 96, 128, 256]),
    st.sampled_from([512, 1024, 4096, 32768]), st.sampled_from(["yes", "no"]),
)  # fmt: skip
def test_a_forced_tile_takes_no_turns_of_another(
    rows: int, head_dim: int, seqlen: int, causal: str
) -> None:
    """Of whatever size: turns were tuned beside the tile that is replaced. Asked for, they stay."""
    settings = {"machine": "h200", "head_dim": head_dim, "seqlen": seqlen, "causal": causal,
                "tile_m": rows, "tile_n": 48}  # fmt: skip
    assert not build(settings).pipeline.takes_turns
    if rows > 64:
        assert build({**settings, "ping_pong": "yes"}).pipeline.takes_turns
