import torch

from paceline.tensors.statistics import RunningStatistics


def test_batches_merge_into_the_statistics_of_all_rows():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(120, 3, generator=generator) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, -3.0, 40.0])
    statistics = RunningStatistics(3, torch.device("cpu"))
    for batch in rows.split((20, 70, 30)):
        statistics.merge(statistics.sums(batch.unflatten(0, (2, -1))))
    torch.testing.assert_close(statistics.mean, rows.mean(0))
    torch.testing.assert_close(statistics.variance, rows.var(0, correction=0), rtol=1e-4, atol=1e-6)
    assert statistics.count == 120


def test_a_constant_observation_is_not_amplified():
    statistics = RunningStatistics(1, torch.device("cpu"))
    statistics.merge(statistics.sums(torch.full((50, 1), 7.0)))
    assert statistics.normalize(torch.tensor([[7.01]])).abs() <= 1.01


def test_constant_observations_have_a_finite_scale():
    # For some of these values rounding would make the variance negative.
    values = torch.linspace(0.1, 900.0, 500)
    statistics = RunningStatistics(500, torch.device("cpu"))
    for _ in range(3):
        statistics.merge(statistics.sums(values.expand(49, -1)))
    assert statistics.normalize(values[None]).isfinite().all()
    assert (statistics.variance >= 0.0).all()
