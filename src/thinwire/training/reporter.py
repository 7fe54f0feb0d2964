"""Tells people and files how a run is going. Only the reporter of the first replica has anyone to tell."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console

from thinwire.core.errors import first_line
from thinwire.exchange.traffic import Count
from thinwire.training.clock import Clock
from thinwire.training.config import TrainConfig
from thinwire.training.evaluation import Score
from thinwire.training.history import Totals
from thinwire.training.journal import News
from thinwire.training.logs import RunLog
from thinwire.training.methods import Method, lr_share
from thinwire.training.progress import Progress, Status, choose_progress
from thinwire.training.run_page import FAILED, FINISHED, NAME, STOPPED, RunPage


@dataclass(frozen=True)
class _Mark:
    """The clock at the last news, so that speeds are those since then."""

    step: int
    busy_seconds: float = 0.0
    network_seconds: float = 0.0


class Reporter:
    """Log, TensorBoard, page and display of one run."""

    def __init__(
        self, config: TrainConfig, folder: Path, first_step: int, is_first: bool, waits_are_known: bool, console: Console
    ) -> None:
        self._config, self._folder, self._console, self._first_step = config, folder, console, first_step
        self._waits_are_known = waits_are_known
        self._validation_loss: float | None = None
        # What this process had counted when it began to report: nothing, unless another did before it.
        self._uncounted: Totals | None = {}
        self._open(is_first, first_step)
        self._progress.say(f"to watch it in a browser: {folder / NAME}")

    def _open(self, is_first: bool, step: int) -> None:
        run = self._config.run
        self._is_first = is_first
        self._log = RunLog(self._folder, step, run.tensorboard, run.wandb, asdict(self._config)) if is_first else None
        if self._log is not None:
            self._before = self._log.history.totals
            self._page = RunPage(self._folder, self._config, self._log.history)
        self._progress: Progress = choose_progress(self._console, is_first, run.print_every)
        self._mark = _Mark(step)

    def appoint(self, is_first: bool, step: int) -> None:
        """Begin or cease to be the one that reports, where replicas come and go."""
        if is_first != self._is_first:
            self._close()
            self._uncounted = None
            self._open(is_first, step)

    def say(self, text: str) -> None:
        """A line for the person who watches, and for the log."""
        self._progress.say(text)
        if self._log is not None:
            self._log.write("note", self._log.history.step, text=text)
            self._page.refresh()

    def news(self, news: News, method: Method, clock: Clock, examples_to_units: int, unit: str) -> None:
        """Write down the losses of some steps, and show how it goes."""
        if self._log is None or not news.losses:
            return
        traffic = method.traffic.last_step
        for step, loss in enumerate(news.losses, news.first_step):
            if not math.isfinite(loss):
                self.say(f"step {step} was left out: its loss is {loss}")
                continue
            lr = self._config.optim.lr * lr_share(self._config.schedule, step - 1)
            counts = {"sent_bytes": traffic.sent_bytes, "received_bytes": traffic.received_bytes}
            self._log.write("step", step, loss=loss, lr=lr, replicas=news.num_replicas, **counts)
        status = self._status(news, traffic, clock, examples_to_units, unit)
        speed = {"units_per_second": status.per_second, "unit": unit, "wait_share": status.wait_share}
        self._log.write("speed", status.step, **speed, totals=self._totals(_counted(method, clock)))
        self._log.flush()
        self._progress.update(status)
        self._page.refresh()

    def _totals(self, counted: Totals) -> dict[str, float]:
        """Since the beginning of the run, whoever counted then."""
        if self._uncounted is None:
            self._uncounted = counted
        uncounted = self._uncounted
        return {name: self._before.get(name, 0) + now - uncounted.get(name, 0) for name, now in counted.items()}

    def _status(self, news: News, traffic: Count, clock: Clock, examples_to_units: int, unit: str) -> Status:
        schedule = self._config.schedule
        step = news.first_step + len(news.losses) - 1
        mark, self._mark = self._mark, _Mark(step, clock.step_seconds, clock.seconds["network"])
        spent = max(1e-9, self._mark.busy_seconds - mark.busy_seconds)
        wait_share = (self._mark.network_seconds - mark.network_seconds) / spent
        return Status(
            step=step,
            num_steps=schedule.steps,
            loss=news.losses[-1],
            validation_loss=self._validation_loss,
            per_second=(step - mark.step) * schedule.batch * examples_to_units / spent,
            unit=unit,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            wait_share=wait_share if self._waits_are_known else None,
            seconds_left=clock.training_seconds / max(1, step - self._first_step) * (schedule.steps - step),
        )

    def evaluation(self, step: int, score: Score) -> None:
        """Write down and show a validation loss."""
        self._validation_loss = score.loss
        if self._log is not None:
            self._log.write("evaluation", step, loss=score.loss, accuracy=score.accuracy)
            self._log.flush()
        accuracy = "" if score.accuracy is None else f", {score.accuracy:.1%} right"
        self._progress.say(f"step {step}: validation loss {score.loss:.4f}{accuracy}")

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """End the display and the logs, and write down how the run has ended. For `contextlib.ExitStack.push`."""
        if self._log is not None:
            step = self._log.history.step
            state = STOPPED if step < self._config.schedule.steps else FINISHED
            if isinstance(error, Exception):
                state = FAILED
            text = (
                "" if error is None else first_line(error) if state == FAILED else f"ended at once by {type(error).__name__}"
            )
            self._log.write("end", step, state=state, text=text)
            self._log.flush()
            self._page.write()
        self._close()

    def _close(self) -> None:
        self._progress.close()
        if self._log is not None:
            self._log.close()


def _counted(method: Method, clock: Clock) -> dict[str, float]:
    """All that this process has measured since it began."""
    traffic, drift = method.traffic.total, method.drift
    counts = {"encode": traffic.encode_seconds, "early": traffic.early_seconds, "apply": traffic.apply_seconds}
    counts |= {"hidden": traffic.hidden_seconds, "sent_bytes": traffic.sent_bytes, "received_bytes": traffic.received_bytes}
    if drift is not None:
        counts |= {"drift_checks": drift.num_checks, "drift_differences": drift.num_differences}
    return {
        name: round(seconds, 4) for name, seconds in {"elapsed": clock.elapsed_seconds, **clock.table(), **counts}.items()
    }
