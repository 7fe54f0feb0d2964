"""One replica's state as files, by torch's distributed checkpoint in its safetensors form: nothing is ever unpickled.

A state dict is split into its tensors, stored under their paths in it, and the rest, stored as JSON in a tensor of bytes.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from thinwire.core.errors import CheckpointError, first_line

_FACTS = "facts"
_TENSOR = "__tensor__"


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write a nested dict of tensors, numbers, texts and lists; keys may be texts or whole numbers."""
    tensors: dict[str, Tensor] = {}
    facts = json.dumps(_take_tensors(state, "", tensors))
    tensors[_FACTS] = torch.frombuffer(bytearray(facts.encode()), dtype=torch.uint8)
    # Each replica writes alone (no_dist): planning together would send pickles between the replicas.
    with alone_on_purpose():
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote. Tensors come on the CPU."""
    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")  # type: ignore[union-attr]
    if _FACTS not in tensors:
        raise CheckpointError(f"{folder} holds no state of a run")
    with alone_on_purpose():
        load(tensors, storage_reader=reader, no_dist=True)
    facts = json.loads(tensors.pop(_FACTS).numpy().tobytes())
    state: dict[str, Any] = _put_tensors(facts, tensors)
    return state


@contextmanager
def alone_on_purpose() -> Iterator[None]:
    """Without the warning that nobody else takes part, on the CPU, whatever torch's default device, and with errors as they
    were before torch wrapped them."""
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # no Exception, but a BaseException: it would pass every net above
            (first, _), *_ = error.failures.values()
            reason = first.strerror if isinstance(first, OSError) and first.strerror else first_line(first)
            raise CheckpointError(reason) from first


def _take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # Groups may share a learning rate, and files hold no tensor twice.
        tensors[path] = value.detach().clone() if value.numel() == 1 else value.detach().contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        named = {_key_as_text(key): item for key, item in value.items()}
        return {key: _take_tensors(item, f"{path}/{_escaped(key)}", tensors) for key, item in named.items()}
    if isinstance(value, (list, tuple)):
        return [_take_tensors(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
    return value


def _key_as_text(key: object) -> str:
    """JSON's keys are texts: whole numbers (torch's parameter numbers) come back as such, marked by a #."""
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise CheckpointError(f"a key of a saved dict is {key!r}; it must be a text or a whole number")
    if isinstance(key, int):
        return f"#{key}"
    return f"'{key}" if key[:1] in ("#", "'") else key


def _key_from_text(key: str) -> int | str:
    return int(key[1:]) if key.startswith("#") else key.removeprefix("'")


def _escaped(key: str) -> str:
    """No two paths are the same, also if keys have slashes in them."""
    return key.replace("~", "~0").replace("/", "~1")


def _put_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {_key_from_text(key): _put_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_tensors(item, tensors) for item in value]
    return value
