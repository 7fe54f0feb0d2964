"""What the study of parallelism and precision measures."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.core.errors import ThinwireError
from thinwire.parallel.rehearsal import Ending, Rehearsal, difference, on_a_mesh, on_whole_replicas
from thinwire.studies.q10_parallelism import PrecisionTrial, what_travels
from thinwire.studies.simulation import VirtualReplicas
from thinwire.studies.trials import Trial

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"layers": 1, "width": 64, "heads": 1, "mlp_width": 96, "sequence": 16, "batch": 4}
TINY |= {"steps": 3, "warmup_steps": 1, "eval_every": 3, "eval_examples": 4, "lr": 1e-2, "update": "sign", "topk": 32}


def test_a_sharded_replica_ends_where_a_whole_one_ends_and_another_does_not() -> None:
    plan = Rehearsal(1, shards=2, steps=2)
    given, trained = replace(plan, given_gradients=True), replace(plan, options={"update": "sgd", "values": "float32"})
    found = on_a_mesh([given, trained])
    whole = [on_whole_replicas(one) for one in (given, trained)]
    assert all(one.agrees for one in found)
    assert difference(found[0], whole[0]) == 0
    assert difference(found[1], whole[1]) < 1e-6
    assert found[1].loss == pytest.approx(whole[1].loss, abs=1e-5)
    assert difference(found[0], on_whole_replicas(replace(given, options={"lr": 2e-2}))) > 5e-3
    assert whole[0].sent_bytes < found[0].sent_bytes < 1.1 * whole[0].sent_bytes


def test_the_largest_difference_of_any_parameter_is_found() -> None:
    one = Ending({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])}, 0, True)
    other = Ending({"a": torch.tensor([1.0, 2.5]), "b": torch.tensor([0.25])}, 0, True)
    assert difference(one, other) == 0.5


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(ThinwireError, match=r"rank 0 failed:(.|\n)*nonsense"):
        on_a_mesh([Rehearsal(1, options={"update": "nonsense"})])


def test_plans_for_two_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match="processes of their own"):
        on_a_mesh([Rehearsal(1), Rehearsal(2)])


@pytest.mark.parametrize("name", ["momentum_dtype", "parameter_dtype"])
def test_what_is_to_be_short_is_short_and_the_payload_is_not_changed(name: str) -> None:
    trial = PrecisionTrial("quickstart", 2, settings=TINY, **{name: "bfloat16"})  # type: ignore[arg-type]
    simulation = trial.build(CPU)
    simulation.take_step()
    assert isinstance(simulation.method, VirtualReplicas)
    momenta = {tensor.momentum_CE.dtype for local in simulation.method.replicas for tensor in local.tensors}
    assert momenta == {torch.bfloat16 if name == "momentum_dtype" else torch.float32}
    parameters = {parameter.dtype for parameter in simulation.model.parameters()}
    assert parameters == {torch.bfloat16 if name == "parameter_dtype" else torch.float32}
    whole = Trial("quickstart", 2, settings=TINY).build(CPU)
    assert isinstance(whole.method, VirtualReplicas)
    assert what_travels(simulation.method.optimizer.plan) == what_travels(whole.method.optimizer.plan)
    assert simulation.method.sent_bytes == whole.method.sent_bytes


def test_in_float32_a_trial_of_precision_is_any_other_trial() -> None:
    row = PrecisionTrial("quickstart", 2, settings=TINY).run(CPU)
    assert row["curve"] == Trial("quickstart", 2, settings=TINY).run(CPU)["curve"]
    assert row["wire"].startswith("9.0 + 1 bits (sign)")
