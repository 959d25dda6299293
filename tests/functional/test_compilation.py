"""Compiled blocks: one compilation for those that are alike, and the same gradients with every recomputation."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import apply_activation_checkpointing, checkpointed_block
from lightning_tricks.functional.compilation import compile_blocks
from tests.functional.test_checkpointing import ByKeyword, KeywordStack, Stack
from tests.models import Block


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return aot_eager(graph, inputs)


class WithFront(nn.Module):
    def __init__(self, make=Block, count: int = 6) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)
        self.body = Stack(make, count)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.front(x))


def train(module: nn.Module, steps: int = 2, sizes: tuple[int, ...] = (4,)) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    for step in range(steps):
        module(torch.randn(sizes[step % len(sizes)], 8)).square().sum().backward()
    return [*(p.grad.clone() for p in module.parameters()), *(b.clone() for b in module.buffers())]


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", [None, "blocks", "segments", "selective"])
def test_equal_blocks_are_compiled_once(mode: str | None) -> None:
    backend = Counting()
    module = WithFront(count=12)
    if mode is not None:
        apply_activation_checkpointing(module, mode=mode)
    handle = compile_blocks(module, backend=backend)
    assert len(handle.compiled) == 12
    train(module)
    assert backend.graphs == 1
    with torch.no_grad():
        module(torch.randn(4, 8))
    assert backend.graphs == 2


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("mode", [None, "blocks", "segments", "selective", "budget"])
def test_gradients_and_buffers_equal_those_of_the_plain_module(mode: str | None, batchnorm: bool) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = WithFront(lambda: Block(dropout=0.3, batchnorm=batchnorm))
        if compiled:
            if mode == "budget":
                apply_activation_checkpointing(module, with_budget=True).budget.settle(["body.blocks.1"])
            elif mode is not None:
                apply_activation_checkpointing(module, mode=mode)
            compile_blocks(module, backend="aot_eager")
        results.append(train(module, steps=3, sizes=(4, 3, 4)))
    assert_equal(*results)


def test_keywords_and_nested_outputs() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = KeywordStack(ByKeyword)
        if compiled:
            apply_activation_checkpointing(module)
            assert len(compile_blocks(module, backend="aot_eager").compiled) == 3
        results.append(train(module))
    assert_equal(*results)


@pytest.mark.parametrize("mode", ["blocks", "segments"])
def test_a_recomputation_runs_what_the_forward_pass_ran(mode: str) -> None:
    """Where two compilations would do, the compiler takes the one that ran last, which may save other tensors."""
    ran: list[int] = []

    def backend(graph, inputs):
        number = next(numbers)
        return lambda *values: ran.append(number) or graph(*values)

    numbers = itertools.count()
    encoder, decoder = Stack(Block, 2), Stack(Block, 2)  # as in T5, of one class
    module = nn.ModuleList([encoder, decoder])
    apply_activation_checkpointing(module, Block, mode=mode, segment_length=1)
    compile_blocks(module, Block, backend=backend)
    for step, (long, short) in enumerate([(4, 4), (4, 3), (5, 4), (7, 6), (8, 9), (3, 10), (10, 1), (12, 7), (13, 14)]):
        ran.clear()
        x, y = torch.randn(long, 8, requires_grad=True), torch.randn(short, 8, requires_grad=True)
        loss = encoder(x).mean() + decoder(y).mean()
        forward = list(ran)
        loss.backward()
        assert len(forward) == 4
        assert ran[len(forward) :] == forward[::-1]
        if step == 4:
            compiled = next(numbers)
    assert next(numbers) <= compiled + 3  # other sizes are variables: with 8, without, and 1


def test_what_a_segment_holds_is_as_without_compilation() -> None:
    sizes = []
    for compiled in (False, True):
        module = WithFront(count=16)
        apply_activation_checkpointing(module, mode="segments", segment_length=4)
        if compiled:
            compile_blocks(module, backend="aot_eager")
        with measure_saved_activations() as saved:
            module(torch.randn(4, 8))
        sizes.append(saved.num_bytes)
    assert sizes[0] == sizes[1]


def test_a_block_runs_as_it_is_while_a_budget_measures() -> None:
    backend = Counting()
    module = WithFront()
    budget = apply_activation_checkpointing(module, with_budget=True).budget
    compile_blocks(module, backend=backend)
    measurement = budget.begin()
    with measurement.around():
        loss = module(torch.randn(4, 8)).sum()
    loss.backward()
    assert measurement.is_complete
    assert backend.graphs == 0
    budget.settle(["body.blocks.0"])
    train(module, 1)
    assert backend.graphs == 1


def test_undo_leaves_no_trace_and_copies_compile_anew() -> None:
    for mode in (None, "blocks", "segments"):
        module = WithFront()
        keys = list(module.state_dict())
        checkpointing = None if mode is None else apply_activation_checkpointing(module, mode=mode)
        backend = Counting()
        handle = compile_blocks(module, backend=backend)
        train(module)
        assert list(module.state_dict()) == keys
        copied = copy.deepcopy(module)
        assert_equal(train(copied), train(module))
        assert backend.graphs == 1  # of the backend, which was copied too
        handle.remove()
        handle.remove()
        if checkpointing is not None:
            assert checkpointed_block(module.body.blocks[0]).forward is None
            checkpointing.remove()
        assert not any("forward" in vars(part) for part in module.modules())


def test_a_pickled_block_trains() -> None:
    module = WithFront()
    compile_blocks(module, backend="aot_eager")
    train(module)
    again = pickle.loads(pickle.dumps(module))
    assert_equal(train(again), train(module))


def test_copies_in_the_module_get_their_forward_back() -> None:
    for mode in (None, "segments"):
        module = WithFront()
        checkpointing = None if mode is None else apply_activation_checkpointing(module, mode=mode)
        handle = compile_blocks(module, backend="aot_eager")
        module.average = copy.deepcopy(module.body)
        handle.remove()
        if checkpointing is not None:
            checkpointing.remove()
        assert not any("forward" in vars(part) for part in module.modules())


def test_what_is_compiled_already_is_left_alone() -> None:
    module = WithFront()
    module.body.blocks[0].compile(backend="eager")
    module.body.blocks[1] = torch.compile(module.body.blocks[1], backend="eager")
    handle = compile_blocks(module, "body.blocks.*", backend="aot_eager")
    assert handle.already == ["body.blocks.0", "body.blocks.1"]
    again = compile_blocks(module, Block, backend="aot_eager")
    assert again.compiled == []
    assert len(again.already) == 6
    again.remove()
    train(module)


def test_a_compiled_parent_compiles_all() -> None:
    module = WithFront()
    compile_blocks(module, backend="eager")
    backend = Counting()
    torch.compile(module, backend=backend)(torch.randn(4, 8))
    assert backend.graphs == 1


def test_segments_inside_of_a_compiled_block_are_refused() -> None:
    module = Stack(lambda: nn.Sequential(Block(), Block()), 3)
    apply_activation_checkpointing(module, "blocks.*.*", mode="segments")
    with pytest.raises(ValueError, match=r"got 'blocks.0', where 'blocks.0.0' is recomputed in segments"):
        compile_blocks(module, "blocks.?")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "inducer"}, ValueError, "`backend` to be one of .*'inductor'.*got 'inducer'"),
        ({"backend": 3}, TypeError, "`backend` to be a name or a function, got 3"),
        ({"mode": "fast"}, ValueError, "`mode` to be one of .*'max-autotune'.*got 'fast'"),
        ({"mode": 3}, TypeError, "`mode` to be a name or None, got 3"),
        ({"mode": "default", "backend": "eager"}, ValueError, "to go with backend=\"inductor\", got backend='eager'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compile_blocks(WithFront(), **arguments)
