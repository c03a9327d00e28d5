"""What the names of a PTX text mean: nested scopes, renaming, special registers."""

from __future__ import annotations

from collections.abc import Iterable

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.syntax import Register, Symbol, Vector

_THREE_DIMENSIONAL = (
    *("tid", "ntid", "ctaid", "nctaid"),
    *("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"),
)
_SCALAR = (
    *("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "is_explicit_cluster"),
    *("cluster_ctarank", "cluster_nctarank"),
    *("lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt"),
    *("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"),
    *("total_smem_size", "aggr_smem_size", "dynamic_smem_size", "current_graph_exec"),
    *(f"reserved_smem_offset_{part}" for part in ("begin", "end", "cap", "0", "1")),
    *(f"pm{i}{suffix}" for i in range(8) for suffix in ("", "_64")),
    *(f"envreg{i}" for i in range(32)),
)

# PTX ISA 10, "Special Registers".
SPECIAL_REGISTERS: frozenset[str] = frozenset(
    [f"%{name}.{axis}" for name in _THREE_DIMENSIONAL for axis in "xyz"]
    + [f"%{name}" for name in _SCALAR]
)


class Names:
    """The names visible at the current place, and what each stands for.

    `meaning` maps every visible name, as written, to a Register or Symbol with its unique name, or
    to the Vector of a vector register's elements.
    The first declaration of a name keeps it, later ones in other scopes get "name@2", "name@3".
    """

    def __init__(self, outer: Names | None = None) -> None:
        """The outermost names of a module, or of a kernel inside the module's names `outer`."""
        if outer is None:
            self.meaning: dict[str, Register | Symbol | Vector] = {
                name: Register(name) for name in SPECIAL_REGISTERS
            }
        else:
            self.meaning = dict(outer.meaning)
        self._uses = dict.fromkeys(self.meaning, 1)
        # One dict per open scope: name -> (what it meant outside, line of the declaration).
        self._scopes: list[dict[str, tuple[Register | Symbol | Vector | None, int]]] = [{}]

    def open_scope(self) -> None:
        """Begins a scope: what is declared from here on may shadow names."""
        self._scopes.append({})

    def close_scope(self) -> None:
        """Ends the innermost scope: its names mean again what they meant before it."""
        for name, (outside, _) in self._scopes.pop().items():
            if outside is None:
                del self.meaning[name]
            else:
                self.meaning[name] = outside

    def declare_registers(self, names: Iterable[str], line: int) -> list[str]:
        """Declares registers in the innermost scope; their unique names.

        PtxError if the scope has a name already.
        """
        return [self._declare(Register, name, line) for name in names]

    def declare_vector(self, name: str, width: int, line: int) -> list[str]:
        """Declares a register of 2 or 4 elements, .x to .w or .r to .a; the elements' unique names.

        PtxError as above.
        """
        self._enter(name, line)
        written = [f"{name}.{axis}" for axis in "xyzw"[:width]]
        elements = [Register(unique) for unique in self.declare_registers(written, line)]
        self.meaning[name] = Vector(tuple(elements))
        for colour, element in zip("rgba", elements, strict=False):
            self._enter(f"{name}.{colour}", line)
            self.meaning[f"{name}.{colour}"] = element
        return [element.name for element in elements]

    def declare_symbol(self, name: str, line: int) -> str:
        """Declares a variable, parameter, function or label; its unique name. PtxError as above."""
        return self._declare(Symbol, name, line)

    def _declare(self, kind: type[Register] | type[Symbol], name: str, line: int) -> str:
        self._enter(name, line)
        use = self._uses.get(name, 0) + 1
        self._uses[name] = use
        unique = name if use == 1 else f"{name}@{use}"
        self.meaning[name] = kind(unique)
        return unique

    def _enter(self, name: str, line: int) -> None:
        scope = self._scopes[-1]
        if name in scope:
            raise PtxError(f"{name} is declared already, on line {scope[name][1]}", line)
        scope[name] = (self.meaning.get(name), line)
