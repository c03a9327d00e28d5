"""Bugs that attention kernels of this design had, put back on purpose: which check catches each.

A bug is one edit of a role's source. The altered copy is imported beside the original, takes its
place while a kernel is compiled, and that kernel is run by the emulator.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fa4.compiled import forward as compiling
from fa4.config import ForwardConfig, ForwardPipeline
from fa4.hardware import B200
from fa4.plan.forward import forward_plan
from fa4.sm100.forward import correction, host, kernel, softmax
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import Case
from tests.sm100.forward_kernel import build, make_inputs

SMALL = {"head_dim": 16, "head_dim_v": 16, "numerics": ForwardConfig(tile_n=32)}


@dataclass(frozen=True)
class Bug:
    """module: what is altered, from `old` to `new`. kinds: findings of which one must appear."""

    module: ModuleType
    old: str
    new: str
    kinds: frozenset[str]


BUGS = {
    "missing TMEM-store fence": Bug(
        softmax,
        """            cute.arch.fence_view_async_tmem_store()
            signals.arrive("p#_full_o#_scaled")
""",
        """            signals.arrive("p#_full_o#_scaled")
""",
        frozenset({"race", "uninitialised"}),
    ),
    "stride of the statistics' slots": Bug(
        kernel,
        'plan.buffer("row_stats").start + i * 2 * WARPGROUP * 4',
        'plan.buffer("row_stats").start + i * WARPGROUP * 4',
        frozenset({"race"}),
    ),
    "correction that does not arrive when it skips": Bug(
        correction,
        '                signals.numbered(i).arrive("p#_full_o#_scaled")\n'
        '                signals.numbered(last - i).arrive("stats#_empty")\n',
        '                    signals.numbered(i).arrive("p#_full_o#_scaled")\n'
        '                signals.numbered(last - i).arrive("stats#_empty")\n',
        frozenset({"deadlock"}),
    ),
    "warpgroup without its idle warp": Bug(
        host,
        "block=(spec.plan.warps * WARP, 1, 1)",
        "block=((spec.plan.warps - 1) * WARP, 1, 1)",
        frozenset({"deadlock"}),
    ),
    "empty tile that nobody signals": Bug(
        softmax,
        "number, stop = tile.kv_stop, tile.kv_start",
        "number, stop = (tile.visible_end(tile.last_row) + 31) // 32, tile.kv_start",
        frozenset({"deadlock"}),
    ),
}  # fmt: skip


def altered(bug: Bug, folder: Path) -> ModuleType:
    """A copy of the bug's module with the edit; the original where `bug.old` equals `bug.new`."""
    assert bug.module.__file__ is not None
    source = Path(bug.module.__file__).read_text(encoding="utf-8")
    assert source.count(bug.old) == 1, "the edit must fit one place of the source"
    file = folder / f"altered_{bug.module.__name__.rsplit('.', 1)[-1]}.py"
    file.write_text(source.replace(bug.old, bug.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def put_in_place(module: ModuleType, bug: Bug, patch: pytest.MonkeyPatch) -> None:
    """The compiler finds the altered role, or the altered host function, where it looks."""
    role = bug.module.__name__.rsplit(".", 1)[-1]
    if bug.module is kernel:
        patch.setattr(compiling, "forward", module.forward)
    else:
        name = "launch" if bug.module is host else role
        patch.setattr(kernel, name, getattr(module, name))


def findings() -> set[str]:
    """What the emulator finds in the kernel as it is now: three work tiles, one without keys."""
    run = build(ForwardSpec(**SMALL, packed_k=True))
    case = Case(layout="packed", lengths=((257, 64), (257, 0)), head_dim=16, head_dim_v=16,
                dtype="bf16")  # fmt: skip
    _, report = run(make_inputs(run.spec, case), num_sms=1, collect=True)
    return {finding.kind for finding in report.findings}


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator reports one of the kinds that the bug must have."""
    put_in_place(altered(BUGS[name], tmp_path), BUGS[name], monkeypatch)
    assert findings() & BUGS[name].kinds


def test_nothing_is_found_without_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unaltered copy in the same place has no finding: it is the edits that are caught."""
    same = Bug(correction, "CHUNK = 16", "CHUNK = 16", frozenset())
    put_in_place(altered(same, tmp_path), same, monkeypatch)
    assert findings() == set()


@pytest.mark.parametrize("stages", [4, 12])
def test_too_many_kv_stages_are_refused_by_the_plan(stages: int) -> None:
    """Stages beyond shared memory are a ValueError of `forward_plan`, before anything compiles."""
    pipeline: dict[str, Any] = {"head_dim": 128, "head_dim_v": 128}
    assert forward_plan(ForwardPipeline(**pipeline, kv_stages=3), B200).buffer("kv").stages == 3
    with pytest.raises(ValueError, match="shared memory plan needs"):
        forward_plan(ForwardPipeline(**pipeline, kv_stages=stages), B200)
