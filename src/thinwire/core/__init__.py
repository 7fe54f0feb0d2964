"""Pure tensor maths: no ranks, no bytes, no I/O."""
