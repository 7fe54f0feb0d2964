"""Trials by real processes: the same training as the simulator's, and an end in NaN that is a row."""

from typing import Any

import pytest
import torch

from thinwire.studies.process_trials import ProcessTrial
from thinwire.studies.trials import Trial
from thinwire.training.errors import TrainingError

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"layers": 1, "width": 64, "heads": 1, "mlp_width": 64, "sequence": 16, "batch": 4}
TINY |= {"steps": 4, "warmup_steps": 1, "eval_every": 2, "eval_examples": 8, "lr": 1e-2, "seed": 3}


def test_processes_train_what_the_simulator_does() -> None:
    trial = Trial("quickstart", 2, settings=TINY)
    real, simulated = ProcessTrial(**vars(trial)).run(CPU), trial.run(CPU)
    assert real["trial"] == simulated["trial"]
    assert [step for step, _ in real["curve"]] == [2, 4]
    assert [loss for _, loss in real["curve"]] == pytest.approx([loss for _, loss in simulated["curve"]], abs=1e-4)
    for name in ("sent_bytes", "parameters", "accuracy"):
        assert real[name] == simulated[name], name
    assert real["loss"] == real["curve"][-1][1]


def test_a_run_that_diverges_is_a_row_and_one_that_cannot_start_is_an_error() -> None:
    lost = ProcessTrial("quickstart", 2, "sgd", {**TINY, "lr": 1e30, "clip": 0.0}).run(CPU)
    assert lost["loss"] is None
    with pytest.raises(TrainingError, match="kept, apart"):
        ProcessTrial("quickstart", 2, settings=TINY, kept=0.5).run(CPU)
    with pytest.raises(TrainingError, match=r"optimizer=demo ended with exit code 1: .*heads=7"):
        ProcessTrial("quickstart", 2, settings={**TINY, "heads": 7}).run(CPU)
