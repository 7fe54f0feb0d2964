"""All-gather or owner exchange: what the messages of each weigh, how long a step takes with either, and which to take.

`DeMo(exchange="auto")` knows no link, and goes by the number of replicas alone (`thinwire.exchange.choice`); here the link
decides. Pure: nothing is sent, printed or timed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.exchange.choice import OWNER
from thinwire.exchange.plan import ExchangePlan, with_owners
from thinwire.exchange.slices import deal, slices_of
from thinwire.planner.cost import DeviceCosts, Prediction, Workload, all_to_all, predict, ring_all_gather, thinwire_demo
from thinwire.planner.links import Link

# Owners must save this share of a step: less is within the model's error. docs/planner.md has the cell that taught it.
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Sizes:
    """What the messages of a step weigh, all buckets together and headers included: a payload, what each owner gets of it,
    and what each owner answers."""

    payload_bytes: int
    slice_bytes: int
    answer_bytes: int
    num_buckets: int = 1


def sizes_of(plan: ExchangePlan, num_replicas: int, owner_topk: int | None = None) -> Sizes:
    """Exact to the byte, for a plan with owners or, if it has none, with those that keep ``owner_topk`` coefficients."""
    answers = (plan if plan.answers is not None else with_owners(plan, owner_topk)).answers
    assert answers is not None
    dealt = [deal(bucket, num_replicas) for bucket in plan.buckets]
    slices, replies = (
        sum(slices_of(bucket, owned)[0].payload_bytes for bucket, owned in zip(one.buckets, dealt, strict=True))
        for one in (plan, answers)
    )
    return Sizes(plan.payload_bytes, slices, replies, max(1, len(plan.buckets)))


def both_exchanges(
    num_parameters: int,
    sizes: Sizes,
    topk: int,
    values: str,
    num_replicas: int,
    compute_seconds: float,
    costs: DeviceCosts,
) -> tuple[Workload, Workload]:
    """Thinwire's DeMo with an all-gather, and with an owner exchange: slices to their owners, which hide behind backward as
    payloads do, then answers, which do not. To decode both takes as long as payloads of as many bytes do."""
    gather = thinwire_demo(
        num_parameters, sizes.payload_bytes, topk, values, num_replicas, compute_seconds, costs, sizes.num_buckets
    )
    if num_replicas == 1:
        return gather, replace(gather, exchange_name=OWNER)
    num_decoded = num_replicas * (sizes.slice_bytes + sizes.answer_bytes) / sizes.payload_bytes
    decode_ns = (num_decoded - 1) * costs.decode_ns_per_parameter
    owner_ns = costs.demo_ns_per_parameter + decode_ns + costs.owner_ns_per_parameter / num_replicas
    owner = replace(
        gather,
        exchange=all_to_all(sizes.slice_bytes, num_replicas),
        answers=ring_all_gather(sizes.answer_bytes, num_replicas),
        optimizer_seconds=num_parameters * owner_ns * 1e-9,
        exchange_name=OWNER,
    )
    return gather, owner


def better(workloads: Sequence[Workload], link: Link) -> Prediction:
    """The first on this link, or the second if it saves enough to be sure; it says what a step with the other would take."""
    first, *others = (predict(workload, link) for workload in workloads)
    if not others:
        return first
    (second,) = others
    if second.step_seconds < (1 - LEAST_GAIN) * first.step_seconds:
        first, second = second, first
    return replace(first, other_step_seconds=second.step_seconds)


def choose_exchange(
    sizes: Sizes,
    num_replicas: int,
    link: Link,
    *,
    num_parameters: int,
    compute_seconds: float,
    costs: DeviceCosts,
) -> str:
    """``owner`` where that makes the step shorter by a twentieth, ``all_gather`` elsewhere.

    Where replicas average inside islands first and send one payload per island, it is the number of islands and the link
    between them that count.
    """
    both = both_exchanges(num_parameters, sizes, 1, "", num_replicas, compute_seconds, costs)
    name = better(both, link).exchange_name
    assert name is not None
    return name
