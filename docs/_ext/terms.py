"""Links words of every page to the glossary: the first time that each is used.

The words are the entries of glossary.md. A name of a signal (`p0_full_o0_scaled`) leads to the
entry that explains such names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from glossary_words import SIGNAL, SIGNAL_TERM, cut, pattern_of, read_glossary
from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform

GLOSSARY = Path(__file__).resolve().parents[1] / "glossary.md"
# Words in these are left alone.
CLOSED = (nodes.title, nodes.literal, nodes.reference, pending_xref, nodes.literal_block, nodes.raw,
          nodes.comment, nodes.math, nodes.caption, nodes.term, nodes.rubric)  # fmt: skip
OPEN = (nodes.paragraph, nodes.list_item, nodes.definition)


class LinkTerms(SphinxTransform):
    """Puts a reference in place of the first use of each term on a page."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        self.env.note_dependency(str(GLOSSARY))
        terms = read_glossary(GLOSSARY.read_text(encoding="utf-8"))
        found, seen = pattern_of(terms), set[str]()
        for node in list(self.document.findall(nodes.Text)):
            above = []
            while (node_above := (above[-1] if above else node).parent) is not None:
                above.append(node_above)
            if isinstance(node.parent, nodes.literal) and not self.closed(above[1:]):
                self.link_signal(node, seen, terms)
            elif not self.closed(above):
                known = self.of_entry(above, terms) if self.env.docname == "glossary" else seen
                self.link_words(node, cut(str(node), found, known, terms))

    def closed(self, above: list[Any]) -> bool:
        """Is this no running text?"""
        return any(isinstance(x, CLOSED) for x in above) or not any(
            isinstance(x, OPEN) for x in above
        )

    def of_entry(self, above: list[Any], terms: dict[str, str]) -> set[str]:
        """In the glossary each entry has links of its own, but none to itself."""
        entry = next((x for x in above if isinstance(x, nodes.definition_list_item)), None)
        if entry is None:
            return set()
        own = {terms[x.astext()] for x in entry.findall(nodes.term) if x.astext() in terms}
        linked = {terms[x["reftarget"]] for x in entry.findall(pending_xref)}
        return own | linked

    def link_words(self, node: nodes.Text, pieces: list[Any]) -> None:
        if any(isinstance(piece, tuple) for piece in pieces):
            new = [nodes.Text(x) if isinstance(x, str) else self.link(*x) for x in pieces]
            node.parent.replace(node, new)

    def link_signal(self, node: nodes.Text, seen: set[str], terms: dict[str, str]) -> None:
        if SIGNAL.fullmatch(str(node)) and terms[SIGNAL_TERM] not in seen:
            seen.add(terms[SIGNAL_TERM])
            literal = node.parent
            literal.parent.replace(literal, self.link(SIGNAL_TERM, literal.deepcopy()))

    def link(self, term: str, shown: str | nodes.Node) -> pending_xref:
        """A reference to the glossary's entry."""
        content = nodes.inline("", shown) if isinstance(shown, str) else shown
        return pending_xref(
            "", content, refdomain="std", reftype="term", reftarget=term, refexplicit=True,
            refdoc=self.env.docname, refwarn=True, classes=["term"],
        )  # fmt: skip


def explain(app: Any, document: nodes.document, name: str) -> None:
    """The definition's first sentence, shown when the pointer rests on the link."""
    terms = read_glossary(GLOSSARY.read_text(encoding="utf-8"))
    ids = {f"term-{re.sub('[^A-Za-z0-9]+', '-', term)}": text for term, text in terms.items()}
    for link in document.findall(nodes.reference):
        anchor = link.get("refuri", "").partition("#")[2] or link.get("refid", "")
        if anchor in ids:
            link["reftitle"] = ids[anchor]
            link["classes"] = ["term"]


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.add_transform(LinkTerms)
    app.connect("doctree-resolved", explain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
