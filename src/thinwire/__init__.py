"""Thinwire: DeMo (decoupled momentum optimization) for PyTorch, data-parallel training over thin wires."""

from thinwire.core.errors import (
    AgreementError,
    CheckpointError,
    DriftError,
    ExchangeError,
    NonFiniteGradientError,
    PayloadError,
    ThinwireError,
    TooFewReplicasError,
)
from thinwire.exchange.gradient_sync import disable_gradient_sync
from thinwire.hidden import hidden_and_rest
from thinwire.optimizer import DeMo

__all__ = [
    "AgreementError",
    "CheckpointError",
    "DeMo",
    "DriftError",
    "ExchangeError",
    "NonFiniteGradientError",
    "PayloadError",
    "ThinwireError",
    "TooFewReplicasError",
    "disable_gradient_sync",
    "hidden_and_rest",
]
__version__ = "0.1.0"
