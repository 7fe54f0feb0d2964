"""``thinwire plan``: which settings fit a link, before anything is trained."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from thinwire.commands.asked import make_folder
from thinwire.core.errors import check_int
from thinwire.exchange.plan import TensorSpec
from thinwire.planner import Link, make_report, parse_bandwidth, parse_seconds, tensors_from_count
from thinwire.planner.link_spec import parse_link
from thinwire.planner.links import format_seconds
from thinwire.planner.report import OVERLAPPED_BUCKETS, Report, recommend
from thinwire.training import recipes
from thinwire.training.config import DataConfig, ModelConfig, TrainConfig
from thinwire.training.errors import TrainingError

_COUNT = re.compile(r"([\d_.]+)\s*([kKmMbBgG]?)")
_MOST_PARAMETERS = 10**14
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000, "g": 1_000_000_000}


@dataclass(frozen=True)
class PlanCommand:
    """Predict bytes, step time and efficiency of DDP and of DeMo on a link, and recommend a setting.

    The model behind the figures, and how well it meets measurements: docs/planner.md. `thinwire plan scale` is about
    many replicas, up to thousands.
    """

    model: tyro.conf.Positional[str]
    """A recipe (paper-1b), a Hugging Face model folder or config.json, or a number of parameters (320M)."""
    compute: str
    """Time of forward and backward per step and replica, such as 0.8s or 250ms; `thinwire train --dry-run` estimates it."""
    replicas: int = 2
    """Replicas that train together."""
    link: str = ""
    """Rate and round trip in one, such as 100mbit,20ms; in place of --bandwidth and --round-trip."""
    bandwidth: str = "100Mbit"
    """Rate of each replica's link, such as 100Mbit or 10Gbit."""
    round_trip: str = "20ms"
    """Time to another replica and back, such as 20ms; 0 for none."""
    device: Literal["gpu", "cpu"] = "gpu"
    """What the replicas compute on; decides what an optimizer step costs."""
    topks: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Coefficients per chunk to compare."""
    values: tuple[str, ...] = ("sign", "sign_scale", "int8", "float32")
    """Value codecs to compare."""
    chunk: int = 64
    """Edge of the chunks."""
    overlap: bool = False
    """Let Thinwire's rows be those of overlap=True: buckets leave while backward runs."""
    exchange: Literal["auto", "all_gather", "owner"] = "auto"
    """Thinwire's exchange; auto takes the faster one in each row, and says what a step with the other would take."""
    owner_topk: int | None = None
    """Coefficients per chunk that owners answer with; eight times the row's unless given."""
    update: Literal["auto", "sign", "sgd", "adamw", "lion", "muon"] = "auto"
    """Thinwire's update rule: muon costs more than the others. auto: the recipe's own, or sign."""
    figure: Path | None = None
    """Also draw efficiency against bandwidth, as a PNG file."""
    debug: bool = False
    """Show where an error came from."""


def command(arguments: list[str]) -> int:
    """Run it."""
    if arguments[:1] == ["scale"]:
        from thinwire.commands import scale

        return scale.command(arguments[1:])
    asked = tyro.cli(PlanCommand, prog="thinwire plan", args=arguments)
    check_int("--replicas", asked.replicas, 1)
    if asked.figure is not None:
        make_folder("--figure", asked.figure.parent)
    ask = partial(
        make_report,
        tensors_of(asked.model),
        asked.replicas,
        _link_asked_for(asked, arguments),
        parse_seconds(asked.compute, "--compute"),
        device=asked.device,
        topks=asked.topks,
        values=asked.values,
        chunk=asked.chunk,
        exchange=asked.exchange,
        owner_topk=asked.owner_topk,
        update=_update_of(asked),
    )
    report = ask(overlap=asked.overlap)
    from thinwire.planner.table import print_report

    print_report(report, Console())
    if asked.overlap:
        print(against_overlap(report, ask(overlap=False)), end="")
    if asked.figure is not None:
        from thinwire.planner.figure import draw

        draw(report, asked.figure)
        print(f"figure: {asked.figure}")
    return 0


def against_overlap(with_overlap: Report, without: Report) -> str:
    """A sentence where overlap makes steps longer; empty where it does not."""
    advised = recommend(with_overlap).prediction
    same = next(row for row in without.predictions if row.label == advised.label)
    if same.step_seconds >= advised.step_seconds:
        return ""
    return (
        f"Leave overlap out here: its {OVERLAPPED_BUCKETS} exchanges pay the round trip each, and the same step would take "
        f"{format_seconds(same.step_seconds)} without it.\n"
    )


def _update_of(asked: PlanCommand) -> str:
    if asked.update != "auto":
        return asked.update
    return recipes.build(asked.model).optim.update if asked.model in recipes.RECIPES else "sign"


def _link_asked_for(asked: PlanCommand, arguments: list[str]) -> Link:
    if not asked.link:
        round_trip = parse_seconds(asked.round_trip, "--round-trip", allow_zero=True)
        return Link(parse_bandwidth(asked.bandwidth, "--bandwidth"), round_trip)
    for flag in ("--bandwidth", "--round-trip"):
        if any(argument.replace("_", "-").split("=")[0] == flag for argument in arguments):
            raise TrainingError(f"--link {asked.link} says it all: leave {flag} out")
    return read_link(asked.link, "--link")


def read_link(text: str, name: str) -> Link:
    """A link as the planner sees it: rate and round trip."""
    spec = parse_link(text, name)
    if spec.jitter_seconds or spec.loss:
        raise ValueError(f"{name}={text!r}: the planner knows no jitter and no loss; leave them out")
    return spec.link


def parse_count(text: str, name: str) -> int:
    """A number of parameters, such as 320M; ``name`` is what an error calls it."""
    match = _COUNT.fullmatch(text)
    try:
        count = round(float(match[1]) * _FACTORS[match[2].lower()]) if match is not None else None
    except ValueError as error:
        raise TrainingError(f"{name}={text!r} is not a number of parameters: {error}") from error
    if count is None:
        raise TrainingError(f"{name}={text!r} is not a number of parameters, such as 320M")
    if not 1 <= count <= _MOST_PARAMETERS:
        raise TrainingError(f"{name}={text!r}: the number of parameters must be from 1 to {_MOST_PARAMETERS:.0e}")
    return count


def tensors_of(model: str) -> tuple[TensorSpec, ...]:
    """The trained tensors of a recipe, a model folder, or of a model of which only the size is known."""
    from thinwire.training.shapes import build_on_meta, specs_of

    if model in recipes.RECIPES:
        return tuple(specs_of(build_on_meta(recipes.build(model))))
    if _COUNT.fullmatch(model) is not None and not Path(model).exists():
        return tensors_from_count(parse_count(model, "model"))
    if not Path(model).exists():
        raise TrainingError(
            f"model={model!r} is neither a recipe ({', '.join(recipes.RECIPES)}), nor a model folder or config.json that "
            "exists, nor a number of parameters such as 320M"
        )
    config = TrainConfig(model=ModelConfig(architecture=model), data=DataConfig(sequence=1))
    return tuple(specs_of(build_on_meta(config)))
