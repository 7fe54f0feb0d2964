"""What a trial's replicas would send, from shapes alone: nothing is trained, and no weight takes memory."""

from collections.abc import Callable
from functools import cache

from thinwire.exchange.plan import ExchangePlan, TensorSpec, make_plan
from thinwire.options import DEFAULT_DENSE_BELOW, coding_of
from thinwire.studies.trials import Trial
from thinwire.training.config import DataConfig, ModelConfig, TrainConfig
from thinwire.training.shapes import build_on_meta, specs_of


@cache
def _tensors(model: ModelConfig, data: DataConfig) -> tuple[TensorSpec, ...]:
    return tuple(specs_of(build_on_meta(TrainConfig(model=model, data=data))))


def plan_of(trial: Trial) -> ExchangePlan:
    """The plan of a training with DeMo, with the bytes of its optimizer's."""
    config = trial.config
    coding = coding_of({**vars(config.optim), "layout": "adaptive", "dense_below": DEFAULT_DENSE_BELOW})
    return make_plan(_tensors(config.model, config.data), [coding])


def topk_for_bytes(num_bytes: int, trial_with: Callable[[int], Trial], most: int) -> int:
    """The k from 1 to ``most`` whose payload comes nearest to so many bytes."""
    low, high = 1, most
    while low < high:  # the largest whose payload is not larger
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan_of(trial_with(middle)).payload_bytes <= num_bytes else (low, middle - 1)
    nearest = (low, min(low + 1, most))
    return min(nearest, key=lambda topk: abs(plan_of(trial_with(topk)).payload_bytes - num_bytes))
