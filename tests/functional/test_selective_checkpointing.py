"""Selective checkpointing: what is kept, what is recomputed, and results that are written into."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import apply_activation_checkpointing
from lightning_tricks.functional.selective_checkpointing import (
    ATTENTION_OPERATIONS,
    MATMUL_OPERATIONS,
    SelectivePolicy,
    selective_contexts,
)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 8, 32)).sum().backward()
    return counter.get_total_flops()


def held(model: nn.Module) -> int:
    with measure_saved_activations() as saved:
        model(torch.randn(2, 8, 32)).sum()
    return saved.num_bytes


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_share_of_matrix_multiplications_is_kept(share: float) -> None:
    policy = SelectivePolicy(share, set())
    kept = [policy.keeps(torch.ops.aten.addmm.default) for _ in range(20)]
    assert sum(kept) == round(20 * share)
    assert not kept or share == 0 or kept[0]


def test_the_lists_are_of_operations_that_exist_and_do_not_overlap() -> None:
    assert not ATTENTION_OPERATIONS & MATMUL_OPERATIONS
    assert all(isinstance(one, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)) for one in ATTENTION_OPERATIONS)
    policy = SelectivePolicy(0.0, set())
    assert all(policy.keeps(one) for one in ATTENTION_OPERATIONS)


def test_flops_and_bytes_lie_between_full_checkpointing_and_none() -> None:
    cost = {}
    for name, options in {
        "none": None,
        "all": {"mode": "selective", "matmul_share": 1.0},
        "half": {"mode": "selective", "matmul_share": 0.5},
        "nothing": {"mode": "blocks"},
    }.items():
        model = Transformer()
        if options:
            apply_activation_checkpointing(model, **options)
            model(torch.randn(2, 8, 32)).sum().backward()  # the first pass learns
        cost[name] = (flops(model), held(model))
    assert cost["none"][0] == cost["all"][0] < cost["half"][0] < cost["nothing"][0]
    assert cost["none"][1] > cost["all"][1] > cost["half"][1] > cost["nothing"][1]


def test_policy_and_contexts_are_picklable() -> None:
    policy = pickle.loads(pickle.dumps(SelectivePolicy(0.5, {3})))
    assert (policy.matmul_share, policy.overwritten) == (0.5, {3})
    assert pickle.loads(pickle.dumps(selective_contexts)) is selective_contexts


class InPlace(nn.Module):
    """Writes into the result of its first convolution, as most ResNets do, and into a view of its second's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu_(self.first(x)))
        y[:, :2].mul_(2.0)
        return x + torch.tanh(y)


def test_results_that_are_written_into_are_recomputed() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(InPlace() for _ in range(3)))
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, InPlace, mode="selective", matmul_share=1.0)
    for _ in range(3):
        for one in (plain, model):
            one.zero_grad()
            one(torch.linspace(-1, 1, 2 * 4 * 25).view(2, 4, 5, 5)).square().sum().backward()
        for first, second in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(first.grad, second.grad)


class WritesNowAndThen(InPlace):
    writes = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return x + torch.tanh(y.mul_(2.0) if self.writes else y)


def test_a_write_that_the_first_pass_did_not_show_is_an_error_once() -> None:
    model = nn.ModuleList([WritesNowAndThen()])
    apply_activation_checkpointing(model, WritesNowAndThen, mode="selective", matmul_share=1.0)
    x = torch.randn(2, 4, 5, 5)
    model[0](x).sum().backward()
    model[0].writes = True
    with pytest.raises(RuntimeError, match="mutated"):
        model[0](x).sum().backward()
    model[0](x).sum().backward()
