"""q18: is there a train script that reproduces the runs? The recipes of `thinwire train`, and what differs in the paper."""

import functools
import inspect
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from thinwire.studies.study import Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row
from thinwire.training.models import is_image_model, num_parameters
from thinwire.training.peer_costs import rehearse
from thinwire.training.recipes import OPTIMIZERS, RECIPES, build
from thinwire.training.shapes import build_on_meta

# Of the paper: what it trains on, and what its Table 1 says that its 1B model sends per step with k 32.
PAPER_TOKENS, PAPER_SENT_BYTES = 100e9, 110.32e6
PAPER_RECIPES = ("paper-300m", "paper-1b")
_COUNTED = "published-code"
_READING = (
    "`thinwire train RECIPE` trains a recipe from its first step to its last; `--dry-run` says what it would need, "
    "`--optimizer adamw` runs the baseline with the same data and steps, `--resume` goes on bit for bit. The trainings "
    "behind the studies are run again by `thinwire study run`."
)
_DIFFERS = (
    "**What differs from the paper** in `paper-300m` and `paper-1b`:\n\n"
    "- The data: the paper trains on Dolma, which is not part of this project. `--dataset` names a folder of token shards "
    "in the formats of nanoGPT or modded-nanogpt.\n"
    "- The optimizer: `demo` has the paper's hyper-parameters, with this project's wire (1 bit per value) and exact "
    "decoding. `--optimizer published` follows the published code's arithmetic, and `--optimizer published-code` runs an "
    "implementation that is not ours.\n"
    "- The score: validation loss on held-out shards; the paper's downstream tasks are not part of the trainer.\n"
    "- **No run of these two recipes has been made to its end here**: 100 billion tokens are beyond this project's means. "
    "They are built, counted and dry-run; what is trained to the end are the smaller recipes."
)


@functools.cache
def parameters_of(recipe: str) -> int:
    """Counted on a model that takes no memory."""
    return num_parameters(build_on_meta(build(recipe)))


@functools.cache
def published_bytes(recipe: str) -> int | None:
    """What the published algorithm sends per step, by the code of pytorch-optimizer; None where that is not installed."""
    if find_spec("pytorch_optimizer") is None:
        return None
    config = build(recipe, _COUNTED)
    return rehearse(config.optim, build_on_meta(config), 2)[0].sent_bytes


def command_of(recipe: str) -> str:
    """What trains it."""
    data = " --dataset SHARDS" if recipe in PAPER_RECIPES else ""
    return f"thinwire train {recipe} --replicas 2{data}"


def _find(rows: Sequence[Row], results: Path) -> Finding:
    lines = []
    for name, recipe in RECIPES.items():
        config, first_line = build(name), (inspect.getdoc(recipe) or "").splitlines()[0]
        schedule = config.schedule
        seen = schedule.steps * schedule.batch * (1 if is_image_model(config) else config.data.sequence)
        unit = "images" if is_image_model(config) else "tokens"
        size = f"{parameters_of(name) / 1e6:,.1f} M"
        lines.append([name, first_line, f"`{command_of(name)}`", size, f"{schedule.steps:,}", f"{seen:,} {unit}"])
    heads = ("recipe", "what it is", "command", "parameters", "steps", "sees")
    claims = _claims()
    lead = verdict(claims, "Yes", "In part", "No")
    answer = (
        f"{lead}: `thinwire train RECIPE`, for {len(RECIPES)} recipes and {len(OPTIMIZERS)} optimizers. Those of the paper "
        f"({', '.join(PAPER_RECIPES)}) have its sizes and hyper-parameters, and have not been trained to their end here."
    )
    return Finding(f"{_READING}\n\n{table(heads, lines, 3)}\n\n{_DIFFERS}", claims, answer)


def _claims() -> list[Claim]:
    built = [(recipe, optimizer) for recipe in RECIPES for optimizer in OPTIMIZERS if _is_built(recipe, optimizer)]
    wanted = len(RECIPES) * len(OPTIMIZERS)
    claims = [Claim(f"every recipe can be built for every optimizer: {len(built)} of {wanted}", len(built) == wanted)]
    for name in PAPER_RECIPES:
        config = build(name)
        tokens = config.schedule.steps * config.schedule.batch * config.data.sequence
        text = f"{name} sees as many tokens as the paper's runs, 100 billion: {tokens / 1e9:.2f}"
        claims.append(Claim(text, abs(tokens / PAPER_TOKENS - 1) < 1e-3))
    sent = published_bytes("paper-1b")
    if sent is not None:
        text = (
            f"the published algorithm on paper-1b sends the 110.32 MB per step of the paper's Table 1: {sent / 1e6:.2f} MB"
        )
        claims.append(Claim(text, abs(sent / PAPER_SENT_BYTES - 1) < 1e-3))
    return claims


def _is_built(recipe: str, optimizer: str) -> bool:
    return build(recipe, optimizer).optim.optimizer == optimizer


STUDY = Study(
    "q18",
    "Reproducing the runs",
    "Is there a train script that reproduces the runs, and what differs from the paper's?",
    find=_find,
)
