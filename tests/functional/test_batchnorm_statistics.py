"""Running statistics taken anew: the mean over the passes of the context, and nothing of layers that stand still."""

import pytest
import torch
from torch import nn

from lightning_tricks.functional.batchnorm_statistics import fresh_statistics, layers_with_statistics


def test_equals_torchs_own_for_averaged_weights() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(6, 3) * (k + 1) + k for k in range(4)]
    ours, reference = (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
    reference.load_state_dict(ours.state_dict())
    with torch.no_grad(), fresh_statistics(ours):
        for batch in batches:
            ours(batch)
    torch.optim.swa_utils.update_bn(batches, reference)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
    assert [layer.momentum for layer in layers_with_statistics(ours)] == [0.1, 0.1]


def test_layers_in_evaluation_mode_and_unused_ones_keep_theirs() -> None:
    model = nn.ModuleDict({name: nn.BatchNorm1d(2) for name in ("used", "frozen", "unused")})
    for layer in model.values():
        nn.init.constant_(layer.running_mean, 3.0)
    model["frozen"].eval()
    with torch.no_grad(), fresh_statistics(model):
        assert torch.equal(model["frozen"].running_mean, torch.full((2,), 3.0))
        assert torch.equal(model["used"].running_mean, torch.zeros(2))
        model["frozen"](model["used"](torch.ones(4, 2)))
    assert torch.equal(model["used"].running_mean, torch.ones(2))
    assert torch.equal(model["frozen"].running_mean, torch.full((2,), 3.0))
    assert torch.equal(model["unused"].running_mean, torch.full((2,), 3.0))


def fail_within(layer: nn.Module) -> None:
    with fresh_statistics(layer):
        layer(torch.ones(4, 2))
        raise RuntimeError("boom")


def test_an_error_brings_all_back() -> None:
    layer = nn.BatchNorm1d(2)
    nn.init.constant_(layer.running_mean, 3.0)
    with pytest.raises(RuntimeError, match="boom"):
        fail_within(layer)
    assert torch.equal(layer.running_mean, torch.full((2,), 3.0))
    assert layer.momentum == 0.1
