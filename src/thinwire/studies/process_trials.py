"""Trainings by the trainer itself, with a process per replica: for methods that the simulator does not know."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thinwire.studies.trials import Row, Trial
from thinwire.training.config_file import as_toml
from thinwire.training.divergence import ADVICE
from thinwire.training.errors import TrainingError
from thinwire.training.logs import read_rows

_MOST_SECONDS = 3600.0
# What the errors of a training that has diverged have in them.
_DIVERGED = (ADVICE, "NaN or Inf in the gradient")


class ProcessTrial(Trial):
    """A run of ``thinwire train --replicas R``, on one thread each, of which only what its row needs is kept."""

    def run(self, device: torch.device) -> Row:
        """See `Trial`."""
        config = self.config
        beside_the_run = replace(self, recipe="", replicas=1, optimizer="demo", settings={})
        if beside_the_run != type(self)("", 1):
            raise TrainingError(
                "absent, lost, kept, apart, later_topk, returned and keeps_errors are for the simulator, not for processes"
            )
        run = replace(config.run, tensorboard=False, sample_tokens=0, checkpoint_every=0)
        with TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "config.toml").write_text(as_toml(replace(config, run=run)), encoding="utf-8")
            command = [sys.executable, "-m", "thinwire", "train", self.recipe, f"--config={folder / 'config.toml'}"]
            command += [f"--replicas={self.replicas}", f"--out={folder / 'run'}", f"--device={device.type}", "--threads=1"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
            has_diverged = done.returncode != 0 and any(words in done.stderr for words in _DIVERGED)
            if done.returncode and not has_diverged:
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise TrainingError(f"optimizer={self.optimizer} ended with exit code {done.returncode}: {last}")
            summary = {} if has_diverged else json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
            rows = read_rows(folder / "run" / "log.jsonl")
        return {"trial": self.facts, **_measured(rows, summary, config.schedule.steps)}


def _measured(rows: list[dict[str, Any]], summary: dict[str, Any], steps: int) -> Row:
    """What a row has of a run; seconds are those without its start."""
    scores = [row for row in rows if row["kind"] == "evaluation" and row["step"]]
    curve = [[row["step"], round(row["loss"], 6)] for row in scores if math.isfinite(row["loss"])]
    seconds = summary.get("elapsed_seconds", 0.0)
    return {
        "loss": curve[-1][1] if summary and curve and curve[-1][0] == steps else None,
        "accuracy": summary.get("accuracy"),
        "curve": curve,
        "sent_bytes": round(summary.get("sent_bytes_per_step", 0)),
        "parameters": summary.get("num_parameters", 0),
        "seconds": round(seconds, 2),
        "step_seconds": round(seconds / steps, 5),
    }
