"""Learned thresholds, held to slow references that follow the papers' algorithms line by line."""

import math

import numpy as np
import pytest
import torch

from lightning_tricks.functional.learned_clipping import NormHistory, NormStatistics

INF, NAN = math.inf, math.nan


class SlowZClip:
    """Algorithm 1 of arXiv:2504.02507 with reciprocal clipping, in Python floats."""

    def __init__(self, z_threshold: float, decay: float, warmup_steps: int) -> None:
        self.z_threshold, self.decay, self.warmup_steps = z_threshold, decay, warmup_steps
        self.seen: list[float] = []
        self.mean = self.var = 0.0

    def clip(self, norm: float) -> float:
        if len(self.seen) < self.warmup_steps:
            self.seen.append(norm)
            if len(self.seen) == self.warmup_steps:
                self.mean = sum(self.seen) / len(self.seen)
                self.var = sum((one - self.mean) ** 2 for one in self.seen) / len(self.seen)
            return norm
        std = math.sqrt(self.var)
        z = (norm - self.mean) / (std + 1e-6)
        clipped = self.mean + self.z_threshold**2 / z * std if z > self.z_threshold else norm
        self.mean = self.decay * self.mean + (1 - self.decay) * clipped
        self.var = self.decay * self.var + (1 - self.decay) * (clipped - self.mean) ** 2
        return clipped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("z_threshold", "decay", "warmup_steps"), [(2.5, 0.97, 25), (1.0, 0.9, 1), (3.0, 0.5, 4)])
def test_zclip_equals_the_papers_algorithm(z_threshold: float, decay: float, warmup_steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norms = torch.randn(200, generator=generator, dtype=torch.float64).exp()
    norms[torch.randint(0, 200, (10,), generator=generator)] *= 50
    fast, slow = NormStatistics(decay, warmup_steps, z_threshold), SlowZClip(z_threshold, decay, warmup_steps)
    clips = 0
    for norm in norms:
        limit = fast.threshold(norm)
        clipped = torch.minimum(norm, limit)
        clips += bool(limit < norm)
        assert float(clipped) == pytest.approx(slow.clip(float(norm)), rel=1e-9)
        fast.step(clipped)
    assert clips >= 5


def test_percentile_equals_a_list_of_the_last_norms() -> None:
    history, slow = NormHistory(10.0, 50, 5), []
    for norm in torch.rand(200, dtype=torch.float64):
        threshold = float(history.threshold(norm))
        assert threshold == (pytest.approx(np.percentile(slow[-50:], 10)) if len(slow) >= 5 else INF)
        history.step(norm)
        slow.append(float(norm))


@pytest.mark.parametrize("make", [lambda: NormStatistics(0.9, 3, 2.0), lambda: NormHistory(50.0, 10, 3)])
@pytest.mark.parametrize("device_knows", [False, True])
def test_what_was_not_applied_or_is_not_finite_changes_nothing(make, device_knows: bool) -> None:
    with_others, alone = make(), make()
    for i in range(12):
        norm = torch.tensor(1.0 + i % 3)
        for estimator in (with_others, alone):
            estimator.step(norm, torch.tensor(1.0) if device_knows else True)
        with_others.step(torch.tensor(NAN))
        with_others.step(torch.tensor(INF), torch.tensor(1.0))
        with_others.step(torch.tensor(1e6), torch.tensor(0.0) if device_knows else False)
    probe = torch.tensor(1e3)
    assert torch.equal(with_others.threshold(probe), alone.threshold(probe))
    assert float(alone.threshold(probe)) < 10


@pytest.mark.parametrize("make", [lambda: NormStatistics(0.9, 3, 2.0), lambda: NormHistory(50.0, 10, 3)])
@pytest.mark.parametrize("steps", [0, 2, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_goes_on(make, steps: int, dtype: torch.dtype) -> None:
    first = make()
    for i in range(steps):
        first.step(torch.tensor(1.0 + 0.1 * (i % 7), dtype=dtype))
    second = make()
    second.load_state_dict(first.state_dict(), torch.device("cpu"))
    probe = torch.tensor(50.0, dtype=dtype)
    for norm in (2.0, 9.0, 4.0):
        for one in (first, second):
            one.step(torch.tensor(norm, dtype=dtype))
        assert torch.equal(first.threshold(probe), second.threshold(probe))


def test_a_constant_norm_clips_nothing_of_its_own_size() -> None:
    statistics = NormStatistics(0.97, 5, 2.5)
    for _ in range(50):
        statistics.step(torch.tensor(2.0))
    assert float(statistics.threshold(torch.tensor(2.0))) == INF
    assert float(statistics.threshold(torch.tensor(3.0))) == pytest.approx(2.0)


def test_a_shorter_history_keeps_the_newest() -> None:
    long, short = NormHistory(0.0, 10, 1), NormHistory(0.0, 3, 1)
    for i in range(10, 0, -1):
        long.step(torch.tensor(float(i)))
    short.load_state_dict(long.state_dict(), torch.device("cpu"))
    assert short.norms.tolist() == [3.0, 2.0, 1.0]
