"""The random numbers of `soapstone.ops.mask`: the same for every split, and random enough."""

from __future__ import annotations

import torch
from torch import Tensor

from soapstone.ops import Interval
from soapstone.ops.mask import bits, kept, normal, uniform

SIZES = (400, 500)


def draw(seed: int, *sizes: int) -> Tensor:
    return bits(seed, sizes, [Interval(0, n) for n in sizes])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].abs())


def test_a_part_draws_what_the_whole_draws_there() -> None:
    whole = draw(3, 6, 10, 8)
    part = bits(3, (6, 10, 8), [Interval(2, 4), Interval(0, 10), Interval(3, 8)])
    assert torch.equal(part, whole[2:4, :, 3:8])
    assert torch.equal(bits(3, (7,), [Interval(4, 7)]), draw(3, 7)[4:])
    assert draw(3).shape == ()


def plain(seed: int, row: int, column: int) -> int:
    """The rule over Python's integers."""
    golden = 0x9E3779B97F4A7C15

    def mixed(x: int, rounds: tuple[tuple[int, int], ...], width: int) -> int:
        for shift, factor in rounds:
            x = ((x ^ (x >> shift)) * factor) % 2**width
        return x

    def splitmix(x: int) -> int:
        return mixed(x % 2**64, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)), 64)

    key = splitmix(row * golden + splitmix(seed + golden))
    place = (column * 0x9E3779B9 % 2**32) ^ (key >> 32)
    drawn = mixed(place, ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)), 32) ^ (key % 2**32)
    return drawn - 2**32 if drawn >= 2**31 else drawn


def test_numbers_follow_the_rule() -> None:
    """A run resumed elsewhere or later drops what it would have dropped: the numbers never change."""
    assert draw(9, 2, 2, 3).flatten().tolist() == [
        plain(9, row, column) for row in range(4) for column in range(3)
    ]
    assert draw(-1, 1, 2).flatten().tolist() == [plain(-1, 0, column) for column in range(2)]
    assert draw(1, 2, 3)[0].tolist() == [1406147403, 1588215200, 686260385]


def test_every_bit_is_set_half_the_time() -> None:
    drawn = draw(5, *SIZES)
    for place in range(32):
        share = ((drawn >> place) & 1).double().mean()
        assert abs(share - 0.5) < 0.005, place


def test_values_are_spread_evenly() -> None:
    """Chi-squared over 256 bins has mean 255 and standard deviation 23."""
    histogram = torch.histc(uniform(draw(7, *SIZES), torch.float64), 256, 0, 1)
    expected = SIZES[0] * SIZES[1] / 256
    assert ((histogram - expected) ** 2 / expected).sum() < 255 + 4 * 23


def test_neighbours_and_seeds_are_independent() -> None:
    """Correlations of 200 000 pairs have a standard deviation of 0.0022."""
    drawn = draw(11, *SIZES)
    for lag in (1, 2, 3, 16, 64):
        assert correlation(drawn[lag:], drawn[:-lag]) < 0.011
        assert correlation(drawn[:, lag:], drawn[:, :-lag]) < 0.011
    for other in (0, 10, 12, 11 + (1 << 32), 11 + (1 << 48), -11):
        assert correlation(drawn, draw(other, *SIZES)) < 0.011


def test_as_many_are_kept_as_asked_for() -> None:
    drawn = draw(13, *SIZES)
    assert not kept(drawn, 0.0).any()
    assert kept(drawn, 1.0).all()
    assert kept(drawn, 1 - 1e-12).all()
    for probability in (0.1, 0.5, 0.9):
        assert abs(kept(drawn, probability).double().mean() - probability) < 0.005


def test_normal_numbers_have_the_moments_of_the_distribution() -> None:
    values = normal(draw(17, *SIZES), draw(18, *SIZES), torch.float64)
    assert abs(values.mean()) < 0.01
    assert abs(values.var() - 1) < 0.02
    assert abs((values**4).mean() - 3) < 0.1
