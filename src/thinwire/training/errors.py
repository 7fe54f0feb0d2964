"""What can be wrong with a run, as one sentence for the person who started it."""

from thinwire.core.errors import ThinwireError


class TrainingError(ThinwireError):
    """A run cannot start or go on; the message says why and what to do."""


class DivergedError(TrainingError):
    """A loss or a parameter is no number any more."""
