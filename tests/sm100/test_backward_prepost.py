"""The kernels before and behind the backward kernel, against their definition."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.emulator.errors import EmulationFailed
from fa4.emulator.host.session import Session
from fa4.emulator.machine.options import Options
from fa4.inspect.cubin import read_resources
from fa4.sm100.backward import postprocess, preprocess, row_blocks
from fa4.sm100.backward.spec import BackwardSpec
from tests.sm100.backward_prepost import (
    DOUT_LAYOUTS,
    FUNCTIONS,
    LSE_LAYOUTS,
    PARAMETERS,
    Array,
    Call,
    Sizes,
    compile_small,
    copy,
    errors,
)
from tests.sm100.test_bug_classes import Bug, altered

SPECS = {
    "plain": BackwardSpec(head_dim=128, head_dim_v=128),
    "used": BackwardSpec(head_dim=64, head_dim_v=64, dtype="fp16", used_q=True, sink=True),
    "packed": BackwardSpec(head_dim=72, head_dim_v=72, packed_q=True, sink=True,
                           lse_gradient=True, deterministic=True),
    "(192, 128)": BackwardSpec(head_dim=192, head_dim_v=128, lse_gradient=True),
    "packed, used": BackwardSpec(head_dim=8, head_dim_v=16, dtype="fp16", packed_q=True,
                                 used_q=True, sink=True, deterministic=True),
    "d below dv": BackwardSpec(head_dim=40, head_dim_v=104, used_q=True, lse_gradient=True),
    "residual": BackwardSpec(head_dim=64, head_dim_v=72, packed_q=True, used_q=True, sink=True,
                             lse_gradient=True, deterministic=True, out_residual=True),
    "d above dv": BackwardSpec(head_dim=120, head_dim_v=8, dtype="fp16", packed_q=True),
}  # fmt: skip
LENGTHS = (1, 2, 127, 128, 129, 257)
MOST_BLOCKS = 10
REGISTERS = 56
SCHEDULES = ("fifo", "random", "adversarial")


@cache
def compiled(name: str, variant: str) -> tuple[Any, Session]:
    return compile_small(name, SPECS[variant]), Session(None, (), {})


def run(name: str, call: Call, kernel: Any, session: Session, **options: Any) -> list[str]:
    """What is wrong after a launch in the emulator, whose findings raise."""
    before = call.buffer(name)
    after = copy(before)
    session._options = Options(**options)
    session.call(kernel, call.arguments(name, after), {})
    return errors(name, call, before, after)


@st.composite
def drawn_sizes(draw: Any, spec: BackwardSpec) -> Sizes:
    varied = spec.packed_q or spec.used_q
    choices = st.sampled_from((0, *LENGTHS) if varied else LENGTHS)
    lengths = draw(st.lists(choices, min_size=1, max_size=4 if varied else 2))
    if not varied:
        lengths = [lengths[0]] * len(lengths)
    return Sizes(
        lengths=tuple(lengths),
        heads=draw(st.integers(1, 3)),
        slack=draw(st.sampled_from((0, 3, 150))),
        tail=draw(st.sampled_from((0, 1, 300))),
        dout=draw(st.sampled_from(DOUT_LAYOUTS)),
        lse=draw(st.sampled_from(LSE_LAYOUTS)),
        dlse=draw(st.sampled_from((*LSE_LAYOUTS, "one for all"))),
        blind=draw(st.sampled_from((0.0, 0.1, 1.0))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("variant", SPECS)
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=20)
@given(data=st.data())
def test_as_defined(name: str, variant: str, data: st.DataObject) -> None:
    sizes = data.draw(drawn_sizes(SPECS[variant]))
    schedule, seed = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(0, 99))
    call = Call(SPECS[variant], sizes)
    assert run(name, call, *compiled(name, variant), schedule=schedule, seed=seed) == []


@pytest.mark.parametrize("variant", ["used", "packed"])
def test_the_same_bits_in_every_order(variant: str) -> None:
    """Sums do not depend on which warp or CTA comes first, nor on how many run at a time."""
    call = Call(SPECS[variant], Sizes((257, 0, 129, 1), heads=2))
    for name in FUNCTIONS:
        images = set()
        for schedule in SCHEDULES:
            for seed, resident in ((1, 1), (2, 7)):
                buffer = call.buffer(name)
                kernel, session = compiled(name, variant)
                session._options = Options(schedule=schedule, seed=seed, resident_clusters=resident)
                session.call(kernel, call.arguments(name, buffer), {})
                images.add(buffer.tobytes())
        assert len(images) == 1


@pytest.mark.parametrize("lengths", [(0, 130, 0), (0, 0), (1,) * 90, (3, 0, 128) * 20])
def test_sink_gradient_of_many_sequences(lengths: tuple[int, ...]) -> None:
    """Whatever tiles nobody owns lie between; the first sequence may be empty."""
    for variant in ("packed", "used"):
        call = Call(SPECS[variant], Sizes(lengths, heads=1))
        assert run("postprocess", call, *compiled("postprocess", variant)) == []


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("variant", ["plain", "packed"])
def test_offsets_of_more_than_32_bits(name: str, variant: str) -> None:
    """Heads 2^31 + 2^19 elements apart, of which most is never touched."""
    call = Call(SPECS[variant], Sizes((130,), heads=2))
    near, far = call.buffer(name), call.buffer(name)
    kernel, session = compiled(name, variant)
    session._options = Options(checks=False)
    session.call(kernel, call.arguments(name, near), {})
    heads = {"out": -2, "dout": -2, "dq": -2, "dq_accum": 0}
    apart = {x: far_apart(call.view(far, x), axis) for x, axis in heads.items()}
    arguments = zip(PARAMETERS[name], call.arguments(name, far), strict=True)
    session.call(kernel, [apart.get(x, value) for x, value in arguments], {})
    for x, tensor in apart.items():
        call.view(far, x)[:] = tensor
    assert far.tobytes() == near.tobytes()


def far_apart(tensor: Array, axis: int) -> Array:
    """A copy with more than 2^32 bytes from one index of a dimension to the next."""
    parts = np.moveaxis(tensor, axis, 0)
    step = 2**31 + 2**19
    room = np.empty(step * (len(parts) - 1) + parts[0].size, tensor.dtype)
    inner = np.ascontiguousarray(parts[0]).strides
    far = np.lib.stride_tricks.as_strided(room, parts.shape, (step * tensor.itemsize, *inner))
    far[:] = parts
    return np.moveaxis(far, 0, axis)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("variant", SPECS)
def test_registers(variant: str, arch: str) -> None:
    """Nothing in local memory, and 1,024 threads on an SM: loads under way for all of HBM."""
    for name in FUNCTIONS:
        kernel = compiled(name, variant)[0] if arch == "sm_100a" else compile_small(
            name, SPECS[variant], arch
        )  # fmt: skip
        (resources,) = read_resources(kernel.artifacts.CUBIN)
        assert resources.registers <= REGISTERS
        assert resources.frame_bytes == resources.stack_bytes == 0


def edit(module: ModuleType, old: str, new: str) -> Bug:
    return Bug(module, old, new, frozenset())


FAULTS = {
    "LSE to base e": edit(preprocess, "-(lse_of_row * LOG2_E)", "-lse_of_row"),
    "LSE of -inf as any other": edit(
        preprocess, "cutlass.select_(blind, Float32(0.0), -(lse_of_row * LOG2_E))",
        "-(lse_of_row * LOG2_E)",
    ),
    "gradient of the LSE added": edit(preprocess, "d -= block", "d += block"),
    "residual left out": edit(preprocess, "outs = [*outs, block.of(residual)]", "pass"),
    "residual taken off": edit(preprocess, "a + b for a, b", "a - b for a, b"),
    "D without its sign": edit(preprocess, "(exists, -d,", "(exists, d,"),
    "rows beyond the sequence as its last": edit(
        preprocess, "cutlass.select_(exists, base, -Float32.inf)", "base"
    ),
    "rows beyond the sequence are read": edit(
        preprocess, "cutlass.min(first_row + first + i, rows - 1)", "first_row + first + i"
    ),
    "lanes that have no row write one": edit(preprocess, "lane < readers.rows", "lane >= 0"),
    "groups begin at another's rows": edit(
        preprocess, "// lanes * readers.rows", "// lanes * (readers.rows + 1)"
    ),
    "lanes beyond a row count": edit(
        preprocess, "cutlass.select_(lane < vectors, dot(*loaded[i]), Float32(0.0))",
        "dot(*loaded[i])",
    ),
    "padded columns not zeroed": edit(
        preprocess, "block_rows * rows.spec.dq_dim", "block_rows * rows.spec.head_dim"
    ),
    "numbers that were drawn stay": edit(preprocess, "drawn[(0, 0)] = Int32(0)", "pass"),
    "half of the counters": edit(
        preprocess, "< rows.spec.dq_counters:", "< rows.spec.dq_counters // 2:"
    ),
    "rows beyond the sequence in dsink": edit(
        preprocess, "cutlass.select_(exists, -(share * d), Float32(0.0))", "-(share * d)"
    ),
    "sink's share of rows without keys": edit(
        preprocess, "cutlass.select_(blind, Float32(1.0), share)", "share"
    ),
    "tile of another sequence": edit(
        row_blocks, "        tile=tile,", "        tile=tile + (batch > 0),"
    ),
    "blocks beyond the sequence": edit(row_blocks, "self.rows > 0", "self.rows > -128"),
    "tensor's rows for the sequence's": edit(
        row_blocks, "sequence(rows.cu_seqlens, rows.seqused,", "sequence(rows.cu_seqlens, None,"
    ),
    "no barrier before the last sum": edit(row_blocks, "    cute.arch.barrier()\n", ""),
    "bisection one off": edit(row_blocks, "[middle]) <= tile", "[middle]) < tile"),
    "last tiles left out": edit(row_blocks, "tiles_of(seqlen, batch,", "tiles_of(seqlen, 0,"),
    "dQ unscaled": edit(postprocess, "[x * scale for x", "[x for x"),
    "dQ's columns": edit(postprocess, "vector * WIDTH + VECTOR", "vector * WIDTH"),
    "rows of no sequence stored": edit(
        postprocess, "if first_row + row < block.rows:", "if block.rows > 0:"
    ),
    "parts of tiles that nobody has": edit(
        postprocess, "if block_at(rows, head, tile).exists:", "if tile >= 0:"
    ),
    "no dsink if the first sequence is empty": edit(
        postprocess, "if block.tile == 0:", "if block.exists & (block.tile == 0):"
    ),
}  # fmt: skip


def put_in_place(bug: Bug, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """The kernels as they are compiled next have the fault; those that do."""
    module, names = altered(bug, folder), []
    for original in (preprocess, postprocess):
        name = original.__name__.rsplit(".", 1)[-1]
        if bug.module is row_blocks:
            line = f"from {row_blocks.__name__} import"
            module = altered(edit(original, line, "from altered_row_blocks import"), folder)
        if bug.module in (row_blocks, original):
            patch.setitem(FUNCTIONS, name, getattr(module, name))
            names.append(name)
    return names


def seen(name: str, spec: BackwardSpec, call: Call) -> bool:
    """Is there a difference, or a finding of the emulator?"""
    try:
        return bool(run(name, call, compile_small(name, spec), Session(None, (), {})))
    except EmulationFailed:
        return True


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_is_seen(
    fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of the kernels that have it; and nothing is seen in either without one."""
    bug = FAULTS[fault] if fault else edit(row_blocks, "SmemAllocator", "SmemAllocator")
    names = put_in_place(bug, tmp_path, monkeypatch)
    spec = replace(SPECS["packed"], used_q=True, out_residual=True)
    call = Call(spec, Sizes((0, 130, 128, 1), heads=1, slack=3, blind=0.3))
    assert any(seen(name, spec, call) for name in names) == (fault is not None)
