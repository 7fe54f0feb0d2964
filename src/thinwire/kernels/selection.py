"""The K largest magnitudes of a chunk, by counting, inside a kernel.

The bit pattern of a positive float, taken as an integer, orders as the float does. So a chunk's largest are found by asking
how many patterns are at least t, for a few t, until there are between K and L of them. These are marked, and the exact
choice is made among those few. Ties go to the lower index, zeros are never kept.
"""

import triton
import triton.language as tl

_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def count(mask):
    """How many of a tile are set."""
    return tl.sum(mask.to(tl.int32))


@triton.jit
def threshold(bits, guess, FEWEST: tl.constexpr, MOST: tl.constexpr, NUM_BITS: tl.constexpr):
    """(t, number of patterns >= t, number of patterns > t if the former exceeds ``MOST``).

    Between ``FEWEST`` and ``MOST`` patterns are at least t, if there is such a t. Else fewer than ``FEWEST`` are not 0, and
    t is 0; or those equal to t tie for the last places. ``guess`` is where to look first.

    Downwards in octaves until there are enough, then where the count would be right if its logarithm fell on a straight
    line, in turn with the middle.
    """
    low = guess * 0
    num_low = low + NUM_BITS
    high = low + _INFINITY
    num_high = low
    octaves = low + (1 << 23)
    num_tries = low
    while (num_low > MOST) & (high - low > 1):
        num = count(bits >= guess)
        if num >= FEWEST:
            low = guess
            num_low = num
        else:
            high = guess
            num_high = num
        if low == 0:
            guess = tl.maximum(high - octaves, 1)
            octaves = octaves * 2
        else:
            many = num_low.to(tl.float32)
            down = tl.log2(many) - tl.log2((FEWEST + MOST) * 0.5)
            whole = tl.log2(many) - tl.log2(tl.maximum(num_high.to(tl.float32), 0.5))
            share = tl.where(num_tries % 2 == 0, down / whole, 0.5)
            guess = low + ((high - low).to(tl.float32) * share).to(tl.int32)
            guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
            num_tries += 1
    return low, num_low, num_high


@triton.jit
def store_marks(mask, rows, cols, marks_ptr, BLOCK_C: tl.constexpr, WORD: tl.constexpr):
    """Write a tile's mask as words of ``WORD`` bits, row by row."""
    for word in tl.static_range(BLOCK_C // WORD):
        bits = tl.sum(tl.where(mask & (cols // WORD == word), 1 << (cols % WORD), 0), axis=1)
        tl.store(marks_ptr + rows * (BLOCK_C // WORD) + word, bits[:, None])


@triton.jit
def settle_ties(
    tied_bits, num_wanted, momentum_ptrs, marks_ptrs, MARKS: tl.constexpr, ROW_WORDS: tl.constexpr, WORD: tl.constexpr,
    ROW_EDGE: tl.constexpr, COL_EDGE: tl.constexpr,
):  # fmt: skip
    """Mark the first ``num_wanted`` elements of each chunk whose pattern is ``tied_bits``, unless that is 0. Rare, slow."""
    bit = tl.arange(0, WORD)[None, :]
    num_found = num_wanted * 0
    for word in range(0, MARKS):
        row = word // ROW_WORDS
        col = (word % ROW_WORDS) * WORD + bit
        exists = (tied_bits > 0) & (col < COL_EDGE) & (col + row * COL_EDGE < ROW_EDGE * COL_EDGE)
        values = tl.load(momentum_ptrs + row * COL_EDGE + col, mask=exists, other=0.0).to(tl.float32)
        is_tied = exists & ((values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == tied_bits)
        num_so_far = num_found + tl.cumsum(is_tied.to(tl.int32), axis=1)
        more = tl.sum(tl.where(is_tied & (num_so_far <= num_wanted), 1 << bit, 0), axis=1)[:, None]
        tl.store(marks_ptrs + word, tl.load(marks_ptrs + word, mask=tied_bits > 0, other=0) | more, mask=tied_bits > 0)
        num_found += tl.sum(is_tied.to(tl.int32), axis=1)[:, None]
    tl.debug_barrier()


@triton.jit
def popcount(words):
    """How many bits of each int32 are set."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def list_marks(words, first_index, lists_ptr):
    """Write the indices of the set bits of each row of words to that row's list, ascending; return how many there are."""
    num_set = popcount(words)
    spot = tl.cumsum(num_set, axis=1) - num_set
    for _ in range(0, tl.max(num_set)):
        lowest = (words & -words).to(tl.uint32, bitcast=True).to(tl.float32)
        bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(lists_ptr + spot, first_index + bit, mask=words != 0)
        words = words & (words - 1)
        spot += 1
    return tl.sum(num_set, axis=1)


@triton.jit
def among_largest(bits, lane, live, lists_ptr, num_listed, K: tl.constexpr):
    """Which candidates of each row are its K largest, ties to the first. All pairs are compared: the lists are short.

    The patterns of a row also lie at its pointer.
    """
    num_larger = bits * 0
    for other in range(0, tl.max(num_listed)):
        theirs = tl.load(lists_ptr + other, mask=other < num_listed[:, None], other=0)
        num_larger += ((theirs > bits) | ((theirs == bits) & (other < lane))).to(tl.int32)
    return live & (num_larger < K)
