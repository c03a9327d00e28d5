"""The page is one file that asks for nothing else, put together from modules as they are."""

from __future__ import annotations

import re

import pytest

from fa4.explore import page
from fa4.explore.page import build_page, bundle, read_files
from tests.explore.conftest import Small

MAIN = 'import { one } from "./first.js";\n\nconsole.log(one());\n'
FIRST = "const own = 1;\n\nexport function one() {\n  return own;\n}\n"


def test_modules_become_functions_in_order() -> None:
    script = bundle({"main.js": MAIN, "first.js": FIRST})
    assert script.index("const first_module") < script.index("const { one } = first_module;")
    assert "return { one };" in script
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"main.js": MAIN}, "main.js imports first.js, which is missing"),
        ({"main.js": MAIN, "first.js": 'import { main } from "./main.js";\n'}, "circle: main.js"),
        ({"main.js": 'import main from "./first.js";\n'}, "main.js: not understood: 'import main"),
        ({"main.js": "export default 1;\n"}, "main.js: not understood: 'export default"),
    ],
)
def test_imports_that_cannot_be_followed(files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bundle(files)


def test_every_file_is_used() -> None:
    script, files = bundle(read_files()), read_files()
    for name in files:
        if name.endswith(".js"):
            assert f"// {name}\n" in script, name
            assert 40 <= files[name].count("\n") <= 300, name


def test_the_page_needs_nothing_else(small: Small) -> None:
    """No address in it but those of names, and nothing that a browser would fetch."""
    text = build_page(small.text)
    assert small.text in text and len(text.encode()) < page.MOST_BYTES
    rest = text.replace(small.text, "")
    assert set(re.findall(r"\w+://[\w./-]+", rest)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon", rest)
    assert "default-src 'none'" in rest
    for mark in ("/*STYLE*/", "/*SCRIPT*/", "DATA<!---->"):
        assert mark not in text


def test_a_page_that_is_too_large_is_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"at most 10000 bytes; it has \d+"):
        build_page(small.text)


def test_a_page_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_files()
    files["page.html"] = files["page.html"].replace("/*STYLE*/", "")
    monkeypatch.setattr(page, "read_files", lambda: files)
    with pytest.raises(ValueError, match="lacks the place for"):
        build_page("data")
