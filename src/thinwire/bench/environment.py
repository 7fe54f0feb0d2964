"""What a measurement was made on, for the file beside its rows."""

import os
import platform
import subprocess
from datetime import UTC, datetime

import numpy as np
import torch

import thinwire


def environment() -> dict[str, object]:
    """Versions, hardware and commit; no paths and no host names."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "thinwire": thinwire.__version__,
        "commit": git.stdout.strip() if git.returncode == 0 else "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
