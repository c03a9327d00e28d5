"""Real processes over gloo: the oracle's numbers, refusals on every rank, exact bits, a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


def start(module: str, rank: int, *words: str) -> subprocess.Popen[str]:
    """A rank in a process of its own."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(rank), *words],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has printed."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    ranks = [
        start("tests.distributed.worker", rank, str(RANKS), str(meeting)) for rank in range(RANKS)
    ]
    results = [rank.communicate(timeout=240) for rank in ranks]
    assert [x.returncode for x in ranks] == [0] * RANKS, [err[-2000:] for _, err in results]
    return [json.loads(out) for out, _ in results]


def test_float64_equals_the_oracle(found: list[dict[str, Any]]) -> None:
    """O, LSE, dQ, dK, dV and dsink of every method, of a large sink as well."""
    assert len(found[0]["fp64"]) == 8
    assert all(error < 1e-11 for rank in found for error in rank["fp64"].values()), found


def test_bf16_is_within_its_rounding(found: list[dict[str, Any]]) -> None:
    """fp32 merges of 16-bit parts."""
    assert all(error < 0.05 for rank in found for error in rank["bf16"].values()), found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("causal", "causal must be the same on every rank; rank 0 has True, rank 1 has False"),
        ("type", "type must be the same"),
        ("heads", "heads must be the same"),
        ("method", "method must be the same"),
        ("rows", "rows must be those of layout zigzag of 13: [7, 6]; got [8, 5]"),
        ("name", "method must be one of ring, "),
        ("cu_seqlens", "cu_seqlens must ascend from 0 to the 16 rows; got (0, 5)"),
        ("ulysses", "ulysses needs a number of ranks that divides 1 query heads"),
    ],
)
def test_refusals_are_one_line_on_every_rank(
    found: list[dict[str, Any]], name: str, words: str
) -> None:
    """Nobody waits for somebody who has given up."""
    said = {rank["refusals"].get(name) for rank in found}
    assert len(said) == 1 and None not in said, said
    assert words in said.pop()


def test_exact_bits_over_a_group(found: list[dict[str, Any]]) -> None:
    """Of two ranks as of one."""
    assert all(rank["exact"] for rank in found)


def test_compiled_models_run_sharded(found: list[dict[str, Any]]) -> None:
    """torch.compile breaks its graph at the call, and computes the same."""
    assert all(rank["compiled"] for rank in found)


def test_models_run_sharded(found: list[dict[str, Any]]) -> None:
    """Unmodified, under `context_parallel`."""
    assert all(error < 1e-11 for rank in found for error in rank["replaced"].values()), found


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("killed", "asking what all ranks are about to do"),
        ("between", "hop0, with 1"),
        pytest.param("silent", "asking what all ranks", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_said_in_one_line(when: str, words: str, tmp_path: Path) -> None:
    """Within the group's time-out, and nothing is half-written."""
    meeting = str(tmp_path / "meeting")
    ranks = [start("tests.distributed.lost", rank, meeting, when) for rank in range(2)]
    try:
        out, err = ranks[0].communicate(timeout=240)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    said, state = out.splitlines()
    assert said.startswith("rank 0 of 2 lost another one in ") and words in said, (said, err)
    assert state == "unchanged" and len(said) < 400


BEGIN = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = dist.group.WORLD
before = sys.getrefcount(group)
"""
CALL_AND_END = """
import torch
x = torch.randn(1, 8, 2, 16, dtype=torch.float64, requires_grad=True)
distributed.attention(x, x, x, causal=True).sum().backward()
del x
import torch._dynamo
assert sys.getrefcount(group) == before, (before, sys.getrefcount(group))
dist.destroy_process_group()
assert sys.getrefcount(group) == 2, sys.getrefcount(group)  # the name, and the argument
import torch.distributed.nn
assert torch.distributed.nn.all_reduce.__defaults__[-1] is None
"""


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("import torch\nfrom fa4 import distributed", ""),
        ("from fa4 import distributed\nimport torch", ""),
        ("", "from fa4 import distributed"),
        ("", "import torch.distributed.nn\nfrom fa4 import distributed"),
    ],
)
def test_nothing_keeps_a_group_that_is_destroyed(before: str, between: str, tmp_path: Path) -> None:
    """Its threads end with it, not in an abort with the process, whatever is loaded when."""
    end = CALL_AND_END
    if "nn" in between:  # the caller keeps the group, until this package is loaded
        end = end.replace("== before", "<= before")
    program = "\n".join(("import sys", before, BEGIN, between, end))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "meeting")],
        cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, check=False, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]


def test_what_ranks_agreed_on_ends_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL a form is asked for once, in each group: another may have the same address."""
    import torch
    import torch.distributed as dist

    from fa4.distributed import front, group

    class Group:
        """What a form is remembered of."""

    asked: list[Any] = []

    def agreed(of: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
        asked.append(mine)
        return [mine]

    monkeypatch.setattr(dist, "get_backend_config", lambda of: "cuda:nccl")
    monkeypatch.setattr(front, "_place", lambda *given: "place")
    monkeypatch.setattr(group, "require_agreement", agreed)
    q = torch.zeros(1, 4, 2, 8)
    known = len(front._known)
    for times in (1, 2):
        one = Group()
        for _ in range(2):
            assert front.agree(one, (q, q, q), {"transport": "group"}) == ([4], "place")
        assert len(asked) == times and len(front._known) == known + 1
        del one
        assert len(front._known) == known
