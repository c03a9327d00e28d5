"""A kernel is one record: nobody asks of which kind a pipeline or spec is; a stub is a file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fa4
from fa4 import designs
from fa4.cli import main
from fa4.compiled.variants import GPUS
from fa4.config import Problem
from fa4.designs import design_of, design_of_spec, find_design, plan_of
from fa4.designs.design import Design, named
from fa4.explore import controls
from fa4.explore.recording import record_grid
from fa4.hardware import B200, H200
from fa4.plan.checks import check_plan
from fa4.sim import fields

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub.py")
NAMES = designs.NAMES
PROBLEM = Problem(seqlen_q=4096, seqlen_k=4096, heads_q=8, heads_k=8, head_dim=64, causal=True)
MODELLED = [one for one in designs.designs() if one.choose is not None]
COMPILED = [one for one in designs.designs() if one.compiled is not None]
Fa4 = Callable[..., str]


def kinds(text: str) -> Iterator[str]:
    """Where a source asks of which design something is: isinstance, a name in a comparison."""
    known = {name for one in designs.designs() for name in (one.name, one.kernel)}
    known -= {"forward", "backward"}  # passes, too
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            asked = [x for x in ast.walk(node.args[1]) if isinstance(x, (ast.Name, ast.Attribute))]
            names = [x.id if isinstance(x, ast.Name) else x.attr for x in asked]
            if any(name.endswith(("Pipeline", "Spec")) for name in names):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare):
            words = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            if known.intersection(word for word in words if isinstance(word, str)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nobody_asks_of_which_kind() -> None:
    """Of a pipeline, a spec or a design, outside the records."""
    files = [path for folder in ("fa4", "lab") for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if (ROOT / "fa4" / "designs") not in path.parents]
    assert len(files) > 500
    found = {str(path.relative_to(ROOT)): list(kinds(path.read_text("utf-8"))) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    ["isinstance(p, ForwardPipeline)", "isinstance(x, (int, config.BackwardPipeline))",
     "isinstance(s, WarpgroupSpec | None)", "design.name == 'hopper_forward'",
     "kernel in ('fa2', 'x')", "'published' != design.kernel"],
)  # fmt: skip
def test_such_a_question_is_found(code: str) -> None:
    assert len(list(kinds(f"if {code}: pass"))) == 1
    assert list(kinds("if isinstance(x, Problem) and kernel == 'forward': pass")) == []


@pytest.mark.parametrize("design", MODELLED, ids=lambda one: one.name)
def test_what_is_chosen_is_of_the_design(design: Design) -> None:
    """And its plan is sound on a machine that it runs on."""
    gpu = next(gpu for gpu in (B200, H200) if not design.missing(gpu))
    assert design.choose is not None
    pipeline = design.choose(PROBLEM, gpu, False)
    assert design_of(pipeline) is design
    assert find_design(gpu, backward=design.backward, kernel=design.kernel) is design
    assert check_plan(plan_of(pipeline, gpu), gpu) == []


@pytest.mark.parametrize("design", COMPILED, ids=lambda one: one.name)
def test_what_is_tuned_is_of_the_design(design: Design) -> None:
    """Its spec, for the head dims that it is for; the spec's plan is the record's."""
    assert design.compiled is not None
    gpu = next(gpu for gpu in GPUS.values() if not design.missing(gpu))
    dim = 256 if "wide" in design.name else 64
    spec = named(design.compiled.tuned)(dim, dim, gpu)
    assert design_of_spec(spec) is design
    assert type(spec.pipeline) is design.pipeline
    assert design.plan(spec.pipeline, spec.gpu) == spec.plan
    assert callable(named(design.compiled.compiler)) and named(design.compiled.support)


def test_what_is_of_no_design() -> None:
    """One line each."""
    with pytest.raises(TypeError, match="no design has a pipeline such as 3"):
        design_of(3)
    with pytest.raises(TypeError, match="no design is compiled from builtins:int"):
        design_of_spec(3)
    with pytest.raises(ValueError, match="kernel hopper needs wgmma, which only sm_90a has"):
        find_design(B200, kernel="hopper")
    with pytest.raises(ValueError, match="no backward of hopper is modelled; machine H200"):
        find_design(H200, backward=True)
    with pytest.raises(ValueError, match="no backward of fa2 is modelled; machine B200"):
        find_design(B200, backward=True, kernel="fa2")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Design]:
    """A design whose file is tests/designs/stub.py, and whose name is in the list."""
    place = importlib.util.spec_from_file_location("fa4.designs.stub", STUB)
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, "fa4.designs.stub", module)
    place.loader.exec_module(module)
    monkeypatch.setattr(designs, "NAMES", (*NAMES, "stub"))
    designs.designs.cache_clear()
    # What a fresh process would read of the list when it is imported.
    kernel = fields.FIELDS["kernel"]
    monkeypatch.setitem(fields.FIELDS, "kernel", replace(kernel, choices=designs.kernels()))
    yield module.DESIGN
    monkeypatch.undo()
    designs.designs.cache_clear()


@pytest.fixture
def fa4_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fa4:
    """Runs the command, which must succeed; what it printed."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fa4", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code in (0, None), err
        return out

    return run


def test_a_stub_is_predicted_and_explained(stub: Design, fa4_command: Fa4) -> None:
    """As the kernel that it copies."""
    call = ("--seqlen", "1k", "--head-dim", "64", "--no-why", "--no-interval", "--json")
    mine, other = (
        json.loads(fa4_command("predict", *call, *more))
        for more in (("--kernel", "stub"), ("--kernel", "blackwell"))
    )
    assert mine["seconds"] == other["seconds"]
    told = json.loads(fa4_command("explain", "--kernel", "stub", "--head-dim", "64", "--json"))
    assert told["plan"].startswith("forward d64x64") and not told["findings"]


def test_a_stub_is_compiled(stub: Design, fa4_command: Fa4) -> None:
    """By its own compiler."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    told = json.loads(fa4_command("compile", "stub", "--head-dim", "64", "--no-cache", "--json"))
    assert told["spec"]["head_dim"] == 64 and told["bytes"]["ptx"] > 10_000


def test_a_stub_is_in_the_doctors_matrix(stub: Design, fa4_command: Fa4) -> None:
    """A column, and its own row."""
    rows = json.loads(fa4_command("doctor", "--matrix", "--json"))["features"]
    found = {row["feature"]: row["stub"] for row in rows}
    assert found["stubs"] is True and found["fp8"] is None


def test_a_stub_is_in_the_explorer(stub: Design) -> None:
    """A kernel to choose, with what it chooses itself."""
    fresh = importlib.util.find_spec("fa4.explore.controls")
    assert fresh is not None and fresh.loader is not None
    module = importlib.util.module_from_spec(fresh)
    sys.modules["fa4.explore.fresh_controls"] = module
    try:
        fresh.loader.exec_module(module)
    finally:
        del sys.modules["fa4.explore.fresh_controls"]
    few = {
        "machine": ("b200",), "pass": ("fwd",), "kernel": ("stub",), "head_dim": ("64",),
        "mask": ("none",), "seqlen": ("1k",), "tile_n": ("128",), "q_tiles": ("2",),
        "kv_stages": ("fit",), "cta_group": ("1",), "exp2": ("off",), "rescale_rate": ("0",),
        "scheduler": ("static",),
    }  # fmt: skip
    chosen = tuple(c.only(*few[c.key]) if c.key in few else c for c in module.CONTROLS)
    recording = record_grid(chosen, lambda: None)
    (context,) = recording.contexts
    assert context["choices"]["kernel"] == "stub" and context["auto"]["q_tiles"] == "2"
    assert len(recording.results) == 1 and recording.results[0].tflops > 0


def test_a_stub_machine_is_one_file(
    fa4_command: Fa4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the SMs take about twice the time; its plan is explained, too."""
    path = tmp_path / "stub.toml"
    path.write_text('base = "b200"\n[gpu]\nname = "Stub"\nsm_count = 74\n', encoding="utf-8")
    call = ("--seqlen", "8k", "--head-dim", "64", "--no-why", "--no-interval", "--json")
    half, whole = (
        json.loads(fa4_command("predict", *call, "--machine", machine))
        for machine in (str(path), "b200")
    )
    assert 1.6 < half["seconds"] / whole["seconds"] < 2.4 and half["machine"]["name"] == "Stub"
    told = json.loads(fa4_command("explain", "--machine", str(path), "--json"))
    assert told["machine"] == "Stub" and not told["findings"]


def test_a_stub_is_gone_again() -> None:
    """The tests above leave nothing behind."""
    assert [one.name for one in designs.designs()] == list(NAMES)
    assert "stub" not in [choice.key for choice in controls.BY_KEY["kernel"].choices]
    assert fa4.__name__ == "fa4"
