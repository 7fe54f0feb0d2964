"""The key with which the replicas of a run sign what they send: read from a file that only its owner can read."""

from pathlib import Path

from thinwire.exchange.signed import LEAST_KEY_BYTES
from thinwire.training.errors import TrainingError

_MAKE_ONE = "head -c 32 /dev/urandom | base64 makes one"


def read_key(key_file: str) -> bytes | None:
    """The key in this file, without white space at its end; None if no file is named. Errors never show any of it."""
    if not key_file:
        return None
    path = Path(key_file)
    if not path.is_file():
        raise TrainingError(f"key_file={key_file!r}: there is no such file; {_MAKE_ONE}")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise TrainingError(f"key_file={key_file!r} is open to other users (mode {mode:03o}): chmod 600 {key_file}")
    try:
        key = path.read_bytes().rstrip()
    except OSError as error:
        raise TrainingError(f"key_file={key_file!r} cannot be read: {error.strerror}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise TrainingError(f"key_file={key_file!r} holds {len(key)} bytes, a key needs {LEAST_KEY_BYTES}; {_MAKE_ONE}")
    return key
