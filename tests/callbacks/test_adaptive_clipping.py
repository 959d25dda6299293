"""Unit-wise clipping in a Trainer: what it leaves alone, half precision, and shards whose units span ranks."""

import pytest
import torch
from torch import nn

import lightning_tricks as lt
from tests.distributed_cases import unitwise_on_shards
from tests.models import FixedGradients, Net, assert_same, fit, fp16, largest_difference, seeded


class Recorder(Net):
    """Keeps each parameter's gradient as the optimizer sees it."""

    def on_before_optimizer_step(self, optimizer) -> None:
        self.seen = {name: one.grad.clone() for name, one in self.named_parameters()}


def gradients(*callbacks, **options) -> dict[str, torch.Tensor]:
    module = seeded(lambda: Recorder(lr=0.0))
    fit(module, *callbacks, max_steps=1, **options)
    return module.seen


@pytest.mark.parametrize(
    ("exclude", "left_alone"),
    [
        ("head", {"net.3.weight", "net.3.bias"}),
        ((), set()),
        (nn.LayerNorm, {f"net.{i}.norm.{name}" for i in range(3) for name in ("weight", "bias")}),
        (["head", "*.bias"], {"net.3.weight"} | {name for name, _ in Net().named_parameters() if "bias" in name}),
    ],
)
def test_what_is_excluded_is_left_alone(exclude, left_alone: set[str]) -> None:
    plain, clipped = gradients(), gradients(lt.AdaptiveGradientClipping(1e-4, exclude=exclude))
    assert {name for name in plain if torch.equal(plain[name], clipped[name])} == left_alone


def test_gradients_are_unscaled_first() -> None:
    expected = gradients(lt.AdaptiveGradientClipping(1e-3, exclude=()))
    scaled = gradients(lt.AdaptiveGradientClipping(1e-3, exclude=()), plugins=fp16(2.0**8))
    assert_same(scaled, expected, rtol=1e-2, atol=1e-5)
    assert largest_difference(expected, gradients()) > 1e-3


def test_a_step_that_is_not_finite_is_left_out() -> None:
    module = FixedGradients([[float("inf"), 1.0], [1.0, 1.0]])
    with pytest.warns(UserWarning, match="not finite in: weight"):
        run = fit(module, lt.AdaptiveGradientClipping())
    assert lt.step_ledger(run)[0].skipped_guard == 1
    assert module.weight.tolist() == pytest.approx([-1e-5 / 2**0.5] * 2)  # the weight is zero: eps times the factor


def test_units_that_span_ranks(two_processes) -> None:
    for faults in two_processes.run(unitwise_on_shards):
        assert faults == []
