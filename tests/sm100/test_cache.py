"""Compiled kernels on disk: whole or not there, damage found, trouble said once and survived."""

from __future__ import annotations

import errno
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.compiled import cache as cache_module
from fa4.compiled.artifact import CompiledKernel, DamagedArtifact, from_bytes, to_bytes
from fa4.compiled.cache import CacheWarning, KernelCache, open_cache

KEY = "0123abcd" * 5


def artifact(key: str = KEY, **spec: object) -> CompiledKernel:
    return CompiledKernel(
        spec=None,
        key=key,
        arch="sm_100a",
        ptx=".version 8.8 // é",
        cubin=bytes(range(256)),
        host_object=b"\x7fELF object",
        function_name="fa4_forward",
        parameters=("q", "k"),
        metadata={"spec": spec or {"head_dim": 64}, "compiler": {"flavour": "cu12"}},
    )


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_said", set())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KernelCache]:
    cache = KernelCache(tmp_path / "deep" / "cache")
    assert cache.store(artifact())
    yield cache
    assert not list(cache.folder.glob("*.part"))


def same(one: CompiledKernel | None, two: CompiledKernel) -> bool:
    return one is not None and to_bytes(one) == to_bytes(two)


def test_what_was_kept_comes_back(kept: KernelCache) -> None:
    """With the spec of whoever asks; only its owner may read or write it."""
    found = kept.load(KEY, "the spec")
    assert same(found, artifact()) and found.spec == "the spec"
    assert kept.load("f" * 40, None) is None
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert kept.path(KEY).stat().st_mode & 0o777 == 0o600


@given(st.data())
@settings(max_examples=150)
def test_no_damaged_byte_goes_unnoticed(data: st.DataObject) -> None:
    """One changed byte anywhere, or an end that is missing or too long."""
    whole = to_bytes(artifact())
    place = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["change", "cut", "more"]))
    if kind == "change":
        wrong = whole[place] ^ data.draw(st.integers(1, 255))
        damaged = whole[:place] + bytes([wrong]) + whole[place + 1 :]
    else:
        damaged = whole[:place] if kind == "cut" else whole + whole[:1]
    with pytest.raises(DamagedArtifact):
        from_bytes(damaged)


def test_damage_is_said_once_and_the_kernel_made_anew(kept: KernelCache) -> None:
    path = kept.path(KEY)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(CacheWarning, match=f"{path} is damaged"):
        assert kept.load(KEY, None) is None
    assert kept.load(KEY, None) is None  # a second warning would be an error
    assert kept.entries()[0].problem == "cut off"
    assert kept.store(artifact()) and same(kept.load(KEY, None), artifact())


def test_a_kernel_under_another_key_is_damage(kept: KernelCache) -> None:
    os.rename(kept.path(KEY), kept.path("e" * 40))
    with pytest.warns(CacheWarning, match="holds the kernel"):
        assert kept.load("e" * 40, None) is None


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("where", ["mkstemp", "replace"])
def test_a_folder_that_takes_nothing(
    error: int, where: str, kept: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only, full or forbidden: said once, nothing left behind, what is there still serves."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error), "there")

    owner = cache_module.tempfile if where == "mkstemp" else cache_module.os
    monkeypatch.setattr(owner, where, fail)
    with pytest.warns(CacheWarning, match=f"cannot keep compiled kernels: {os.strerror(error)}"):
        assert not kept.store(artifact("a" * 40))
    assert not kept.store(artifact("b" * 40))
    assert same(kept.load(KEY, None), artifact())


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "cache")
    assert cache.entries() == []
    with pytest.warns(CacheWarning, match="cannot read"):
        assert cache.load(KEY, None) is None
    with cache.lock(KEY), pytest.warns(CacheWarning, match="cannot keep"):
        assert not cache.store(artifact())


@pytest.mark.parametrize("when", ["write", "replace"])
def test_an_interrupted_store_leaves_nothing(
    when: str, kept: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    owner, name = (cache_module, "to_bytes") if when == "write" else (cache_module.os, "replace")
    monkeypatch.setattr(owner, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        kept.store(artifact("a" * 40))
    assert [entry.key for entry in kept.entries()] == [KEY]


def test_a_lock_that_cannot_be_had_is_not_waited_for(
    kept: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that hangs costs the time limit, a file system without locks nothing."""
    monkeypatch.setattr(cache_module, "_LOCK_SECONDS", 0.1)
    start = time.monotonic()
    with kept.lock(KEY), kept.lock(KEY):  # two files: the second one has to wait
        assert 0.1 <= time.monotonic() - start < 5.0
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with kept.lock(KEY):
        pass


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA4_CACHE_DIR, XDG_CACHE_HOME if absolute, the home folder; FA4_CACHE=0 for none."""

    def folder(**environment: str) -> str | None:
        cache = open_cache(environment)
        return None if cache is None else str(cache.folder)

    monkeypatch.setenv("HOME", "/home/someone")
    assert folder(FA4_CACHE_DIR="/a", XDG_CACHE_HOME="/b") == "/a"
    assert folder(XDG_CACHE_HOME="/b") == "/b/fa4"
    assert folder(XDG_CACHE_HOME="b") == folder() == "/home/someone/.cache/fa4"
    assert folder(FA4_CACHE_DIR="~/kernels") == "/home/someone/kernels"
    for off in ("0", "off", " No ", "FALSE"):
        assert folder(FA4_CACHE=off, FA4_CACHE_DIR="/a") is None
    assert folder(FA4_CACHE="1", FA4_CACHE_DIR="/a") == "/a"

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(CacheWarning, match="FA4_CACHE_DIR"):
        assert folder() is None


def test_entries_are_the_newest_first_and_told_by_their_headers(kept: KernelCache) -> None:
    kept.store(artifact("a" * 40, head_dim=128, causal=True))
    os.utime(kept.path(KEY), (time.time() - 7200, time.time() - 7200))
    kept.path("b" * 40).write_bytes(b"junk")
    os.utime(kept.path("b" * 40), (0, 0))
    first, second, third = kept.entries()
    assert (first.key, first.text, first.problem) == ("a" * 40, "head_dim=128 causal", "")
    assert second.key == KEY and 7200 <= second.age_seconds < 7300
    assert third.problem.startswith("damaged: ") and third.size_bytes == 4 and third.text == ""
    json.dumps(dict(first.header))


def test_clear_by_pattern_and_age(kept: KernelCache) -> None:
    keys = {"a" * 40: "causal", "b" * 40: "softcap", "c" * 40: "causal"}
    for key, feature in keys.items():
        kept.store(artifact(key, **{feature: True}))
        with kept.lock(key):
            pass
    os.utime(kept.path("c" * 40), (0, 0))
    assert [entry.key for entry in kept.clear("causal", 3600)] == ["c" * 40]
    assert [entry.key for entry in kept.clear("bbb")] == ["b" * 40]
    assert kept.clear("no such thing") == []
    leftover = kept.folder / "x.part"
    leftover.write_bytes(b"")
    os.utime(leftover, (0, 0))
    assert {entry.key for entry in kept.clear()} == {"a" * 40, KEY}
    assert list(kept.folder.iterdir()) == []


def test_messages_are_said_once_each() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for message in ("one", "two", "one"):
            cache_module.say_once(message)
    assert [str(warning.message) for warning in said] == ["one", "two"]
