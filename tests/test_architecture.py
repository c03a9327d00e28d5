"""The house rules as functions on source text, applied to the project and to planted faults.

Each rule returns the list of what breaks it. CONTRIBUTING.md says the rules in words; the import
contracts are in pyproject.toml and run with `make lint`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from lab.import_graph import circles, import_graph, package_sources

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fa4", "tests", "docs", "examples", "lab", ".ci")
SKIPPED = {"__pycache__", "generated", "out"}

LIBRARY_LINES, TEST_LINES = 500, 700
FUNCTION_LINES, ROLE_LINES = 60, 150
PARAMETERS = 8

MANY_PARAMETERS = {
    "fa4.api.flash_attn_func": "keeps FlashAttention's signature",
    "fa4.api.flash_attn_varlen_func": "keeps FlashAttention's signature",
    "fa4.api.flash_attn_backward": "takes what flash_attn_func takes",
    "fa4.api.flash_attn_varlen_backward": "takes what flash_attn_varlen_func takes",
    "fa4.flash_attn.plain.flash_attn_func": "keeps flash_attn 2's signature",
    "fa4.flash_attn.plain.flash_attn_varlen_func": "keeps flash_attn 2's signature",
    "fa4.flash_attn.packed.flash_attn_qkvpacked_func": "keeps flash_attn 2's signature",
    "fa4.flash_attn.packed.flash_attn_kvpacked_func": "keeps flash_attn 2's signature",
    "fa4.flash_attn.packed.flash_attn_varlen_qkvpacked_func": "keeps flash_attn 2's signature",
    "fa4.flash_attn.packed.flash_attn_varlen_kvpacked_func": "keeps flash_attn 2's signature",
    "fa4.flash_attn.kvcache.flash_attn_with_kvcache": "keeps flash_attn 2's signature",
    "fa4.flash_attn.cute.interface.flash_attn_func": "keeps flash-attn-4's signature",
    "fa4.flash_attn.cute.interface.flash_attn_varlen_func": "keeps flash-attn-4's signature",
    "fa4.dropin.sdpa.sdpa": "keeps torch's signature",
    "fa4.distributed.merging.merge_rows": "the arguments of a compiled kernel",
    "fa4.distributed.front.attention": "an attention call: one parameter per option",
    "fa4.commands.verify.verify": "a typer command: one parameter per option",
    "fa4.commands.demo.demo": "a typer command: one parameter per option",
    "fa4.commands.generations.generations": "a typer command: one parameter per option",
    "fa4.commands.explain.explain": "a typer command: one parameter per option",
    "fa4.commands.predict.predict": "a typer command: one parameter per option",
    "fa4.commands.validate.validate": "a typer command: one parameter per option",
    "fa4.commands.calibrate.calibrate": "a typer command: one parameter per option",
    "fa4.commands.roofline.roofline": "a typer command: one parameter per option",
    "fa4.commands.sweep.sweep": "a typer command: one parameter per option",
    "fa4.commands.trace.trace": "a typer command: one parameter per option",
    "fa4.commands.ablate.ablate": "a typer command: one parameter per option",
    "fa4.commands.emulate.emulate": "a typer command: one parameter per option",
    "fa4.sm100.backward.host.backward": "the arguments of a compiled kernel",
    "fa4.sm90.backward.host.backward": "the arguments of a compiled kernel",
    "fa4.sm100.backward.host.gradients": "the arguments of a compiled kernel",
    "fa4.sm90.backward.host.gradients": "the arguments of a compiled kernel",
    "fa4.sm100.backward.kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm90.backward.kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm100.backward.postprocess.postprocess": "the arguments of a compiled kernel",
    "fa4.sm90.backward.postprocess.postprocess": "the arguments of a compiled kernel",
    "fa4.sm100.backward.preprocess.kernel": "the arguments of a compiled kernel",
    "fa4.sm100.backward.preprocess.preprocess": "the arguments of a compiled kernel",
    "fa4.sm100.forward.kernel.forward": "the arguments of a compiled kernel",
    "fa4.sm100.halves.kernel.forward": "the arguments of a compiled kernel",
    "fa4.sm100.forward.kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm100.halves.kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.forward": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.forward_narrow": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.forward_narrow_queue": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.forward_queue": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.forward_split": "the arguments of a compiled kernel",
    "fa4.sm90.forward.kernel.attend": "the arguments of a compiled kernel",
    "fa4.sm90.forward.combine.combine": "the arguments of a compiled kernel",
    "fa4.sm90.forward.combine.kernel": "the arguments of a compiled kernel",
    "fa4.sm90.wide.host.backward": "the arguments of a compiled kernel",
    "fa4.sm90.wide.host.gradients": "the arguments of a compiled kernel",
    "fa4.sm90.wide.keys_kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm90.wide.keys_kernel.key_gradients": "the arguments of a compiled kernel",
    "fa4.sm90.wide.queries_kernel.kernel": "the arguments of a compiled kernel",
    "fa4.sm90.wide.queries_kernel.query_gradients": "the arguments of a compiled kernel",
    "fa4.commands.bench.bench": "a typer command: one parameter per option",
    "fa4.commands.run.run": "a typer command: one parameter per option",
    "fa4.commands.compile.compile": "a typer command: one parameter per option",
}

# Folders whose modules import one way only, and of which none imports another in a circle.
WITHOUT_CIRCLES = ("fa4", "docs", "examples", "lab", "tests")

# Classes that share a name, and why.
SAME_NAME: dict[str, str] = {}
MOST_ROOT_MODULES = 8  # beside __init__ and __main__

# Written in pieces, so that this file does not contain what it forbids.
REGISTRY = re.compile(
    "|".join(
        (
            r"\bpy" + r"pi\.(?:org|python)",
            "python" + r"hosted\.org",
            "registry" + r"\.(?:npmjs|yarnpkg)",
            "deb" + r"\.debian\.org",
            "(?:extra-)?index" + r"-url",
            "find" + "-links",
            "/opt/" + "(?:wheels|py" + "pi)",
            "/work/" + "(?:shared|main)",
        )
    )
)


def python_files(*folders: str) -> Iterator[tuple[str, str]]:
    """(path relative to the root, text) of the Python files in `folders`."""
    for path, text in project_files(*folders):
        if path.endswith(".py"):
            yield path, text


def project_files(*folders: str) -> Iterator[tuple[str, str]]:
    """(path relative to the root, text) of the text files in `folders`; "." is the root alone."""
    for folder in folders:
        found = ROOT.glob("*") if folder == "." else (ROOT / folder).rglob("*")
        for path in sorted(found):
            relative = path.relative_to(ROOT)
            if path.is_file() and not SKIPPED.intersection(relative.parts):
                try:
                    yield str(relative), path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, node) of every function in a tree, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{prefix}.{node.name}" if prefix else node.name
            if not isinstance(node, ast.ClassDef):
                yield inner, node
        yield from functions(node, inner)


def module_name(path: str) -> str:
    """fa4/api.py -> fa4.api; fa4/sim/__init__.py -> fa4.sim."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def too_long(path: str, text: str) -> list[str]:
    """A file over its limit, and functions over theirs."""
    lines = len(text.splitlines())
    limit = TEST_LINES if path.startswith("tests/") else LIBRARY_LINES
    found = [f"{path}: {lines} lines, limit {limit}"] if lines > limit else []
    limit = ROLE_LINES if path.startswith(("fa4/sm100/", "fa4/sm90/")) else FUNCTION_LINES
    for name, node in functions(ast.parse(text)):
        counted = f"{module_name(path)}.{name}" not in MANY_PARAMETERS
        first = node.lineno if counted else node.body[0].lineno  # of a long signature, the body
        lines = (node.end_lineno or first) - first + 1
        if lines > limit:
            found.append(f"{path}: {name} has {lines} lines, limit {limit}")
    return found


def too_many_parameters(path: str, text: str, allowed: dict[str, str]) -> list[str]:
    """Functions with more parameters than the limit (self and cls apart) and no stated reason."""
    found = []
    for name, node in functions(ast.parse(text)):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        count = sum(a is not None and a.arg not in ("self", "cls") for a in every)
        if count > PARAMETERS and f"{module_name(path)}.{name}" not in allowed:
            found.append(f"{path}: {name} has {count} parameters, limit {PARAMETERS}")
    return found


def undocumented(path: str, text: str) -> list[str]:
    """The module and its public classes, functions and methods that lack a docstring."""
    tree = ast.parse(text)
    found = [] if ast.get_docstring(tree) else [f"{path}: module"]
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if node.name.startswith("_") or "overload" in map(ast.unparse, node.decorator_list):
                continue
            if not ast.get_docstring(node):
                found.append(f"{path}: {prefix}{node.name}")
            if isinstance(node, ast.ClassDef):
                pending.append((f"{prefix}{node.name}.", node))
    return found


def forbidden_text(path: str, text: str) -> list[str]:
    """Lines that name a package registry or a path of one machine."""
    numbered = enumerate(text.splitlines(), 1)
    return [
        f"{path}:{number}: {line.strip()}" for number, line in numbered if REGISTRY.search(line)
    ]


def unpinned(pyproject: str, pre_commit: str) -> list[str]:
    """Tools that the pre-commit hooks pin otherwise than the extra `dev`."""
    pin = re.compile(r'"([A-Za-z][\w.-]*)==([\w.]+)"')
    wanted = dict(pin.findall(pyproject))
    used = pin.findall(pre_commit)
    missing = {"ruff", "mypy"} - dict(used).keys()
    wrong = {f"{tool}=={version}" for tool, version in used if wanted.get(tool) != version}
    return sorted(missing | wrong)


def parts_without_contract(pyproject: str, parts: set[str]) -> list[str]:
    """Parts of fa4 that no layer names, and torch-free parts the torch contract leaves out."""
    layers = "".join(re.findall(r"^layers = \[(.*?)\]", pyproject, re.DOTALL | re.MULTILINE))
    sources = "".join(
        re.findall(r"^source_modules = \[(.*?)\]", pyproject, re.DOTALL | re.MULTILINE)
    )
    torch_free = parts & {"plan", "sim", "reference", "emulator", "config", "hardware", "dtypes"}
    found = [f"{p}: in no layer" for p in parts if not re.search(rf"\bfa4\.{p}\b", layers)]
    found += [f"{p}: may import torch" for p in torch_free if f'"fa4.{p}"' not in sources]
    return sorted(found)


def test_sizes() -> None:
    """Files and functions keep their limits."""
    assert [e for path, text in python_files(*FOLDERS) for e in too_long(path, text)] == []


def test_parameters() -> None:
    """Functions keep the parameter limit, or stand in the list with a reason."""
    files = python_files("fa4", "examples", "lab")
    assert [e for p, text in files for e in too_many_parameters(p, text, MANY_PARAMETERS)] == []


def test_docstrings() -> None:
    """Everything public in the library is documented."""
    assert [e for path, text in python_files("fa4") for e in undocumented(path, text)] == []


def test_no_forbidden_text() -> None:
    """Nothing in the project depends on one registry or one machine."""
    assert not [
        e for path, text in project_files(".", *FOLDERS) for e in forbidden_text(path, text)
    ]


def written_version() -> str:
    """That of fa4/version.py."""
    text = (ROOT / "fa4/version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)[0]


def test_changelog_has_an_unreleased_section() -> None:
    """Changes since the last version have a place; it is empty only in the release itself."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, _, released = text.partition("## [Unreleased]")[2].partition("\n## [")
    dated = re.match(r"(\S+)\] - \d{4}-\d\d-\d\d\n", released)
    assert dated and "\n- " in released
    assert "\n- " in unreleased or dated[1] == written_version()


def test_pins_agree() -> None:
    """The hooks use the versions that `make lint` uses."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not unpinned(pyproject, (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))


def test_version_is_said_once() -> None:
    """pyproject.toml and fa4/version.py agree."""
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and declared[1] == written_version()


def test_every_part_is_in_an_import_contract() -> None:
    """A new part of fa4 must say what it may import."""
    parts = {p.stem for p in (ROOT / "fa4").glob("*.py")} - {"__init__"}
    parts |= {p.parent.name for p in (ROOT / "fa4").glob("*/__init__.py")}
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert parts_without_contract(pyproject, parts) == []


def test_imports_lead_one_way() -> None:
    """No module imports itself by way of others, for types only or inside a function neither."""
    sources = {}
    for package in WITHOUT_CIRCLES:
        sources |= package_sources(ROOT, package)
    graph = import_graph(sources)
    for package in WITHOUT_CIRCLES:  # it has seen the package, and how its modules import
        inside = {name for name in graph if name.startswith(f"{package}.")}
        assert any(graph[name] & inside for name in inside) or package == "examples", package
    assert circles(graph) == []


def classes_by_name(sources: dict[str, str]) -> dict[str, list[str]]:
    """Name of a class -> the modules that define one of that name."""
    homes: dict[str, list[str]] = {}
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    return homes


def test_class_names_are_unique() -> None:
    """One name, one thing; the pairs that share one say why."""
    shared = {name: homes for name, homes in classes_by_name(package_sources(ROOT, "fa4")).items()
              if len(homes) > 1}  # fmt: skip
    assert shared.keys() == SAME_NAME.keys(), shared
    assert classes_by_name({"a": "class X: pass", "b": "class X: pass"}) == {"X": ["a", "b"]}


PLANTED_IMPORTS = {
    "at the top": "from p import b",
    "for types": "if TYPE_CHECKING:\n    from p.b import B",
    "in a function": "def f():\n    import p.b",
    "relative": "from . import b",
    "relative name": "from .b import B",
    "by text": "b = importlib.import_module('p.b')",
}


@pytest.mark.parametrize("planted", PLANTED_IMPORTS.values(), ids=PLANTED_IMPORTS)
def test_a_planted_circle_is_seen(planted: str) -> None:
    """Whatever way the import that closes it is written."""
    around = {
        "p": "from p.a import A",
        "p.b": "import p.q.c",
        "p.q": "",
        "p.q.c": "from p import a",
    }
    assert circles(import_graph({**around, "p.a": planted})) == [["p.a", "p.b", "p.q.c"]]
    assert circles(import_graph({**around, "p.a": "from other import b"})) == []


def test_a_planted_circle_of_scripts_is_seen() -> None:
    """Files of a folder that is no package import one another by their own names."""
    scripts = {"s.a": "def f():\n    from b import B", "s.b": "import s.c", "s.c": "import a as x"}
    assert circles(import_graph(scripts)) == [["s.a", "s.b", "s.c"]]
    assert circles(import_graph({"s": "", **scripts})) == []  # a package: other modules a and b


def test_exceptions_are_still_needed() -> None:
    """The list of exceptions names functions that exist, wherever their file does."""
    for qualified in MANY_PARAMETERS:
        module, _, name = qualified.rpartition(".")
        path = ROOT / (module.replace(".", "/") + ".py")
        if path.exists():
            assert name in dict(functions(ast.parse(path.read_text(encoding="utf-8")))), qualified


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
NINE = "def f(a, b, /, c, *d, e, g, h, i, **j): ..."


PLANTED = [
    ("long file", too_long, "fa4/x.py", "x = 1\n" * 501),
    ("long test", too_long, "tests/x.py", "x = 1\n" * 701),
    ("long function", too_long, "fa4/x.py", LONG_FUNCTION),
    ("long method", too_long, "fa4/x.py", "class C:\n" + indent(LONG_FUNCTION, "    ")),
    ("long role", too_long, "fa4/sm100/x.py", "def f():\n" + "    x = 1\n" * 150),
    ("parameters", too_many_parameters, "fa4/x.py", NINE, {}),
    ("module docstring", undocumented, "fa4/x.py", "x = 1"),
    ("function docstring", undocumented, "fa4/x.py", '"""M."""\ndef f(): ...'),
    ("method docstring", undocumented, "x.py", '"M."\nclass C:\n    "C."\n    def f(self): ...'),
    ("registry", forbidden_text, "x.md", "https://py" + "pi.org/project/x"),
    ("index option", forbidden_text, "x.md", "pip install --index" + "-url x"),
    ("local path", forbidden_text, "x.md", "see /work/" + "shared/x"),
    ("another pin", unpinned, '"ruff==1.0", "mypy==2.0"', '["ruff==1.1"]\n["mypy==2.0"]'),
    ("missing pin", unpinned, '"ruff==1.0", "mypy==2.0"', '["ruff==1.0"]'),
    ("no layer", parts_without_contract, 'layers = [\n"(fa4.sim)"]\n', {"new"}),
    ("torch allowed", parts_without_contract, 'layers = ["fa4.sim"]\n', {"sim"}),
]


@pytest.mark.parametrize("planted", PLANTED, ids=[row[0] for row in PLANTED])
def test_each_rule_finds_its_planted_fault(planted: tuple) -> None:
    """A rule that cannot fail checks nothing."""
    _, rule, *arguments = planted
    assert len(rule(*arguments)) == 1


def test_rules_accept_what_is_allowed() -> None:
    """Limits are inclusive, private things need no docstring, exceptions are honoured."""
    assert not too_long("fa4/x.py", "x = 1\n" * 500)
    assert not too_long("fa4/x.py", "def f():\n" + "    x = 1\n" * 59)
    assert not too_many_parameters("fa4/x.py", "def f(self, a, b, c, d, e, g, h, i): ...", {})
    assert not too_many_parameters("fa4/x.py", NINE, {"fa4.x.f": "a reason"})
    assert not undocumented("fa4/x.py", '"""M."""\ndef _f(): ...')
    contracts = 'layers = ["(fa4.sim)"]\nsource_modules = ["fa4.sim"]\n'
    assert not parts_without_contract(contracts, {"sim"})


def test_the_root_of_the_package_is_small() -> None:
    """What is not one of the few names that everybody reads has a folder."""
    loose = {path.stem for path in (ROOT / "fa4").glob("*.py")} - {"__init__", "__main__"}
    assert len(loose) <= MOST_ROOT_MODULES, sorted(loose)
