"""``thinwire train``: from recipe, file and flags to a run, as one process or as several."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from thinwire.parallel.group import leave
from thinwire.parallel.launch import LAUNCHED, launch, launch_elastic
from thinwire.parallel.mesh import parse_mesh
from thinwire.parallel.place import Place, find_place
from thinwire.training import recipes
from thinwire.training.config import TrainConfig, all_fields, check
from thinwire.training.config_file import RECIPE_KEY, as_toml, override, read_file
from thinwire.training.errors import TrainingError
from thinwire.training.keys import read_key
from thinwire.training.readers import refuse_unread
from thinwire.training.resuming import check_unchanged, saved_config

# A replica that dies more often than this has something wrong with it.
_MOST_RESTARTS = 100
_OPTIMIZER_SETTINGS = frozenset(setting.name for section, setting in all_fields() if section == "optim")


@dataclass(frozen=True)
class TrainCommand:
    """Train a model with one or more replicas.

    RECIPE comes first and is one of quickstart, gpt-small, gpt-10m, paper-300m, paper-1b, vit, cnn. The defaults below are
    those of the chosen recipe, changed by --config. Every option may also stand in the file, with _ for -.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")] = "quickstart"
    """Name of a recipe; must come before the options."""
    config: Path | None = None
    """A .toml or .yaml file with settings; its key `recipe` may name another recipe."""
    resume: Path | None = None
    """Go on from the last checkpoint of this run folder, with its settings."""
    residual: Literal["exact", "keep", "sum", "mean", "zero"] = "exact"
    """With --resume: all but `exact` let the number of replicas or the mesh change. DeMo's momenta are then dealt out so
    that their `sum` or `mean` stays, or each replica may `keep` its own, or all start from `zero`."""
    print_config: bool = False
    """Print the complete configuration as TOML, and do nothing."""
    dry_run: bool = False
    """Say what the run would need: parameters, memory, bytes, predicted time; and do nothing."""
    debug: bool = False
    """Show where an error came from."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def command(arguments: list[str]) -> int:
    """Run it."""
    asked = parse(arguments)
    config, place = asked.settings, find_place(os.environ)
    if asked.print_config:
        # A run folder has all settings, and does not know whose recipe they were.
        recipe = f'{RECIPE_KEY} = "{asked.recipe}"\n\n' if asked.resume is None else ""
        print(f"{recipe}{as_toml(config)}", end="")
        return 0
    num_replicas = _num_replicas(config, place, arguments)
    check(config, num_replicas)
    if asked.dry_run:
        from thinwire.training.dry_run import describe

        describe(config, num_replicas, Console())
        return 0
    read_key(config.launch.key_file)  # said once, before replicas are started
    folder = _choose_folder(asked, place)
    if place.launcher == "none" and num_replicas > 1 and not config.launch.lighthouse:
        return _start_replicas(arguments, folder, num_replicas, asked)
    return _train_here(asked, place, folder)


def _num_replicas(config: TrainConfig, place: Place, arguments: Sequence[str] = ()) -> int:
    """How many processes there are, or are to be."""
    wanted, mesh = config.launch.replicas, config.launch.mesh
    if config.launch.lighthouse:
        return wanted
    if mesh:
        in_mesh, asked = parse_mesh(mesh).num_ranks, _peek(arguments, "--replicas")
        if asked is not None and asked != str(in_mesh):
            raise TrainingError(
                f"mesh={mesh!r} has {in_mesh} ranks, not {asked}: leave --replicas out, or --mesh '' for whole replicas"
            )
        wanted = in_mesh
    if place.launcher == "none":
        return wanted
    if wanted != place.num_replicas and (mesh or wanted != 1):
        what, flag = (f"mesh={mesh!r} has {wanted} ranks", "--mesh") if mesh else (f"replicas={wanted}", "--replicas")
        raise TrainingError(f"{what}, but {place.launcher} has started {place.num_replicas}: leave {flag} out")
    return place.num_replicas


def parse(arguments: Sequence[str]) -> TrainCommand:
    """The command with its recipe, its file and its flags, in this order of weight."""
    rest = list(arguments)
    named = rest[0] if rest and not rest[0].startswith("-") else None
    file, resume = _peek(rest, "--config"), _peek(rest, "--resume")
    values = read_file(Path(file)) if file else {}
    recipe = str(named or values.get(RECIPE_KEY, "quickstart"))
    optimizer = _peek(rest, "--optimizer") or values.get("optimizer", "demo")
    if optimizer != values.get("optimizer", optimizer):
        # The file's settings are another optimizer's; this one has the recipe's.
        values = {name: value for name, value in values.items() if name not in _OPTIMIZER_SETTINGS}
    base = recipes.build(recipe, optimizer if optimizer in recipes.OPTIMIZERS else "demo")
    if resume is not None:
        if named is not None:
            raise TrainingError(f"--resume takes the settings of the run folder: leave the recipe {named!r} out")
        base = saved_config(Path(resume))
    base = override(base, values, f"--config {file}")
    default = TrainCommand(recipe=recipe, settings=base)
    asked = tyro.cli(
        TrainCommand,
        prog="thinwire train",
        default=default,
        args=rest,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    if asked.recipe != recipe:
        raise TrainingError(f"the recipe {asked.recipe!r} must come first: thinwire train {asked.recipe} ...")
    refuse_unread(asked.settings.optim, rest)
    if asked.resume is not None:
        if asked.settings.run.out != base.run.out:
            raise TrainingError(f"--resume writes to its own folder: leave --out {asked.settings.run.out} out")
        check_unchanged(saved_config(asked.resume), asked.settings)
        launch = asked.settings.launch
        if asked.residual not in ("exact", "zero") and (launch.elastic or launch.lighthouse):
            raise TrainingError(f"--residual {asked.residual} is for replicas that do not come and go; use exact or zero")
    elif asked.residual != "exact":
        raise TrainingError(f"--residual {asked.residual} is for --resume alone")
    return asked


def _peek(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, before the parser that needs to know it runs."""
    found = None
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            found = arguments[place + 1]
        if argument.startswith(flag + "="):
            found = argument.split("=", 1)[1]
    return found


def _choose_folder(asked: TrainCommand, place: Place) -> Path:
    if asked.resume is not None:
        return asked.resume
    config = asked.settings
    name = f"{asked.recipe}-{config.optim.optimizer}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run.out) if config.run.out else Path("runs") / name
    is_launched = LAUNCHED in os.environ
    if place.local_replica == 0 and not is_launched and (folder / "config.toml").exists():
        from thinwire.training.checkpoints import available_steps
        from thinwire.training.logs import read_rows

        # One that failed before its first step has left nothing to go on with, and nothing to lose.
        if available_steps(folder):
            raise TrainingError(f"out={folder} already holds a run: go on with --resume {folder}, or name another folder")
        if any(row["kind"] == "step" for row in read_rows(folder / "log.jsonl")):
            raise TrainingError(f"out={folder} already holds a run: it has no checkpoint; name another folder")
        (folder / "log.jsonl").unlink(missing_ok=True)
    return folder


def _start_replicas(arguments: list[str], folder: Path, num_replicas: int, asked: TrainCommand) -> int:
    """Start local replicas with the same options, but for the folder, which they could not choose alike."""
    out = [] if asked.resume is not None else [f"--out={folder}"]
    settings = asked.settings.launch
    if not settings.elastic:
        launch(["train", *arguments, *out], num_replicas, settings.port)
        return 0
    threads = settings.threads or max(1, _num_cores() // num_replicas)
    least = settings.min_replicas or num_replicas // 2 + 1
    restarts = _MOST_RESTARTS if settings.on_loss == "continue" else 0
    folder.mkdir(parents=True, exist_ok=True)
    launch_elastic(["train", *arguments, *out, f"--threads={threads}"], num_replicas, settings.port, least, restarts)
    return 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _SteadyConsole(Console):
    """Training goes on when nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        """Say no more."""
        self.quiet = True


def _train_here(asked: TrainCommand, place: Place, folder: Path) -> int:
    from thinwire.training.job import Job
    from thinwire.training.loop import run_replica
    from thinwire.training.report import finish

    config = asked.settings
    torch.set_num_threads(config.launch.threads or max(1, _num_cores() // place.num_local_replicas))
    is_launched = LAUNCHED in os.environ
    job = Job(config, place, folder, asked.resume is not None, asked.residual, os.getppid() if is_launched else None)
    console = _SteadyConsole()
    outcome = run_replica(job, console)
    if outcome is None:
        return 0
    if outcome.is_first:
        finish(outcome, console)
    leave()
    # Under a launcher a clean stop is a success; the launcher knows about the signal.
    return 0 if outcome.is_finished or place.launcher != "none" else 128 + outcome.stop_signal
