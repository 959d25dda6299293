"""What a folder cannot hold. Saving and loading are tested under the strategies."""

import pytest
import torch
from torch import nn

from lightning_tricks.distributed.sharded_checkpoint import named_optimizer_state


def test_nested_optimizer_state_is_refused_when_it_is_saved() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight] = {"momentum": torch.zeros(2, 2), "history": [torch.zeros(2)]}
    with pytest.raises(ValueError, match=r"got SGD, whose 'history' of weight nests them"):
        named_optimizer_state(optimizer, module)
    optimizer.state[module.weight] = {"momentum": torch.zeros(2, 2), "betas": (0.9, 0.99)}
    assert named_optimizer_state(optimizer, module)["state"].keys() == {"weight"}
