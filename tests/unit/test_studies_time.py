"""What varies in time: likeness, groups, and what is recorded."""

import math
import random
from typing import Any

import torch
from torch import Tensor

from thinwire.studies.chunks import KINDS
from thinwire.studies.q2_time import GROUPS, LAGS, Record, Recorder, TimeTrial, likeness, measure, sizes
from thinwire.studies.trials import Trial, train

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"layers": 1, "width": 64, "heads": 1, "mlp_width": 64, "sequence": 16, "batch": 4, "chunk": 16}
TINY |= {"steps": 5, "warmup_steps": 1, "eval_every": 5, "eval_examples": 4, "lr": 1e-2, "update": "sign", "topk": 8}
TINY |= {"momentum_decay": 0.9}
STEPS = 80


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_likeness(first: list[list[float]], second: list[list[float]], groups: list[list[bool]]) -> float | None:
    """The mean of cosines, one number at a time."""
    cosines = []
    for a, b, group in zip(first, second, groups, strict=True):
        inside = [(x, y) for x, y, is_in in zip(a, b, group, strict=True) if is_in]
        norms = math.sqrt(sum(x * x for x, _ in inside)) * math.sqrt(sum(y * y for _, y in inside))
        if norms > 0:
            cosines.append(sum(x * y for x, y in inside) / norms)
    return sum(cosines) / len(cosines) if cosines else None


def a_record(num_steps: int = STEPS) -> Record:
    """Four chunks of 2 x 4, of which some components are sent, some often and some never."""
    chances = torch.tensor([0.0, 0.02, 0.05, 0.1, 0.02, 0.02, 1.0, 0.0]).view(2, 4)
    is_sent = torch.rand(num_steps, 4, 2, 4, generator=torch.Generator().manual_seed(1)) < chances
    return Record(noise(num_steps, 4, 2, 4, seed=2) + 0.5, is_sent, noise(num_steps, 4, 2, 4, seed=3))


def test_likeness_is_a_mean_of_cosines() -> None:
    first, second = noise(6, 3, 4, seed=1), noise(6, 3, 4, seed=2)
    group = torch.rand(6, 3, 4, generator=torch.Generator().manual_seed(3)) < 0.4
    group[2] = False
    lists = [one.flatten(1).tolist() for one in (first, second, group)]
    wanted, found = slow_likeness(*lists), likeness(first, second, group)
    assert wanted is not None
    assert found is not None
    assert math.isclose(found, wanted, rel_tol=1e-4)
    assert math.isclose(likeness(first, first) or 0, 1.0, rel_tol=1e-6)
    assert math.isclose(likeness(first, -3 * first, group) or 0, -1.0, rel_tol=1e-6)
    assert likeness(first, second, torch.zeros_like(group)) is None


def test_likeness_is_the_share_of_energy_that_stays() -> None:
    """The same direction at every step, with as much energy in noise that is new at every step."""
    series = noise(1, 20_000, seed=1) + noise(50, 20_000, seed=2)
    for lag in (1, 7):
        assert math.isclose(likeness(series[:-lag], series[lag:]) or 0, 0.5, abs_tol=0.02)
    fresh = noise(50, 20_000, seed=3)
    assert abs(likeness(fresh[:-1], fresh[1:]) or 0) < 0.01


def test_groups_are_compared_after_they_were_chosen() -> None:
    """Every group at every lag, from lists and loops over steps."""
    record, decay = a_record(), 0.9
    gradient, is_sent, residual = (one[STEPS // 10 :].flatten(1).tolist() for one in record)
    steps, components = range(len(gradient)), range(len(gradient[0]))
    half = len(gradient) // 2
    counts = [sum(is_sent[t][j] for t in range(half)) for j in components]
    often = 4 * sum(counts) / len(counts)
    fixed = {"never": [count == 0 for count in counts], "often": [count >= often for count in counts]}
    fixed["seldom"] = [0 < count < often for count in counts]
    assert all(any(group) for group in fixed.values())
    values = [
        [is_sent[t][j] * (decay * residual[t - 1][j] + gradient[t][j] - residual[t][j]) for j in components]
        for t in steps[1:]
    ]
    found = measure(record, decay)
    assert tuple(found) == GROUPS
    for place, lag in enumerate(LAGS):
        starts = [t for t in steps if t + 1 + lag < len(gradient)]
        after, later = [gradient[t + 1] for t in starts], [gradient[t + 1 + lag] for t in starts]
        wanted = {
            "sent": slow_likeness(after, later, [is_sent[t] for t in starts]),
            "kept": slow_likeness(after, later, [[not one for one in is_sent[t]] for t in starts]),
            "values": slow_likeness(values[:-lag], values[lag:], [[True] * len(components)] * (len(values) - lag)),
            "residual": slow_likeness(residual[:-lag], residual[lag:], [[True] * len(components)] * (len(residual) - lag)),
        }
        for group, is_in in fixed.items():
            pairs = gradient[half:-lag], gradient[half + lag :]
            wanted[group] = slow_likeness(*pairs, [is_in] * len(pairs[0]))
        for group, one in wanted.items():
            assert one is not None
            assert math.isclose(found[group][place] or 0, one, abs_tol=1e-5), (group, lag)
    shares = sizes(record)
    for group, is_in in fixed.items():
        assert math.isclose(shares[group], sum(is_in) / len(is_in), abs_tol=1e-6)


def test_noise_alone_gives_nothing_to_what_is_sent() -> None:
    """A replica that gathers noise and sends the strongest must not seem to have chosen what lasts."""
    chance, steps, decay = torch.Generator().manual_seed(5), 200, 0.95
    momentum, gradient = torch.zeros(8, 256), torch.randn(steps, 8, 256, generator=chance)
    is_sent, residual = torch.zeros(steps, 8, 256, dtype=torch.bool), torch.zeros(steps, 8, 256)
    for step in range(steps):
        momentum = decay * momentum + gradient[step]
        is_sent[step].scatter_(1, momentum.abs().topk(8, dim=1).indices, True)
        momentum = momentum * ~is_sent[step]
        residual[step] = momentum
    found = measure(Record(gradient, is_sent, residual), decay)
    for group in ("sent", "kept", "often", "seldom", "never"):
        assert all(one is None or abs(one) < 0.05 for one in found[group]), group
    assert (found["residual"][0] or 0) > 0.7


def test_the_record_has_what_was_sent_and_what_stayed() -> None:
    """Decayed residual plus gradient is what was sent plus what stays, and signs are sent with one size per chunk."""
    trial = Trial("quickstart", 2, settings=TINY)
    simulation = trial.build(CPU)
    recorder = Recorder(simulation, 16, 5)
    train(trial, simulation)
    for kind in KINDS:
        record = recorder.of(kind)
        assert record is not None
        assert record.gradient.shape == (5, 8, 16, 16)
        assert (record.is_sent.flatten(2).sum(dim=2) == 8).all()
        taken = 0.9 * record.residual[:-1] + record.gradient[1:] - record.residual[1:]
        is_sent, scale = record.is_sent[1:], taken.abs().amax(dim=(2, 3), keepdim=True)
        assert ((taken.abs() < 1e-4 * scale) | is_sent).all()
        assert torch.allclose(taken.abs()[is_sent], scale.expand_as(taken)[is_sent], rtol=1e-3)


def test_a_row_has_all_that_was_asked_for() -> None:
    row = TimeTrial("quickstart", 2, settings={**TINY, "steps": 70, "eval_every": 70}).run(CPU)
    made_up = TimeTrial("quickstart", 2).made_up(random.Random(0))
    assert [entry["kind"] for entry in row["time"]] == list(KINDS)
    for mine, other in zip(row["time"], made_up["time"], strict=True):
        assert mine.keys() == other.keys()
        assert mine["likeness"].keys() == other["likeness"].keys()
        assert mine["sizes"].keys() == other["sizes"].keys()
        assert all(len(some) == len(LAGS) for some in mine["likeness"].values())
