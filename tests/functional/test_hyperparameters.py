"""Targets, and the numbers that they find."""

import pytest
import torch
import transformers
from torch import nn

from lightning_tricks.functional.hyperparameters import (
    Place,
    Target,
    dropout_factor,
    dropout_places,
    group_places,
    module_places,
    parse_target,
)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("optimizer.lr", Target(None, "lr", None)),
        ("optimizer.betas[1]", Target(None, "betas", 1)),
        ("temperature", Target("", "temperature", None)),
        ("net.0.p", Target("net.0", "p", None)),
        ("*.weights[-1]", Target("*", "weights", -1)),
        ("optimizer_wrapper.k", Target("optimizer_wrapper", "k", None)),
    ],
)
def test_targets(target: str, expected: Target) -> None:
    assert parse_target(target) == expected


@pytest.mark.parametrize("target", ["", "optimizer.", "optimizer.betas[x]", "net.*", "optimizer.params", "a b"])
def test_what_is_no_target(target: str) -> None:
    with pytest.raises(ValueError, match=r"expected `target` to be"):
        parse_target(target)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0
        self.weights = [1.0, 2.0]
        self.flag = True
        self.register_buffer("scale", torch.tensor(3.0))
        self.learned = nn.Parameter(torch.tensor(1.0))
        self.drop = nn.Dropout(0)


def test_places_of_a_module_are_set_and_restored_as_they_were() -> None:
    model = Model()
    buffer = model.scale
    targets = {"temperature": 2.0, "weights[1]": 2.0, "scale": 3.0, "drop.p": 0.0}
    places = [module_places(parse_target(target), model)[0] for target in targets]
    assert [place.own for place in places] == list(targets.values())
    for place in places:
        place.set(0.25)
    assert (model.temperature, model.weights, model.scale.item(), model.drop.p) == (0.25, [1.0, 0.25], 0.25, 0.25)
    for place in places:
        place.restore()
    assert (model.temperature, model.weights, model.scale.item(), model.drop.p) == (2.0, [1.0, 2.0], 3.0, 0)
    assert model.scale is buffer
    assert type(model.drop.p) is int
    for target in ("flag", "learned", "missing", "weights", "weights[2]", "temperature[0]"):
        with pytest.raises(ValueError, match="none with a number"):
            module_places(parse_target(target), model)


def test_places_of_groups() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": parameters[:1], "betas": (0.8, 0.9)}, {"params": parameters[1:], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    betas = group_places(parse_target("optimizer.betas[0]"), optimizer, 0)
    rates = group_places(parse_target("optimizer.lr"), optimizer, 0)
    rate = optimizer.param_groups[1]["lr"]
    for place in (*betas, *rates):
        place.set(0.25)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.25, 0.9), (0.25, 0.999)]
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]
    assert optimizer.param_groups[1]["lr"] is rate
    for place in (*betas, *rates):
        place.restore()
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9), (0.9, 0.999)]
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.1, 0.5]
    with pytest.raises(ValueError, match=r"momentum in the groups of optimizer 1, a AdamW, which has betas, eps, lr"):
        group_places(parse_target("optimizer.momentum"), optimizer, 1)
    assert len({place.key for place in (*betas, *rates)}) == 4


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


class StochasticDepth(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.use_dropout = True
        self.drop_last = 5
        self.p = 0.5


def test_dropout_of_all_kinds() -> None:
    model = nn.ModuleList(
        [
            nn.Dropout(0.1),
            nn.Dropout3d(0.2),
            nn.AlphaDropout(0.3),
            nn.MultiheadAttention(4, 2, dropout=0.4),
            nn.LSTM(4, 4, num_layers=2, dropout=0.5),
            DropPath(0.6),
            StochasticDepth(0.7),
            Flagged(),
        ]
    )
    assert [place.own for place in dropout_places(model)] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_dropout_of_transformers() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        vocab_size=8,
        attention_dropout=0.3,
    )
    places = dropout_places(transformers.LlamaModel(config))
    assert [(place.label, place.own) for place in places] == [("layers.0.self_attn.attention_dropout", 0.3)]


def test_dropout_factor() -> None:
    modes = {mode: [dropout_factor(k, mode=mode, steps=2) for k in range(4)] for mode in ("early", "late", "constant")}
    assert modes == {"early": [1, 1, 0, 0], "late": [0, 0, 1, 1], "constant": [1, 1, 1, 1]}


def test_keys_tell_places_apart() -> None:
    dropout = nn.Dropout(0.5)
    assert Place(dropout, "p").key == Place(dropout, "p").key != Place(nn.Dropout(0.5), "p").key
