"""Which exchange DeMo uses in a run."""

from torch import nn

from thinwire.exchange.choice import AUTO
from thinwire.exchange.plan import make_plan
from thinwire.optimizer import DEFAULT_DENSE_BELOW
from thinwire.options import coding_of
from thinwire.planner.cost import DEVICES
from thinwire.planner.links import Link
from thinwire.planner.owners import choose_exchange, sizes_of
from thinwire.training.config import OptimConfig
from thinwire.training.shapes import specs_of

_USUAL_COMPUTE_SECONDS = 1.0


def settle_exchange(config: OptimConfig, model: nn.Module, num_replicas: int, link: Link | None) -> str:
    """What ``exchange`` comes to: where ``auto`` is asked for and a link is known, the planner decides.

    It is told that a step computes for a second, since replicas may judge differently how long theirs do. With overlap that
    would decide too much; then, and wherever no link is known, it is left to DeMo's own rule.
    """
    if config.exchange != AUTO or link is None or num_replicas == 1 or config.overlap or config.delay:
        return config.exchange
    settings = {"chunk": config.chunk, "topk": config.topk, "values": config.values, "update": config.update}
    specs = specs_of(model)
    plan = make_plan(specs, [coding_of({**settings, "layout": "adaptive", "dense_below": DEFAULT_DENSE_BELOW})])
    return choose_exchange(
        sizes_of(plan, num_replicas, config.owner_topk or None),
        num_replicas,
        link,
        num_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        compute_seconds=_USUAL_COMPUTE_SECONDS,
        costs=DEVICES["gpu" if next(model.parameters()).is_cuda else "cpu"],
    )
