"""Checkpoints are there whole or not at all, and say what is wrong with them."""

import dataclasses
import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.core.errors import CheckpointError
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import SoloTransport, Transport
from thinwire.parallel.listing import check_files, list_files
from thinwire.parallel.state_files import read_state, write_state
from thinwire.training.checkpoints import Checkpoints, RunState, available_steps, read_run

RUN = RunState(10, 320, 1, "demo", 2.5, 2.5, 1.0, 100, 100)


def state() -> dict[str, Any]:
    return {"momentum": torch.arange(6.0), "random": torch.get_rng_state()}


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")


def save(folder: Path, step: int = 10, best: bool = False, transport: Transport | None = None) -> Path:
    run = dataclasses.replace(RUN, step=step)
    return Checkpoints(folder, transport or SoloTransport()).save(run, state, write_model, best)


def find_last(folder: Path) -> tuple[Path, RunState]:
    return Checkpoints(folder, SoloTransport()).load_run()


def test_states_survive_files_bit_by_bit(tmp_path: Path) -> None:
    model = torch.nn.Linear(70, 9)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(3, 70)).sum().backward()
    optimizer.step()
    before = {
        "optimizer": optimizer.state_dict(),
        "none": None,
        "empty": torch.empty(0, 3),
        "halves": torch.randn(5).bfloat16(),
        "doubles": torch.randn(2, 2, dtype=torch.float64),
        "number": 0.1 + 0.2,
        "strided": torch.randn(4, 6).t(),
        "random": torch.get_rng_state(),
    }
    write_state(before, tmp_path / "state")
    after = read_state(tmp_path / "state")
    assert after.keys() == before.keys()
    for name in ("empty", "halves", "doubles", "strided", "random"):
        assert torch.equal(after[name], before[name])
        assert after[name].dtype == before[name].dtype
    assert (after["none"], after["number"]) == (None, 0.1 + 0.2)
    for number, tensors in before["optimizer"]["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(after["optimizer"]["state"][number][name], tensor)
    assert not any(path.read_bytes()[:2] == b"\x80\x04" for path in (tmp_path / "state").iterdir())  # no pickle


def test_states_of_their_own_want_as_many_replicas(tmp_path: Path) -> None:
    for optimizer, is_fixed in (("topk", True), ("powersgd", True), ("adamw", False), ("demo", False)):
        folder = tmp_path / optimizer
        run = dataclasses.replace(RUN, optimizer=optimizer, num_replicas=4)
        Checkpoints(folder, SoloTransport()).save(run, state, write_model, False)
        if is_fixed:
            words = f"is of 4 replicas, this run has 1: with optimizer={optimizer} .* so start 4"
            with pytest.raises(CheckpointError, match=words):
                find_last(folder)
        else:
            assert find_last(folder)[1] == run


def test_last_best_and_the_one_before_the_last_are_kept_and_nothing_else(tmp_path: Path) -> None:
    for step, best in ((10, True), (20, True), (30, False), (40, False)):
        save(tmp_path, step, best)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best", "last", "step-000020", "step-000030", "step-000040"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == "step-000020"
    checkpoint, run = find_last(tmp_path)
    assert (checkpoint.name, run.step, run.position) == ("step-000040", 40, 320)
    loaded = Checkpoints(tmp_path, SoloTransport()).load_state(checkpoint, 0)
    assert torch.equal(loaded["momentum"], torch.arange(6.0))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def no_space(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step 20: replica 0 could not write .*No space left on device"):
        Checkpoints(tmp_path, SoloTransport()).save(dataclasses.replace(RUN, step=20), state, no_space, True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last", "step-000010"]
    assert find_last(tmp_path)[1].step == 10


def test_one_replica_without_space_is_named_on_all(tmp_path: Path) -> None:
    def work(transport: Transport) -> str:
        save(tmp_path, 10, transport=transport)

        def own_state() -> dict[str, Any]:
            if transport.replica == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return state()

        checkpoints = Checkpoints(tmp_path, transport)
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(dataclasses.replace(RUN, step=20), own_state, write_model, False)
        return str(error.value)

    messages = run_replicas(work, 2)
    assert messages[0] == messages[1]
    assert "replica 1 could not write" in messages[0]
    assert find_last(tmp_path)[1].step == 10
    assert not list(tmp_path.rglob("*.partial"))


def test_a_checkpoint_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / "step-000010.partial"
    (partial / "replica-0" / "state").mkdir(parents=True)
    (partial / "replica-0" / "state" / "rubbish").write_text("from a killed process")
    Checkpoints(tmp_path, SoloTransport()).clean()
    save(tmp_path, 10)
    (tmp_path / "checkpoints" / "step-000020.partial" / "replica-7").mkdir(parents=True)
    Checkpoints(tmp_path, SoloTransport()).clean()
    assert not list(tmp_path.rglob("*.partial"))
    checkpoint, _ = find_last(tmp_path)
    assert not list(tmp_path.rglob("rubbish"))
    check_files(checkpoint, 0, "model")


def test_copies_beside_the_files_are_nobodys_and_tensors_among_them_are_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    shutil.copy(checkpoint / "files-0.json", checkpoint / "files-old.json")
    shutil.copytree(checkpoint / "replica-0", checkpoint / "replica-0.bak")
    found, run = find_last(tmp_path)
    assert (found, run.step) == (checkpoint, 10)
    own = Checkpoints(tmp_path, SoloTransport())
    assert own.replicas_here(checkpoint) == [0]
    assert own.load_state(checkpoint, 0)["momentum"].tolist() == [0, 1, 2, 3, 4, 5]
    write_state({"momentum": torch.zeros(6)}, tmp_path / "other")
    for path in (tmp_path / "other").glob("*.safetensors"):
        shutil.copy(path, checkpoint / "replica-0" / "state" / "another.safetensors")
    with pytest.raises(CheckpointError, match=r"another\.safetensors was not written with this checkpoint"):
        own.load_state(checkpoint, 0)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    path = next((checkpoint / "replica-0" / "state").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-1])
    words = "is missing: the checkpoint is not whole" if damage == "remove" else "is damaged: its length or SHA-256"
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(tmp_path, SoloTransport()).load_state(checkpoint, 0)


def test_the_one_before_a_damaged_checkpoint_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever finds the damage, all replicas go back together."""
    for culprit in (0, 2):
        folder = tmp_path / str(culprit)

        def work(transport: Transport, folder: Path = folder, culprit: int = culprit) -> tuple[str, int]:
            for step in (10, 20, 30):
                checkpoint = save(folder, step, transport=transport)
            if transport.replica == culprit:
                path = next((checkpoint / f"replica-{culprit}" / "state").glob("*.safetensors"))
                path.write_bytes(path.read_bytes()[:-1])
            found, run = Checkpoints(folder, transport).load_run()
            return found.name, run.step

        with caplog.at_level(logging.WARNING, logger="thinwire"):
            assert run_replicas(work, 3) == [("step-000020", 20)] * 3
        assert f"replica-{culprit}" in caplog.text
        assert "the checkpoint before it is tried" in caplog.text


@pytest.mark.parametrize("what", ["cut", "all"])
def test_who_reads_the_states_of_all_goes_back_for_any_of_them(what: str, tmp_path: Path) -> None:
    """Fewer replicas go on with the momenta of all, of which that of a replica that is not there any more is damaged."""

    def work(transport: Transport) -> None:
        for step in (10, 20):
            save(tmp_path, step, transport=transport)

    run_replicas(work, 2)
    state = tmp_path / "checkpoints" / "step-000020" / "replica-1" / "state"
    path = next(state.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    if what == "all":
        shutil.rmtree(state.parent)
    assert Checkpoints(tmp_path, SoloTransport()).load_run()[1].step == 20
    assert Checkpoints(tmp_path, SoloTransport()).load_run(reads_all=True)[1].step == 10
    # A replica that has no state of its own there reads another's.
    assert Checkpoints(tmp_path, SoloTransport(), slot=2).newest_here()[1].step == 10  # type: ignore[index]


def test_checkpoints_of_other_versions(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    path = checkpoint / "replica-0" / "run.json"
    facts = json.loads(path.read_text())
    for name in ("data", "dense_bytes"):
        del facts[name]
    path.write_text(json.dumps(facts))
    list_files(checkpoint, 0, [checkpoint / "replica-0", checkpoint / "model"])
    assert find_last(tmp_path)[1] == RUN
    path.write_text(json.dumps({**facts, "moon": "full"}))
    list_files(checkpoint, 0, [checkpoint / "replica-0", checkpoint / "model"])
    with pytest.raises(CheckpointError, match=r"run\.json has 'moon', of which this version knows nothing"):
        find_last(tmp_path)


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint is there for all replicas"):
        find_last(tmp_path)
    checkpoint = save(tmp_path)
    with pytest.raises(CheckpointError, match="has no state of replica-3"):
        Checkpoints(tmp_path, SoloTransport()).load_state(checkpoint, 3)
    facts = json.loads((checkpoint / "replica-0" / "run.json").read_text())
    (checkpoint / "replica-0" / "run.json").write_text(json.dumps({**facts, "step": 99}))
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        find_last(tmp_path)
    (checkpoint / "files-0.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"does not list replica-0/run\.json"):
        find_last(tmp_path)
    (checkpoint / "files-0.json").unlink()
    with pytest.raises(CheckpointError, match="so this is no checkpoint of thinwire"):
        find_last(tmp_path)
    for path in checkpoint.glob("replica-0/run.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"holds no replica's run\.json"):
        find_last(tmp_path)


def test_replicas_on_machines_of_their_own(tmp_path: Path) -> None:
    """Without a shared disk each machine has its own folder, with what its replicas need."""

    def work(transport: Transport) -> int:
        folder = tmp_path / f"machine-{transport.replica}"
        checkpoints = Checkpoints(folder, transport)
        checkpoints.save(RUN, lambda: {"own": torch.tensor(transport.replica)}, write_model, True)
        checkpoint, run = checkpoints.load_run()
        assert run.step == 10
        return int(checkpoints.load_state(checkpoint, transport.replica)["own"])

    assert run_replicas(work, 2) == [0, 1]


def test_machines_that_share_a_disk_have_one_keeper(tmp_path: Path) -> None:
    """Every replica could be the first of its machine; only one may rename and remove."""

    def work(transport: Transport) -> bool:
        checkpoints = Checkpoints(tmp_path, transport)
        for step in (10, 20, 30):
            checkpoints.save(dataclasses.replace(RUN, step=step), state, write_model, step == 10)
        return checkpoints.is_keeper

    assert run_replicas(work, 4) == [True, False, False, False]
    assert available_steps(tmp_path) == [30, 20, 10]
    for name in ("last", "best"):
        checkpoint = (tmp_path / "checkpoints" / name).resolve()
        for replica in range(4):
            check_files(checkpoint, replica, f"replica-{replica}")
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(left) == ["best", "last", "step-000010", "step-000020", "step-000030"]


def test_the_newest_checkpoint_that_all_have_is_taken(tmp_path: Path) -> None:
    """One machine was killed when the other had already given step 20 its name."""

    def work(transport: Transport) -> int:
        folder = tmp_path / f"machine-{transport.replica}"
        checkpoints = Checkpoints(folder, transport)
        assert checkpoints.is_keeper
        checkpoints.save(RUN, state, write_model, True)
        if transport.replica == 0:
            (folder / "checkpoints" / "step-000010").rename(folder / "kept")
            save(folder, 20)
            (folder / "kept").rename(folder / "checkpoints" / "step-000010")
        return Checkpoints(folder, transport).load_run()[1].step

    assert run_replicas(work, 2) == [10, 10]
    assert available_steps(tmp_path / "machine-0") == [20, 10]
    assert read_run(tmp_path / "machine-0" / "checkpoints" / "step-000020", 0).step == 20
