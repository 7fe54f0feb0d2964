"""Which exchange DeMo uses in a run."""

from torch import nn

from thinwire.exchange.choice import AUTO
from thinwire.exchange.plan import ExchangePlan, TensorSpec, make_plan
from thinwire.options import DEFAULT_DENSE_BELOW, coding_of
from thinwire.planner.cost import DEVICES
from thinwire.planner.links import Link
from thinwire.planner.owners import choose_exchange, sizes_of
from thinwire.training.config import OptimConfig
from thinwire.training.groups import decoupled_groups, trained

_USUAL_COMPUTE_SECONDS = 1.0


def settle_exchange(config: OptimConfig, model: nn.Module, num_replicas: int, link: Link | None) -> str:
    """What ``exchange`` comes to: where ``auto`` is asked for and a link is known, the planner decides.

    It is told that a step computes for a second, since replicas may judge differently how long theirs do. With overlap that
    would decide too much; then, and wherever no link is known, it is left to DeMo's own rule.
    """
    if config.exchange != AUTO or link is None or num_replicas == 1 or config.overlap or config.delay:
        return config.exchange
    plan = _plan(config, model)
    return choose_exchange(
        sizes_of(plan, num_replicas, config.owner_topk or None),
        num_replicas,
        link,
        num_parameters=sum(parameter.numel() for _, parameter in trained(model)),
        compute_seconds=_USUAL_COMPUTE_SECONDS,
        costs=DEVICES["gpu" if next(model.parameters()).is_cuda else "cpu"],
    )


def _plan(config: OptimConfig, model: nn.Module) -> ExchangePlan:
    """What DeMo will exchange, without building one."""
    settings = {"chunk": config.chunk, "topk": config.topk, "values": config.values, "update": config.update}
    settings |= {"layout": "adaptive", "dense_below": DEFAULT_DENSE_BELOW}
    specs, codings = [], []
    for index, group in enumerate(decoupled_groups(config, model)):
        named = [(name, parameter) for name, parameter in group["params"] if parameter.requires_grad]
        specs += [TensorSpec(name, tuple(parameter.shape), str(parameter.dtype), index) for name, parameter in named]
        codings.append(coding_of({**settings, **group}))
    return make_plan(specs, codings)
