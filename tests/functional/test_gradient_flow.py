"""Sums by block, held to a slow loop; and what is called vanishing, exploding, dead and non-finite."""

import math

import pytest
import torch
from torch import nn

from lightning_tricks.functional.gradient_flow import (
    BlockHealth,
    block_of_parameters,
    diagnose,
    gradient_sums,
    update_sums_,
)

INF, NAN = math.inf, math.nan


def test_sums_equal_a_slow_loop() -> None:
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float32]
    gradients = [torch.randn(3, 4).to(dtype) for dtype in dtypes]
    gradients[0][0, :3] = 0.0
    gradients[3][1, 1], gradients[3][1, 2] = INF, NAN
    gradients[4] = torch.zeros(0)
    blocks = [0, 1, 1, 2, 2]
    found = gradient_sums(gradients, blocks, 4)
    for block in range(4):
        members = [g for g, b in zip(gradients, blocks, strict=True) if b == block]
        elements = [float(x) for g in members for x in g.double().flatten()]
        squares = sum(x * x for x in elements)
        assert float(found[block, 0]) == pytest.approx(squares, rel=1e-6, nan_ok=True)
        zeros = sum(x == 0 for x in elements)
        assert found[block, 1:].tolist() == [zeros, sum(not math.isfinite(x) for x in elements), len(elements)]


def test_updates_equal_a_slow_loop() -> None:
    torch.manual_seed(0)
    before = [torch.randn(4), torch.randn(2, 2), torch.zeros(3, dtype=torch.bfloat16)]
    after = [one + 0.01 for one in before]
    found = update_sums_([one.clone() for one in before], after, [1, 0, 1], 2)
    for block, members in ((0, [1]), (1, [0, 2])):
        weights = sum(float(before[i].double().square().sum()) for i in members)
        updates = sum(float((after[i].double() - before[i].double()).square().sum()) for i in members)
        assert found[block].tolist() == pytest.approx([weights, updates], rel=1e-4)


def test_large_half_precision_gradients_do_not_overflow() -> None:
    found = gradient_sums([torch.full((4,), 6e4, dtype=torch.float16)], [0], 1)
    assert float(found[0, 0]) == pytest.approx(4 * 6e4**2, rel=1e-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))


def test_parameters_belong_to_blocks_or_to_who_holds_them() -> None:
    assert block_of_parameters(Model()) == {
        "scale": "Model",
        "stem.weight": "stem",
        "stem.bias": "stem",
        "blocks.0.0.weight": "blocks.0",
        "blocks.0.0.bias": "blocks.0",
        "blocks.1.0.weight": "blocks.1",
        "blocks.1.0.bias": "blocks.1",
    }
    assert set(block_of_parameters(Model(), "stem").values()) == {"Model", "stem", "blocks.0.0", "blocks.1.0"}
    with pytest.raises(ValueError, match="found no 'encoder"):
        block_of_parameters(Model(), "encoder.*")


def healths(*norms: float, zeros: dict[int, float] | None = None, nonfinite: int | None = None) -> list[BlockHealth]:
    zeros = zeros or {}
    return [BlockHealth(str(i), n, 1e-3, zeros.get(i, 0.0), float(i == nonfinite)) for i, n in enumerate(norms)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (healths(1.0, 1.0, 1.0), None),
        (healths(1e-3, 1.0, 10.0), None),
        (healths(1e-9, 1e-6, 1e-3, 1.0), ("vanishing", "1")),
        (healths(1e5, 2e3, 10.0), ("exploding", "1")),
        (healths(0.0, 0.0, 1.0, zeros={0: 1.0, 1: 1.0}), ("dead", "1")),
        (healths(1.0, 1.0, 1.0, zeros={0: 0.99}), None),
        (healths(1.0, NAN, 1.0, nonfinite=1), ("non-finite", "1")),
        (healths(1e5, INF, 1e-9, nonfinite=1), ("non-finite", "1")),
        ([], None),
    ],
)
def test_the_block_that_shows_it_first_on_the_way_back(blocks: list[BlockHealth], expected) -> None:
    found = diagnose(blocks, vanishing_below=1e-4, exploding_above=1e3)
    assert (None if found is None else (found[0], found[1].name)) == expected


def test_an_embedding_may_be_mostly_zero() -> None:
    blocks = healths(1.0, 1.0, zeros={0: 1.0})
    assert diagnose(blocks, 1e-4, 1e3)[0] == "dead"
    assert diagnose(blocks, 1e-4, 1e3, sparse={"0"}) is None
