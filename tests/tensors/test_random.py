"""Compare the generator with its published answers, and its samples with the expected statistics.

Seeds are fixed, so a test either always passes or always fails; bounds are quantiles that a good generator exceeds once
in a million.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from paceline.tensors.random import Stream, bits, normal, philox, uniform

ONE_IN_A_MILLION = NormalDist().inv_cdf(1.0 - 1e-6)
WORD = 0xFFFFFFFF


def reference_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's unbounded integers, written from the paper."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(a * 0xD2511F53, 2**32)
        high1, low1 = divmod(c * 0xCD9E8D57, 2**32)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return a, b, c, d


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


# kat_vectors of Random123 1.14, the lines "philox4x32 10".
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]):
    c0, c1, c2, c3 = words(*counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == answer
    assert reference_philox(counter, key) == answer


def test_counter_is_block_stream_step_env_and_key_is_the_seed():
    """All versions sample the same numbers, so that an env and a step in a bug report can be reproduced."""
    seed, env, step = 0xDEADBEEF_12345678, 1733, 40112
    sampled = bits(seed, torch.tensor(env), torch.tensor(step), Stream.ACTION, 8).tolist()
    expected = [reference_philox((block, 1, step, env), (0x12345678, 0xDEADBEEF)) for block in range(2)]
    assert sampled == [*expected[0], *expected[1]]


@pytest.mark.parametrize("step", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1])
@pytest.mark.parametrize("env", [0, 2**31, 2**32 - 1])
def test_words_are_right_beyond_31_bits(env: int, step: int):
    sampled = bits(2**63 - 1, torch.tensor(env), torch.tensor(step), Stream.MINIBATCH, 4).tolist()
    assert sampled == list(reference_philox((0, 2, step, env), (WORD, 2**31 - 1)))


def test_both_halves_of_a_64_bit_seed_matter():
    env, step = torch.arange(64), torch.tensor(0)
    seeds = (5, 5 + 2**32, 5 + 2**62, 6)
    sampled = [bits(seed, env, step, Stream.RESET, 4) for seed in seeds]
    for i, one in enumerate(sampled):
        for other in sampled[:i]:
            assert (one == other).float().mean() < 0.01


@pytest.mark.parametrize("sample", [bits, uniform, normal])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_splitting_envs_over_ranks_changes_no_number(sample: Callable[..., Tensor], ranks: int):
    step = torch.tensor(17)
    whole = sample(3, torch.arange(24), step, Stream.RESET, 5)
    shares = torch.arange(24).chunk(ranks)
    assert torch.equal(torch.cat([sample(3, share, step, Stream.RESET, 5) for share in shares]), whole)


@pytest.mark.parametrize("sample", [bits, uniform, normal])
def test_a_block_of_steps_holds_the_numbers_of_its_single_steps(sample: Callable[..., Tensor]):
    env = torch.arange(6)
    block = sample(3, env, torch.arange(100, 108)[:, None], Stream.RESET, 3)
    assert block.shape == (8, 6, 3)
    for i, step in enumerate(range(100, 108)):
        assert torch.equal(block[i], sample(3, env, torch.tensor(step), Stream.RESET, 3))


def test_the_first_numbers_do_not_depend_on_the_count():
    few, many = (uniform(3, torch.arange(5), torch.tensor(1), Stream.RESET, count) for count in (3, 11))
    assert torch.equal(many[:, :3], few)


@pytest.mark.parametrize("count", range(10))
def test_any_count_has_its_shape(count: int):
    for sample in (bits, uniform, normal):
        assert sample(0, torch.arange(3), torch.tensor(0), Stream.RESET, count).shape == (3, count)


def test_no_two_envs_steps_streams_or_places_share_a_word():
    env, step = torch.arange(64), torch.arange(32)[:, None]
    sampled = torch.cat([bits(9, env, step, stream, 8).flatten() for stream in Stream])
    # The words are random, so a few coincide: n^2 / 2^33 pairs are expected, with that variance.
    n = sampled.numel()
    expected = n * n / 2**33
    repeated = n - sampled.unique().numel()
    assert repeated <= expected + ONE_IN_A_MILLION * math.sqrt(expected) + 1


def chi_square_bounds(bins: int) -> tuple[float, float]:
    """Return the one-in-a-million quantiles on both sides, by the approximation of Wilson and Hilferty."""
    k = bins - 1
    spread = ONE_IN_A_MILLION * math.sqrt(2.0 / (9 * k))
    return k * (1 - 2 / (9 * k) - spread) ** 3, k * (1 - 2 / (9 * k) + spread) ** 3


def chi_square(numbers: Tensor, bins: int) -> float:
    """Return the statistic of numbers in [0, 1) against equal shares."""
    counts = torch.bincount((numbers.double().flatten() * bins).long(), minlength=bins).double()
    expected = numbers.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("seed", [0, 2**40 + 1])
def test_uniform_numbers_fill_all_bins_evenly(seed: int, stream: Stream):
    numbers = uniform(seed, torch.arange(512), torch.arange(64)[:, None], stream, 6)
    low, high = chi_square_bounds(256)
    for place in numbers.unbind(-1):
        assert low < chi_square(place, 256) < high
    # The last bits that a float32 holds count too: the place within the 2^-16 grid.
    assert low < chi_square((numbers * 2**16) % 1.0, 256) < high


def test_uniform_numbers_lie_in_the_half_open_interval_on_the_grid():
    numbers = uniform(1, torch.arange(4096), torch.arange(64)[:, None], Stream.RESET, 4)
    assert numbers.dtype == torch.float32
    assert 0.0 <= float(numbers.min()) < 1e-5
    assert 1.0 - 1e-5 < float(numbers.max()) < 1.0
    assert torch.equal(numbers * 2**24, (numbers * 2**24).round())


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())).double())[0, 1])


@pytest.mark.parametrize("sample", [uniform, normal])
def test_neighboring_envs_steps_streams_places_and_seeds_are_uncorrelated(sample: Callable[..., Tensor]):
    env, step = torch.arange(1025), torch.arange(65)[:, None]
    numbers = sample(4, env, step, Stream.RESET, 4)
    pairs = {
        "env": (numbers[:, 1:], numbers[:, :-1]),
        "step": (numbers[1:], numbers[:-1]),
        "place": (numbers[..., 1:], numbers[..., :-1]),
        "half": (numbers[..., 2:], numbers[..., :2]),
        "stream": (numbers, sample(4, env, step, Stream.ACTION, 4)),
        "seed": (numbers, sample(5, env, step, Stream.RESET, 4)),
        "high seed": (numbers, sample(4 + 2**32, env, step, Stream.RESET, 4)),
    }
    for neighbor, (one, other) in pairs.items():
        bound = ONE_IN_A_MILLION / math.sqrt(one.numel())
        assert abs(correlation(one, other)) < bound, neighbor
        # Pairs of Box and Muller share a radius if something is wrong: then the squares are correlated.
        assert abs(correlation(one.square(), other.square())) < bound, f"squares, {neighbor}"


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    z = normal(7, torch.arange(2048), torch.arange(64)[:, None], Stream.ACTION, 3).double().flatten()
    error = ONE_IN_A_MILLION / math.sqrt(z.numel())
    assert abs(z.mean()) < error
    assert abs(z.square().mean() - 1.0) < math.sqrt(2.0) * error
    assert abs(z.pow(3).mean()) < math.sqrt(15.0) * error
    assert abs(z.pow(4).mean() - 3.0) < math.sqrt(96.0) * error


def test_normal_numbers_have_the_shape_of_a_normal_distribution():
    z = normal(7, torch.arange(2048), torch.arange(64)[:, None], Stream.ACTION, 3).double()
    low, high = chi_square_bounds(256)
    for place in z.unbind(-1):
        assert low < chi_square(0.5 * torch.erfc(-place / math.sqrt(2.0)), 256) < high


@pytest.mark.parametrize("beyond", [2.0, 3.0, 4.0])
def test_normal_numbers_have_both_tails(beyond: float):
    z = normal(7, torch.arange(4096), torch.arange(128)[:, None], Stream.ACTION, 2)
    n, share = z.numel(), NormalDist().cdf(-beyond)
    spread = ONE_IN_A_MILLION * math.sqrt(n * share * (1 - share))
    for tail in (z < -beyond, z > beyond):
        assert abs(int(tail.sum()) - n * share) < spread


# Found by search: with seed 0 these envs' first number at step 0 is the least and the greatest there is.
ENV_OF_ZERO, ENV_OF_ALMOST_ONE = 48318229, 1409364


def test_the_least_and_the_greatest_uniform_number_make_finite_normal_ones():
    """Box and Muller takes a logarithm, of which one end would be infinite."""
    env, step = torch.tensor([ENV_OF_ZERO, ENV_OF_ALMOST_ONE]), torch.tensor(0)
    assert uniform(0, env, step, Stream.ACTION, 1).flatten().tolist() == [0.0, 1.0 - 2.0**-24]
    pairs = normal(0, env, step, Stream.ACTION, 2)
    assert pairs[0].tolist() == [0.0, 0.0]
    assert float(pairs[1].norm()) == pytest.approx(math.sqrt(2 * 24 * math.log(2.0)))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_normal_numbers_are_box_and_muller_of_the_first_and_second_half(count: int):
    """Exact to float32's last digits, so that a change of layout, which would change every run, is noticed."""
    even = count + count % 2
    u = uniform(11, torch.tensor(5), torch.tensor(9), Stream.ACTION, even).double()
    radius, angle = torch.sqrt(-2 * torch.log1p(-u[: even // 2])), 2 * math.pi * u[even // 2 :]
    expected = torch.cat((radius * angle.cos(), radius * angle.sin()))[:count]
    sampled = normal(11, torch.tensor(5), torch.tensor(9), Stream.ACTION, count)
    assert sampled.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
