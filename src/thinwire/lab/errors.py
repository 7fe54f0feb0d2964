"""What can be wrong with a laboratory of links, as one sentence."""

from thinwire.core.errors import ThinwireError


class LabError(ThinwireError):
    """The laboratory cannot do what was asked, or does not do what it says."""


class LabUnavailableError(LabError):
    """This machine cannot hold a laboratory at all; the message says what it lacks."""
