"""The words of glossary.md, and where a text uses them; knows nothing of Sphinx."""

from __future__ import annotations

import re
from typing import Any

# `p0_full_o0_scaled`: what is true of a buffer when its signal's phase is complete.
SIGNAL = re.compile(
    r"[a-z]+\d?(_[a-z0-9]+)*_(full|empty|last|read|done|peer|relayed)(_[a-z0-9_]+)?"
    r"|(turn|stored)\d"
)
SIGNAL_TERM = "signal name"
# Too common in other senses to be linked wherever they stand.
NOT_LINKED = ("S", "P", "static", "commit", "window")


def read_glossary(text: str) -> dict[str, str]:
    """Term -> the first sentence of its definition, from the page's glossary blocks."""
    terms: dict[str, str] = {}
    for block in re.findall(r"^```\{glossary\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for names, body in re.findall(r"((?:^\S.*\n)+)((?:^(?: .*)?\n)+)", block, re.MULTILINE):
            words = " ".join(body.split()).replace("`", "")
            first = re.split(r"(?<=[.;]) ", words)[0].rstrip(":;")
            terms |= dict.fromkeys((name.strip() for name in names.splitlines()), first)
    return terms


def pattern_of(terms: dict[str, str]) -> re.Pattern[str]:
    """Finds any of them as a word, longest first, an s behind it included."""
    linked = sorted(set(terms) - {*NOT_LINKED}, key=len, reverse=True)
    words = "|".join(re.escape(term) for term in linked)
    return re.compile(rf"(?<![\w-])({words})(s?)(?![\w-])")


def cut(text: str, found: re.Pattern[str], seen: set[str], terms: dict[str, str]) -> list[Any]:
    """Text and (term, spelling) of each first use; `seen` holds definitions that had a link."""
    pieces: list[Any] = []
    end = 0
    for match in found.finditer(text):
        if terms[match[1]] in seen:
            continue
        seen.add(terms[match[1]])
        pieces += [text[end : match.start()], (match[1], match[0])]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]
