"""The estimator against the formulas, step by step."""

import torch

from lightning_tricks.functional.noise_scale import NoiseScale


class SlowNoiseScale:
    """McCandlish et al. (2018), appendix A.1, with plain numbers."""

    def __init__(self, decay: float) -> None:
        self.decay, self.trace, self.signal = decay, 0.0, 0.0

    def step(self, small_square: float, big_square: float, small: float, big: float) -> None:
        signal = (big * big_square - small * small_square) / (big - small)
        trace = (small_square - big_square) / (1 / small - 1 / big)
        self.trace = self.decay * self.trace + (1 - self.decay) * trace
        self.signal = self.decay * self.signal + (1 - self.decay) * signal


def tensors(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def test_it_is_the_slow_one() -> None:
    fast, slow = NoiseScale(0.9), SlowNoiseScale(0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        small_square, big_square = (torch.rand(2, generator=generator) * torch.tensor([5.0, 2.0])).tolist()
        small = float(torch.randint(1, 5, (), generator=generator))
        big = small + float(torch.randint(1, 5, (), generator=generator))
        one, two, three, four = tensors(small_square, big_square, small, big)
        fast.step(one, two, small=three, big=four, applied=True)
        slow.step(small_square, big_square, small, big)
        torch.testing.assert_close(fast.trace.item(), slow.trace)
        torch.testing.assert_close(fast.signal.item(), slow.signal)
        known = slow.trace > 0 and slow.signal > 0
        torch.testing.assert_close(
            fast.scale().item(), slow.trace / slow.signal if known else float("nan"), equal_nan=True
        )


def test_what_was_not_applied_or_is_not_finite_teaches_nothing() -> None:
    noise = NoiseScale(0.5)
    one, two, three, inf = tensors(1.0, 2.0, 3.0, float("inf"))
    noise.step(three, two, small=one, big=two, applied=True)
    before = noise.state_dict()
    noise.step(three, two, small=one, big=two, applied=False)
    noise.step(three, two, small=one, big=two, applied=torch.tensor(0.0))
    noise.step(inf, two, small=one, big=two, applied=True)
    noise.step(three, two, small=two, big=two, applied=True)  # nothing to compare
    assert noise.state_dict() == before


def test_its_state_is_all_there_is() -> None:
    noise, other = NoiseScale(0.5), NoiseScale(0.5)
    one, two, three = tensors(1.0, 2.0, 3.0)
    other.load_state_dict(noise.state_dict(), torch.device("cpu"))
    assert other.scale() is None
    noise.step(three, two, small=one, big=two, applied=True)
    other.load_state_dict(noise.state_dict(), torch.device("cpu"))
    assert other.scale() == noise.scale()
