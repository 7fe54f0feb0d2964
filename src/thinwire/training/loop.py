"""One replica's run, from the first weights to the last checkpoint. `Run.train` is the loop."""

import dataclasses
import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from thinwire.core.errors import CheckpointError, ExchangeError, NonFiniteGradientError, TooFewReplicasError
from thinwire.exchange.signed import choose_transport
from thinwire.exchange.transport import Elastic, Transport, elastic
from thinwire.parallel.group import backend_name
from thinwire.parallel.sharding import gather_whole, sharding_of
from thinwire.training.attendance import Attendance, elastic_transport
from thinwire.training.checkpoints import Checkpoints, RunState, available_steps, check_model
from thinwire.training.clock import Clock
from thinwire.training.config import DECOUPLED_OPTIMIZERS
from thinwire.training.config_file import as_toml
from thinwire.training.divergence import check_loss, check_parameters, way_back
from thinwire.training.errors import DivergedError, TrainingError
from thinwire.training.evaluation import evaluate
from thinwire.training.examples import Batch, Order, Stream
from thinwire.training.job import (
    Job,
    agree,
    agree_on_key,
    check_data,
    choose_device,
    common_facts,
    describe,
    load_data,
    lock,
    seed_everything,
    settle_folder,
    sizes_of,
)
from thinwire.training.journal import Journal
from thinwire.training.keys import read_key
from thinwire.training.logs import write_text
from thinwire.training.methods import Decoupled, Method, build_method, lr_share
from thinwire.training.models import build_model, loss_of, num_parameters
from thinwire.training.outcome import Outcome
from thinwire.training.reporter import Reporter
from thinwire.training.shaping import join_over, words_for
from thinwire.training.stopping import StopRequest
from thinwire.training.summary import dense_step_bytes
from thinwire.training.text import TextData
from thinwire.training.wording import count, method_words, replica_words

_log = logging.getLogger("thinwire")
_LOADING_ATTEMPTS = 3
# Where faults are expected, the last checkpoint is worth a minute's wait.
_LAST_SAVE_ATTEMPTS, _LAST_SAVE_PAUSE = 6, 10.0


def run_replica(job: Job, console: Console) -> Outcome | None:
    """Train as one replica among those of ``job.place``; collective. None: it came back to a run that is over."""
    disable_progress_bar()  # transformers' own would tear the display
    if job.config.launch.lighthouse and max(available_steps(job.folder), default=0) >= job.config.schedule.steps:
        console.print(f"the run in {job.folder} is at its last step; --steps can add more", soft_wrap=True)
        return None
    device = choose_device(job)
    seed_everything(job.config.run.seed)
    launch, key = job.config.launch, read_key(job.config.launch.key_file)
    if launch.lighthouse:
        transport = choose_transport(elastic_transport(job.config), None, launch.timeout_seconds, key)
    else:
        transport = join_over(launch, job.place, device)
        agree_on_key(key is not None, transport)
        transport = choose_transport(transport, None, launch.timeout_seconds, key)
        job = settle_folder(job, transport)
    with ExitStack() as stack:
        run = Run(job, device, transport, key, console, stack)
        try:
            run.train()
        except (DivergedError, NonFiniteGradientError) as error:
            raise type(error)(f"{error}{way_back(job.folder)}") from error
        return run.outcome()


class Run:
    """All parts of a replica's run. ``key`` is the one that ``transport`` signs with, if it does."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        transport: Transport,
        key: bytes | None,
        console: Console,
        stack: ExitStack,
    ) -> None:
        self._job, self._config, self._device, self._transport = job, job.config, device, transport
        self._key = key
        self._sharding = sharding_of(job.config.launch.mesh, device, job.config.launch.timeout_seconds)
        # Over gloo DeMo waits for the GPU before each exchange anyway, so that waiting a little earlier costs nothing.
        is_decoupled = job.config.optim.optimizer in DECOUPLED_OPTIMIZERS
        has_early_sync = device.type == "cuda" and is_decoupled and transport.num_replicas > 1 and backend_name() == "gloo"
        self.clock = Clock(torch.cuda.synchronize if has_early_sync else None)
        self._data = load_data(self._config)
        self._data_words = describe(self._data)
        self._elastic = elastic(transport)
        self._attendance: Attendance | None = None
        # Replicas that come and go have a slot each, which says what part of the data they see.
        launch = job.config.launch
        place = (transport.replica, transport.num_replicas) if self._elastic is None else (launch.slot, launch.replicas)
        self._number, num_shares = place
        self._checkpoints = Checkpoints(job.folder, transport, None if self._elastic is None else self._number)
        if self._elastic is None:
            if self._checkpoints.is_keeper:
                stack.enter_context(lock(job.folder))
            self._checkpoints.clean()
        else:
            stack.enter_context(lock(job.folder, f".lock-{self._number}"))
        sizes = (len(self._data.train), self._config.schedule.batch)
        self._order = Order(*sizes, self._number, num_shares, self._config.run.seed)
        if self._elastic is None:
            checkpoint, self.state = self._find_start()
            agree(self._config, self._data_words, self.state.step, transport)
            self._check_data()
            self._build(checkpoint)
        else:
            self._build_from_what_is_here()
            self._begin_attendance(self._elastic)
        self._stack = stack
        self._open_stream()
        self._start_reporting(console, stack)
        self._stop = stack.enter_context(StopRequest(job.parent, transport.replica == 0))
        self.clock.end_set_up()

    def _open_stream(self) -> None:
        self._stream = Stream(self._data.train, self._order, self.state.position, self._config.data.workers)
        self._stack.callback(self._stream.close)

    def _begin_attendance(self, transport: Elastic) -> None:
        method = self.method
        assert isinstance(method, Decoupled)
        facts, buffers = common_facts(self._config, self._data_words), list(self._model.buffers())
        self._attendance = Attendance(transport, method.optimizer, buffers, facts)
        self._attendance.begin(self.state.step, self.state.position)
        self._attendance.news()
        self.state = dataclasses.replace(self.state, step=self._attendance.step, position=self._attendance.position)

    def _find_start(self) -> tuple[Path | None, RunState]:
        optimizer, num_replicas = self._config.optim.optimizer, self._transport.num_replicas
        if not self._job.resume:
            return None, self._first_state(num_replicas)
        checkpoint, state = self._checkpoints.load_run(reads_all=self._job.residual != "exact")
        if state.step >= self._config.schedule.steps:
            asked = self._config.schedule.steps
            done = (
                f"has taken {state.step} steps, more than {asked}" if asked < state.step else f"is at its last step, {asked}"
            )
            raise TrainingError(f"the run in {self._job.folder} {done}; --steps can add more")
        if state.optimizer != optimizer:
            raise CheckpointError(f"the checkpoint is of optimizer={state.optimizer}, this run has {optimizer}")
        has_residual = optimizer in DECOUPLED_OPTIMIZERS
        if has_residual and state.num_replicas != num_replicas and self._job.residual == "exact":
            raise CheckpointError(
                f"the checkpoint is of {count(state.num_replicas, 'replica')}, this run has {num_replicas}: start as many, "
                "or let --residual sum, mean, keep or zero say what is to become of their momenta"
            )
        return checkpoint, dataclasses.replace(state, num_replicas=num_replicas)

    def _first_state(self, num_replicas: int) -> RunState:
        optimizer = self._config.optim.optimizer
        return RunState(0, 0, num_replicas, optimizer, None, None, 0.0, 0, 0, data=self._data_words, dense_bytes=0.0)

    def _check_data(self) -> None:
        check_data(self._config, self.state.data, self._data_words)
        self.state = dataclasses.replace(self.state, data=self._data_words)

    def _build_from_what_is_here(self) -> None:
        """A replica that was started again begins with the last checkpoint, and gets what came after it from the others."""
        launch = self._config.launch
        for _ in range(_LOADING_ATTEMPTS):
            found = self._checkpoints.newest_here()
            if found is None:
                break
            self.state = dataclasses.replace(found[1], num_replicas=launch.replicas)
            self._check_data()
            try:
                self._build(found[0])
                return
            except (CheckpointError, OSError) as error:
                # The others, who go on training, may just have replaced it by a newer one.
                _log.warning("%s", error)
        self.state = self._first_state(launch.replicas)
        self._build(None)

    def _build(self, checkpoint: Path | None) -> None:
        self._build_model(checkpoint)
        if checkpoint is not None:
            self._restore(checkpoint)

    def _build_model(self, checkpoint: Path | None) -> None:
        self._model = build_model(self._config, sizes_of(self._data))
        self._num_parameters = num_parameters(self._model)
        if checkpoint is not None and self._transport.replica == 0:
            # The others get the weights from replica 0, as at the beginning of any run.
            check_model(checkpoint)
            kind: Any = type(self._model)
            loaded = kind.from_pretrained(checkpoint / "model", local_files_only=True, use_safetensors=True)
            self._model.load_state_dict(loaded.state_dict())
        if self._sharding is not None:
            self._sharding.shard_(self._model, self._transport)
        self._model.to(self._device).train()
        # From here on, what is random (dropout) differs between replicas.
        seed_everything(self._config.run.seed + 1 + self._number)
        compiled: Any = torch.compile(self._model) if self._config.model.compile else self._model
        self._callable_model: nn.Module = compiled
        reach = self._transport
        if self._sharding is not None:
            group, timeout_seconds = self._sharding.between_replicas, self._config.launch.timeout_seconds
            reach = choose_transport(None, group, timeout_seconds, self._key)
        launch, islands = self._config.launch, None
        if launch.islands:
            islands = {"islands": launch.islands, "secret": self._key, "timeout_seconds": launch.timeout_seconds}
        self.method: Method = build_method(self._config.optim, self._model, self._callable_model, reach, islands)

    def _restore(self, checkpoint: Path) -> None:
        here, own = self._checkpoints.replicas_here(checkpoint), self._number
        is_exact = self._job.residual == "exact"
        has_own = own in here and is_exact
        needs_own = not self.method.state_is_shared and is_exact and self._elastic is None
        state = self._checkpoints.load_state(checkpoint, own if has_own or needs_own else min(here, default=0))
        if has_own:
            torch.set_rng_state(state["random"])
            if self._device.type == "cuda" and state["random_cuda"] is not None:
                torch.cuda.set_rng_state(state["random_cuda"], self._device)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(state["buffers"][name])
        if isinstance(self.method, Decoupled) and self._elastic is not None:
            self.method.load_own(state["optimizer"], has_own)
            return
        if needs_own:
            states: Iterable[dict[str, Any]] = [state["optimizer"]]
        else:
            found = (self._checkpoints.load_state(checkpoint, other)["optimizer"] for other in here)
            states = (optimizer for optimizer in found if optimizer is not None)
        try:
            self.method.load_state_dict(states, self._job.residual)
        except CheckpointError as error:
            if not is_exact:
                raise
            # What follows is DeMo's advice to those who call it themselves.
            problem = str(error).partition("; ")[0]
            raise CheckpointError(
                f"{problem}; --residual sum, mean, keep or zero goes on with another exchange, mesh or number of replicas"
            ) from error

    def _start_reporting(self, console: Console, stack: ExitStack) -> None:
        if self._checkpoints.is_keeper:
            aside = self._job.folder / "config.toml.new"
            # Where to find the others is of this start, not of the run.
            launch = dataclasses.replace(self._config.launch, lighthouse="", slot=0)
            write_text(aside, as_toml(dataclasses.replace(self._config, launch=launch)))
            aside.replace(self._job.folder / "config.toml")
        facts = (self._is_first, self._waits_are_known)
        self._reporter = Reporter(self._config, self._job.folder, self.state.step, *facts, console)
        stack.push(self._reporter.leave)
        self._introduce()

    @property
    def _is_first(self) -> bool:
        """Whether it is this replica that reports."""
        return self._transport.replica == 0

    def _introduce(self) -> None:
        """Say what is about to be trained, and how."""
        launch, num_replicas = self._config.launch, self._transport.num_replicas
        self._reporter.say(
            f"{self._config.model.architecture} with {self._num_parameters:,} parameters on {self._data.description}"
        )
        carrier = backend_name() if self._elastic is None else "gloo"
        backend = f" over {carrier}" if num_replicas > 1 else ""
        backend += (", signed" if num_replicas > 1 and self._key is not None else "") + words_for(launch)
        where = f"{replica_words(launch, num_replicas)} on {self._device.type}{backend}, run in {self._job.folder}"
        self._reporter.say(f"{method_words(self._config.optim)}, {where}")
        if self.state.step:
            policy = self._job.residual
            momenta = ", with empty momenta" if policy == "zero" else "" if policy == "exact" else f", momenta by {policy!r}"
            self._reporter.say(f"going on after step {self.state.step}{momenta}")

    def train(self) -> None:
        """Step after step, until all are taken or somebody asks to stop."""
        journal = Journal(self._transport, self.state.step, self._config.optim.on_nonfinite == "skip")
        if self.state.step == 0 and self._attendance is None:
            self.score()
        is_done = False
        while not is_done:
            try:
                is_at_end = self.state.step >= self._config.schedule.steps
                is_done = self._look_up(journal) if is_at_end else self._step(journal)
                continue
            except ExchangeError as error:
                if self._attendance is None or isinstance(error, TooFewReplicasError):
                    raise
                self._reporter.say(f"{error}; the replicas meet")
            # It was no step that failed, but an evaluation, a checkpoint, or news. All leave it at that.
            self._attendance.meet()
            self._greet(journal, has_stepped=False)

    def _step(self, journal: Journal) -> bool:
        """One step, and what is due after it; whether the run ends here."""
        loss = self.take_step()
        if self._attendance is not None and self._greet(journal, has_stepped=True):
            return False
        journal.add(loss)
        self.count_step(self.state.step + 1)
        return self._look_up(journal)

    def take_step(self) -> Tensor:
        """Change the parameters once; the loss before it."""
        self.method.start_step(lr_share(self._config.schedule, self.state.step))
        with self.clock.phase("data"):
            batch = next(self._stream).to(self._device)
        loss = self._gradients(batch)
        with self.clock.phase("optimizer"):
            self.method.step()
        return loss

    def _greet(self, journal: Journal, has_stepped: bool) -> bool:
        """If replicas have come or gone: take note of it. Whether this one has nothing more to do for this step, since it
        was given a later state, or only just caught up with the others."""
        assert self._attendance is not None
        has_met, is_copy, lost = self._attendance.news()
        if not has_met:
            return False
        members = self._transport.num_replicas
        self._reporter.appoint(self._is_first, self._attendance.step)
        if is_copy:
            position = self._attendance.position
            self.state = dataclasses.replace(self.state, step=self._attendance.step, position=position)
            self._stream.close()
            self._open_stream()
        self._reporter.say(f"{count(members, 'replica')} after step {self.state.step}{f', without {lost}' if lost else ''}")
        if lost and self._config.launch.on_loss == "stop":
            self._stop.ask()
        has_caught_up = has_stepped and not is_copy and not self._attendance.has_moved
        if has_caught_up:
            self.count_step(self.state.step + 1)
        journal.restart(self.state.step)
        return is_copy or has_caught_up

    def _gradients(self, batch: Batch) -> Tensor:
        """Gradients of the mean loss over this replica's share of the batch, clipped; returns that loss."""
        size = self._config.schedule.micro_batch or len(batch.inputs)
        parts = [Batch(*pair) for pair in zip(batch.inputs.split(size), batch.targets.split(size), strict=True)]
        total = torch.zeros((), device=self._device)
        for place, part in enumerate(parts):
            with nullcontext() if place == len(parts) - 1 else self.method.accumulating():
                with self.clock.phase("forward"), self._autocast():
                    loss, _ = loss_of(self.method.model, part)
                with self.clock.phase("backward"):
                    (loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        with self.clock.phase("backward"):
            self.method.after_backward(self._config.optim.clip)
        return total

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.model.precision == "bfloat16")

    def count_step(self, step: int) -> None:
        """Count the step, and what of its time and bytes was the network's."""
        traffic, dense_bytes = self.method.traffic.last_step, self.state.dense_bytes
        if self._waits_are_known:
            self.clock.move(traffic.wait_seconds, self.method.waits_in, "network")
        if dense_bytes is not None:
            dense_bytes += dense_step_bytes(self._config.launch, self._transport.num_replicas, self._num_parameters)
        self.state = dataclasses.replace(
            self.state,
            step=step,
            position=self._stream.position,
            sent_bytes=self.state.sent_bytes + traffic.sent_bytes,
            received_bytes=self.state.received_bytes + traffic.received_bytes,
            dense_bytes=dense_bytes,
        )
        if self._attendance is not None:
            self._attendance.count(step, self._stream.position)

    @property
    def _waits_are_known(self) -> bool:
        """DDP's exchange, and NCCL's, run beside the GPU's other work: nothing says how much of that was waiting."""
        if self._transport.num_replicas == 1 or self._device.type == "cpu":
            return True
        return self.method.waits_in == "optimizer" and backend_name() == "gloo"

    def _look_up(self, journal: Journal) -> bool:
        """Between two steps: exchange news, evaluate and save where it is time to. True: the run ends here."""
        run, step = self._config.run, self.state.step
        is_last = step >= self._config.schedule.steps
        evaluates = is_last or step % run.eval_every == 0
        saves = is_last or (run.checkpoint_every > 0 and step % run.checkpoint_every == 0)
        if not (journal.is_due or evaluates or saves):
            return False
        # Reading the losses waits for a GPU that is still computing.
        with self.clock.phase("network" if self._device.type == "cpu" else "backward"):
            news = journal.exchange(self._stop.is_asked)
        is_text = isinstance(self._data, TextData)
        units = (self._config.data.sequence, "tokens") if is_text else (1, "images")
        self._reporter.news(news, self.method, self.clock, *units)
        if evaluates or saves or news.stop:
            with self.clock.phase("optimizer"):
                self.method.drain()
        is_best = evaluates and self.score()
        if saves or is_best or news.stop:
            with self.clock.phase("checkpoints"):
                self._save(is_best, is_needed=self._attendance is None or is_last or news.stop)
        return news.stop or is_last

    def score(self) -> bool:
        """Score the model; whether it is the best so far."""
        schedule = self._config.schedule
        with self.clock.phase("evaluation"):
            score = evaluate(
                self._callable_model,
                self._data.validation,
                self._config.run.eval_examples,
                schedule.micro_batch or schedule.batch // self._transport.num_replicas,
                self._transport,
                self._device,
                self._autocast(),
            )
        check_loss(f"the validation loss after step {self.state.step}", score.loss)
        best = self.state.best_loss
        is_best = self.state.step > 0 and (best is None or score.loss < best)
        self.state = dataclasses.replace(self.state, loss=score.loss, best_loss=score.loss if is_best else best)
        self._reporter.evaluation(self.state.step, score)
        return is_best

    def _save(self, is_best: bool, is_needed: bool) -> None:
        check_parameters(self._model, self._transport, self.state.step)
        elapsed = self.state.elapsed_seconds + self.clock.elapsed_seconds
        state = dataclasses.replace(self.state, elapsed_seconds=elapsed)
        # All ranks take part in gathering, and rank 0 alone in writing.
        self._whole = gather_whole(self._model) if self._sharding is not None else None
        attempts = _LAST_SAVE_ATTEMPTS if is_needed and self._attendance is not None else 1
        for attempt in range(1, attempts + 1):
            try:
                self._checkpoints.save(state, self._replica_state, self._write_model, is_best)
                return
            except CheckpointError as error:
                if is_needed and attempt == attempts:
                    raise
                go_on = f"it is tried again in {_LAST_SAVE_PAUSE:g} s" if is_needed else "training goes on"
                self._reporter.say(f"{error}; {go_on}, and the checkpoint before it stays")
            if is_needed:
                time.sleep(_LAST_SAVE_PAUSE)

    def _replica_state(self) -> dict[str, Any]:
        # Where all replicas have the same optimizer state, one copy per disk is enough.
        is_copy = self.method.state_is_shared and not self._checkpoints.is_keeper
        return {
            "optimizer": None if is_copy else self.method.state_dict(),
            "buffers": dict(self._model.named_buffers()),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }

    def _write_model(self, folder: Path) -> None:
        # It empties the dict that it is given.
        whole = None if self._whole is None else dict(self._whole)
        self._model.save_pretrained(folder, state_dict=whole)  # type: ignore[operator]
        tokenizer = Path(self._config.data.tokenizer)
        if tokenizer.is_file():
            (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())

    def _reported_model(self) -> nn.Module:
        """What the report looks at. A sharded model would wait for all ranks, so rank 0 gets a whole one, on its host."""
        if self._sharding is None or not self._whole:
            return self._model
        model = build_model(self._config, sizes_of(self._data))
        model.load_state_dict(self._whole)
        return model

    def outcome(self) -> Outcome:
        """How it ended."""
        elapsed = self.state.elapsed_seconds + self.clock.elapsed_seconds
        return Outcome(
            job=self._job,
            model=self._reported_model(),
            data=self._data,
            device=self._device if self._sharding is None else torch.device("cpu"),
            state=dataclasses.replace(self.state, elapsed_seconds=elapsed),
            seconds=self.clock.table(),
            is_finished=self.state.step >= self._config.schedule.steps,
            stop_signal=self._stop.signal_number,
            is_first=self._is_first,
        )
