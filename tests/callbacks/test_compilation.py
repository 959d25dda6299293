"""Compilation by block under a Trainer: in one order with checkpointing, and settled after a budget."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch._dynamo.backends.debugging import aot_eager

import lightning_tricks as lt
from tests.models import Net, assert_same, fit, fp16, loader, seeded, weights


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Noting:
    """A backend that notes on which batch it compiles."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.module: Net | None = None

    def __call__(self, graph, inputs):
        self.batches.append(len(self.module.losses))
        return aot_eager(graph, inputs)


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", [None, "blocks", "segments", "selective", "budget"])
def test_the_run_is_the_same(mode: str | None, precision: str) -> None:
    results = []
    dropout = 0.3 if precision == "32" else 0.0  # compiled, it rounds elsewhere
    checkpointing = {"budget": {"budget": 0.9}}.get(mode, {"mode": mode})
    options = {"bf16": {"precision": "bf16-mixed"}}.get(precision, {})
    for compiled in (False, True):
        module = seeded(lambda: Net(dropout=dropout, batchnorm=True))
        tricks = [] if mode is None else [lt.ActivationCheckpointing(**checkpointing)]
        if precision == "fp16":
            options = {"plugins": fp16()}
        if compiled:
            tricks.insert(0, lt.ModelCompilation(backend="aot_eager"))
        fit(module, *tricks, **options)
        results.append(weights(module))
        assert not any("forward" in vars(part) for part in module.modules())
    assert_same(*results)


def test_a_budget_is_settled_first() -> None:
    backend = Noting()
    backend.module = module = seeded(Net)
    checkpointing = lt.ActivationCheckpointing(budget=0.9)
    fit(module, lt.ModelCompilation(backend=backend), checkpointing)
    assert checkpointing.choice.measured is not None
    assert set(backend.batches) == {1}  # the first batch, with index 0, is measured


def test_equal_blocks_are_compiled_once_and_a_second_fit_goes_on() -> None:
    backend = Noting()
    backend.module = module = seeded(Net)
    run = fit(module, lt.ModelCompilation(backend=backend))
    assert backend.batches == [0, 0]  # the first block's input takes no gradient
    run.fit_loop.max_epochs = 4
    run.fit(module, loader())
    assert run.global_step == 28
    assert not any("forward" in vars(part) for part in module.modules())


class Copies(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        for copied in (copy.deepcopy(self), pickle.loads(pickle.dumps(self))):
            assert torch.equal(copied.net(batch[0]), self.net(batch[0]))


def test_a_module_may_be_copied_while_it_trains() -> None:
    for tricks in ([], [lt.ActivationCheckpointing(mode="segments")]):
        fit(Copies(), lt.ModelCompilation(backend="aot_eager"), *tricks, limit_train_batches=1)


def test_a_module_compiled_as_a_whole_is_a_rival() -> None:
    with pytest.raises(MisconfigurationException, match=r"ModelCompilation and torch.compile\(module\) would both"):
        fit(torch.compile(Net(), backend="eager"), lt.ModelCompilation(backend="eager"))


def test_nothing_left_to_compile_is_said() -> None:
    module = Net()
    for block in module.net[:3]:
        block.compile(backend="eager")
    with pytest.warns(UserWarning, match="ModelCompilation changed nothing: all 3 matching blocks are compiled"):
        fit(module, lt.ModelCompilation(backend="eager"), limit_train_batches=1)


def test_offloading_and_the_monitor_see_what_compiled_blocks_save() -> None:
    results = []
    for tricks in ([], [lt.ModelCompilation(backend="aot_eager"), lt.ActivationOffloading(min_bytes=1)]):
        module, monitor = seeded(Net), lt.ActivationMemoryMonitor()
        fit(module, monitor, *tricks)
        results.append(weights(module))
        assert {"net.0", "net.1", "net.2"} <= monitor.saved.by_block.keys()
    assert_same(*results)
