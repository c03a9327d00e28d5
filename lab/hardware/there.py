"""The machine with the GPU, as result files name it. Needs nvidia-smi."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from typing import Any

import numpy as np


def query(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of these fields of the first GPU; "unknown" where there is none."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return dict.fromkeys(fields, "unknown")
    values = (value.strip() for value in done.stdout.strip().split(","))
    return dict(zip(fields, values, strict=True))


def describe_driver() -> dict[str, Any]:
    """Of a run that needs NumPy and the driver alone."""
    gpu = query("name", "driver_version")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu["name"],
        "driver": gpu["driver_version"],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def describe_machine() -> dict[str, Any]:
    """The GPU and what decides its results; FA4_COMMIT names the commit where there is no git."""
    import torch

    found: dict[str, Any] = {"commit": os.environ.get("FA4_COMMIT", ""), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = ", ".join(query("name", "driver_version", "clocks.sm").values())
    return found
