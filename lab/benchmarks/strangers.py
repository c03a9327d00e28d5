"""Test suites of Triton projects that know nothing of fa4, with `pytest --fa4-emulate`, unmodified.

    python -m lab.benchmarks.strangers FOLDER [--only NAME]

FOLDER has a checkout of each project, at the commit below, under its name (`git clone`). Of each
test file the smallest tests run, so many of them and so long as said here; what became of each is
the record. Projects are on the Python path, not installed; Triton is that of `make conformance`,
or the version that a project needs, installed into FOLDER/triton-VERSION
(`pip install --no-deps --target`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.benchmarks.first_launch import PROGRAM
from lab.foreign import SITE
from lab.records import read_record, record_path, write_record

PER_FILE, LIMIT_S = 2, 120
TOGETHER = 3  # projects at a time
PROJECT_S = 3000  # the tests that have not begun by then are not run
MOST_CRASHES = 5


@dataclass(frozen=True, kw_only=True)
class Project:
    """source: where its package lies. triton: a version other than that of the other tests, and
    why. files: patterns. options: of its own, for pytest. variables: of the environment."""

    name: str
    url: str
    commit: str
    source: str
    files: tuple[str, ...]
    triton: str = ""
    why_triton: str = ""
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def _named(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names.split())


PROJECTS = (
    Project(
        name="Liger-Kernel", url="https://github.com/linkedin/Liger-Kernel",
        commit="ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c", source="src",
        files=_named(
            "test/transformers",
            "attn_res cross_entropy dyt fused_add_rms_norm fused_linear_cross_entropy "
            "fused_linear_jsd fused_moe fused_neighborhood_attention geglu group_norm grpo_loss "
            "jsd kl_div layer_norm llama4_rope mhc multi_token_attention poly_norm qwen2vl_mrope "
            "relu_squared rms_norm rope softmax sparsemax swiglu tvd",
        ),
    ),
    Project(
        name="flash-linear-attention", url="https://github.com/fla-org/flash-linear-attention",
        commit="bc3b101dcb713ddc5bd8924b66754eb68b5ccf89", source=".",
        files=(
            *_named("tests/modules", "activation conv cross_entropy kl_div l2norm l2warp layernorm "
                    "layernorm_gated rotary token_shift grpo"),
            *_named("tests/ops", "attn based delta gdn gla gsa hgrn kda linear_attn retention "
                    "rwkv7 simple_gla solve_tril ttt"),
        ),
        triton="3.7.1",
        why_triton="an autotuner of its own names a key that is no argument, which 3.9 refuses",
    ),
    Project(
        name="FlagGems", url="https://github.com/FlagOpen/FlagGems",
        commit="532ff438c70343d7aec9becdabb76a71225a0553", source="src",
        files=_named(
            "tests", "unary_pointwise_ops binary_pointwise_ops norm_ops reduction_ops blas_ops "
            "general_reduction_ops special_ops attention_ops quant tensor_constructor_ops",
        ),
        options=("--mode", "quick"), triton="3.5.1",
        why_triton="it generates source that 3.7 and later do not compile",
        # It asks `nvidia-smi` for the vendor otherwise.
        variables=(("GEMS_VENDOR", "nvidia"),),
    ),
)  # fmt: skip


def run(project: Project, folder: Path) -> dict[str, Any]:
    """What became of its tests. A process that dies has its test noted and goes on behind it."""
    left, tests, collected = list(project.files), {}, {}
    for _ in range(MOST_CRASHES):
        found, died = _run_files(project, folder / project.name, folder, left)
        collected |= found.get("collected", {})
        tests |= found.get("tests", {})
        under_way = [name for name, test in tests.items() if not test["outcome"]]
        for name in under_way:
            if died:
                tests[name] |= {"outcome": "failed", "why": "the process died"}
            else:
                del tests[name]  # the time of the project was over
        if not died or not under_way:
            break
        # What ran, and the files in which it died, do not run again.
        left = [file for file in left if not any(name.startswith(f"{file}::") for name in tests)]
        if not left:
            break
    return {
        "url": project.url, "commit": project.commit,
        "triton": project.triton or _version_of_triton(), "files": len(project.files),
        "collected": sum(collected.values()), "tests": tests,
    }  # fmt: skip


def _run_files(
    project: Project, checkout: Path, folder: Path, files: list[str]
) -> tuple[dict[str, Any], bool]:
    """The outcomes, and whether the process died."""
    own = [folder / f"triton-{project.triton}"] if project.triton else []
    paths = [*own, ROOT, SITE, checkout / project.source]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1",
        "TRITON_DEFAULT_FP_FUSION": "1", **dict(project.variables),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes.json"
        command = [
            sys.executable, "-m", "pytest", "--fa4-emulate", "-q", "-W", "ignore",
            "-p", "lab.benchmarks.strangers_chosen", "--chosen", str(PER_FILE),
            "--outcomes", str(outcomes), "-p", "no:cacheprovider",
            "--timeout", str(LIMIT_S), "-o", "log_cli=false",
            *project.options, *files,
        ]  # fmt: skip
        variables["TRITON_CACHE_DIR"] = str(Path(scratch) / "triton")
        process = subprocess.Popen(command, cwd=checkout, env=variables)
        try:
            died = process.wait(PROJECT_S) not in (0, 1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            died = False
        found = json.loads(outcomes.read_text()) if outcomes.is_file() else {}
    return found, died


def _version_of_triton() -> str:
    names = [path.name for path in SITE.glob("triton-*.dist-info")]
    return names[0].removeprefix("triton-").removesuffix(".dist-info") if names else "none"


def main() -> None:
    """Runs the projects and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="checkouts, by name")
    parser.add_argument("--only", help="one project; the others stay as they are recorded")
    options = parser.parse_args()
    known = read_record("strangers")["projects"] if options.only else {}
    chosen = [project for project in PROJECTS if options.only in (None, project.name)]
    # The emulator compiles its checks once for a machine, not in the time of somebody's test.
    warm = [sys.executable, "-c", PROGRAM, "checks"]
    subprocess.run(warm, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    with ThreadPoolExecutor(TOGETHER) as pool:
        made = list(pool.map(lambda one: run(one, options.folder.resolve()), chosen))
    projects = {**known, **dict(zip([one.name for one in chosen], made, strict=True))}
    report = {
        "per_file": PER_FILE,
        "limit_s": LIMIT_S,
        "project_s": PROJECT_S,
        "projects": projects,
    }
    write_record(record_path("strangers"), report, ("torch", "numba", "numpy"))


if __name__ == "__main__":
    main()
