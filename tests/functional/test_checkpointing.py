"""Activation checkpointing of plain modules: gradients bit for bit, buffers written once, and the way back."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks.functional.activation_budget import ActivationBudget
from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import ActivationCheckpointingHandle, apply_activation_checkpointing
from tests.models import Block


class Stack(nn.Module):
    """Blocks of one class in a list, walked by a forward of the user's."""

    def __init__(self, make, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ByKeyword(nn.Module):
    """Takes keywords, one of them named as an option of torch's checkpoint, and returns a tuple and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x: Tensor, debug: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = torch.sin(self.linear(x)) * debug
        return y, {"twice": 2 * y}


class KeywordStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_ones(())
        for block in self.blocks:
            x, extra = block(x=x, debug=scale)
            x = x + extra["twice"]
        return x


class FrozenFront(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8).requires_grad_(False)
        self.body = Stack(Block)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding((x[:, 0] > 0).long()))


class Spectral(Block):
    """Its vectors are written in each forward pass, and read again in the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)


class InstanceNorm(Block):
    """Statistics that are written without a count and without a new version of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x).unsqueeze(1)).squeeze(1))


class BareStatistics(Block):
    """Statistics without a count: the kernel writes them without a new version of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=self.training)
        return x + torch.tanh(normed)


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: dict) -> dict:
        state["x"] = state["x"] + torch.tanh(self.linear(state["x"]))
        state["all"].append(state["x"])
        return state


class DictionaryStack(Stack):
    """Hands one dictionary, with a list in it, from block to block."""

    def __init__(self, make) -> None:
        super().__init__(make)
        self.stem = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.stem(x), "all": []}
        for block in self.blocks:
            state = block(state)
        return sum(state["all"])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for layer in self.layers:
            x, _ = layer(x)
        return x


MODELS = {
    "plain": lambda: Stack(Block),
    "dropout": lambda: Stack(lambda: Block(dropout=0.5)),
    "batchnorm": lambda: Stack(lambda: Block(batchnorm=True)),
    "spectral norm": lambda: Stack(Spectral),
    "keywords, tuples, dictionaries": lambda: KeywordStack(ByKeyword),
    "frozen front": FrozenFront,
    "instance norm": lambda: Stack(InstanceNorm),
    "bare statistics": lambda: Stack(BareStatistics),
    "written dictionaries and lists": lambda: DictionaryStack(WritesItsInput),
    "lstm": Lstm,
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    ),
}
models = pytest.mark.parametrize("name", MODELS)


WAYS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "segments": {"mode": "segments", "segment_length": 2},
    "measured segments": {"mode": "segments"},
    "selective": {"mode": "selective"},
    "budget": {"with_budget": True},
}
"""Every way to recompute. With a budget the first of two steps is measured, and the second as chosen."""
ways = pytest.mark.parametrize("way", WAYS)


def checkpointed(model: nn.Module, way: str, blocks="auto") -> ActivationCheckpointingHandle:
    handle = apply_activation_checkpointing(model, blocks, **WAYS[way])
    assert handle.wrapped
    if handle.budget is not None:
        handle.budget.begin()
    return handle


def step(
    model: nn.Module, *, autocast: bool = False, budget: ActivationBudget | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two training steps, since buffers of the first are read in the second; gradients and buffers after them."""
    torch.manual_seed(3)
    for _ in range(2):
        model.zero_grad()
        # Without oneDNN, which has no LSTM in bf16 on some CPUs.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.backends.mkldnn.flags(enabled=not autocast):
            model(torch.randn(6, 8)).float().square().mean().backward()
        if budget is not None:
            budget.settle(budget.names[::2])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@models
@ways
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_and_buffers_equal_bit_for_bit(name: str, way: str, autocast: bool) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)
    budget = checkpointed(model, way).budget
    for first, second in zip(
        step(plain, autocast=autocast), step(model, autocast=autocast, budget=budget), strict=True
    ):
        assert_equal(first, second)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
@ways
def test_recomputes_in_training_and_not_in_evaluation(name: str, way: str) -> None:
    model = MODELS[name]()
    handle = checkpointed(model, way)
    calls = dict.fromkeys(handle.wrapped, 0)
    for block in handle.wrapped:

        def count(*args, block=block) -> None:
            calls[block] += 1

        parts = model.get_submodule(block)
        getattr(parts, "linear1", getattr(parts, "linear", None)).register_forward_hook(count)
    model(torch.randn(6, 8)).sum().backward()
    assert set(calls.values()) == {2}
    with torch.no_grad():
        model(torch.randn(6, 8))
    assert set(calls.values()) == {3}


def test_memory_held_is_the_blocks_inputs() -> None:
    model, x = Stack(Block, count=8), torch.randn(64, 8)
    held = []
    for apply in (False, True):
        if apply:
            apply_activation_checkpointing(model)
        with measure_saved_activations(leave_out=model.parameters()) as saved:
            model(x).sum()
        held.append(saved.num_bytes)
    assert held[1] == 8 * x.nbytes  # one input a block
    assert held[0] > 2.5 * held[1]


def test_recomputation_costs_one_forward_of_the_blocks() -> None:
    """The claim itself: measured FLOPs of a step rise from 3 forwards to at most 4."""
    flops = []
    for apply in (False, True):
        model = Stack(Block)
        if apply:
            apply_activation_checkpointing(model)
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(6, 8, requires_grad=True)).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[1] / flops[0] == pytest.approx(4 / 3, abs=0.001)


def test_every_second_block() -> None:
    handle = apply_activation_checkpointing(Stack(Block, count=5), every=2)
    assert handle.wrapped == ["blocks.0", "blocks.2", "blocks.4"]
    with pytest.raises(ValueError, match="got 0"):
        apply_activation_checkpointing(Stack(Block), every=0)


@ways
def test_names_types_keys_and_undo(way: str) -> None:
    model = Stack(Block)
    before = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    keys = list(model.state_dict())
    handle = checkpointed(model, way)
    assert list(model.state_dict()) == keys
    assert all(isinstance(block, Block) for block in model.blocks)
    handle.remove()
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == before
    handle.remove()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@ways
def test_copies_and_pickles_stand_alone(way: str, copied) -> None:
    model = Stack(lambda: Block(batchnorm=True))
    checkpointed(model, way)
    output = model.train()(torch.randn(6, 8))  # a copy in the midst of a step
    model.blocks[0].norm.num_batches_tracked.zero_()
    other = copied(model)
    output.sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other(torch.randn(6, 8)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert other.blocks[0].norm.num_batches_tracked == 1
    assert model.blocks[0].norm.num_batches_tracked == 0


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("way", ["blocks", "selective"])
def test_compiled_parent(way: str, batchnorm: bool) -> None:
    torch.manual_seed(0)
    plain = Stack(lambda: Block(batchnorm=batchnorm))
    model = copy.deepcopy(plain)
    checkpointed(model, way)
    expected_gradients, expected_buffers = step(plain)
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient)
    for name, buffer in expected_buffers.items():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer)


def test_mode_switch_is_seen() -> None:
    """Learned in evaluation mode that nothing is written, BatchNorm must still be right in training mode."""
    model = Stack(lambda: Block(batchnorm=True))
    apply_activation_checkpointing(model)
    model.eval()(torch.randn(6, 8)).sum().backward()
    model.train()(torch.randn(6, 8)).sum().backward()
    assert model.blocks[0].norm.num_batches_tracked == 1


@ways
def test_block_used_twice_and_backward_through_a_retained_graph(way: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(dropout=0.3)] * 2, Block())
    model = copy.deepcopy(plain)
    checkpointed(model, way, Block)
    for one in (plain, model):
        torch.manual_seed(1)
        loss = one(torch.ones(2, 8)).sum()
        loss.backward(retain_graph=True)
        if one is model and way == "selective":
            with pytest.raises(RuntimeError, match="backward once"):
                loss.backward()
            return
        loss.backward()
    assert_equal(
        {name: p.grad for name, p in plain.named_parameters()}, {name: p.grad for name, p in model.named_parameters()}
    )


@pytest.mark.parametrize("how", ["ours", "wrapper", "composable"])
def test_checkpointed_blocks_are_left_alone(how: str) -> None:
    model = Stack(Block)
    if how == "ours":
        apply_activation_checkpointing(model, "blocks.1")
    elif how == "wrapper":
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    else:
        composable_checkpoint(model.blocks[1])
    handle = apply_activation_checkpointing(model, Block)
    assert handle.wrapped == ["blocks.0", "blocks.2"]
    assert len(handle.already) == 1
    model(torch.randn(6, 8)).sum().backward()


def test_cache_with_content_is_refused_and_a_fresh_one_not_filled() -> None:
    class Cache:
        def __init__(self, length: int) -> None:
            self.length = length

        def get_seq_length(self, layer: int) -> int:
            return self.length

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
            assert cache is None
            return self.linear(x)

    model = Cached()
    apply_activation_checkpointing(nn.ModuleList([model]), Cached)
    model(torch.ones(1, 2), Cache(0)).sum().backward()
    with pytest.raises(RuntimeError, match="use_cache=False"):
        model(torch.ones(1, 2), Cache(3))


class StochasticDepth(Block):
    """Its BatchNorm is written in some passes only."""

    def __init__(self) -> None:
        super().__init__(batchnorm=True)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else super().forward(x)


@ways
def test_buffers_that_are_written_now_and_then_are_written_once(way: str) -> None:
    torch.manual_seed(0)
    plain = Stack(StochasticDepth)
    model = copy.deepcopy(plain)
    checkpointed(model, way)
    for one in (plain, model):
        torch.manual_seed(3)
        for _ in range(10):
            one(torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))
    assert 0 < plain.blocks[0].norm.num_batches_tracked < 10


@ways
def test_input_that_is_written_to_later_is_noticed(way: str) -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * 2)

    block = ByName()
    checkpointed(nn.ModuleList([block]), way, ByName)
    hidden = nn.Linear(8, 8)(torch.ones(2, 8))
    output = block(x=hidden)
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class WritesIntoItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.relu(x, inplace=True))


@ways
def test_a_block_that_writes_into_its_input_is_refused_at_the_place(way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), WritesIntoItsInput())
    checkpointed(model, way, WritesIntoItsInput)
    with pytest.raises(
        RuntimeError, match=r"WritesIntoItsInput '1' is checkpointed, and writes into its input in place"
    ):
        model(torch.randn(6, 8))


@ways
def test_double_backward_is_right_or_refused(way: str) -> None:
    torch.manual_seed(0)
    plain = Stack(Block)
    model = copy.deepcopy(plain)
    checkpointed(model, way)
    found = []
    for one in (plain, model):
        one(torch.ones(6, 8)).sum().backward()  # the first pass of "selective" keeps nothing
        one.zero_grad()
        x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
        loss = one(x).square().sum()
        if one is model and way not in ("blocks", "selective"):
            with pytest.raises(RuntimeError, match=r"'blocks\.2'.*create_graph=True"):
                torch.autograd.grad(loss, x, create_graph=True)
            return
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        if one is model and way == "selective":
            with pytest.raises(RuntimeError, match="backward once"):
                gradient.square().sum().backward()
            return
        gradient.square().sum().backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    assert_equal(*found)


class Fickle(Block):
    """Saves something else each time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        if self.calls > 1 and self.how == "fewer":
            return y
        return torch.sin(y[:, : 8 // self.calls] if self.how == "smaller" else y)


@ways
@pytest.mark.parametrize("how", ["fewer", "smaller"])
def test_a_forward_that_differs_the_second_time_is_an_error(how: str, way: str) -> None:
    model = nn.ModuleList([Fickle(how)])
    checkpointed(model, way, Fickle)
    with pytest.raises((RuntimeError, CheckpointError), match=r"recomput|encountered during backward"):
        model[0](torch.randn(6, 8)).sum().backward()


def test_wrong_arguments() -> None:
    for name, value in (("every", 0), ("mode", "segment"), ("segment_length", 0), ("matmul_share", 1.5)):
        with pytest.raises(ValueError, match=f"`{name}` to be .*, got {value!r}"):
            apply_activation_checkpointing(Stack(Block), **{name: value})


def test_copies_made_meanwhile_are_undone_with_the_module() -> None:
    model = Stack(Block)
    handle = apply_activation_checkpointing(model)
    model.teacher = copy.deepcopy(model.blocks)
    handle.remove()
    assert all("forward" not in vars(part) for part in model.modules())
