"""Unit-wise clipping, held to a slow loop over units and to figures of another implementation."""

import pytest
import torch
from torch import Tensor

from lightning_tricks.functional.adaptive_clipping import clip_unitwise_, unitwise_scales

SHAPES = [(), (5,), (4, 3), (3, 2, 2, 2), (6, 1)]


def slow(weight: Tensor, gradient: Tensor, clip_factor: float, eps: float) -> Tensor:
    """Equation 3 of the paper, unit by unit, in double precision."""
    clipped = gradient.double().clone()
    units = [(...,)] if weight.ndim <= 1 else [(i,) for i in range(len(weight))]
    for unit in units:
        w, g = weight.double()[unit].norm(), gradient.double()[unit].norm()
        limit = clip_factor * max(float(w), eps)
        if float(g) > limit:
            clipped[unit] *= limit / float(g)
    return clipped


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e3])
def test_equals_the_slow_loop(scale: float) -> None:
    weights = [torch.randn(shape) * 0.1 for shape in SHAPES] + [torch.zeros(3, 2)]
    gradients = [torch.randn_like(one) * scale for one in weights]
    expected = [slow(w, g, 0.01, 1e-3) for w, g in zip(weights, gradients, strict=True)]
    clip_unitwise_(weights, gradients, 0.01, 1e-3)
    for one, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-6, atol=1e-7 * scale)


def test_equals_the_figures_of_timm() -> None:
    """Of `timm.utils.agc.adaptive_clip_grad`, timm 1.0.31, which cannot be imported beside a CPU build of torch."""
    weight = torch.arange(-6.0, 6.0).view(3, 2, 2) / 10
    gradient = torch.arange(12.0).view(3, 2, 2) / 1000
    vector, its_gradient = torch.tensor([0.0, 0.0]), torch.tensor([3.0, -4.0])
    clip_unitwise_([weight, vector], [gradient, its_gradient])
    assert gradient.flatten().tolist() == pytest.approx(TIMM, abs=1e-7)
    assert its_gradient.tolist() == pytest.approx(TIMM_VECTOR, abs=1e-7)


TIMM = [
    0.0, 0.00100000005, 0.00200000009, 0.00300000003,
    0.000872871547, 0.00109108933, 0.00130930729, 0.00152752525,
    0.00307288533, 0.00345699582, 0.00384110655, 0.00422521727,
]  # fmt: skip
TIMM_VECTOR = [6.00000067e-06, -8.00000089e-06]


def test_a_unit_that_starts_at_zero_keeps_learning() -> None:
    gradient = torch.ones(2, 2)
    clip_unitwise_([torch.zeros(2, 2)], [gradient])
    assert bool((gradient > 0).all())


def test_one_unit_does_not_touch_another() -> None:
    weight, gradient = torch.ones(2, 4), torch.tensor([[1e-3] * 4, [1e3] * 4])
    scales = unitwise_scales([weight], [gradient])
    assert scales[0].flatten().tolist() == pytest.approx([1.0, 1e-5])


def test_half_precision_and_complex() -> None:
    weight, gradient = torch.ones(2, 4, dtype=torch.bfloat16), torch.full((2, 4), 100.0, dtype=torch.bfloat16)
    clip_unitwise_([weight], [gradient])
    assert gradient.dtype == torch.bfloat16
    assert float(gradient[0].float().norm()) == pytest.approx(0.02, rel=1e-2)
    weight, gradient = torch.ones(2, dtype=torch.cfloat), torch.full((2,), 3 + 4j)
    clip_unitwise_([weight], [gradient])
    assert float(gradient.abs().square().sum().sqrt()) == pytest.approx(0.01 * 2**0.5)


def test_nothing_to_clip() -> None:
    assert clip_unitwise_([], []) == []
