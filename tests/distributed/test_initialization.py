"""Filling models on the meta device. The broadcast is tested under the strategies."""

import pytest
import torch
from torch import nn

from lightning_tricks.distributed.initialization import Materializer, has_meta_tensors
from lightning_tricks.functional.blocks import inner_first
from tests.models import assert_same


class WithOwn(nn.Module):
    """Draws for its own parameter after its children's constructors have drawn, as most modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(3))
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.own.is_meta:
            nn.init.normal_(self.own)


def build() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 2), WithOwn(), nn.Conv1d(2, 2, 3), nn.Linear(2, 4, bias=False))
    model[3].weight = model[0].weight
    return model


def filled(provided: tuple[str, ...] = ()) -> nn.Module:
    with torch.device("meta"):
        model = build()
    materializer = Materializer(model, torch.device("cpu"), provided)
    for name, one in inner_first(model):
        materializer.fill_(name, one)
    return model


def test_filling_draws_what_construction_draws() -> None:
    torch.manual_seed(5)
    expected = build()
    torch.manual_seed(5)
    model = filled()
    assert not has_meta_tensors(model)
    assert_same(model.state_dict(), expected.state_dict())


def test_tied_weights_stay_tied() -> None:
    model = filled()
    assert model[3].weight is model[0].weight


def test_frozen_parameters_stay_frozen() -> None:
    linear = nn.Linear(2, 2, device="meta").requires_grad_(False)
    Materializer(linear, torch.device("cpu")).fill_("", linear)
    assert not linear.weight.requires_grad


class HalfFilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("level", torch.zeros(2, dtype=torch.uint8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


@pytest.mark.parametrize(
    ("provided", "missing"),
    [
        ((), "block.positions, block.scale, block.mask, block.level"),
        (("block.scale", "block.positions", "block.level"), "block.mask"),
    ],
)
def test_what_no_reset_fills_is_an_error(provided, missing: str) -> None:
    with torch.device("meta"):
        module = HalfFilled()
    with pytest.raises(ValueError, match=f"got none for {missing}: no reset_parameters of HalfFilled fills it"):
        Materializer(module, torch.device("cpu"), provided).fill_("block", module)


def fill(module: nn.Module) -> None:
    Materializer(module, torch.device("cpu")).fill_("", module)


def test_a_module_without_a_reset_needs_values_from_elsewhere() -> None:
    def module() -> nn.Module:
        one = nn.Module()
        one.weight = nn.Parameter(torch.empty(2, device="meta"))
        return one

    with pytest.raises(ValueError, match=r"got none for weight: no reset_parameters of Module is there to fill it"):
        fill(module())
    one = module()
    Materializer(one, torch.device("cpu"), ["weight"]).fill_("", one)
    assert not one.weight.is_meta


class Whole(HalfFilled):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for buffer in (self.positions, self.scale, self.mask, self.level):
            buffer.zero_()


def test_zeros_and_false_are_values() -> None:
    with torch.device("meta"):
        module = Whole()
    fill(module)
    assert not module.mask.any()
