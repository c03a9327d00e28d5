"""The table of what the kernel supports: every row that refuses does, and says why."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fa4.compiled.support import (
    BACKWARD,
    FORWARD,
    SM90,
    SM90_BACKWARD,
    TABLES,
    BackwardCall,
    Feature,
    ForwardCall,
    NotSupported,
    check,
    describe_support,
)
from fa4.config import BackwardConfig, ForwardConfig

PLAIN = ForwardCall(
    dtype="bf16", head_dim=64, head_dim_v=64, heads_q=4, heads_k=2, batch=1, rows_q=5, rows_k=7
)  # fmt: skip

REFUSED = [
    ({"dtype": "e4m3"}, "fp8", "got e4m3"),
    ({"descale": "qk"}, "fp8", "16-bit types only"),
    ({"dtype": "fp32"}, "fp32, fp64", "convert to bf16 or fp16; got fp32"),
    ({"head_dim": 63, "head_dim_v": 63}, "head dimensions", "got (d, dv) = (63, 63)"),
    ({"head_dim": 192, "head_dim_v": 192}, "head dimensions", "d 192 with dv 128"),
    ({"head_dim": 136}, "head dimensions", "got (d, dv) = (136, 64)"),
    ({"rows_k": 2**31}, "sequence lengths", "got 2147483648"),
    ({"softmax_scale": 0.0}, "softmax_scale", "positive; got 0.0"),
    ({"softmax_scale": -1.0}, "softmax_scale", "positive; got -1.0"),
    ({"heads_q": 6, "pack_gqa": True}, "pack_gqa", "got 6 on 2 heads"),
    ({"score_mod": max}, "score_mod", "got max"),
    ({"mask_mod": max}, "mask_mod", "got max"),
    ({"aux": (("fp32", 1), ("int64", 2))}, "aux_tensors", "got int64 of rank 2"),
    ({"aux": (("bf16", 0),)}, "aux_tensors", "got bf16 of rank 0"),
    ({"numerics": ForwardConfig(tile_n=64)}, "config", "got tile_n = 64"),
    ({"numerics": ForwardConfig(rescale_rows=32)}, "config", "got rescale_rows = 32"),
    ({"dropout_p": 0.1}, "dropout_p", "no random numbers in the kernel; got 0.1"),
    ({"num_splits": 2}, "num_splits", "got 2"),
    ({"paged": True}, "page_table", "not in pages"),
    ({"block_sparse": True}, "block_sparse_tensors", "is computed; got"),
]  # fmt: skip


BACKWARD_PLAIN = BackwardCall(**vars(PLAIN))
BACKWARD_REFUSED = [
    *(row for row in REFUSED
      if row[1] not in ("head dimensions", "score_mod", "config", "pack_gqa", "num_splits")),
    ({"head_dim": 63, "head_dim_v": 63}, "head dimensions", "got (d, dv) = (63, 63)"),
    ({"head_dim": 128, "head_dim_v": 192}, "head dimensions", "got (d, dv) = (128, 192)"),
    ({"score_mod": max}, "score_mod", "got score_mod without score_mod_bwd"),
    ({"score_mod_bwd": max}, "score_mod", "got score_mod_bwd alone"),
    ({"score_mod": max, "score_mod_bwd": min}, "score_mod", "(@cute.jit); got max"),
    ({"order": BackwardConfig(tile_n=64)}, "config", "got tile_n = 64"),
    ({"order": BackwardConfig(cta_group=2)}, "config", "got cta_group = 2"),
    ({"order": BackwardConfig(dq_order="random")}, "config", "got dq_order = random"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "feature", "message"), BACKWARD_REFUSED)
def test_refused_gradients(changes, feature, message, monkeypatch) -> None:
    """As those of forward calls."""
    call = replace(BACKWARD_PLAIN, **changes)
    with pytest.raises(
        NotSupported, match="SM100 backward kernel.*" + re.escape(message)
    ) as caught:
        check(call)
    assert caught.value.feature == feature and "\n" not in str(caught.value)
    others = tuple(row for row in BACKWARD if row.name != feature)
    monkeypatch.setitem(TABLES, "sm100 backward", others)
    check(call)


def test_what_only_the_forward_pass_looks_at() -> None:
    """Gradients of what the forward kernel would compute in another way are the same."""
    for changes in (
        {"num_splits": 2}, {"heads_q": 6, "pack_gqa": True}, {"numerics": ForwardConfig(tile_n=64)},
    ):  # fmt: skip
        check(replace(BACKWARD_PLAIN, **changes))
        with pytest.raises(NotSupported):
            check(replace(PLAIN, **changes))
    check(replace(BACKWARD_PLAIN, order=BackwardConfig(), deterministic=False, lse_gradient=True))


def test_both_tables_in_one() -> None:
    """A row says which kernels it is of, and where they differ, what holds for each."""
    rows = {row["feature"]: row for row in describe_support()}
    assert rows["dropout_p"]["forward"] is rows["dropout_p"]["backward"] is False
    assert [rows["CTA pairs"][name] for name in ("forward", "backward", "sm90")] == [
        True, True, None
    ]  # fmt: skip
    assert [rows["gradients"][name] for name in ("backward", "sm90", "sm90 backward")] == [
        True, None, True
    ]  # fmt: skip
    wide = "; sm90, sm90 backward: d and dv each a multiple of 8 up to 256"
    assert rows["head dimensions"]["detail"].endswith(wide)
    assert (rows["num_splits"]["forward"], rows["num_splits"]["backward"]) == (False, None)
    assert (rows["deterministic"]["forward"], rows["deterministic"]["backward"]) == (None, True)
    assert rows["score_mod"]["detail"].endswith(
        "(@cute.jit); backward, sm90 backward: with its score_mod_bwd, both CuTe-DSL functions "
        "(@cute.jit)"
    )


@pytest.mark.parametrize(("changes", "feature", "message"), REFUSED)
def test_refusals_name_the_row_and_the_value(changes, feature, message, monkeypatch) -> None:
    """One line: row, reason, value. Without its row, nothing would refuse the call."""
    call = replace(PLAIN, **changes)
    with pytest.raises(NotSupported, match=re.escape(message)) as caught:
        check(call)
    assert caught.value.feature == feature and "\n" not in str(caught.value)
    others = tuple(row for row in FORWARD if row.name != feature)
    monkeypatch.setitem(TABLES, "sm100", others)
    check(call)


SM90_REFUSED = [
    *(row for row in REFUSED if row[1] not in ("head dimensions", "pack_gqa", "num_splits", "fp8")),
    ({"dtype": "e4m3", "head_dim": 72}, "fp8", "multiples of 16; no num_splits"),
    ({"dtype": "e4m3", "num_splits": 2}, "fp8", "got num_splits = 2"),
    ({"descale": "qk"}, "fp8", "got factors of qk in bf16"),
    ({"head_dim": 63, "head_dim_v": 63}, "head dimensions", "up to 256; got (d, dv) = (63, 63)"),
    ({"head_dim_v": 264}, "head dimensions", "got (d, dv) = (64, 264)"),
    ({"numerics": ForwardConfig(q_tiles=1)}, "config", "got q_tiles = 1"),
]


@pytest.mark.parametrize(("changes", "feature", "message"), SM90_REFUSED)
def test_refusals_of_hopper(changes, feature, message, monkeypatch) -> None:
    """As those of SM100, by its own table."""
    call = replace(PLAIN, **changes)
    with pytest.raises(NotSupported, match="SM90 kernel.*" + re.escape(message)) as caught:
        check(call, "sm90")
    assert caught.value.feature == feature and "\n" not in str(caught.value)
    monkeypatch.setitem(TABLES, "sm90", tuple(row for row in SM90 if row.name != feature))
    check(call, "sm90")


def test_what_hopper_takes() -> None:
    """Every head dim, and the rest as on Blackwell."""
    for changes in (
        {}, {"head_dim": 256, "head_dim_v": 8}, {"head_dim": 136}, {"softcap": 3.0, "sink": True},
        {"numerics": ForwardConfig(rescale_threshold_log2=0.0)}, {"rows_q": 0},
        {"num_splits": 2}, {"num_splits": 0}, {"heads_q": 6, "pack_gqa": True},
    ):  # fmt: skip
        check(replace(PLAIN, **changes), "sm90")


SM90_BACKWARD_REFUSED = [
    *(row for row in BACKWARD_REFUSED if row[1] != "head dimensions"),
    (
        {"head_dim": 264, "head_dim_v": 128},
        "head dimensions",
        "up to 256; got (d, dv) = (264, 128)",
    ),
    ({"head_dim_v": 60}, "head dimensions", "got (d, dv) = (64, 60)"),
]


@pytest.mark.parametrize(("changes", "feature", "message"), SM90_BACKWARD_REFUSED)
def test_refusals_of_hoppers_gradients(changes, feature, message, monkeypatch) -> None:
    """As those of SM100's backward kernels, by its own table."""
    call = replace(BACKWARD_PLAIN, **changes)
    with pytest.raises(NotSupported, match="SM90 backward kernel.*" + re.escape(message)) as caught:
        check(call, "sm90")
    assert caught.value.feature == feature and "\n" not in str(caught.value)
    others = tuple(row for row in SM90_BACKWARD if row.name != feature)
    monkeypatch.setitem(TABLES, "sm90 backward", others)
    check(call, "sm90")
    monkeypatch.undo()
    check(BACKWARD_PLAIN, "sm90")


def test_every_refusing_row_is_tested() -> None:
    """A new row needs a case above."""
    refusing = {row.name for row in FORWARD if row.refused is not Feature("", True, "").refused}
    assert refusing == {feature for _, feature, _ in REFUSED}
    plain = Feature("", True, "").refused
    refusing = {row.name for row in SM90 if row.refused is not plain}
    assert refusing == {feature for _, feature, _ in SM90_REFUSED}
    refusing = {row.name for row in BACKWARD if row.refused is not plain}
    assert refusing == {feature for _, feature, _ in BACKWARD_REFUSED}
    refusing = {row.name for row in SM90_BACKWARD if row.refused is not plain}
    assert refusing == {feature for _, feature, _ in SM90_BACKWARD_REFUSED}


def test_accepted() -> None:
    """What the rows allow passes them."""
    for changes in (
        {},
        {"dtype": "fp16", "window": (3, 0), "sink": True, "packed_q": True, "used_k": True},
        {"head_dim": 192, "head_dim_v": 128},
        {"head_dim": 8, "head_dim_v": 128, "pack_gqa": True},
        {"heads_q": 6, "pack_gqa": False},
        {"numerics": ForwardConfig(q_tiles=1, rescale_threshold_log2=0.0)},
        {"rows_q": 0, "rows_k": 0},
    ):
        check(replace(PLAIN, **changes))


def test_callables_must_be_device_functions() -> None:
    """A kernel takes @cute.jit functions, not Python's."""
    from cutlass import cute

    with pytest.raises(NotSupported, match="a CuTe-DSL function"):
        check(replace(PLAIN, mask_mod=lambda *_: True))
    check(replace(PLAIN, mask_mod=cute.jit(_keep)))


def _keep(*_):
    return True


def test_doctor_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for machines; every row."""
    from fa4.cli import main

    shown = []
    for arguments in (["doctor", "--matrix"], ["doctor", "--matrix", "--json"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        shown.append(capsys.readouterr().out)
    names = {row.name for row in (*FORWARD, *BACKWARD, *SM90)}
    assert all(name in shown[0] for name in names)
    assert json.loads(shown[1])["features"] == describe_support()
    assert sorted(row["feature"] for row in describe_support()) == sorted(names)
