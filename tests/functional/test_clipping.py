"""Layer 0 clipping against slow references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_tricks.functional.clipping import (
    clip_by_norm_,
    clip_by_value_,
    clip_coefficient,
    count_exceeding,
    gradient_norm,
    nonfinite_names,
)
from tests.distributed_cases import sharded_gradient_norms


def slow_norm(gradients: list[Tensor], p: float) -> float:
    """The formula, one element at a time in Python floats."""
    elements = [abs(x) for gradient in gradients for x in gradient.double().flatten().tolist()]
    if math.isinf(p):
        return max(elements, default=0.0)
    return sum(x**p for x in elements) ** (1 / p)


shapes = st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=3), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, p=st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]), seed=st.integers(0, 999))
def test_norm_equals_the_formula(shapes: list[list[int]], p: float, seed: int) -> None:
    torch.manual_seed(seed)
    gradients = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert gradient_norm(gradients, p).item() == pytest.approx(slow_norm(gradients, p), rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norm_and_clipping_equal_torchs(p: float) -> None:
    ours = [torch.nn.Parameter(torch.randn(7, 3)) for _ in range(4)]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(7, 3)
        other.grad = one.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, p)
    norm = gradient_norm([one.grad for one in ours], p)
    clip_by_norm_([one.grad for one in ours], 0.5, norm)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_of_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    gradients = [torch.full((1000,), 3.0e4, dtype=dtype), torch.full((10,), 1.0, dtype=dtype)]
    norm = gradient_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(slow_norm(gradients, 2.0), rel=1e-6)


def test_mixed_dtypes_and_empty_input() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64), torch.zeros(0)]
    assert gradient_norm(gradients).item() == 5.0
    assert gradient_norm(gradients).dtype == torch.float64
    assert gradient_norm([]).item() == 0.0
    assert gradient_norm([torch.zeros(0)], math.inf).item() == 0.0
    assert count_exceeding([], 1.0).item() == 0


def test_direction_stays_and_small_gradients_are_untouched() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([0.0])]
    coefficient = clip_by_norm_(gradients, 1.0, gradient_norm(gradients))
    torch.testing.assert_close(gradients[0], torch.tensor([0.6, 0.8]), rtol=0, atol=1e-6)
    assert coefficient.item() == pytest.approx(0.2, abs=1e-6)
    before = gradients[0].clone()
    assert clip_by_norm_(gradients, 5.0, gradient_norm(gradients)).item() == 1.0
    assert torch.equal(gradients[0], before)


def test_infinite_threshold_only_measures() -> None:
    gradients = [torch.tensor([math.nan])]
    assert clip_by_norm_(gradients, math.inf, gradient_norm(gradients)).item() == 1.0
    assert clip_coefficient(torch.tensor(math.inf), 1.0).item() == 0.0
    assert clip_coefficient(torch.tensor(math.nan), 1.0).isnan()


def test_values_are_clamped_and_counted() -> None:
    gradients = [torch.tensor([3.0, -0.1, -2.0]), torch.tensor([[1.0]], dtype=torch.float64)]
    assert count_exceeding(gradients, 1.0).item() == 2
    clip_by_value_(gradients, 1.0)
    assert gradients[0].tolist() == pytest.approx([1.0, -0.1, -1.0])
    assert gradients[1].item() == 1.0


def test_sparse_gradients_are_refused() -> None:
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    with pytest.raises(ValueError, match="sparse=False"):
        gradient_norm([sparse])


def test_culprits_are_named_up_to_a_limit() -> None:
    named = [(str(index), torch.tensor([math.nan if index % 2 else 1.0])) for index in range(10)]
    assert nonfinite_names(named, limit=2) == ["1", "3"]


def test_shards_of_several_meshes_beside_plain_tensors(two_processes) -> None:
    """Values are known to every rank, so the reference is computed from the whole tensors."""
    for found in two_processes.run(sharded_gradient_norms):
        for p, (norm, expected) in found["norms"].items():
            assert norm == pytest.approx(expected, rel=1e-5), p
        assert found["clipped"] == pytest.approx(1.0, rel=1e-4)
        assert found["exceeding"] == found["expected_exceeding"]
        assert found["nan_norms"] == {1.0: False, 2.0: False, math.inf: False}
        assert found["culprits"] == ["sharded"]
