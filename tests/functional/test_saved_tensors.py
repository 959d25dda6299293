"""What hooks on saved tensors must see to themselves: writes, and cycles."""

import weakref

import pytest
import torch
from torch import nn

from lightning_tricks.functional.saved_tensors import SavedTensor, is_parameter, storages_of

hooks = lambda: torch.autograd.graph.saved_tensors_hooks(SavedTensor, SavedTensor.value)  # noqa: E731


@pytest.mark.parametrize("operation", [torch.exp, torch.sin])
def test_a_write_before_the_backward_pass_is_an_error_as_without_hooks(operation) -> None:
    """`exp` saves what it returns, `sin` what it is given."""
    for around in (hooks, lambda: torch.enable_grad()):
        hidden = torch.ones(2, requires_grad=True) * 2
        with around():
            result = operation(hidden)
        (result if operation is torch.exp else hidden).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_graph_that_is_dropped_is_gone() -> None:
    x = torch.ones(2, requires_grad=True)
    with hooks():
        result = x.exp()
    leaf = weakref.ref(x)  # the graph holds it
    del x, result
    assert leaf() is None


def test_double_backward_goes_through() -> None:
    x = torch.tensor([0.5], requires_grad=True)
    with hooks():
        y = x.exp()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert torch.equal(second, x.detach().exp())


def test_views_and_parameters() -> None:
    linear = nn.Linear(3, 3)
    assert is_parameter(linear.weight)
    assert is_parameter(linear.weight.t())
    assert not is_parameter(linear(torch.ones(1, 3)))
    assert storages_of(linear.weight) == storages_of(linear.weight[1:])
    assert storages_of(torch.eye(2).to_sparse()) == {}
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert 20 in storages_of(nested).values()
