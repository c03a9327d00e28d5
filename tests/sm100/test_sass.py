"""Loops, counts and resources of compiled kernels, read from machine code, ELF and PTX.

The listings are written here in nvdisasm's form: real ones are compared with the peers' known
figures by `lab/benchmarks/codegen.py`.
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest

from fa4.inspect import codegen, cubin, loops, ptx_report, sass
from fa4.inspect.flow import NaturalLoop
from fa4.inspect.loops import LoopReport

KERNEL = "attention_kernel"
INSTRUCTION_BYTES = 16


def listing(code: str, name: str = KERNEL, padding: int = 0) -> str:
    """What nvdisasm -c prints of some code: a label or an instruction a line, no addresses."""
    lines = [
        "\t.target\tsm_100a",
        f"//--------------------- .text.{name} --------------------------",
        f'\t.section\t.text.{name},"ax",@progbits',
        f"        .type           {name},@function",
        f"{name}:",
        f".text.{name}:",
    ]
    address = 0
    for line in filter(None, map(str.strip, code.splitlines())):
        if line.endswith(":"):
            lines.append(line)
            continue
        text, note, targets = line.partition(" -> ")
        text = text.replace("%", "`(") + (")" if "%" in text else "")
        note = f'(*"BRANCH_TARGETS {targets}"*)' if note else ""
        lines.append(f"        /*{address:04x}*/                   {text}{' ' * padding}{note} ;")
        address += INSTRUCTION_BYTES
    return "\n".join(lines) + "\n"


def repeat(count: int, instruction: str) -> str:
    return f"{instruction}\n" * count


MAXIMA = repeat(loops.MIN_MAXIMA, "FMNMX3 R2, R4, R5, R2")
SOFTMAX = (
    "LDTM.x32 R4, tmem[UR4]\n"
    + MAXIMA
    + "MUFU.EX2 R3, R3\nSTS [R9], R3\n"
    + repeat(28, "MUFU.EX2 R6, R6")
    + "STTM.x16 tmem[UR5], R6\n"
    + repeat(32, "F2FP.BF16.F32.PACK_AB R6, R6, R7")
    + repeat(3, "MUFU.EX2 R6, R6")
    + "STTM.x16 tmem[UR5+0x10], R180\nFENCE.VIEW.ASYNC.T\n"
    + "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ\n"
)

# Work tiles around KV tiles; the retries of both waits stand behind EXIT.
PROGRAM = f"""
USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xc0
.L_tile:
UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ
.L_kv:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5
@!P0 BRA %.L_retry_a
.L_ready_a:
{SOFTMAX}
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R5
@!P0 BRA %.L_retry_b
.L_ready_b:
BRA.U UP1, %.L_kv
MOV R1, R2
BRA.U UP2, %.L_tile
EXIT
.L_retry_a:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5
@!P0 BRA %.L_retry_a
BRA %.L_ready_a
.L_retry_b:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R5
@!P0 BRA %.L_retry_b
BRA %.L_ready_b
"""
SOFTMAX_LENGTH = 2 + SOFTMAX.count("\n") + 3


def only(text: str) -> sass.Function:
    (function,) = sass.parse(text)
    return function


def found(code: str, padding: int = 0) -> tuple[NaturalLoop, ...]:
    return only(listing(code, padding=padding)).graph.loops


def reports(code: str, kind: str) -> list[LoopReport]:
    return [one for one in loops.classify(only(listing(code))) if one.kind == kind]


def softmax_of(code: str) -> LoopReport:
    (report,) = reports(code, loops.SOFTMAX)
    return report


def test_instructions_are_taken_apart() -> None:
    code = "@!UP0 UIADD3.X UR5, UPT, UPT, URZ, UR5, URZ, UP1, !UPT\n@PT MOV R1, R2\nBRA.U !UP2, %.L"
    first, second, third = only(listing(code)).instructions
    assert (first.address, first.guard) == (0, "!UP0")
    assert (first.opcode, first.base) == ("UIADD3.X", "UIADD3")
    assert first.operands.startswith("UR5, UPT") and first.operands.endswith("!UPT")
    assert (second.address, second.guard) == (16, ""), "@PT always executes"
    assert (third.targets, third.ends, third.falls) == ((".L",), True, True)


def test_encodings_and_comments_are_no_instructions() -> None:
    text = listing("MOV R1, R2\nEXIT").replace("EXIT ;", "EXIT ;   /* 0x000000000000794d */")
    text += "        /* 0x000fe20003800000 */\n// a comment\n/* another one */ and text\n"
    assert [one.opcode for one in only(text).instructions] == ["MOV", "EXIT"]


def test_functions_keep_their_section() -> None:
    helper = ".type $helper,@function\n$helper:\n /*0040*/ MOV R1, R2 ;\n /*0050*/ RET R4 ;\n"
    first, second = sass.parse(listing("CALL.REL.NOINC %$helper\nNOP\nEXIT") + helper)
    assert (first.name, first.section, first.count) == (KERNEL, KERNEL, 2)
    assert (second.name, second.section, second.count) == ("$helper", KERNEL, 2)
    other = listing("EXIT", name="another")
    assert [one.section for one in sass.parse(listing("EXIT") + other)] == [KERNEL, "another"]


def test_text_without_instructions_is_refused() -> None:
    with pytest.raises(ValueError, match="no instructions in 'usage: nvdisasm'"):
        sass.parse("usage: nvdisasm")


def test_nested_loops_and_retries_at_the_end() -> None:
    tile, kv, retry_a, retry_b = found(PROGRAM)
    assert kv.length == SOFTMAX_LENGTH
    assert (kv.parent, tile.parent) == (tile.header, None)
    assert (retry_a.parent, retry_b.parent) == (kv.header, kv.header)
    assert tile.length == kv.length + 3
    assert len(kv.outside) == len(tile.outside) == 6
    assert retry_a.length == retry_b.length == 2


def test_a_retry_that_jumps_to_the_header_does_not_stretch_the_loop() -> None:
    """The wait is the first thing of the loop: the retry at the end goes back to its start."""
    changed = PROGRAM.replace("BRA %.L_ready_a", "BRA %.L_kv")
    assert changed != PROGRAM
    kv = next(one for one in found(changed) if one.length > 40 and one.parent is not None)
    assert (kv.length, len(kv.outside)) == (SOFTMAX_LENGTH, 6)


def test_a_loop_entered_in_its_middle_is_whole() -> None:
    code = "BRA %.L_middle\n.L_top:\nFADD R1, R1, R2\nFADD R1, R1, R3\n.L_middle:\n"
    (loop,) = found(code + "FMUL R1, R1, R4\n@P0 BRA %.L_top\nEXIT")
    assert loop.length == 4
    # The header is the block behind the entry; the latch stands before it.
    assert loop.header == 3 * INSTRUCTION_BYTES


@pytest.mark.parametrize(
    "fault", ["FFMA2 R1, R2, R3, R4", "NOP", "@!PT FADD R1, R2, R3", "IMAD.MOV.U32 R1, RZ, RZ, R2"]
)
def test_an_instruction_more_is_seen(fault: str) -> None:
    store = "STTM.x16 tmem[UR5], R6"
    plain, longer = PROGRAM, PROGRAM.replace(store, f"{fault}\n{store}")
    assert softmax_of(longer).length == softmax_of(plain).length + 1
    before, after = softmax_of(plain).columns, softmax_of(longer).columns
    assert sum(after.values()) == sum(before.values()) + 1
    assert sum(after[name] != before.get(name, 0) for name in after) == 1


def test_a_retry_in_the_loop_is_counted() -> None:
    """What ptxas did not move away costs slots."""
    retry = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5\n@!P0 BRA %.L_here"
    code = PROGRAM.replace(".L_ready_a:", f".L_ready_a:\n.L_here:\n{retry}")
    assert softmax_of(code).length == SOFTMAX_LENGTH + 2


def test_a_loop_without_its_back_edge_is_none() -> None:
    code = PROGRAM.replace("BRA.U UP1, %.L_kv", "NOP")
    (report,) = reports(code, loops.SOFTMAX)
    assert report.length == SOFTMAX_LENGTH + 3, "only the loop over work tiles is left"
    assert not reports(code.replace("BRA.U UP2, %.L_tile", "NOP"), loops.SOFTMAX)


def test_table_jumps_and_their_padding() -> None:
    table = "BRX R2 -0x8f0 -> .L_one,.L_two\n.L_one:\nNOP\n.L_two:\n"
    code = PROGRAM.replace("MOV R1, R2\n", table)
    began = time.perf_counter()
    tile, kv, *_ = found(code, padding=20_000)
    assert time.perf_counter() - began < 5
    assert (kv.length, tile.length) == (SOFTMAX_LENGTH, SOFTMAX_LENGTH + 4)
    # Without the note nobody knows where it goes: the loop over work tiles is not found.
    lost = found(code.replace(" -> .L_one,.L_two", ""))
    assert [one.length for one in lost] == [SOFTMAX_LENGTH, 2, 2]


def test_diverged_threads_meet_where_their_region_says() -> None:
    region = "BSSY.RECONVERGENT B0, %.L_met{0}\n@P0 BRA %.L_side{0}\nNOP\nBSYNC.RECONVERGENT B0\n"
    region += ".L_side{0}:\nBSYNC.RECONVERGENT B0\n.L_met{0}:\n"
    code = region.format(1) + ".L_loop:\n" + region.format(2) + "@P1 BRA %.L_loop\nEXIT"
    (loop,) = found(code)
    assert (loop.header, loop.length) == (5 * INSTRUCTION_BYTES, 6)
    # What stands behind a BSYNC is not what follows it.
    away = "BSSY B0, %.L_met\n@P0 BRA %.L_side\n.L_met:\nEXIT\n.L_side:\nBSYNC B0\n"
    assert not found(away + ".L_loop:\nNOP\nBRA %.L_loop")
    assert found(away.replace("BSYNC B0\n", "") + ".L_loop:\nNOP\nBRA %.L_loop")


def test_what_a_softmax_loop_reports() -> None:
    report = softmax_of(PROGRAM)
    assert (report.elements, report.emulated, report.registers) == (64, 64 + 1 - 32, 0xC0)
    assert report.per_row == 2 * SOFTMAX_LENGTH
    assert report.highest_register == 180
    assert (report.shortest, report.outside, report.spills) == (SOFTMAX_LENGTH, 6, 0)
    place = [one.split()[0] for one in SOFTMAX.splitlines()]

    def percent(index: int) -> float:
        return round(100 * (index + 3) / SOFTMAX_LENGTH, 1)

    assert report.alpha == percent(place.index("STS"))
    assert report.p_stored == tuple(percent(i) for i, one in enumerate(place) if one[:4] == "STTM")
    assert report.p_arrived == (percent(place.index("SYNCS.ARRIVE.TRANS64.A1T0")),)
    assert json.loads(json.dumps(report.describe()))["columns"]["MUFU.EX2"] == 32


def test_alpha_through_tensor_memory() -> None:
    for opcode, narrow in (("STTM.x2", True), ("STTM", True), ("STTM.x8", False)):
        report = softmax_of(PROGRAM.replace("STS [R9], R3", f"{opcode} tmem[UR8], R3"))
        assert (report.alpha is not None) is narrow
        assert len(report.p_stored) == (2 if narrow else 3)


def test_only_the_first_arrival_behind_p_counts() -> None:
    arrival = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ\n"
    report = softmax_of(PROGRAM.replace(arrival, arrival + arrival))
    assert report.p_arrived == (round(100 * (SOFTMAX_LENGTH - 3) / (SOFTMAX_LENGTH + 1), 1),)


def test_the_shortest_way_stays_in_the_loop() -> None:
    code = f""".L_outer:\nMOV R1, R2\n.L_inner:\n@P0 BRA %.L_out
        {repeat(10, "FADD R1, R1, R2")}@P1 BRA %.L_inner\n.L_out:\n@P2 BRA %.L_outer\nEXIT"""
    outer, inner = loops.classify(only(listing(code)))
    assert (outer.shortest, outer.length) == (3, 14)
    assert (inner.shortest, inner.length) == (12, 12)


def test_spills_are_counted() -> None:
    code = PROGRAM.replace("STS [R9], R3", "STL [R1], R3\nLDL R3, [R1]\nSTS [R9], R3")
    assert softmax_of(code).spills == 2


@pytest.mark.parametrize("count, masked", [(60, False), (61, True)])
def test_masked_loops_select_each_element(count: int, masked: bool) -> None:
    code = PROGRAM.replace("STS [R9], R3", repeat(count, "FSEL R4, R4, -INF , P1") + "STS [R9], R3")
    assert len(reports(code, loops.MASKED)) == masked
    assert len(reports(code, loops.SOFTMAX)) == (not masked)


def test_thirty_exponentials_make_a_softmax_loop() -> None:
    store = "STTM.x16 tmem[UR5+0x10]"
    few = PROGRAM.replace(repeat(3, "MUFU.EX2 R6, R6") + store, store)
    assert not reports(few, loops.SOFTMAX)
    assert reports(few.replace("STS [R9], R3", "MUFU.EX2 R6, R6\nSTS [R9], R3"), loops.SOFTMAX)


@pytest.mark.parametrize("selects", [0, 61])
def test_a_loop_without_maxima_makes_gradients(selects: int) -> None:
    """Each score becomes a P and a dS, two conversions to 16 bits; nothing else is emulated."""
    code = PROGRAM.replace(MAXIMA, repeat(selects, "FSEL R4, R4, -INF , P1") + "BAR.SYNC 0x1\n")
    kinds = loops.GRADIENTS, loops.GRADIENTS_MASKED
    assert [len(reports(code, kind)) for kind in kinds] == [not selects, bool(selects)]
    (report,) = reports(code, kinds[bool(selects)])
    assert (report.elements, report.emulated, report.alpha, report.barriers) == (32, 0, None, 1)
    assert report.per_row == 4 * report.length and len(report.p_stored) == 2
    found = code.replace("LDTM.x32", "LDTM.STAT.x32.MAX.F32")
    assert not any(reports(found, kind) for kind in kinds), "LDTM finds the maximum itself"


@pytest.mark.parametrize(
    "count, more, reduces",
    [(8, "", True), (7, "", False), (8, "F2FP.BF16.F32.PACK_AB R6, R6, R7", False)],
)
def test_float32_sums_leave_tensor_memory(count: int, more: str, reduces: bool) -> None:
    code = f""".L_tile:\nLDTM.x32 R4, tmem[UR4]\n{more}\n{repeat(count, "STS.128 [R9], R4")}
        UBLKRED.G.S.ADD.F32.RN [UR4], [UR6], UR8\n@P0 BRA %.L_tile\nEXIT"""
    (loop,) = loops.classify(only(listing(code)))
    assert (loop.kind == loops.REDUCE) == reduces


ROLES = f"""
USETMAXREG.DEALLOC.CTAPOOL 0x30
.L_mma:
{repeat(8, "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]")}
BRA.U UP0, %.L_mma
USETMAXREG.DEALLOC.CTAPOOL 0x50
.L_rescale:
VOTE.ANY P0, P1
@!P0 BRA %.L_skip
LDTM.x16 R4, tmem[UR4]
{repeat(8, "FMUL2 R4, R4, R2")}
STTM.x16 tmem[UR4], R4
.L_skip:
BRA.U UP0, %.L_rescale
.L_copy:
UTMALDG.4D [UR4], [UR6]
@P0 BRA %.L_copy
EXIT
"""


def test_other_roles_and_their_budgets() -> None:
    mma, correction, load = loops.classify(only(listing(ROLES)))
    kinds = [one.kind for one in (mma, correction, load)]
    assert kinds == [loops.MMA, loops.CORRECTION, loops.LOAD]
    assert (mma.length, mma.registers, mma.columns["MMA"]) == (9, 0x30, 8)
    assert (correction.length, correction.shortest, correction.registers) == (13, 3, 0x50)
    assert mma.elements == 0 and mma.per_row == 0


def test_columns_are_those_of_the_table() -> None:
    expected = {
        "IMAD.MOV.U32": "MOV", "IMAD.U32": "MOV", "IMAD": "integer", "IMAD.SHL.U32": "integer",
        "UMOV": "MOV", "UIADD3": "uniform", "MUFU.RCP": "scalar FP", "MUFU.EX2": "MUFU.EX2",
        "FMNMX3": "FMNMX3", "BAR.ARV": "sync", "BRA.U": "branch", "STL": "spill", "QUX": "other",
        "UTCHMMA.2CTA": "MMA",
    }  # fmt: skip
    code = only(listing("\n".join(f"{opcode} R1" for opcode in expected)))
    assert {one.opcode: loops.column_of(one) for one in code.instructions} == expected


# Resources in the ELF file.


def elf(kernels: dict[str, tuple[int, int, int]]) -> bytes:
    """A cubin of attributes alone. kernels: name -> (registers, frame bytes, static SMEM bytes)."""
    names = ["", *kernels]
    strings, symbols, info = b"\0", b"", struct.pack("<BBH", 3, 0x37, 0x80)
    for index, name in enumerate(names):
        symbols += struct.pack("<IBBHQQ", len(strings) if name else 0, 0, 0, 1, 0, 0)
        strings += name.encode() + b"\0" if name else b""
        if name:
            registers, frame, _ = kernels[name]
            for code, value in ((0x2F, registers), (0x11, frame), (0x12, frame + 8)):
                info += struct.pack("<BBHII", 4, code, 8, index, value)
    parts = [("", 0, b"", 0), (".strtab", 3, strings, 0), (".symtab", 2, symbols, 1)]
    parts.append((".nv.info", 1, info, 0))
    parts += [(f".nv.info.{name}", 1, b"", 0) for name in kernels]
    parts += [(f".nv.shared.{name}", 8, bytes(size), 0) for name, (*_, size) in kernels.items()]
    titles = b"".join(name.encode() + b"\0" for name, *_ in parts) + b".shstrtab\0"
    parts.append((".shstrtab", 3, titles, 0))
    body, headers = b"", b""
    for name, kind, data, link in parts:
        title = titles.index(name.encode() + b"\0")
        place = (0, 0, 64 + len(body), len(data))
        headers += struct.pack("<IIQQQQIIQQ", title, kind, *place, link, 0, 1, 0)
        body += data
    start = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body))
    tail = struct.pack("<HHH", 64, len(parts), len(parts) - 1)
    return start.ljust(58, b"\0") + tail + body + headers


def test_resources_of_a_cubin() -> None:
    one, two = cubin.read_resources(elf({"b": (168, 0, 1024), "a": (128, 16, 0)}))
    assert one == cubin.Resources("a", 128, 16, 24, 0)
    assert two == cubin.Resources("b", 168, 0, 8, 1024)


def test_resources_of_something_else() -> None:
    with pytest.raises(ValueError, match=r"not a cubin: begins with b'\.ver'"):
        cubin.read_resources(b".version 8.8")


# With and without a disassembler.


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place on PATH for a stand-in of nvdisasm."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "nvdisasm"


def install(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_a_kernel_with_its_machine_code(tool: Path) -> None:
    (tool.parent / "out.txt").write_text(listing(PROGRAM + "STL [R1], R2\nNOP"))
    install(tool, f"cat {tool.parent}/out.txt")
    (code,) = codegen.read_kernels(elf({KERNEL: (128, 16, 1024)}))
    assert code.problem == "" and (code.spill_loads, code.spill_stores) == (0, 1)
    assert code.instructions == len(only(listing(PROGRAM)).instructions) + 1, "NOP is left out"
    softmax = code.loop(loops.SOFTMAX)
    assert softmax is not None and softmax.length == SOFTMAX_LENGTH
    assert code.loop(loops.MMA) is None
    assert [one.kind for one in code.known_loops] == [loops.SOFTMAX]
    plain = json.loads(json.dumps(code.with_smem({code.resources.name: 5}).describe()))
    assert (plain["frame_bytes"], plain["dynamic_smem_bytes"], len(plain["loops"])) == (16, 5, 1)


def test_budgets_that_the_compiler_ignores(tool: Path) -> None:
    """Planted: machine code without one of two budgets, or both. Without PTX none is asked."""
    asked = ptx_report.read(PTX)[0].budgets
    kept = [f"USETMAXREG.DEALLOC.CTAPOOL {registers:#x}\n" for _, registers in asked]
    install(tool, f"cat {tool.parent}/out.txt")
    for present in (kept, kept[:1], []):
        (tool.parent / "out.txt").write_text(listing("".join(present) + "EXIT"))
        (code,) = codegen.read_kernels(elf({KERNEL: (128, 0, 0)}), PTX)
        missing = {registers for _, registers in asked[len(present) :]}
        assert set(code.ignored_budgets) == missing == set(code.describe()["ignored_budgets"])
    (code,) = codegen.read_kernels(elf({KERNEL: (128, 0, 0)}))
    assert code.ignored_budgets == ()


def test_kernels_of_one_module_are_counted_apart(tool: Path) -> None:
    (tool.parent / "out.txt").write_text(listing("EXIT", "a") + listing("STL [R1], R2\nEXIT", "b"))
    install(tool, f"cat {tool.parent}/out.txt")
    one, two = codegen.read_kernels(elf({"a": (128, 0, 0), "b": (128, 8, 0)}))
    assert (one.instructions, one.spill_stores) == (1, 0)
    assert (two.instructions, two.spill_stores) == (2, 1)


def test_without_a_disassembler_the_rest_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "find_disassembler", lambda: None)
    (code,) = codegen.read_kernels(elf({KERNEL: (128, 16, 0)}), PTX)
    assert code.resources.frame_bytes == 16 and code.ptx is not None
    assert (code.instructions, code.spill_loads, code.loops) == (None, None, ())
    assert "pip install nvidia-cuda-nvdisasm" in code.problem


def test_a_disassembler_that_refuses(tool: Path) -> None:
    install(tool, "echo 'nvdisasm fatal: unknown arch' >&2; exit 255")
    text, problem = cubin.disassemble(b"anything")
    assert text is None and problem.endswith("refuses the cubin: nvdisasm fatal: unknown arch")


def test_a_file_that_cannot_be_executed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    packaged = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    unpacked = tmp_path / "toolkit" / "bin" / "nvdisasm"
    for file in (packaged, unpacked):
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\n")
    packaged.chmod(0o755)
    unpacked.chmod(0o644)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert cubin.find_disassembler() == packaged


# PTX.

WAIT = """{ .reg .pred P; WAIT:
    mbarrier.try_wait.parity.shared.b64 P, [%r9], %r2; @P bra DONE; bra WAIT; DONE: }"""
PTX = """
.version 9.4
.target sm_100a
.extern .shared .align 1024 .b8 memory[];
.visible .entry KERNEL(.param .b64 KERNEL_param_0)
.reqntid 384, 1, 1
{
  .reg .pred %p<4>; .reg .b32 %r<40>; // registers; not instructions
  mov.b32 %r1, 128;  mov.b32 %r2, %tid.x;
  mbarrier.init.shared.b64 [%r9], %r1;
  mbarrier.init.shared.b64 [%r9+8], 1;
  mbarrier.init.shared.b64 [%r9+16], %r2;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 512;
  @%p1 bra $OTHER;
  setmaxnreg.inc.sync.aligned.u32 192;
$KV:
  WAIT WAIT
  ex2.approx.ftz.f32 %r3, %r3; fma.rn.f32x2 %rd1, %rd1, %rd2, %rd3;
  mov.b64 {%r4, %r5}, %rd1; /* not; an end } */
  @%p2 bra $KV;
  ret;
$OTHER:
  setmaxnreg.dec.sync.aligned.u32 64;
  brx.idx %r2, $TABLE;
$TABLE: .branchtargets $A, $B;
$A: add.s32 %r3, %r3, 1;
  bra.uni $OTHER;
$B: ADDS
  bra.uni $OTHER;
}
""".replace("KERNEL", KERNEL).replace("  WAIT WAIT", WAIT + WAIT)
PTX = PTX.replace("ADDS", "add.s32 %r3, %r3, 1;" * 8)


def test_ptx_of_a_kernel() -> None:
    (report,) = ptx_report.read(PTX)
    assert (report.name, report.threads) == (KERNEL, 384)
    assert report.budgets == (("inc", 192), ("dec", 64))
    assert report.mbarrier_counts == (128, 1, None)
    assert report.tmem_columns == (512,)
    softmax, other = report.loops
    # Two waits of three instructions with labels of the same names, three operations, the branch.
    assert (softmax.length, softmax.registers) == (10, 192)
    assert softmax.opcodes["ex2.approx"] == 1 and softmax.opcodes["fma.f32x2"] == 1
    assert softmax.opcodes["mbarrier.try_wait"] == 2
    assert other.opcodes == {"add": 9, "bra": 2, "brx": 1, "setmaxnreg.dec": 1}
    assert json.loads(json.dumps(report.describe()))["loops"][1]["length"] == 13


@pytest.mark.parametrize(
    "old, new, field, value",
    [
        ("[%r9+8], 1", "[%r9+8], 2", "mbarrier_counts", (128, 2, None)),
        ("%r1, 128;", "%r1, 128; mov.b32 %r1, 64;", "mbarrier_counts", (None, 1, None)),
        ("], 512;", "], 256;", "tmem_columns", (256,)),
        ("u32 64;", "u32 72;", "budgets", (("inc", 192), ("dec", 72))),
        ("384, 1, 1", "128, 2, 2", "threads", 512),
    ],
)
def test_a_changed_number_is_seen(old: str, new: str, field: str, value: object) -> None:
    changed = PTX.replace(old, new)
    assert changed != PTX
    assert getattr(ptx_report.read(changed)[0], field) == value


def test_ptx_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no \.entry in '\.version 9\.4"):
        ptx_report.read(".version 9.4\n.func helper() { ret; }")


LAUNCH = """
  llvm.func @other() { %c = llvm.mlir.constant(16 : i64) : i64 }
  %c = llvm.mlir.constant(232448 : i64) : i64
  %1 = llvm.getelementptr %0[0, 1, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<RECORD>
  llvm.store %d, %1 : i32, !llvm.ptr
  %2 = llvm.getelementptr %0[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<RECORD>
  llvm.store %c, %2 : i64, !llvm.ptr
  %3 = llvm.mlir.addressof @kernels_kernel_one : !llvm.ptr
  %4 = llvm.call @_cudaLaunchKernelEx(%0, %3, %5) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  %d = llvm.mlir.constant(8 : i64) : i64
  %6 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<RECORD>
  llvm.store %d, %6 : i64, !llvm.ptr
  %7 = llvm.mlir.addressof @kernels_kernel_two : !llvm.ptr
  %8 = llvm.call @_cudaLaunchKernelEx(%9, %7, %5) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
""".replace("RECORD", "(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)")


def test_dynamic_shared_memory_of_the_launches() -> None:
    """Each kernel's own; None where it is known at run time only."""
    assert codegen.launch_smem_bytes(LAUNCH) == {"kernel_one": 232448, "kernel_two": 8}
    unknown = codegen.launch_smem_bytes(LAUNCH.replace("store %c", "store %arg1"))
    assert unknown == {"kernel_one": None, "kernel_two": 8}
    assert codegen.launch_smem_bytes("module {}") == {}
