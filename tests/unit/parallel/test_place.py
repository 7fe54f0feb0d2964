"""Which replica a process is, from what launchers set."""

import pytest

from thinwire.parallel.place import Place, find_place, first_host


def test_alone() -> None:
    assert find_place({}) == Place()


def test_torchrun() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = find_place({**environment, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert place == Place(5, 8, 1, 4, "torchrun", "10.0.0.1:29500")


def test_slurm() -> None:
    environment = {
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_JOB_ID": "123456",
    }
    assert find_place(environment) == Place(6, 7, 2, 3, "slurm", "gpu03:23456")
    assert find_place({**environment, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}).num_local_replicas == 4


def test_a_batch_script_outside_srun_is_alone() -> None:
    assert find_place({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Place()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("login1", "login1"), ("a[1-3,7]", "a1"), ("n[007,009]", "n007"), ("x1,y2", "x1"), ("r[1-2]-ib,z", "r1-ib")],
)
def test_first_hosts(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="make this replica 0 of 0"):
        find_place({"RANK": "0", "WORLD_SIZE": "0"})
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT must say where"):
        find_place({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK must be a whole number, it is 'first'"):
        find_place({"RANK": "first", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="names no host"):
        first_host("")
    with pytest.raises(ValueError, match="not a count of tasks"):
        find_place(
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": "a",
                "SLURM_STEP_TASKS_PER_NODE": "many",
            }
        )
