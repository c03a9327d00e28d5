"""The pages: glossary, commands that they name, picture, references, and the check of the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from docs._ext.glossary_words import SIGNAL, SIGNAL_TERM, cut, pattern_of, read_glossary
from fa4 import cli
from fa4.base.role_styles import ROLES
from fa4.config import BackwardConfig, BackwardPipeline, ForwardPipeline, WarpgroupPipeline
from fa4.hardware import B200, H100
from fa4.plan import PipelinePlan, backward_plan, forward_plan
from fa4.plan.warpgroup import warpgroup_plan
from lab.pages import picture
from lab.pages.check_site import check_site

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GLOSSARY = read_glossary((DOCS / "glossary.md").read_text(encoding="utf-8"))
MOST_LINES = {"README.md": 88, "ladder": 135}


def plans() -> Iterator[PipelinePlan]:
    """Every kind of kernel that there is a plan of."""
    for group in (1, 2):
        yield forward_plan(ForwardPipeline(cta_group=group), B200)
        for published in (False, True):
            numerics = BackwardConfig(cta_group=group)
            yield backward_plan(BackwardPipeline(numerics=numerics, published=published), B200)
    yield forward_plan(ForwardPipeline(causal=True, scheduler="clc"), B200)
    yield warpgroup_plan(WarpgroupPipeline(), H100)


# The glossary


def test_the_glossary_has_what_newcomers_asked_for() -> None:
    """Each with a first sentence; the roles and the names of signals, too."""
    asked = {"CTA", "TMEM", "MUFU", "TMA", "mbarrier", "phase", "LPT", "work tile", "warp role"}
    asked |= {"ping-pong", "tau", "LSE", "correction", "epilogue", SIGNAL_TERM}
    assert asked <= set(GLOSSARY)
    assert min(len(text) for text in GLOSSARY.values()) > 10
    assert GLOSSARY["thread block"] == GLOSSARY["CTA"]  # two names of one entry
    assert GLOSSARY["warp"] == "32 threads that run one instruction at a time."


def test_every_signal_name_leads_to_its_explanation() -> None:
    """Names of all plans have the form that the pages link; another word has not."""
    names = {signal.name for plan in plans() for signal in plan.signals}
    assert len(names) > 50
    assert sorted(name for name in names if not SIGNAL.fullmatch(name)) == []
    assert not SIGNAL.fullmatch("head_dim") and not SIGNAL.fullmatch("fa4 trace")


def test_the_first_use_of_a_term_is_linked() -> None:
    """Once for each entry, plurals too, the longest name first; parts of words are not."""
    terms = {"CTA": "a", "CTA pair": "b", "warp": "c", "thread block": "a", "window": "d"}
    found = pattern_of(terms)
    seen: set[str] = set()
    text = "A CTA pair has CTAs of warps, unwarped; a warp-wide thread block in a window."
    assert cut(text, found, seen, terms) == [
        "A ", ("CTA pair", "CTA pair"), " has ", ("CTA", "CTAs"), " of ", ("warp", "warps"),
        ", unwarped; a warp-wide thread block in a window.",
    ]  # fmt: skip
    assert cut("CTA, warp", found, seen, terms) == ["CTA, warp"]


# What the pages say of commands


def commands() -> dict[str, Any]:
    """`fa4` and its subcommands by the words before their options."""
    app: Any = typer.main.get_command(cli.build_app())
    found = {"": app}
    for name, command in app.commands.items():
        found[name] = command
        found |= {f"{name} {sub}": x for sub, x in getattr(command, "commands", {}).items()}
    return found


def unknown(line: str, known: dict[str, Any]) -> list[str]:
    """The command, or the options, of a `fa4 ...` line that there are not."""
    words = re.sub(r"'[^']*'", "TEXT", line.partition(" #")[0]).split()[1:]
    words = words[: next((i for i, x in enumerate(words) if x in ("|", ">", "&&")), None)]
    name = next((x for x in (" ".join(words[:2]), " ".join(words[:1])) if x in known), "")
    if words and not name and not words[0].startswith("-"):
        return [words[0]]
    options = {"--help"}
    for option in known[name].params:
        options |= {*option.opts, *option.secondary_opts}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [word for word in given if word not in options]


def command_lines(text: str) -> list[str]:
    """`fa4 ...` in console blocks and between backticks."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(fa4 [a-z][^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [" ".join(line.split()) for line in lines if line.startswith("fa4 ")]


def test_commands_and_options_of_the_pages_exist() -> None:
    """In every page; planted ones are found."""
    known = commands()
    lines = [(path.name, line) for path in PAGES for line in command_lines(path.read_text("utf-8"))]
    assert len(lines) > 80
    wrong = [(name, line, unknown(line, known)) for name, line in lines if unknown(line, known)]
    assert wrong == []
    assert unknown("fa4 predikt --seqlen 8k", known) == ["predikt"]
    assert unknown("fa4 predict --seqlens 8k  # --no-such", known) == ["--seqlens"]
    assert unknown("fa4 cache ls --jsn", known) == ["--jsn"]


def test_make_targets_of_the_pages_exist() -> None:
    """`make x` in README.md, CONTRIBUTING.md and docs/."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for path in (*PAGES, ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text("utf-8"), re.MULTILINE)
        assert set(named) <= set(targets), path


def test_continuous_integration_runs_what_the_readme_says() -> None:
    """The README's test command, with lint and these pages."""
    assert "make test " in (ROOT / "README.md").read_text("utf-8")
    run = (ROOT / ".ci" / "run").read_text("utf-8")
    for line in (r"make lint test test-cpu docs conformance", r"  make test-web"):
        assert re.search(rf"^{line}$", run, re.MULTILINE)


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a page outside of the site to files or headings that there are not."""
    wrong = []
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = path.parent / file
        if not target.exists():
            wrong.append(link)
        elif anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            wrong += [link] if anchor not in slugs else []
    return wrong


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_outside_of_the_site_lead_somewhere(name: str) -> None:
    """Sphinx checks those of docs/; planted faults are found."""
    path = ROOT / name
    text = path.read_text("utf-8")
    assert broken_links(path, text) == []
    planted = "[a](nowhere.md) [b](README.md#nothing) [c](https://example.org)"
    assert broken_links(ROOT / "x.md", planted) == ["nowhere.md", "README.md#nothing"]


# Sizes, references, the picture


def test_short_pages_are_short() -> None:
    """The README is about a screen; a chapter of the ladder has one idea."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_LINES["README.md"]
    chapters = sorted((DOCS / "ladder").glob("[0-9]*.md"))
    assert len(chapters) == 11
    for chapter in chapters:
        text = chapter.read_text("utf-8")
        assert len(text.splitlines()) <= MOST_LINES["ladder"], chapter
        assert "## Change it" in text and "**In the code:**" in text and "```output\n" in text


def test_the_reference_names_every_public_module() -> None:
    """A part of fa4 that says what it offers (`__all__`) is on the page of the Python names."""
    text = (DOCS / "api.md").read_text("utf-8")
    for package in ROOT.glob("fa4/*/__init__.py"):
        if "__all__" in package.read_text("utf-8"):
            name = ".".join(package.parent.relative_to(ROOT).parts)
            assert re.search(rf":: {re.escape(name)}\b", text), name
    import fa4

    for name in set(fa4.__all__) - {"__version__"}:
        assert f":: fa4.{name}\n" in text, name


def test_the_picture_is_current() -> None:
    """If not: python -m lab.pages.picture. Small, loads nothing, names roles and memory."""
    drawn = picture.draw()
    assert picture.PICTURE.read_text(encoding="utf-8") == drawn
    assert len(drawn) < 60_000 and "href" not in drawn and "aria-label" in drawn
    for role in picture.COLOURS:
        letter = ROLES[role].letter
        assert f'>{role} <tspan font-weight="bold">{letter}</tspan></text>' in drawn
    for name in ("tensor core", "S0 / P0", "K/V slot 2", "O1 on its way out"):
        assert f">{name}</text>" in drawn


# The check of the built site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two pages without a fault."""
    (tmp_path / "glossary.html").write_text('<dt id="term-CTA">CTA</dt> <a href="#term-CTA">x</a>')
    (tmp_path / "style.css").write_text("")
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="style.css"><a href="glossary.html#term-CTA">CTA</a>'
        '<a href="https://example.org">elsewhere</a>'
    )
    assert list(check_site(tmp_path)) == []
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('<a href="start.html">', "start.html leads to no file"),
        ('<a href="glossary.html#term-TMA">', "glossary.html#term-TMA leads to no place"),
        ('<a href="#here">', "#here leads to no place"),
        ('<img src="https://example.org/x.png">', "needs https://example.org/x.png"),
        ('<script src="//cdn.example.org/x.js"></script>', "needs //cdn.example.org/x.js"),
    ],
)
def test_a_planted_fault_of_the_site_is_found(site: Path, fault: str, said: str) -> None:
    page = site / "index.html"
    page.write_text(page.read_text() + fault)
    assert list(check_site(site)) == [f"index.html: {said}"]


def test_pages_without_the_glossary_and_empty_sites_are_found(site: Path) -> None:
    """Every page leads to the glossary."""
    (site / "more.html").write_text("<p>CTA</p>")
    assert list(check_site(site)) == ["more.html: no word of it leads to the glossary"]
    (site / "nothing").mkdir()
    assert len(list(check_site(site / "nothing"))) == 1
