"""Measurement files: what a row means, which rows are compared, and errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa4.config import BackwardPipeline, ForwardPipeline, WarpgroupPipeline
from fa4.figures.accuracy import B200_FILE
from fa4.sim.machine import Machine, find_machine
from fa4.sim.measurements import (
    Row,
    machine_name,
    pipeline_for,
    read_measurements,
    select_rows,
)

PUBLISHED = B200_FILE
HEADER = "gpu,software,pass,head_dim,causal,seqlen,batch,heads,dtype,tflops"
GOOD = "B200,FA4,fwd,128,0,8192,4,16,bf16,1534.8"


@pytest.fixture
def b200() -> Machine:
    """The machine of the published figures."""
    return find_machine("b200")


def write(folder: Path, *lines: str) -> Path:
    """A CSV file of these lines."""
    path = folder / "measured.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def one_row(folder: Path, line: str, header: str = HEADER) -> Row:
    """The only row of a file."""
    (row,) = read_measurements(write(folder, header, line))
    return row


def test_published_file() -> None:
    """Every row of the shipped figures, with its line."""
    rows = read_measurements(PUBLISHED)
    assert len(rows) == 15
    assert [row.line for row in rows] == list(range(2, 17))
    assert rows[0].problem.seqlen_k == 1024 and rows[0].tflops == 1355.0
    assert {row.source for row in rows} == {"paper fig 4-6", "FA PR#2280"}
    assert machine_name(rows) == "b200"


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({}, "fwd full B2 H16 S4096 d128"),
        ({"pass": "bwd", "causal": "1"}, "bwd causal B2 H16 S4096 d128"),
        ({"head_dim_v": "64"}, "fwd full B2 H16 S4096 d128x64"),
        ({"head_dim_v": "192"}, "fwd full B2 H16 S4096 d128x192"),
        ({"head_dim": "192", "head_dim_v": "192"}, "fwd full B2 H16 S4096 d192"),
        ({"heads_k": "4"}, "fwd full B2 H16/4 S4096 d128"),
        ({"heads_k": "16", "dtype": "fp16"}, "fwd full B2 H16 S4096 d128 fp16"),
        ({"p_source": "smem"}, "fwd full B2 H16 S4096 d128 P smem"),
        ({"p_source": "registers"}, "fwd full B2 H16 S4096 d128"),
    ],
)
def test_a_point_in_a_few_words(changed: dict[str, str], label: str, tmp_path: Path) -> None:
    """What is as usual is not said."""
    columns = {"gpu": "B200", "software": "FA4", "pass": "fwd", "head_dim": "128", "causal": "0",
               "seqlen": "4096", "batch": "2", "heads": "16", "dtype": "bf16",
               "tflops": "1"} | changed  # fmt: skip
    assert one_row(tmp_path, ",".join(columns.values()), ",".join(columns)).label == label


def test_optional_columns(tmp_path: Path) -> None:
    """head_dim_v and heads_k may be missing or empty; lengths take k; columns in any order."""
    plain = one_row(tmp_path, GOOD)
    assert (plain.problem.head_dim_v, plain.problem.heads_k, plain.approx) == (128, 16, False)
    header = "tflops,heads_k,head_dim_v,approx,source,note," + HEADER.removesuffix(",tflops")
    row = one_row(tmp_path, "700,4,64,1,a plot,x,H200,any,fwd,128,yes,8k,1,16,fp16", header)
    problem = row.problem
    assert (problem.heads_k, problem.head_dim_v, problem.seqlen_q) == (4, 64, 8192)
    assert (problem.causal, row.approx, row.source, row.tflops) == (True, True, "a plot", 700.0)
    empty = one_row(tmp_path, GOOD + ",,", HEADER + ",heads_k,head_dim_v")
    assert empty.problem == plain.problem


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tflops", "x", "must be a positive number; got 'x'"),
        ("tflops", "-3", "must be a positive number; got '-3'"),
        ("tflops", "0", "must be a positive number"),
        ("tflops", "inf", "must be a positive number"),
        ("tflops", "nan", "must be a positive number"),
        ("tflops", "", "must be a positive number; got ''"),
        ("pass", "both", "must be one of fwd, bwd; got 'both'"),
        ("seqlen", "0", "must be a positive whole number; got '0'"),
        ("batch", "1.5", "must be a positive whole number"),
        ("causal", "2", "must be yes or no"),
        ("dtype", "int8", "must be one of bf16, fp16, e4m3, e5m2; got 'int8'"),
        ("gpu", " ", "must not be empty"),
    ],
)
def test_bad_values(column: str, value: str, message: str, tmp_path: Path) -> None:
    """File, line and column are named."""
    cells = dict(zip(HEADER.split(","), GOOD.split(","), strict=True)) | {column: value}
    path = write(tmp_path, HEADER, GOOD, "", ",".join(cells.values()))
    with pytest.raises(ValueError) as caught:
        read_measurements(path)
    assert f"{path} line 4, column {column}: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"\n \n", "empty file"),
        (HEADER.encode(), "no measurement below"),
        (b"gpu,software\nB200,FA4\n", "line 1: missing columns pass, head_dim, causal"),
        (HEADER.replace("pass,", "").encode(), "line 1: missing column pass;"),
        (f"{HEADER},gpu\n{GOOD},B200\n".encode(), "line 1, column gpu: there twice"),
        (f"{HEADER}\n{GOOD},9\n".encode(), "line 2: expected 10 values; got 11"),
        (f"{HEADER}\n{GOOD}\n".encode() + b"\xe9,\n", "line 3: not UTF-8"),
        (f'{HEADER}\n"B200"x,FA4\n'.encode(), "line 2: not valid CSV"),
        (f"{HEADER}\n{GOOD.replace('128', '5000')}\n".encode(), "line 2: head_dim must be"),
    ],
)
def test_bad_files(content: bytes, message: str, tmp_path: Path) -> None:
    """What is wrong with a file as a whole."""
    path = tmp_path / "measured.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_measurements(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_spreadsheet_files(tmp_path: Path) -> None:
    """A byte order mark and Windows line ends are accepted."""
    path = tmp_path / "measured.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n{GOOD}\r\n".encode())
    assert read_measurements(path)[0].tflops == 1534.8


def test_selection(tmp_path: Path, b200: Machine) -> None:
    """Rows of this machine and of FA4, or of the software asked for; the rest is listed."""
    rows = read_measurements(
        write(tmp_path, HEADER, GOOD, GOOD.replace("FA4", "cuDNN 9.13"), GOOD.replace("B2", "B3"))
    )
    used, skipped = select_rows(rows, b200)
    assert [row.line for row in used] == [2]
    assert [(item.row.line, item.why) for item in skipped] == [
        (3, "software is not fa4 or flash-attn-4"),
        (4, "measured on B300"),
    ]
    used, _ = select_rows(rows, b200, "cudnn")
    assert [row.software for row in used] == ["cuDNN 9.13"]
    with pytest.raises(ValueError, match=r"no row is for gpu B200 and software FA9; there are B"):
        select_rows(rows, b200, "FA9")
    with pytest.raises(ValueError, match="rows are from b200, b300"):
        machine_name(rows)
    with pytest.raises(ValueError, match="unknown gpu 'a100'"):
        machine_name(read_measurements(write(tmp_path, HEADER, GOOD.replace("B200", "A100"))))


def test_variants(tmp_path: Path, b200: Machine) -> None:
    """The software's name chooses the kernel."""

    def chosen(software: str, direction: str, machine: Machine = b200) -> object:
        line = GOOD.replace("FA4", software).replace("fwd", direction)
        return pipeline_for(one_row(tmp_path, line), machine)

    single = chosen("FA4 1-CTA deterministic", "bwd")
    assert isinstance(single, BackwardPipeline)
    assert (single.numerics.cta_group, single.deterministic) == (1, True)
    pair = chosen("FA4 2-CTA", "bwd")
    assert isinstance(pair, BackwardPipeline)
    assert (pair.numerics.cta_group, pair.deterministic) == (2, False)
    assert pair.published and single.published
    forward = chosen("FA4 1-CTA deterministic", "fwd")
    assert isinstance(forward, ForwardPipeline) and forward.cta_group == 1
    hopper = chosen("torch 2.11.0 sdpa cudnn_attention", "fwd", find_machine("h200"))
    assert isinstance(hopper, WarpgroupPipeline) and hopper.takes_turns
    serial = chosen("FA2 2.8.3", "fwd", find_machine("h200"))
    assert isinstance(serial, WarpgroupPipeline) and not serial.takes_turns
