"""Settings that hold for every test."""

import os
from collections.abc import Iterator

# Some CPUs stop with SIGILL in oneDNN's bfloat16 matrix products; set before the first one, and inherited by children.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from hypothesis import HealthCheck, settings

# What a person's terminal, launcher or git says must decide no test: neither widths nor colours, ranks nor signed commits.
_OUTSIDE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_OUTSIDE |= {"COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
for _name in [name for name in os.environ if name in _OUTSIDE or name.startswith("GIT_")]:
    del os.environ[_name]
os.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

# Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("thinwire", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("thinwire")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that want a GPU are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A run in this process may have set more, which wait for each other for long where tests share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test, or a library in it (Lightning sets `OMP_NUM_THREADS`), writes into the environment ends with it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is: the CPU always, a GPU with ``make test-gpu``."""
    return torch.device(request.param)
