"""The zoo beside compute-sanitizer: what is launched there, and how a tool's words are read."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bug_zoo import GROUPS
from lab.hardware.sanitizer_zoo import BLACKWELL, HANGS, kernels, read, used
from tests.emulator.kernels import aligned, run_ptx

KERNELS = kernels("sm_100a")


def test_all_but_blackwell_s_are_there() -> None:
    """Each once."""
    names = [bug.name for group, bugs in GROUPS.items() if group != BLACKWELL for bug in bugs]
    assert [one["name"] for one in KERNELS] == names and len(names) >= 50


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one["name"])
def test_what_is_launched_has_the_same_bug(kernel: dict[str, object]) -> None:
    """The store behind a load changes no finding: the emulator still tells broken from mended."""
    if kernel["kind"] in HANGS or kernel["fresh"]:
        return
    for variant in ("broken", "mended"):
        words = [aligned(np.zeros(256, np.uint32)) for _ in range(2)]
        report = run_ptx(
            str(kernel[variant]), words, (int(str(kernel["grid"])), 1, 1),
            (int(str(kernel["threads"])), 1, 1), (int(str(kernel["cluster"])), 1, 1),
            smem=4096, collect=True, max_steps=5000,
        )  # fmt: skip
        kinds = {finding.kind for finding in report.findings if not finding.excuse}
        wanted = kernel["severity"] != "formal" and variant == "broken"
        assert (kernel["kind"] in kinds) == wanted, (variant, kinds)


def test_dropped_loads_are_stored() -> None:
    """Only those that nothing reads."""
    loads = "ld.shared.b32 %r4, [%r2]; ld.shared.b32 %r5, [%r2]; add.u32 %r6, %r5, 1;"
    text = f"  {loads}\n  ret;\n}}"
    assert used(text).count("st.global") == 1 and "st.global.b32 [%rd63], %r4;" in used(text)


def test_a_tool_s_words() -> None:
    """Counts, outcomes and first lines, for one kernel and for several."""
    text = """========= COMPUTE-SANITIZER
@ one
========= Error: Race reported between Write access at kernel+0x10
=========     and Read access at kernel+0x20
@@ ended
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
    found = read(text)
    assert (found["found"], found["outcome"], found["launched"]) == (1, "ended", 1)
    assert found["says"][0].startswith("Race reported between Write access")
    assert list(found["by_kernel"]) == ["one"]
    assert read("Traceback ...")["outcome"] == "no launch"
    clean = read("@ a\n@@ ended\n@ b\n@@ hangs\n========= ERROR SUMMARY: 0 errors\n")
    assert (clean["found"], clean["outcome"], clean["by_kernel"]) == (0, "hangs", {})
