"""Tells people and files how a run is going. Only the reporter of the first replica has anyone to tell."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from thinwire.exchange.traffic import Count
from thinwire.training.clock import Clock
from thinwire.training.config import TrainConfig
from thinwire.training.evaluation import Score
from thinwire.training.journal import News
from thinwire.training.logs import RunLog
from thinwire.training.methods import lr_share
from thinwire.training.progress import Progress, Status, choose_progress


@dataclass(frozen=True)
class _Mark:
    """The clock at the last news, so that speeds are those since then."""

    step: int
    busy_seconds: float = 0.0
    network_seconds: float = 0.0


class Reporter:
    """Log, TensorBoard and display of one run."""

    def __init__(
        self, config: TrainConfig, folder: Path, first_step: int, is_first: bool, waits_are_known: bool, console: Console
    ) -> None:
        self._config, self._folder, self._console, self._first_step = config, folder, console, first_step
        self._waits_are_known = waits_are_known
        self._validation_loss: float | None = None
        self._open(is_first, first_step)

    def _open(self, is_first: bool, step: int) -> None:
        run = self._config.run
        self._is_first = is_first
        self._log = RunLog(self._folder, step, run.tensorboard, run.wandb, asdict(self._config)) if is_first else None
        self._progress: Progress = choose_progress(self._console, is_first, run.print_every)
        self._mark = _Mark(step)

    def appoint(self, is_first: bool, step: int) -> None:
        """Begin or cease to be the one that reports, where replicas come and go."""
        if is_first != self._is_first:
            self.close()
            self._open(is_first, step)

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        self._progress.say(text)

    def news(self, news: News, traffic: Count, clock: Clock, examples_to_units: int, unit: str) -> None:
        """Write down the losses of some steps, and show how it goes."""
        if self._log is None or not news.losses:
            return
        for step, loss in enumerate(news.losses, news.first_step):
            lr = self._config.optim.lr * lr_share(self._config.schedule, step - 1)
            counts = {"sent_bytes": traffic.sent_bytes, "received_bytes": traffic.received_bytes}
            self._log.write("step", step, loss=loss, lr=lr, replicas=news.num_replicas, **counts)
        status = self._status(news, traffic, clock, examples_to_units, unit)
        self._log.write("speed", status.step, units_per_second=status.per_second, wait_share=status.wait_share)
        self._log.flush()
        self._progress.update(status)

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
        self.say(f"step {step}: validation loss {score.loss:.4f}{accuracy}")

    def close(self) -> None:
        """End the display and the logs."""
        self._progress.close()
        if self._log is not None:
            self._log.close()
