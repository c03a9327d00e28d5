"""`fa4 emulate FILE.cu`: CUDA C++ to PTX, by the nvcc that PyPI has or that is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
_FOLDERS = ("cu13/bin/nvcc", "cuda_nvcc/bin/nvcc")
_TIME_LIMIT_S = 300


def find_nvcc() -> str | None:
    """nvcc of PyPI's packages, else the one on the path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        for name in _FOLDERS:
            if (Path(folder) / name).is_file():
                return str(Path(folder) / name)
    return shutil.which("nvcc")


def compile_cuda(file: Path, arch: str) -> str:
    """The PTX of a CUDA C++ file's kernels, with lines of the source. Raises ValueError."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise ValueError(f"{file}: needs nvcc and a host compiler: pip install {PACKAGES}")
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    with tempfile.TemporaryDirectory(prefix="fa4-cuda-") as folder:
        target = Path(folder) / "kernels.ptx"
        command = [nvcc, "-ptx", f"-arch={arch}", "-lineinfo", "-std=c++17", "-o", str(target)]
        try:
            done = subprocess.run(
                [*command, str(file.resolve())],
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"{file}: {nvcc}: {error}") from None
        if done.returncode or not target.is_file():
            lines = (done.stderr or done.stdout).strip().splitlines()
            wrong = [line for line in lines if "error" in line] or lines[-1:]
            raise ValueError(f"{file}: {nvcc}: {wrong[0] if wrong else 'no PTX came of it'}")
        return target.read_text(encoding="utf-8")
