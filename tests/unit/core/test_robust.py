"""Norms in whole numbers, and the factors that follow from them."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.core.robust import clip_factors, squared_norm, squares_by_exponent

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def square_of(values: Tensor) -> int:
    return squared_norm(squares_by_exponent(values))


def as_it_says(values: list[float]) -> Fraction:
    """The sum of squares of values rounded to 16 bits each, without a limit on the number of bits."""
    total = Fraction(0)
    for value in values:
        exponent = max(math.frexp(value)[1], -125)  # below, float32 has fewer bits
        unit = Fraction(2) ** (exponent - 16)
        total += (math.floor(abs(Fraction(value)) / unit + Fraction(1, 2)) * unit) ** 2
    return total


@given(st.lists(FLOATS, max_size=40))
def test_it_is_what_it_says(values: list[float]) -> None:
    unit = Fraction(2) ** -142  # of the exponent 0
    assert square_of(torch.tensor(values, dtype=torch.float32)) * unit**2 == as_it_says(values)


def test_norms_are_those_of_real_arithmetic_to_16_bits() -> None:
    for scale in (1e-38, 1e-20, 1.0, 1e30):
        few = torch.randn(7) * scale
        many = torch.randn(31, 100) * scale
        expected = float(few.double().norm() / many.double().norm())
        assert math.sqrt(square_of(few) / square_of(many)) == pytest.approx(expected, rel=2**-15)


def test_no_order_and_no_cut_changes_a_bit() -> None:
    values = torch.randn(3000) * torch.randint(-80, 80, (3000,)).float().exp2()
    whole = square_of(values)
    assert square_of(values[torch.randperm(3000)].view(30, 100)) == whole
    assert sum(square_of(part) for part in values.split(701)) == whole
    assert square_of(values.view(30, 100).t()) == whole
    assert square_of(-values) == whole
    assert square_of(values.repeat(2)) == 2 * whole


def test_the_largest_sums_fit() -> None:
    values = torch.full((1 << 20,), 2.0 - 2**-23)
    assert square_of(values) == (1 << 52) << (2 * 127)


def test_factors_scale_down_to_the_median_and_leave_the_rest_alone() -> None:
    assert clip_factors([5]) == [1.0]
    assert clip_factors([0]) == [1.0]
    assert clip_factors([16, 1]) == [0.25, 1.0]
    assert clip_factors([4, 400, 1]) == [1.0, torch.tensor(0.1).item(), 1.0]
    assert clip_factors([9, 1, 36, 9]) == [1.0, 1.0, 0.5, 1.0]
    assert clip_factors([4, 16, 64, 256]) == [1.0, 1.0, 0.5, 0.25], "the lower one of two in the middle"


def test_replicas_that_sent_nothing_count() -> None:
    assert clip_factors([0, 7, 0]) == [1.0, 0.0, 1.0]
    assert clip_factors([0, 4, 16]) == [1.0, 1.0, 0.5]


@given(st.lists(st.lists(FLOATS, min_size=1, max_size=5), min_size=1, max_size=7))
def test_factors_are_shares_in_float32_and_the_lower_half_keeps_all(everyone: list[list[float]]) -> None:
    squares = [square_of(torch.tensor(values, dtype=torch.float32)) for values in everyone]
    factors = clip_factors(squares)
    assert all(0 <= factor <= 1 and torch.tensor(factor).item() == factor for factor in factors)
    assert sum(factor == 1 for factor in factors) >= (len(factors) + 1) // 2
    assert clip_factors([4**40 * square for square in squares]) == factors
