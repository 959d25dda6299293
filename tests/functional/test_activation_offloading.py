"""Saved tensors in the host's memory: gradients bit for bit, each storage once, copies that go on beside."""

import pytest
import torch
from torch import Tensor, nn

from lightning_tricks.functional import activation_offloading
from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.activation_offloading import offload_saved_activations
from lightning_tricks.functional.checkpointing import apply_activation_checkpointing
from lightning_tricks.functional.saved_tensors import StorageKey
from tests.functional.test_checkpointing import Stack
from tests.models import Block


class Attention(nn.Module):
    """Saves pieces of one storage, in other shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 2, 4, 24 // 8).permute(3, 0, 2, 1).unbind()
        scores = torch.softmax(q @ k.transpose(1, 2), -1)
        return x + self.dropout((scores @ v).transpose(1, 2).reshape(4, 8)) * x.sum(1, keepdim=True).expand(4, 8)


def gradients(module: nn.Module, around, backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    module.zero_grad()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with around:
        loss = module(x).square().sum()
    for backward in range(backwards):
        loss.backward(retain_graph=backward < backwards - 1)
    return [x.grad, *(p.grad for p in module.parameters())]


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [Attention, lambda: Block(dropout=0.5, batchnorm=True)])
def test_gradients_equal_bit_for_bit(make, autocast: bool, backwards: int) -> None:
    torch.manual_seed(0)
    module = Stack(make)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = gradients(module, torch.enable_grad(), backwards)
        assert_equal(gradients(module, offload_saved_activations(1), backwards), plain)


def test_double_backward_goes_through() -> None:
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    with offload_saved_activations(1):
        y = x.exp().sin().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    exp = x.detach().exp()
    torch.testing.assert_close(second, exp * exp.cos() - exp * exp * exp.sin())


def test_what_is_moved_is_gone_from_where_it_was() -> None:
    x = torch.ones(256, requires_grad=True)
    hidden = x * 2
    was = StorageKey(hidden.untyped_storage())
    with offload_saved_activations(1024):
        y = torch.sin(hidden)
    del hidden
    assert was.expired()
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.full((256,), 2.0).cos())


def test_a_storage_moves_once_and_what_is_small_or_kept_anyway_stays() -> None:
    linear = nn.Linear(256, 256)
    batch = torch.ones(4, 256)
    with offload_saved_activations(4 * 256 * 4, leave_out=[batch]) as moved:
        hidden = linear(batch)  # the batch stays
        first, second = hidden.sin(), hidden.view(2, 512).cos()  # one storage twice
        small = hidden.mean(1).sin()  # 4 floats
        narrow = hidden[:, :8].exp()  # of 32 floats, which lie in a storage of their own
    assert moved.num_bytes == moved.largest_bytes == 4 * 256 * 4
    (first.sum() + second.sum() + small.sum() + narrow.sum()).backward()
    assert linear.weight.grad is not None


def test_a_slice_of_something_large_stays() -> None:
    table = torch.ones(1000, requires_grad=True) * 1
    with offload_saved_activations(100) as moved:
        table[:200].sin()
    assert moved.num_bytes == 0
    with offload_saved_activations(100) as moved:
        table[:300].sin()
    assert moved.num_bytes == 4000


def test_a_graph_that_is_dropped_is_gone(monkeypatch) -> None:
    copies = SlowCopies()
    monkeypatch.setattr(activation_offloading, "_copies_of", lambda device: copies)
    x = torch.ones(8, requires_grad=True)
    with offload_saved_activations(1):
        y = (x * 2).sin().sin().sin()
    del y
    assert [entry.expired() for entry in copies.on_host] == [True] * 3


class SlowCopies(activation_offloading._PlainCopies):
    """Copies that are done when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []
        self.on_host: list[StorageKey] = []

    def to_host(self, data: Tensor):
        host, _ = super().to_host(data)
        self.on_host.append(StorageKey(host.untyped_storage()))
        self.log.append(f"out {len(self.on_host) - 1}")
        return host, f"out {len(self.on_host) - 1}"

    def to_device(self, data: Tensor):
        name = f"back {self.on_host.index(StorageKey(data.untyped_storage()))}"
        self.log.append(name)
        return data, name

    def is_done(self, ticket: str) -> bool:
        return f"wait {ticket}" in self.log

    def wait(self, ticket: str) -> None:
        self.log.append(f"wait {ticket}")


def test_copies_overlap_and_come_back_one_ahead(monkeypatch) -> None:
    copies = SlowCopies()
    monkeypatch.setattr(activation_offloading, "_copies_of", lambda device: copies)
    x = torch.ones(8, requires_grad=True)
    hidden = x * 2
    with offload_saved_activations(1):
        for _ in range(6):
            hidden = hidden.sin()
    out = [entry for entry in copies.log if "out" in entry]
    assert out[:6] == [*(f"out {i}" for i in range(4)), "wait out 0", "out 4"]  # four may be on their way
    assert copies.log[-4:] == [f"wait out {i}" for i in range(2, 6)]
    copies.log.clear()
    hidden.sum().backward()
    waits = [f"wait back {i}" for i in range(5, -1, -1)]
    assert copies.log[:4] == ["back 5", waits[0], "back 4", waits[1]]
    assert [entry for entry in copies.log if "wait" in entry] == waits
    assert sorted(entry for entry in copies.log if "wait" not in entry) == [f"back {i}" for i in range(6)]


def test_what_came_back_and_was_not_asked_for_is_waited_for(monkeypatch) -> None:
    copies = SlowCopies()
    monkeypatch.setattr(activation_offloading, "_copies_of", lambda device: copies)
    x = torch.ones(8, requires_grad=True)
    with offload_saved_activations(1):
        unused = (x * 2).sin()
        y = (x * 3).sin()
    y.sum().backward()
    assert copies.log[-1] == "back 0"
    del unused
    assert copies.log[-1] == "wait back 0"


def test_a_write_while_it_is_copied_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(activation_offloading, "_copies_of", lambda device: copies)
    copies = SlowCopies()
    x = torch.ones(8, requires_grad=True)
    hidden = x * 2
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        offload_saved_activations(1),
    ):
        hidden.sin()
        hidden.add_(1)


def test_what_is_computed_after_a_write_is_saved_anew() -> None:
    results = []
    for around in (torch.enable_grad(), offload_saved_activations(1)):
        x = torch.linspace(0, 1, 8).requires_grad_()
        buffer = torch.ones(8)
        with around:
            y = x * buffer
            if isinstance(around, torch.enable_grad):
                buffer = buffer + 1
            else:
                buffer.add_(1)  # an error without offloading; here the value that was saved counts
            y = y * buffer
        y.sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_checkpointed_blocks_keep_their_inputs_on_the_host() -> None:
    module = Stack(Block)
    plain = gradients(module, torch.enable_grad())
    for mode in ("blocks", "segments", "selective"):
        handle = apply_activation_checkpointing(module, mode=mode)
        gradients(module, torch.enable_grad())  # segments and selection learn in a first pass
        with measure_saved_activations() as saved:
            gradients(module, torch.enable_grad())
        with offload_saved_activations(1) as seen:
            assert_equal(gradients(module, torch.enable_grad()), plain)
        assert 0 < seen.num_bytes <= saved.num_bytes, mode
        handle.remove()


def test_a_measurement_inside_sees_what_is_moved_and_moves_it() -> None:
    x = torch.ones(256, requires_grad=True)
    with offload_saved_activations(1) as moved, measure_saved_activations() as saved:
        (x * 2).sin()
    assert moved.num_bytes == saved.num_bytes == 1024


def test_less_than_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="`min_bytes` to be 1 or more, got 0"), offload_saved_activations(0):
        pass
