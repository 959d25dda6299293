"""The budget: the knapsack against every choice there is, and measured figures against what is held."""

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from lightning_tricks.functional.activation_budget import BlockCosts, choose_blocks, greedy_choice
from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import ActivationCheckpointingHandle, apply_activation_checkpointing


def best_of_all(freed: list[int], seconds: list[float], need: int) -> float | None:
    """The least time of any set of blocks that frees enough."""
    times = [
        sum(seconds[index] for index in chosen)
        for size in range(len(freed) + 1)
        for chosen in itertools.combinations(range(len(freed)), size)
        if sum(freed[index] for index in chosen) >= need
    ]
    return min(times, default=None)


def test_knapsack_equals_the_best_of_all_choices_and_greedy_is_never_better() -> None:
    draw = random.Random(0)
    beaten = 0
    for _ in range(300):
        count = draw.randint(1, 9)
        freed = [draw.randint(-5, 30) for _ in range(count)]
        seconds = [draw.choice([0.0, draw.random(), 0.5]) for _ in range(count)]
        need = draw.randint(-3, 120)
        chosen, greedy = choose_blocks(freed, seconds, need), greedy_choice(freed, seconds, need)
        best = best_of_all(freed, seconds, need)
        if best is None:
            assert chosen is None
            assert greedy is None
            continue
        time = sum(seconds[index] for index in chosen)
        assert sum(freed[index] for index in chosen) >= need
        assert chosen == sorted(set(chosen))
        assert time == pytest.approx(best, abs=1e-12)
        if greedy is not None and need > 0:
            assert time <= sum(seconds[index] for index in greedy) + 1e-12
            beaten += time < sum(seconds[index] for index in greedy) - 1e-12
    assert beaten > 5


def test_many_different_blocks_are_no_worse_than_greedy() -> None:
    draw = random.Random(1)
    freed = [draw.randint(1_000_000, 9_000_000) for _ in range(200)]
    seconds = [draw.random() for _ in range(200)]
    need = sum(freed) // 2
    chosen, greedy = choose_blocks(freed, seconds, need), greedy_choice(freed, seconds, need)
    assert sum(freed[index] for index in chosen) >= need
    assert sum(seconds[index] for index in chosen) <= sum(seconds[index] for index in greedy)


def test_costs() -> None:
    costs = BlockCosts(("a", "b", "c"), 100, (30, -5, 40), (1.0, 1.0, 3.0))
    assert costs.predicted(["a", "c"]) == 30 == costs.least_bytes
    assert costs.predicted([]) == 100
    assert costs.choose(70) == ["a"]
    assert costs.choose(60) == ["c"]
    assert costs.choose(100) == []
    assert costs.choose(29) is None


class Uneven(nn.Module):
    """Blocks that save differently, among them one that frees nothing and two that save the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Wide(8, 32), Wide(8, 16), Identity(), Wide(8, 64, dropout=0.2), Wide(8, 32)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(torch.sin(x))


class Wide(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(torch.tanh(self.down(hidden))) * mask


class Identity(Wide):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * 1.0


def measured(model: nn.Module, x: Tensor) -> tuple[ActivationCheckpointingHandle, BlockCosts]:
    handle = apply_activation_checkpointing(model, "blocks.*", with_budget=True)
    measurement = handle.budget.begin()
    with measurement.around():
        loss = model(x).sum()
    loss.backward()
    assert measurement.is_complete
    return handle, measurement.costs()


def held(model: nn.Module, x: Tensor) -> int:
    with measure_saved_activations() as saved:
        model(x).sum().backward()
    return saved.num_bytes


def test_total_is_what_the_plain_model_saves_and_every_prediction_is_enough() -> None:
    torch.manual_seed(0)
    model, x = Uneven(), torch.randn(64, 8)
    plain = held(model, x)
    handle, costs = measured(model, x)
    assert costs.total_bytes == plain
    assert all(seconds > 0 for name, seconds in zip(costs.names, costs.seconds, strict=True) if name != "blocks.2")
    for size in range(6):
        for chosen in itertools.combinations(costs.names, size):
            handle.budget.settle(chosen)
            assert held(model, x) <= costs.predicted(chosen), chosen
    handle.budget.settle(["blocks.0", "blocks.3"])
    assert held(model, x) >= 0.9 * costs.predicted(["blocks.0", "blocks.3"])


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_held_bytes_keep_to_the_budget(share: float) -> None:
    model, x = Uneven(), torch.randn(64, 8)
    handle, costs = measured(model, x)
    budget = int(share * costs.total_bytes)
    handle.budget.settle(costs.choose(budget))
    assert costs.least_bytes < held(model, x) <= budget


def test_measuring_holds_no_more_than_full_checkpointing() -> None:
    x = torch.randn(64, 8)
    full = Uneven()
    apply_activation_checkpointing(full, "blocks.*")
    with measure_saved_activations() as expected:
        full(x).sum().backward()
    model = Uneven()
    handle = apply_activation_checkpointing(model, "blocks.*", with_budget=True)
    with measure_saved_activations() as saved, handle.budget.begin().around():
        model(x).sum().backward()
    assert saved.num_bytes <= expected.num_bytes


def test_measuring_leaves_random_state_and_buffers_as_the_plain_step_does() -> None:
    states = []
    for measures in (False, True):
        torch.manual_seed(0)
        model = Uneven()
        if measures:
            measured(model, torch.ones(4, 8))
        else:
            model(torch.ones(4, 8)).sum().backward()
        states.append((torch.get_rng_state(), dict(model.named_buffers()), [p.grad for p in model.parameters()]))
    assert torch.equal(states[0][0], states[1][0])
    assert all(torch.equal(states[0][1][name], states[1][1][name]) for name in states[0][1])
    assert all(torch.equal(first, second) for first, second in zip(states[0][2], states[1][2], strict=True))
