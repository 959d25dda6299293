"""The gradient monitor in a Trainer: networks that vanish, explode, die and overflow, and what is logged."""

import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import nn

import lightning_tricks as lt
from tests.distributed_cases import monitor_looks
from tests.models import Net, TwoOptimizers, fit, fp16, loader, seeded
from tests.models import trainer as quiet_trainer
from tests.reads import count_reads


class Deep(Net):
    """A stack of 12 equal blocks."""

    def __init__(self, activation: type[nn.Module], gain: float = 1.0, dead: int | None = None, **options) -> None:
        super().__init__(**options)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), activation()) for _ in range(12)), nn.Linear(8, 1))
        with torch.no_grad():
            for block in self.net[:-1]:
                block[0].weight.mul_(gain)
            if dead is not None:
                self.net[dead][0].bias.fill_(-100.0)


def gradient_norms(module: Deep) -> list[float]:
    """A slow reference: the norm of each block's gradient, for the first batch."""
    module.zero_grad()
    module.loss(next(iter(loader()))).backward()
    blocks = [torch.cat([p.grad.flatten() for p in block.parameters()]) for block in module.net]
    return [float(one.double().norm()) for one in blocks]


@pytest.mark.parametrize(
    ("build", "word", "advice"),
    [
        (lambda: Deep(nn.Sigmoid), "vanishing", "residual connections"),
        (lambda: Deep(nn.Identity, gain=8.0), "exploding", "clip gradients"),
        (lambda: Deep(nn.ReLU, dead=7), "dead", "LeakyReLU"),
        (lambda: Deep(nn.Tanh, nan_at=(0,)), "non-finite", "NonFiniteGuard"),
    ],
)
def test_it_names_the_block_where_it_begins_and_what_helps(build, word: str, advice: str) -> None:
    module = seeded(build)
    norms = gradient_norms(module)
    if word == "vanishing":
        expected = max(i for i, norm in enumerate(norms) if norm < 1e-4 * max(norms))
        assert 0 < expected < 11
    elif word == "exploding":
        expected = max(i for i, norm in enumerate(norms) if norm > 1e3)
    else:
        expected = 7 if word == "dead" else 12
    monitor = lt.GradientMonitor(every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, monitor, lt.NonFiniteGuard())
    told = [str(one.message) for one in caught if str(one.message).startswith("GradientMonitor")]
    assert len(told) == 1
    assert f"'net.{expected}' is {word}" in told[0]
    assert advice in told[0]
    if word != "non-finite":
        assert [one.gradient_norm for one in monitor.history[0].blocks] == pytest.approx(norms, rel=1e-4)


def test_a_sound_network_is_told_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(val|workers|batch_size|treespec).*")
        fit(seeded(Net), lt.GradientMonitor(every_n_steps=1))


def test_an_embedding_with_few_rows_in_a_batch_is_not_dead() -> None:
    class Words(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 8)

        def loss(self, batch):
            return super().loss([batch[0] + self.table(torch.arange(4)), batch[1]])

    monitor = lt.GradientMonitor()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="GradientMonitor")
        fit(Words(), monitor)
    shares = {one.name: one.zero_share for one in monitor.history[0].blocks}
    assert shares["table"] == pytest.approx(0.996)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("scaler", [False, True])
def test_the_ratio_is_that_of_the_weights_before_and_after(scaler: bool, optimizer: str, fused: bool) -> None:
    states = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args) -> None:
            states.append([p.detach().double().clone() for p in pl_module.net[1].parameters()])

        def on_train_end(self, trainer, pl_module) -> None:
            self.on_train_batch_start(trainer, pl_module)

    monitor = lt.GradientMonitor(every_n_steps=3)
    module = seeded(lambda: Net(optimizer=optimizer, fused=fused))
    fit(module, monitor, Watch(), **({"plugins": fp16(2.0**8)} if scaler else {}))
    assert [look.step for look in monitor.history] == [0, 3, 6]
    for step, look in zip((0, 3, 6), monitor.history, strict=True):
        before, after = states[step], states[step + 1]
        change = sum(float((b - a).square().sum()) for a, b in zip(before, after, strict=True)) ** 0.5
        norm = sum(float(a.square().sum()) for a in before) ** 0.5
        block = next(one for one in look.blocks if one.name == "net.1")
        assert block.update_ratio == pytest.approx(change / norm, rel=1e-4)


def test_a_skipped_step_updates_nothing() -> None:
    monitor = lt.GradientMonitor(every_n_steps=1)
    fit(Net(nan_at=(2,)), monitor, lt.NonFiniteGuard())
    ratios = [look.blocks[0].update_ratio for look in monitor.history]
    assert ratios[2] == 0.0
    assert min(ratios[:2] + ratios[3:]) > 0
    assert monitor.history[2].blocks[0].nonfinite_share == 1.0


class Memory(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict]] = []

    name = version = "memory"

    def log_metrics(self, metrics, step=None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, params) -> None:
        pass


def test_it_logs_to_the_loggers_on_its_own_steps(tmp_path) -> None:
    memory = Memory()
    monitor = lt.GradientMonitor(every_n_steps=4)
    fit(Net(), monitor, logger=[memory, CSVLogger(tmp_path)], log_every_n_steps=3)
    lines = [(step, line) for step, line in memory.lines if "grad/block_norm/net.0" in line]
    assert [step for step, _ in lines] == [0, 4]
    assert lines[1][1].keys() == {
        f"{key}/net.{block}"
        for key in ("grad/block_norm", "update/ratio", "grad/zero_share", "grad/nonfinite_share")
        for block in range(4)
    }
    assert lines[1][1]["grad/block_norm/net.2"] == monitor.history[1].blocks[2].gradient_norm


def test_each_optimizer_has_its_own_blocks() -> None:
    memory, monitor = Memory(), lt.GradientMonitor(every_n_steps=2)
    fit(TwoOptimizers(), monitor, logger=memory)
    of_the_head = next(look for look in monitor.history if look.optimizer == 1)
    assert [block.name for block in of_the_head.blocks] == ["net.3"]
    assert any("grad/block_norm/net.3/1" in line for _, line in memory.lines)


def test_nothing_is_read_between_its_steps(monkeypatch) -> None:
    reads = count_reads(monkeypatch)
    counts = []
    for callbacks in ([], [lt.GradientMonitor(every_n_steps=4)]):
        reads.clear()
        fit(seeded(Net), *callbacks, log_every_n_steps=100)
        counts.append(len(reads))
    assert counts[1] - counts[0] == 2  # one transfer at steps 0 and 4


def test_heat_map() -> None:
    monitor = lt.GradientMonitor(every_n_steps=1)
    with pytest.raises(RuntimeError, match="fit first"):
        monitor.plot()
    fit(seeded(Net), monitor)
    axes = monitor.plot().axes[0]
    norms = [[math.log10(block.gradient_norm) for block in look.blocks] for look in monitor.history]
    drawn = axes.images[0].get_array()
    assert drawn.shape == (4, 7)
    assert drawn.T.tolist() == [pytest.approx(one) for one in norms]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["net.0", "net.1", "net.2", "net.3"]


def test_history_goes_on_after_a_resume(tmp_path) -> None:
    whole = lt.GradientMonitor(every_n_steps=3)
    fit(seeded(Net), whole, max_epochs=2)
    first = fit(seeded(Net), lt.GradientMonitor(every_n_steps=3))
    first.save_checkpoint(tmp_path / "a.ckpt")
    again = lt.GradientMonitor(every_n_steps=3)
    quiet_trainer(again, max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert list(again.history) == list(whole.history)


def test_every_rank_and_strategy_sees_the_same(two_processes) -> None:
    expected = monitor_looks("one process", 0, 1)
    for strategy in ("ddp", "zero1", "fsdp2"):
        for rank in two_processes.run(monitor_looks, strategy):
            assert len(rank) == len(expected) == 8
            for look, right in zip(rank, expected, strict=True):
                assert look == pytest.approx(right, rel=1e-4, abs=1e-9)


def test_what_is_ordinary_in_the_first_steps_does_not_use_the_warning_up() -> None:
    """A loss scale that is still too high, and a head that starts at zero, behind which nothing has a gradient."""

    def build() -> Net:
        module = Net()
        torch.nn.init.zeros_(module.net[-1].weight)
        return module

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="GradientMonitor")
        fit(seeded(build), lt.GradientMonitor(every_n_steps=1))
        run = fit(seeded(Net), lt.GradientMonitor(every_n_steps=1), plugins=fp16(2.0**18))
    assert lt.step_ledger(run)[0].skipped_overflow > 0
