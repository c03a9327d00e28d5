"""lab/benchmarks/compare_ptx.py: what counts as a difference between two PTX texts."""

from __future__ import annotations

import pytest

from fa4.emulator.elf import ElfSection
from lab.benchmarks import compare_ptx
from lab.benchmarks.compare_ptx import difference, machine_code

TEXT = """
.visible .entry kernel_one_2(
	.param .u32 kernel_one_2_param_0
)
{
	.reg .b32 	%r<5>;
	ld.param.b32 	%r1, [kernel_one_2_param_0];  // a comment
	add.s32 	%r2, %r1, 1;
$L__BB0_1:
	mul.lo.s32 	%r3, %r2, %r1;
	@%p1 bra 	$L__BB0_1;
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("%r2", "%r9"), ("kernel_one_2", "kernel_other"), ("$L__BB0_1", "$L__BB7_4"),
     ("a comment", "another"), ("<5>", "<9>")],
)  # fmt: skip
def test_names_do_not_count(old: str, new: str) -> None:
    """Registers, labels, kernels, comments and how many registers are declared."""
    assert old in TEXT and difference(TEXT, TEXT.replace(old, new)) == ""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [("add.s32", "sub.s32", "line 7 was 'add.s32"), (", 1;", ", 2;", "line 7"),
     ("%r2, %r1;", "%r2, %r2;", "line 9"), ("\t@%p1 bra \t$L__BB0_1;\n", "", "line 10"),
     ("}\n", "}\nret;\n", "11 lines before, 12 after")],
)  # fmt: skip
def test_everything_else_does(old: str, new: str, found: str) -> None:
    assert found in difference(TEXT, TEXT.replace(old, new))


def test_machine_code_is_the_code_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes, without their names; a changed byte elsewhere is none of it."""

    def read(names: tuple[str, str]) -> list[bytes]:
        sections = (ElfSection(names[0], 1, 0, 4, 0), ElfSection(names[1], 1, 4, 3, 0))
        monkeypatch.setattr(compare_ptx, "read_sections", lambda _: sections)
        return [machine_code(b"codeinf"), machine_code(b"codeINF"), machine_code(b"COdeinf")]

    same, elsewhere, other = read((".text.kernel_1", ".nv.info"))
    assert same == elsewhere == [b"code"] and other != same
    assert read((".text.kernel_2", ".text.f"))[0] == [b"code", b"inf"]
