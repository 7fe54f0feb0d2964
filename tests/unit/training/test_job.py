"""Before the first step: agreement on settings and data, and one folder for all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinwire.core.errors import AgreementError
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import Transport
from thinwire.parallel.place import Place
from thinwire.training.config import DataConfig, LaunchConfig, TrainConfig
from thinwire.training.errors import TrainingError
from thinwire.training.job import Job, agree, agree_on_key, describe, lock, settle_folder
from thinwire.training.shaping import agree_on_link, join_over
from thinwire.training.text import load_text


class FakeFolder:
    """A folder of a peer that means harm."""

    def __init__(self, name: str) -> None:
        self.name, self.parent = name, Path("runs")


def outcome(config: TrainConfig, text: bytes, step: int, transport: Transport, folder: Path) -> str:
    """What one replica hears when it has this configuration and this text."""
    path = folder / f"{transport.replica}.txt"
    path.write_bytes(text)
    config = replace(config, data=DataConfig(dataset=str(path), sequence=8))
    try:
        agree(config, describe(load_text(config.data, folder)), step, transport)
    except AgreementError as error:
        return str(error)
    return "agreed"


def test_equal_data_under_other_names_is_fine(tmp_path: Path) -> None:
    def work(transport: Transport) -> str:
        own = {"threads": transport.replica, "key_file": f"{transport.replica}.key"}
        config = replace(TrainConfig(), launch=replace(TrainConfig().launch, **own))
        return outcome(config, b"abcdefgh" * 50, 0, transport, tmp_path)

    assert run_replicas(work, 2) == ["agreed", "agreed"]


@pytest.mark.parametrize("difference", ["text", "length", "setting", "step"])
def test_a_difference_is_named_on_all(difference: str, tmp_path: Path) -> None:
    def work(transport: Transport) -> str:
        other = transport.replica == 1
        text = b"abcdefgh" * 50
        text = {"text": b"ABCDEFGH" * 50, "length": text + text}.get(difference, text) if other else text
        optim = replace(TrainConfig().optim, topk=5 if other and difference == "setting" else 32)
        return outcome(replace(TrainConfig(), optim=optim), text, int(other and difference == "step"), transport, tmp_path)

    words = {"text": "tokens, fingerprint ", "length": "training and", "setting": "topk = 5", "step": "first step: 1"}
    for message in run_replicas(work, 2):
        assert "the replicas do not agree" in message
        assert words[difference] in message


def test_all_replicas_take_the_name_of_replica_0() -> None:
    def work(transport: Transport) -> Path:
        torch.manual_seed(0)
        return settle_folder(Job(TrainConfig(), Place(), Path("runs") / f"at-{transport.replica}"), transport).folder

    assert run_replicas(work, 3) == [Path("runs/at-0")] * 3


@pytest.mark.parametrize("name", ["..", "", "a/b", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    def work(transport: Transport) -> str:
        job = Job(TrainConfig(), Place(), Path("runs") / "here")
        if transport.replica == 0:
            job = replace(job, folder=FakeFolder(name))  # type: ignore[arg-type]
        with pytest.raises(AgreementError, match="which is no name of a folder"):
            settle_folder(job, transport)
        return "refused"

    assert run_replicas(work, 2) == ["refused"] * 2


def test_all_or_none_have_a_key() -> None:
    def work(transport: Transport) -> str:
        agree_on_key(True, transport)
        agree_on_key(False, transport)
        with pytest.raises(AgreementError) as error:
            agree_on_key(transport.replica == 2, transport)
        return str(error.value)

    assert run_replicas(work, 3) == ["of replicas 0 and 2 one was started with --key-file and the other without"] * 3


def test_all_have_the_same_link() -> None:
    def work(transport: Transport) -> str:
        agree_on_link("10mbit", transport)
        with pytest.raises(AgreementError) as error:
            agree_on_link("10mbit" if transport.replica < 2 else "", transport)
        return str(error.value)

    assert run_replicas(work, 3) == ["replicas 0 and 2 were started with different values of --link"] * 3


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(TrainingError, match="another run is writing to this folder"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass


def test_all_or_none_resume() -> None:
    def work(transport: Transport) -> str:
        job = Job(TrainConfig(), Place(), Path("runs/x"), resume=transport.replica == 1)
        with pytest.raises(AgreementError) as error:
            settle_folder(job, transport)
        return str(error.value)

    assert run_replicas(work, 2) == ["of replicas 0 and 1 one was started with --resume and the other without"] * 2


def test_nccl_is_for_gpus() -> None:
    with pytest.raises(TrainingError, match="backend=nccl: NCCL is for GPUs, and this is a cpu; use --backend gloo or auto"):
        join_over(LaunchConfig(backend="nccl"), Place(num_replicas=2), torch.device("cpu"))
