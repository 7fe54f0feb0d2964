"""Coefficients to bytes and back. ``python -m thinwire.wire`` prints what each choice costs."""

from thinwire.wire.codec import ChunkCodec
from thinwire.wire.indices import INDEX_CODECS
from thinwire.wire.values import VALUE_CODECS

__all__ = ["INDEX_CODECS", "VALUE_CODECS", "ChunkCodec"]
