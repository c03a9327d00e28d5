"""`fa4 cache` on a folder in which not everything is a whole kernel."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fa4.compiled.artifact import MAGIC, CompiledKernel, to_bytes
from tests.commands.support import call, refused

KEYS = {name: name * 40 for name in "abcdef"}


def kernel(key: str) -> bytes:
    """The file of a kernel, without compiling one."""
    made = CompiledKernel(
        spec=None, key=key, arch="sm_100a", ptx=".version", cubin=b"cubin" * 100,
        host_object=b"object", function_name="f", parameters=(),
        metadata={"spec": {"head_dim": 128}, "compiler": {"flavour": "cu13"}},
    )  # fmt: skip
    return to_bytes(made)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two whole kernels among: a flipped byte, another's name, a folder, a strange header."""
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FA4_CACHE", raising=False)
    path = tmp_path / "cache"
    path.mkdir()
    flipped = bytearray(kernel(KEYS["b"]))
    flipped[-100] ^= 1
    header = json.dumps({"sections": [], "metadata": [1]}).encode()
    strange = MAGIC + len(header).to_bytes(8, "little") + header + bytes(32)
    contents = {"a": kernel(KEYS["a"]), "b": bytes(flipped), "c": kernel(KEYS["a"]),
                "e": strange, "f": kernel(KEYS["f"])}  # fmt: skip
    for number, (name, content) in enumerate(contents.items()):
        (path / f"{KEYS[name]}.fa4").write_bytes(content)
        os.utime(path / f"{KEYS[name]}.fa4", (1e9 + number, 1e9 + number))
    (path / f"{KEYS['d']}.fa4").mkdir()
    return path


def test_ls_names_what_is_damaged(folder: Path) -> None:
    """Every byte counts; a kernel under another's key, a folder and a strange header are damage."""
    code, out, err = call("cache", "ls", "--json")
    assert (code, err) == (0, "")
    problems = {row["key"][0]: row["problem"] for row in json.loads(out)["kernels"]}
    assert problems["a"] == problems["f"] == ""
    assert "checksum" in problems["b"] and "holds the kernel aaaa" in problems["c"]
    assert "Is a directory" in problems["d"] and problems["e"].startswith("damaged")
    assert call("cache", "ls")[1].count(": damaged") == 3


def test_clear_goes_on(folder: Path) -> None:
    """What cannot be deleted is named, and everything else is gone."""
    code, out, err = call("cache", "clear")
    assert (code, err) == (1, "")
    assert [path.name[0] for path in folder.iterdir()] == ["d"]
    assert "not deleted: Is a directory" in out and "deleted 5 kernels" in out


def test_a_wrong_age_names_its_option(folder: Path) -> None:
    assert "--older-than must be a number and one of" in refused("cache", "clear", "--older-than=x")
    assert len(list(folder.iterdir())) == 6
