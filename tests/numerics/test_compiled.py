"""The kernels compile for a GPU, and keep to their registers. No GPU is needed for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no build for this platform")
ROOT = Path(__file__).parent.parent.parent


def test_kernels_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels", "64", "32", "sign", "sign", "8", "0.95"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=250)
    assert found.returncode == 0, found.stderr
    assert "FP_FUSION" not in found.stderr, found.stderr  # a launch that leaves it to the compiler's default
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    names = ["accumulate", "accumulate", "checksum", "columns", "decode", "give_back", "judge", "pack", "records", "restore"]
    names += ["squares", "weights"]
    assert sorted(row["kernel"] for row in rows) == [f"_{name}_kernel" for name in names]
    assert max(row["stack_bytes"] for row in rows) <= 128, rows  # registers that did not find room
    most = {"_accumulate_kernel": 168, "_decode_kernel": 128}
    assert all(row["registers"] <= most.get(row["kernel"], 128) for row in rows), rows
