"""Kernels and reports as plain data: lists, dictionaries, text and numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fa4.emulator.errors import EmulatorError, KernelFinding, UnsupportedInstruction
from fa4.emulator.execute import Report, load_module, load_program
from fa4.emulator.machine.coverage import KernelCoverage
from fa4.emulator.ptx.syntax import Kernel, Module
from fa4.emulator.tools.roles import find_roles
from fa4.emulator.translate.layout import lay_out_variables
from fa4.emulator.translate.link import link
from fa4.emulator.warp_lanes import Array

TOP_OPCODES = 16


def describe_kernels(ptx: str) -> dict[str, Any]:
    """The kernels of a PTX text: what a launch needs, what they consist of, what is unsupported.

    Raises PtxError or LaunchError for a text that the emulator cannot read at all.
    """
    module = load_module(ptx)
    return {
        "version": ".".join(map(str, module.version)),
        "target": module.target,
        "kernels": [_describe_kernel(module, kernel) for kernel in module.kernels.values()],
    }


def _describe_kernel(module: Module, kernel: Kernel) -> dict[str, Any]:
    linked, routines = link(module, kernel)
    variables = [*module.variables, *linked.variables]
    mix = Counter(instruction.opcode for instruction in kernel.instructions)
    return {
        "name": kernel.name,
        "parameters": [
            {"name": p.name, "type": p.type, "bytes": p.size_bytes, "align_bytes": p.align_bytes}
            for p in kernel.parameters
        ],
        "static_smem_bytes": lay_out_variables(module, linked, routines).static_shared_bytes,
        "uses_dynamic_smem": any(v.space == "shared" and v.size_bytes is None for v in variables),
        "registers": dict(Counter(kernel.registers.values()).most_common()),
        "directives": {name: list(values) for name, values in kernel.directives.items()},
        "instructions": len(kernel.instructions),
        "mix": dict(mix.most_common()),
        "unsupported": _unsupported(module, kernel),
    }


def _unsupported(module: Module, kernel: Kernel) -> list[dict[str, Any]]:
    """Instructions that keep the kernel from being loaded."""
    try:
        load_program(module.text, kernel.name)
    except UnsupportedInstruction as error:
        return [{"line": line, "text": text, "reason": why} for line, text, why in error.problems]
    except EmulatorError as error:
        return [{"line": 0, "text": "", "reason": str(error)}]
    return []


def describe_report(report: Report, ptx: str) -> dict[str, Any]:
    """A report: findings with their PTX lines, executed thread-instructions, roles, speed."""
    total = report.instructions.total()
    return {
        "kernels": report.kernels,
        "findings": describe_findings(report.findings, ptx),
        "accepted": describe_accepted(report.accepted),
        "ended_early": report.ended_early,
        "thread_instructions": total,
        "instructions": dict(report.instructions.most_common()),
        "roles": [
            {
                "name": role.name,
                "warps": list(role.warps),
                "warp_instructions": role.counts.total(),
                "top": dict(role.counts.most_common(TOP_OPCODES)),
            }
            for role in find_roles(report.by_warp)
        ],
        "work": [dict(vars(work)) for work in report.work],
        "coverage": [describe_coverage(coverage) for coverage in report.coverage],
        "steps": report.steps,
        "seconds": report.seconds,
        "load_seconds": report.load_seconds,
        "thread_instructions_per_s": total / report.seconds if report.seconds else 0.0,
        "output": report.output,
    }


def describe_coverage(coverage: KernelCoverage) -> dict[str, Any]:
    """How much of a kernel ran, and what did not."""
    return {
        "kernel": coverage.kernel,
        "instructions": coverage.instructions,
        "reached": coverage.reached,
        "missed": [dict(vars(one)) for one in coverage.missed],
        "branches": [dict(vars(one)) for one in coverage.branches],
    }


def describe_findings(findings: list[KernelFinding], ptx: str) -> list[dict[str, Any]]:
    """Findings with the text of their PTX line."""
    lines = ptx.splitlines()
    return [
        {
            "kind": finding.kind,
            "severity": finding.severity,
            "message": finding.message,
            "line": finding.line,
            "text": finding.instruction or _line(lines, finding.line) or finding.text,
            "source": finding.source,
            "cta": finding.cta,
            "warp": finding.warp,
            "kernel": finding.kernel,
            "why": finding.why,
        }
        for finding in findings
    ]


def describe_accepted(accepted: list[tuple[KernelFinding, str]]) -> list[dict[str, Any]]:
    """Accepted findings, each with what covers it."""
    described = describe_findings([finding for finding, _ in accepted], "")
    return [{**one, "reason": reason} for one, (_, reason) in zip(described, accepted, strict=True)]


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def describe_array(name: str, array: Array, before: Array) -> dict[str, Any]:
    """What a kernel did to an array: how many elements changed, and their range now."""
    is_integer = array.dtype.kind in "iu"
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = array if is_integer else array.astype(np.float64)
    finite = wide if is_integer else wide[np.isfinite(wide)]
    bits = f"u{array.itemsize}"
    return {
        "name": name,
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "changed": int((array.view(bits) != before.view(bits)).sum()),
        "not_finite": int(wide.size - finite.size),
        "min": finite.min().item() if finite.size else None,
        "max": finite.max().item() if finite.size else None,
    }
