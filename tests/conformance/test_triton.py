"""Triton's kernels in the emulator, by each way in: the context, pytest, the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa4 import emulator
from lab.foreign import ROOT, SITE

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SITE)])


@pytest.fixture
def kernels() -> Iterator[Any]:
    """The kernels; Triton is imported by this."""
    from tests.conformance import triton_kernels

    yield triton_kernels


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_products_of_host_descriptors(arch: str, kernels: Any) -> None:
    """A GEMM through TMA and the tensor core of either machine; only formal findings."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    generator = torch.Generator().manual_seed(3)
    a = torch.randn(128, 192, generator=generator).half()
    b = torch.randn(192, 256, generator=generator).half()
    c = torch.full((128, 256), float("nan"), dtype=torch.float16)
    maps = [
        TensorDescriptor.from_tensor(x, box)
        for x, box in ((a, [128, 64]), (b, [64, 128]), (c, [128, 128]))
    ]
    with emulator.emulate(arch=arch) as session:
        kernels.matmul[(1, 2)](*maps, 192, 128, 128, 64)
    exact = a.double() @ b.double()
    assert (c.double() - exact).abs().max() <= 2**-11 * exact.abs().max() + 1e-3
    (report,) = session.reports
    unit = "tcgen05.mma" if arch == "sm_100a" else "wgmma.mma_async"
    assert any(opcode.startswith(unit) for opcode in report.instructions)
    assert {finding.severity for finding in report.findings} <= {"style", "formal"}
    with emulator.emulate(arch=arch, fail_on="formal"), pytest.raises(emulator.EmulationFailed):
        kernels.matmul[(1, 2)](*maps, 192, 128, 128, 64)


def test_functions_that_are_not_inlined(kernels: Any) -> None:
    """Calls inside calls, with barriers in them."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(2))
    out = torch.full((512,), float("nan"))
    with emulator.emulate() as session:
        kernels.centre[(1,)](x, out, 512)
    exact = x.double() - x.double().mean() + 2 * x.double().sum()
    assert (out.double() - exact).abs().max() < 1e-3
    (report,) = session.reports
    assert not report.findings and report.instructions["call.uni"] >= 3 * 128


def test_pointers_masks_and_tuning(kernels: Any) -> None:
    """Ordinary kernels on odd sizes; autotuning keeps a configuration that can be launched."""
    x, y = torch.randn(1001), torch.randn(1001)
    out = torch.full((1001,), float("nan"))
    with emulator.emulate() as session:
        kernels.add[(8,)](x, y, out, 1001, 128)
        assert torch.equal(out, x + y)
        kernels.scale[lambda meta: (-(-1001 // meta["SIZE"]),)](x, out, 1001, 3.0)
        assert torch.equal(out, 3 * x)
        kernels.softmax[(7,)](x, out, 143, 256)
        assert torch.allclose(out.view(7, 143), x.view(7, 143).softmax(-1), atol=1e-6)
        kernels.add[(0,)](x, y, out, 1001, 128)  # Triton launches nothing
    assert len(session.reports) == 3


class Held:
    """As pointwise libraries hold a tensor: what Triton takes is its type and its address."""

    def __init__(self, tensor: torch.Tensor, offset: int) -> None:
        self.held, self.offset, self.dtype = tensor, offset, tensor.dtype

    def data_ptr(self) -> int:
        """Of the element that it begins with."""
        return self.held.data_ptr() + self.offset * self.held.element_size()


def test_objects_that_hold_a_tensor(kernels: Any) -> None:
    """They are passed as the tensor, from their offset on; one that holds none is refused."""
    x, out = torch.arange(300.0), torch.zeros(300)
    with emulator.emulate():
        kernels.add[(2,)](Held(x, 7), x, Held(out, 100), 200, 128)
        nothing = Held(x, 0)
        nothing.held = SimpleNamespace(data_ptr=lambda: 4096, element_size=lambda: 4)
        with pytest.raises(emulator.LaunchError, match="is a Held, which holds no tensor"):
            kernels.add[(2,)](nothing, x, out, 200, 128)
    assert torch.equal(out[100:], x[7:207] + x[:200]) and not out[:100].any()


def test_timers_of_triton(kernels: Any) -> None:
    """They launch nothing inside, and are Triton's own again afterwards."""
    import triton.testing

    x, out, before = torch.randn(128), torch.zeros(128), triton.testing.do_bench
    with emulator.emulate() as session:
        inside = triton.testing.do_bench
        times = [
            inside(lambda: kernels.add[(1,)](x, x, out, 128, 128), **options)
            for options in ({}, {"quantiles": (0.2, 0.8)}, {"return_mode": "all"})
        ]
    assert times == [1.0, [1.0, 1.0], [1.0]] and not session.reports and not out.any()
    assert triton.testing.do_bench is before is not inside
    with pytest.raises(RuntimeError):  # no driver
        inside(lambda: None)


def test_descriptors_that_the_kernel_makes(kernels: Any) -> None:
    """They lie in scratch memory, which the emulator provides."""
    import triton

    triton.set_allocator(lambda size, alignment, stream: None)
    x = torch.arange(64 * 32, dtype=torch.float32).view(64, 32)
    out = torch.zeros_like(x)
    with emulator.emulate():
        kernels.copy_tile[(2,)](x, out, 64, 32, 32, 32)
    assert torch.equal(out, x)


def test_what_is_wrong_is_named(kernels: Any) -> None:
    """A race between programs, with the line of the kernel; a load behind the end."""
    with (
        emulator.emulate(schedule="random", seed=1),
        pytest.raises(emulator.EmulationFailed) as failure,
    ):
        kernels.shift[(4,)](torch.zeros(513), 128)
    (finding, *_) = failure.value.findings
    assert finding.kind == "race" and "triton_kernels.py" in finding.source
    with emulator.emulate(), pytest.raises(emulator.EmulationFailed, match="behind the end of x"):
        kernels.shift[(4,)](torch.zeros(512), 128)


def test_a_kernel_that_outlives_the_context(kernels: Any) -> None:
    """A compiled kernel cannot be launched after the context, nor does a driver stay behind."""
    from triton.runtime import driver

    before = driver._active
    x = torch.ones(128)
    with emulator.emulate():
        compiled = kernels.add[(1,)](x, x, x.clone(), 128, 128)
    assert driver._active is before
    with pytest.raises(emulator.LaunchError, match="inside emulate"):
        compiled.run(1, 1, 1, 0, "add", None, None, None, None, x, x, x, 128, 128)
    with pytest.raises(RuntimeError), emulator.emulate():
        raise RuntimeError
    assert driver._active is before and not torch.cuda.is_available()


def test_a_suite_for_gpus(tmp_path: Path) -> None:
    """pytest --fa4-emulate: tests that ask for a GPU run, the one with a wrong kernel fails."""
    (tmp_path / "test_gpu.py").write_text(
        """
import pytest, torch, triton
from tests.conformance import triton_kernels as kernels

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("count", [1, 300])
def test_add(count):
    x, y = torch.randn(count, device="cuda"), torch.randn(count).cuda()
    out = torch.empty_like(x)
    assert out.is_cuda and out.device.type == "cuda"
    kernels.add[(triton.cdiv(count, 128),)](x, y, out, count, 128)
    torch.testing.assert_close(out.cpu(), x.cpu() + y.cpu())

def test_wrong(fa4_emulation):
    kernels.shift[(1,)](torch.zeros(128, device="cuda"), 128)
"""
    )
    command = ["-m", "pytest", "-q", "--fa4-emulate", "-p", "no:cacheprovider", "test_gpu.py"]
    done = run(*command, cwd=tmp_path)
    assert "2 passed" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "3 launches of 2 kernels on an emulated sm_100a; findings: 1 error" in done.stdout
    assert re.search(r"add: (\d+) of \1 instructions ran", done.stdout), done.stdout
    files = ["--fa4-sarif=a.sarif", "--fa4-coverage=lines.html", "--fa4-baseline=known.json"]
    done = run(*command, *files[:2], "--fa4-ignore=*:triton_kernels.py", cwd=tmp_path)
    assert "3 passed" in done.stdout and "findings: none; 2 accepted" in done.stdout, done.stdout
    log = json.loads((tmp_path / "a.sarif").read_text())
    results = log["runs"][0]["results"]
    assert {result["ruleId"] for result in results} == {"out-of-bounds", "race"}
    assert all(result["suppressions"] for result in results)
    assert "triton_kernels.py" in (tmp_path / "lines.html").read_text()
    done = run(*command, files[2], "--fa4-write-baseline", cwd=tmp_path)
    assert "wrote known.json" in done.stdout, done.stdout + done.stderr
    assert "3 passed" in run(*command, files[2], cwd=tmp_path).stdout
    refused = run(*command, "--fa4-ignore=rase", cwd=tmp_path)
    assert refused.returncode == 4 and "no finding is called 'rase'" in refused.stderr
    plain = run(*command[:3], "-p", "no:cacheprovider", "test_gpu.py", cwd=tmp_path)
    assert "skipped" in plain.stdout and "emulated" not in plain.stdout


def test_a_script() -> None:
    """fa4 emulate SCRIPT.py: the example's overrun is found, with its line."""
    script = ROOT / "examples" / "triton_overrun.py"
    done = run("-m", "fa4", "emulate", str(script), "--json", cwd=FOLDER)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["failed"], done.stderr
    (finding,) = report["findings"]
    line = script.read_text().splitlines()[int(finding["source"].rpartition(":")[2]) - 1]
    assert finding["kind"] == "out-of-bounds" and "tl.load(x + i)" in line, finding
    assert report["launches"] == {"double": 1}
    page = (ROOT / "docs" / "how-to" / "triton.md").read_text()
    shown = page.split("```text\n")[1].split("```")[0].strip()
    printed = run("-m", "fa4", "emulate", "examples/triton_overrun.py", cwd=ROOT).stdout.strip()
    neighbour = r" and \d+ bytes (before|behind) y"
    printed = re.sub(neighbour, "", re.sub("0x[0-9a-f]+", "0x...", printed))
    assert printed.replace(f"{ROOT}/", "") == shown


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python process that knows the tests."""
    paths = os.pathsep.join(map(str, (ROOT, SITE)))
    variables = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=variables, capture_output=True, text=True
    )
