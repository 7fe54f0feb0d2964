"""What a measurement was made on, for the file beside its rows."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

import thinwire

_SOURCE = Path(thinwire.__file__)


def environment() -> dict[str, object]:
    """Versions, hardware and commit; no paths and no host names."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "thinwire": thinwire.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str:
    """Of this source, with -dirty after it where it has changed since; a repository that only surrounds it is none."""
    if _git("ls-files", "--error-unmatch", _SOURCE.name).returncode:
        return "unknown"
    changed = "-dirty" if _git("diff", "--quiet", "HEAD", "--", ".").returncode else ""
    return _git("rev-parse", "HEAD").stdout.strip() + changed


def _git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["git", "-C", str(_SOURCE.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git at all
        return subprocess.CompletedProcess(command, 1, "", "")
