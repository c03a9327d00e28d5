"""`fa4 run` and `fa4 generations`: options that count, and work that is refused beforehand."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fa4.commands import job, limits
from tests.commands.support import call, refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A file with one layer."""
    rng = np.random.default_rng(0)
    path = tmp_path / "in.npz"
    np.savez(path, **{name: rng.standard_normal((1, 40, 2, 16)) for name in "qkv"})
    return path


def test_a_scale_of_zero_is_a_scale(arrays: Path) -> None:
    """The oracle is asked for the same scale, 0, and not for its default."""
    code, out, _ = call("run", str(arrays), "--scale", "0", "--impl", "reference")
    assert code == 0 and "OVER" not in out


def test_a_scale_of_zero_is_checked(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that ignores it is found."""
    honest = job.flash_attn_func

    def deaf(*tensors, softmax_scale, **options):
        return honest(*tensors, **options)

    monkeypatch.setattr(job, "flash_attn_func", deaf)
    assert call("run", str(arrays), "--scale", "0", "--impl", "reference")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--random", "1,2,100000000,64"], "needs 512.0 GB of memory; there are"),
        (["run", "--random", "1,2,64,8", "--keys", "4000000000000"], "TB of memory"),
        (["run", "--random", "1,2,1m,8", "--no-check"], "reference would take about 4 hours; --mi"),
        (["run", "--random", "1,1,64k,8", "--impl", "oracle"], "scores are stored, needs 141.7 GB"),
        (["run", "--random", "1,1,2k,64", "--impl", "emulator", "--minutes", "1"], "about 84 s"),
        (["run", "--random", "1,2,8,8", "--minutes", "0"], "--minutes must be more than 0"),
        (["run", "--random", "1,2,8,8", "--minutes", "nan"], "--minutes must be more than 0"),
        (["run", "--random", "1,2,8,8", "--impl", "oracle", "--schedule", "fifo"], "--schedule is"),
        (
            ["run", "--random", "1,1,64,64", "--impl", "emulator", "--schedule", "foo"],
            "--schedule must be one of fifo, random, adversarial; got 'foo'",
        ),
        (
            ["run", "--random", "1,1,64,264", "--impl", "emulator_sm90", "--backward"],
            "SM90 kernel, head dimensions: d and dv each a multiple of 8 up to 256; got",
        ),
        (["run", "--random", "1,2,8,8", "--layer", "x"], "--layer is an option of FILE"),
        (["run", "x.npz", "--keys", "8"], "--keys is an option of --random"),
        (["run", "--random", "1,2,8,8", "--seed", "-1"], "--seed must be at least 0; got -1"),
        (["run", "--random", "1,2,8,8", "--heads-k", "-1"], "--heads-k must be at least 0; got -1"),
        (["run", "--random", "1,2,8,8", "--window", "3"], "--window must be LEFT,RIGHT"),
        (["generations", "--sram-kib", "1"], "--sram-kib 1 is too small"),
        (["generations", "--sram-kib", "6", "--seqlen", "4096"], "makes 131072 blocks"),
        (["generations", "--heads", "67108864", "--seqlen", "1"], "must be at most 67108864"),
    ],
)
def test_refused_beforehand(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes days or more memory than there is; options that have no meaning here."""
    monkeypatch.setattr(limits, "memory_bytes", lambda: 25 * 10**9)
    assert message in refused(*arguments)


def test_results_that_cannot_be_written_are_not_computed(
    arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package or a folder in place of the file is told before the work."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was computed")

    monkeypatch.setattr(job, "flash_attn_func", never)
    (tmp_path / "o.npz").mkdir()
    assert "Is a directory" in refused("run", str(arrays), "--out", str(tmp_path / "o.npz"))
    found = builtins.__import__

    def without(name: str, *rest, **more):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    out = tmp_path / "o.safetensors"
    assert "o.safetensors needs safetensors" in refused("run", str(arrays), "--out", str(out))


def test_the_memory_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts where it is lower; "max" is none."""
    whole = limits.memory_bytes()
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(limits, "CGROUP_LIMITS", (tmp_path / "none", tmp_path / "missing"))
    assert limits.memory_bytes() >= whole > 2**28
    monkeypatch.setattr(limits, "CGROUP_LIMITS", (tmp_path / "none", tmp_path / "limit"))
    assert limits.memory_bytes() == 1000000


def test_long_work_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, before it starts."""
    from fa4.commands import run

    said: list[str] = []
    monkeypatch.setattr(run, "say", said.append)
    monkeypatch.setitem(limits.SCORES_PER_SECOND, "reference", 100.0)
    assert call("run", "--random", "1,1,64,16", "--impl", "reference", "--no-check")[0] == 0
    assert "reference: about 10 s" in said


SLOW_IMPORTS = {"torch", "cutlass", "numba", "matplotlib", "hypothesis", "fa4.sim.engine"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--impl", "emulator_sm90", "--backward", "--head-dim-v", "264"),
        ("--impl", "emulator_sm90", "--head-dim-v", "264"),
        ("--impl", "emulator", "--schedule", "foo"),
        ("--impl", "emulator", "--head-dim-v", "300"),
        ("--impl", "emulator", "--seed", "-1"),
        ("--impl", "emulator", "--out", "/dev/null/x.npz"),
    ],
    ids=" ".join,
)
def test_a_refusal_loads_nothing(arguments: tuple[str, ...]) -> None:
    """Neither torch nor a compiler nor the simulator, which take seconds: in a fresh process."""
    code = (
        "import sys\nfrom fa4 import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        f"finally:\n    print(*{SLOW_IMPORTS} & set(sys.modules))"
    )
    words = ("run", "--random", "1,1,64,64", *arguments)
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "\n"), (done.stdout, done.stderr)
    assert done.stderr.startswith("fa4: error: ") and done.stderr.count("\n") == 1
