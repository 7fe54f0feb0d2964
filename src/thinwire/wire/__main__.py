"""Print what one coefficient costs on the wire: ``python -m thinwire.wire [--elements 4096]``."""

import argparse

from thinwire.wire.codec import ChunkCodec
from thinwire.wire.indices import entropy_bound_bits
from thinwire.wire.values import VALUE_CODECS

KEPT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PUBLISHED_BITS = 96


def table(num_elements: int) -> str:
    """A markdown table of bits per coefficient, padding included, for K from 1 to 512."""
    columns = ["K", "index codec", "index bits", "entropy bound", *VALUE_CODECS, "published / sign"]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for num_kept in KEPT:
        if num_kept > num_elements:
            break
        codecs = {name: ChunkCodec(num_elements, num_kept, name) for name in VALUE_CODECS}
        bits = {name: codec.record_bytes * 8 / num_kept for name, codec in codecs.items()}
        sign = codecs["sign"]
        row = [
            str(num_kept),
            sign.index_codec.name,
            f"{sign.index_bits / num_kept:.2f}",
            f"{entropy_bound_bits(num_elements, num_kept):.2f}",
            *(f"{value:.2f}" for value in bits.values()),
            f"{PUBLISHED_BITS / bits['sign']:.1f}x",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Read the options and print."""
    parser = argparse.ArgumentParser(prog="python -m thinwire.wire", description=__doc__)
    parser.add_argument("--elements", type=int, default=4096, help="elements per chunk, E (default: 64 x 64 = 4096)")
    options = parser.parse_args(arguments)
    if options.elements < 1:
        parser.error(f"--elements must be at least 1, got {options.elements}")
    print(f"Bits per coefficient, E = {options.elements} elements per chunk, records padded to whole bytes\n")
    print(table(options.elements))


if __name__ == "__main__":
    main()
