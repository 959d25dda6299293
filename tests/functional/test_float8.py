"""fp8 layers: which, with what numbers, and no trace left."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_tricks.functional.float8 import apply_float8, linear_layers

NAMES = ("0", "2")


def build(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, bias=bias), nn.GELU(), nn.Linear(48, 16, bias=bias))


def rounded(x: torch.Tensor, dim: int | None, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """A slow reference of scaling into fp8 and back: by the largest element, of all or of a row."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    scale = scale.float() if dim is None else torch.exp2(torch.floor(torch.log2(scale))).float()
    return (x * scale).to(dtype).float() / scale


def slow_linear(layer: nn.Linear, x: torch.Tensor, recipe: str) -> torch.Tensor:
    dim = None if recipe == "tensorwise" else 1
    return rounded(x, dim) @ rounded(layer.weight, dim).T + layer.bias


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_output_is_that_of_operands_rounded_to_fp8(recipe: str) -> None:
    model, x = build(), torch.randn(64, 32)
    handle = apply_float8(model, ("0",), recipe, emulate=True)
    torch.testing.assert_close(model[0](x), slow_linear(model[0], x, recipe), rtol=1e-4, atol=1e-4)
    handle.remove()
    assert (model[0](x) - slow_linear(model[0], x, recipe)).abs().max() > 1e-3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_are_near_those_of_full_precision(recipe: str) -> None:
    x, gradients = torch.randn(64, 32), []
    for convert in (False, True):
        model = build()
        if convert:
            apply_float8(model, NAMES, recipe, emulate=True)
        model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, eight in zip(*gradients, strict=True):
        error = float((plain - eight).norm() / plain.norm())
        assert 0 < error < 0.1


def test_parameters_that_are_swapped_are_seen() -> None:
    """As FSDP2 does at every gather, and `Module.to` may."""
    model, x = build(), torch.randn(16, 32)
    apply_float8(model, NAMES, emulate=True)
    before = model(x)
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))
    assert not torch.equal(model(x), before)
    assert model.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_a_model_of_its_own(duplicate) -> None:
    model, x = build(), torch.randn(16, 32)
    apply_float8(model, NAMES, emulate=True)
    other = duplicate(model)
    expected = model(x)
    assert torch.equal(other(x), expected)
    nn.init.zeros_(other[0].weight)
    assert torch.equal(model(x), expected)
    assert not torch.equal(other(x), expected)


def test_nothing_is_left_after_remove() -> None:
    model, plain = build(), build()
    keys = list(model.state_dict())
    handle = apply_float8(model, NAMES, emulate=True)
    assert list(model.state_dict()) == keys
    assert type(model[0]) is nn.Linear
    handle.remove()
    assert [set(vars(one)) for one in model.modules()] == [set(vars(one)) for one in plain.modules()]


def test_which_layers() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "a": nn.Linear(16, 32),
            "b": nn.Linear(16, 10),
            "c": nn.Linear(10, 16),
            "d": Own(16, 16),
            "head": nn.Linear(16, 16),
        }
    )
    found = linear_layers(model)
    assert found.suitable == ("a",)
    assert found.left_out == {
        "b": "16 x 10 does not divide by 16",
        "c": "10 x 16 does not divide by 16",
        "d": "Own may compute something else",
        "head": "excluded",
    }
    assert linear_layers(model, ()).suitable == ("a", "head")
    assert linear_layers(model, ["a"]).suitable == ("head",)


def test_without_a_bias() -> None:
    model = build(bias=False)
    apply_float8(model, NAMES, emulate=True)
    assert model(torch.randn(16, 32)).shape == (16, 16)


def test_a_tied_head_is_left_alone() -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(32, 16), "body": nn.Linear(16, 16), "head": nn.Linear(16, 32, bias=False)}
    )
    model["head"].weight = model["table"].weight
    assert linear_layers(model).suitable == ("body",)


def test_a_batch_that_does_not_divide_by_16() -> None:
    model = build()
    apply_float8(model, NAMES, emulate=True)
    assert model[0].forward.args[0].config.pad_inner_dim  # without it the hardware refuses the gradient of the weight
    model(torch.randn(13, 32)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_forward_or_a_weight_of_somebody_else_is_left_alone() -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("plain", "hooked", "normed")})
    model["hooked"].forward = lambda x: x
    nn.utils.weight_norm(model["normed"])
    assert linear_layers(model, ()).suitable == ("plain",)
