"""Which single changes there are in a source file, and a seeded choice among all files.

The changes are those of cosmic-ray's operators that keep the program sensible: + for -, < for <=,
`and` for `or`, True for False, n for n + 1. Left out are annotations, which do not run, and changes
that cannot run (a matrix product of numbers), since any test notices those.

What is drawn hangs on the text of its own line alone, by a hash of it: an edit elsewhere, or a new
file, leaves the rest of the sample as it was.
"""

from __future__ import annotations

import ast
import hashlib
from ast import literal_eval
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.number_replacer import NumberReplacer
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Number

ALIKE = {
    "Binary": (("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"), ("BitOr", "BitAnd", "BitXor"),
               ("LShift", "RShift")),
    "Comparison": (("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"), ("Is", "IsNot"), ("In", "NotIn")),
}  # fmt: skip
_WANTED = (
    *(
        f"Replace{kind}Operator_{one}_{other}"
        for kind, groups in ALIKE.items()
        for group in groups
        for one, other in product(group, group)
        if one != other
    ),
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "AddNot"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
)
SMALL = 16  # integers up to here change by 1


class ChangeNumber(NumberReplacer):  # type: ignore[misc]
    """cosmic-ray's n + 1 and n - 1 for small integers; twice and half for others, where 1 may be
    nothing."""

    def mutate(self, node: Any, index: int) -> Any:
        """The node with another number."""
        value = literal_eval(node.value)
        if value == 0 or (isinstance(value, int) and value <= SMALL):
            return super().mutate(node, index)
        changed = value * 2 if index == 0 else value / type(value)(2)
        return Number(f" {type(value)(changed)}", node.start_pos)


OPERATORS: dict[str, type[Operator]] = {
    name: OperatorProvider()[name] for name in _WANTED if name in set(OperatorProvider())
} | {"ChangeNumber": ChangeNumber}


@dataclass(frozen=True)
class Mutant:
    """One change of one file, the `occurrence`-th of its operator there. line, column: where, from
    1 and from 0. code: the text of the line. number, place: among the changes of this operator, and
    among the places of this kind of operator, at lines of that text in the file."""

    path: str
    operator: str
    occurrence: int
    line: int
    column: int
    code: str
    number: int
    place: int

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """What stays the same when other lines of the file are edited."""
        return self.path, self.operator, self.code, self.number

    @property
    def family(self) -> str:
        """The kind of the operator: others of it would change the same place."""
        return self.operator.partition("_")[0]

    def text(self, source: str) -> str:
        """The file with the change made."""
        changed: str = mutate_code(source, OPERATORS[self.operator](), self.occurrence)
        return changed


def describe(mutant: Mutant, source: str) -> tuple[str, str]:
    """The line before and after, without indentation."""
    before, after = source.splitlines(), mutant.text(source).splitlines()
    return before[mutant.line - 1].strip(), after[mutant.line - 1].strip()


def find_all(path: str, source: str) -> list[Mutant]:
    """Every change of a file, also those that change nothing."""
    found: list[Mutant] = []
    tree, lines = get_ast(source), [line.strip() for line in source.splitlines()]
    nodes, idle = list(ast_nodes(tree)), list(_annotations(source))
    equal: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, kind in OPERATORS.items():
        operator = kind()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(starts):
            if any(first <= (line, column) < last for first, last in idle):
                continue
            code = lines[line - 1]
            known = places.setdefault((name.partition("_")[0], code), [])
            if (line, column) not in known:
                known.append((line, column))
            number, place = equal[name, code], known.index((line, column))
            equal[name, code] += 1
            found.append(Mutant(path, name, occurrence, line, column, code, number, place))
    return found


def draw(files: Iterable[Path], root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` changes at different places, each place as likely as another; fewer if there are
    fewer places. Those of the smallest hashes: the same for the same lines and seed."""
    places: dict[tuple[str, str, str, int], list[Mutant]] = {}
    sources = {}
    for file in sorted(files):
        path = str(file.relative_to(root))
        sources[path] = file.read_text(encoding="utf-8")
        for mutant in find_all(path, sources[path]):
            place = (path, mutant.family, mutant.code, mutant.place)
            places.setdefault(place, []).append(mutant)
    chosen: list[Mutant] = []
    for place in sorted(places, key=lambda place: _hash(seed, *place)):
        if len(chosen) == count:
            break
        mutant = min(places[place], key=lambda mutant: _hash(seed, *mutant.identity))
        if _changes(mutant, sources[mutant.path]):
            chosen.append(mutant)
    return chosen


def _hash(*words: object) -> bytes:
    """The same in every process and of every version of Python."""
    return hashlib.sha256(repr(words).encode()).digest()


def _changes(mutant: Mutant, source: str) -> bool:
    """Is the changed file another program?"""
    try:
        return ast.dump(ast.parse(mutant.text(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end."""
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.expr) and part.end_lineno and part.end_col_offset:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)
