"""`fa4 explore`: what it writes, and what it refuses before it works."""

from __future__ import annotations

import json
import re
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from fa4 import cli
from fa4.commands import explore
from fa4.explore import recording

QUICK = ["explore", "--quick", "--machine", "h200"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    text = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, text.out, text.err


def test_it_writes_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(shown.append(address)))
    out = tmp_path / "new" / "page.html"
    code, text, _ = run([*QUICK, "--out", str(out), "--open", "--json"], capsys)
    report = json.loads(text)
    assert code == 0 and report["file_bytes"] == out.stat().st_size < 4_000_000
    assert report["predictions"] > 2 and report["timelines"] > 0
    assert shown == [out.resolve().as_uri()]
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "page.txt"], "--out must end in .html; got 'page.txt'"),
        (["--out", "file/page.html"], "Not a directory: file"),
        (["--out", "folder.html"], "Is a directory: folder.html"),
        (["--machine", "b100"], "machine must be a .toml file or one of b200"),
        (["--machine", "none.toml"], "No such file or directory: none.toml"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run([*QUICK[:2], *arguments], capsys)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    out.write_text("an older page")

    def fail(*given: Any) -> None:
        raise ValueError("in the middle of it")

    monkeypatch.setattr(recording, "record_grid", fail)
    code, _, err = run([*QUICK, "--out", str(out)], capsys)
    assert code == 2 and "in the middle of it" in err
    assert out.read_text() == "an older page"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_without_a_terminal_lines_tell_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is to do at once, then how much of it is done; by the clock, not by the step."""
    monkeypatch.setattr(explore, "LINE_SECONDS", 0.0)
    code, _, err = run([*QUICK, "--out", str(tmp_path / "page.html")], capsys)
    first, *lines = err.splitlines()
    total = int(first.removeprefix("fa4 explore: ").removesuffix(" shapes to simulate"))
    assert code == 0 and total == len(lines) > 1
    for done, line in enumerate(lines, 1):
        assert re.fullmatch(rf"fa4 explore: {done} of {total}, .+ left", line)
    monkeypatch.setattr(explore, "LINE_SECONDS", 3600.0)
    code, _, err = run([*QUICK, "--out", str(tmp_path / "page.html")], capsys)
    assert code == 0 and err == f"{first}\n"
