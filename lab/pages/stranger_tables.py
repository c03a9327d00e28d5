"""What became of the test suites of others in the emulator: the table in docs/how-to/suites.md.

`python -m lab.pages.stranger_tables` writes it from the record of `lab.benchmarks.strangers`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lab.benchmarks.strangers import PROJECTS
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "how-to" / "suites.md"
# What an error's text says, and what that is; the first that fits.
REASONS = (
    (r"from pytest-timeout", "takes longer than its time here"),
    (r"^the process died", "the process died"),
    (r"EmulationFailed", "a finding"),
    (r"nsupported (instruction|\w+)", "an instruction that the emulator does not run"),
    (r"_cuda_getDevice|[Ii]nductor|[Dd]ynamo", "`torch.compile` for a GPU, which torch has not"),
    (r"Could not run 'aten::", "calls an operator of torch that has no CPU kernel"),
    (r"unexpected keyword argument 'device'", "written for another version of transformers"),
    (r"elapsed_time|times are unknown", "asks for times"),
)
OTHER = "another error"
# What was looked at of findings: in these kernels, by their names.
_IN_STEP = (
    "right: within a warp lanes read what another lane then overwrites in place; the warp running "
    "in step orders that, no bar.warp.sync does"
)
JUDGED = {
    "causal_conv1d_update_kernel": _IN_STEP,
    "chunk_kda_fwd_kernel_intra_sub_chunk": _IN_STEP,
    "layer_norm_bwd_kernel": (
        "right, and no hazard: tiles reach into the rows of the next program, and both store the "
        "same there; of stores that overlap in part, the rest was compared, too, which is mended"
    ),
    "liger_cross_entropy_kernel": (
        "right: of a row that one warp holds, lanes read the target's element for the loss and "
        "another one overwrites it; the warp running in step orders that, no bar.warp.sync does"
    ),
    "_attn_res_fwd_kernel": (
        "right: several lanes store what they hold of one sum, and a fused multiply-add on one "
        "side of a butterfly gives each another rounding; here the sum cancels, and they are apart"
    ),
    "parallel_attn_fwd_kernel": (
        "right: as Triton 3.7.1 pipelines a loop, tensor memory is read ahead of it, and here the "
        "loop has no round in which a product would have written it"
    ),
    "parallel_based_fwd_kernel": (
        "right: Triton 3.7.1 puts the fence.proxy.async of V in front of the wait for its copies "
        "(3.9 does not); what it reads of tensor memory ahead of a loop without a round is not used"
    ),
}


def reason_of(why: str) -> str:
    """Why a test failed, in a few words."""
    return next((text for pattern, text in REASONS if re.search(pattern, why)), OTHER)


def finding_of(why: str) -> str:
    """Of a finding that failed a test: kernel, kind and place, without those of lesser severity."""
    kernel = re.search(r"EmulationFailed: (\w+)", why)
    kinds = sorted(set(re.findall(r"^  ([a-z-]+): ", why, re.MULTILINE)))
    name = kernel[1] if kernel else ""
    kind = ", ".join(kinds) or "beyond what is recorded"
    return f"`{name}`: {kind}; {JUDGED.get(name, 'not judged')}"


def _failures(tests: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, test in tests.items():
        if test["outcome"] == "failed":
            why = " ".join(test["why"].split("\n")[0].split())
            reason = reason_of(test["why"])
            if reason == "a finding":
                why = finding_of(test["why"])
            yield reason, name, why


def render_counts() -> str:
    """A row for each project: how many tests it has, ran, and what became of them."""
    record: dict[str, Any] = read_record("strangers")
    lines = [
        f"Of each file at most {record['per_file']} tests, {record['limit_s']} seconds for each, "
        f"{record['project_s']} for a project.",
        "",
        "| project | commit | Triton | test files | tests in them | run | passed | of these with "
        "launches | skipped by itself | failed, and why |",
        "|" + "---|" * 10,
    ]
    for name, found in record["projects"].items():
        tests = found["tests"]
        outcomes = Counter(test["outcome"] for test in tests.values())
        launched = sum(t["outcome"] == "passed" and t["launches"] > 0 for t in tests.values())
        reasons = Counter(reason for reason, *_ in _failures(tests))
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
        files = len({test.partition("::")[0] for test in tests})
        cells = (
            f"[{name}]({found['url']})", f"`{found['commit'][:7]}`", found["triton"],
            f"{files} of {found['files']}", found["collected"], len(tests), outcomes["passed"],
            launched, outcomes["skipped"], f"{outcomes['failed']} ({why or 'none'})",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    needs = [
        f"{one.name} runs with Triton {one.triton}: {one.why_triton}."
        for one in PROJECTS if one.triton and one.name in record["projects"]
    ]  # fmt: skip
    return "\n".join([*lines, "", *needs])


def render_failures() -> str:
    """Every test that failed, with its reason."""
    record: dict[str, Any] = read_record("strangers")
    lines = ["| project | test | why | what it said |", "|---|---|---|---|"]
    for project, found in record["projects"].items():
        for reason, name, why in sorted(_failures(found["tests"])):
            file, _, test = name.partition("::")
            said = "" if reason.startswith("takes longer") else why.replace("|", "\\|")
            said = said if reason == "a finding" else said[:160]
            said = said if said.startswith("`") or not said else f"`{said.replace('`', '')}`"
            test = test.replace("|", "\\|")
            lines.append(f"| {project} | `{file.rpartition('/')[2]}::{test}` | {reason} | {said} |")
    return "\n".join(lines)


TABLES = MarkedTables(
    "python -m lab.pages.stranger_tables",
    {"suites": render_counts, "failures": render_failures},
)


if __name__ == "__main__":
    TABLES.write(PAGE)
