"""Checks on what the user passes in, each with one sentence that says what to do.

Lives in ``core`` so that every layer can use it. Holds no tensor maths.
"""

import difflib
import math
from collections.abc import Iterable


class ThinwireError(RuntimeError):
    """Base class of the errors Thinwire raises while it runs."""


class PayloadError(ThinwireError):
    """A payload from a replica is not what the plan says it must be."""


class AgreementError(ThinwireError):
    """The replicas do not train the same model with the same settings."""


class ReceivedDifferentlyError(AgreementError):
    """The replicas agree in all but what they received at the last step."""


class ExchangeError(ThinwireError):
    """An exchange did not finish: a replica is gone, late, or out of step."""


class TooFewReplicasError(ExchangeError):
    """Not enough replicas came to a meeting in time."""


class NonFiniteGradientError(ThinwireError):
    """A replica has a gradient with NaN or Inf in it."""


class DriftError(ThinwireError):
    """Replicas hold different parameters."""


class CheckpointError(ThinwireError):
    """A checkpoint does not belong to this optimizer."""


def first_line(error: BaseException) -> str:
    """What an error says, on one line; libraries' messages may have many, or none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def check_choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; otherwise name the nearest one."""
    names = sorted(allowed)
    if isinstance(value, str) and value in names:
        return value
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.6) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}={value!r} is not one of {', '.join(names)}{hint}")


def check_int(name: str, value: object, least: int) -> int:
    """Return ``value`` if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value}")
    return value


def check_float(name: str, value: object, least: float, most: float = math.inf) -> float:
    """Return ``value`` as a float if it lies in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number from {least} to {most}, got {value!r}")
    if not least <= value <= most or math.isinf(value):
        raise ValueError(f"{name} must be a finite number from {least} to {most}, got {value}")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
