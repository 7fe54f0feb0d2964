"""Run a function as several real processes joined by gloo, and show the first traceback if one fails."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What the server imports before it forks: with the trainer and its model, so that replicas need not import them each.
_PRELOADED = ["torch.distributed.tensor", "hypothesis", "matplotlib.pyplot", "pytest", "thinwire.training.loop"]
_PRELOADED += ["transformers.models.llama.modeling_llama", "transformers.models.resnet.modeling_resnet"]


def forkserver() -> ForkServerContext:
    """Starts processes whose imports are done. There is one server per process of pytest, for all that is started so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_ranks(
    work: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 120.0, may_die: bool = False
) -> list[Any]:
    """Call ``work(rank, *args)`` in ``num_ranks`` processes and return what each returned (None if it died)."""
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(work, rank, num_ranks, folder, args), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_seconds
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        for rank in range(num_ranks):
            failure = Path(folder, f"{rank}.traceback")
            if failure.exists():
                raise AssertionError(f"rank {rank} failed:\n{failure.read_text()}")
        assert not late, f"ranks {late} did not end within {timeout_seconds} s"
        return [_result(Path(folder, f"{rank}.pt"), may_die) for rank in range(num_ranks)]


def _result(path: Path, may_die: bool) -> Any:
    if may_die and not path.exists():
        return None
    return torch.load(path, weights_only=True)


def _rank_main(work: Callable[..., Any], rank: int, num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
        )
        torch.save(work(rank, *args), Path(folder, f"{rank}.pt"))
        # A gloo process may abort at exit while its threads still run (pytorch issue 190489).
        time.sleep(0.2)
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.traceback").write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
