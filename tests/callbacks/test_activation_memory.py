"""The monitor of activation memory: figures against a count by hand, by block, and on the first steps only."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_tricks as lt
from tests.models import Net, assert_same, fit, seeded, weights


class Counted(pl.LightningModule):
    """On 4 samples of 8 floats each tensor is 128 bytes, and what is saved can be said beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        x = torch.ones(4, 8, requires_grad=True) * 1.0
        for layer in self.layers:
            x = layer(x)
        return torch.sin(x).sum()  # saves x, which tanh saved already

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))  # saves its input, but for a layer's output, and tanh's output


def rows(folder) -> list[dict[str, float]]:
    lines = [line.split(",") for line in next(folder.rglob("metrics.csv")).read_text().splitlines()]
    return [{key: float(value) for key, value in zip(lines[0], line, strict=True) if value} for line in lines[1:]]


@pytest.mark.parametrize("log_every", [1, 50])
def test_figures_are_those_of_a_count_by_hand_on_the_first_three_steps(log_every: int, tmp_path) -> None:
    monitor = lt.ActivationMemoryMonitor()
    data = torch.zeros(5, 1)
    fit(Counted(), monitor, data=data, logger=CSVLogger(tmp_path), log_every_n_steps=log_every)
    seen = [row for row in rows(tmp_path) if "activation/saved_bytes" in row]
    assert [int(row["step"]) for row in seen] == [0, 1, 2]
    for row in seen:
        assert row["activation/saved_bytes"] == row["activation/peak_bytes"] == 3 * 128
        assert row["activation/saved_bytes/layers.0"] == 2 * 128
        assert row["activation/saved_bytes/layers.1"] == 128


def test_checkpointing_shows_in_the_figures_and_the_run_is_the_same() -> None:
    found, trained = [], []
    for callbacks in ([], [lt.ActivationCheckpointing()]):
        module = seeded(Net)
        monitor = lt.ActivationMemoryMonitor()
        fit(module, monitor, *callbacks)
        found.append(monitor.saved)
        trained.append(weights(module))
        assert "training_step" not in vars(module)
    plain = seeded(Net)
    fit(plain)
    assert_same(trained[0], weights(plain))
    assert found[1].num_bytes < 0.7 * found[0].num_bytes
    assert found[1].peak_bytes > found[1].num_bytes  # of a block while it is recomputed


def test_micro_batches_count_one_by_one() -> None:
    sizes = []
    for callbacks in ([], [lt.MicroBatching(2)]):
        monitor = lt.ActivationMemoryMonitor()
        fit(Net(), monitor, *callbacks)
        sizes.append(monitor.saved.num_bytes)
    assert sizes[1] == sizes[0] / 2


def test_bars(tmp_path) -> None:
    monitor = lt.ActivationMemoryMonitor()
    with pytest.raises(RuntimeError, match="expected a measurement to draw"):
        monitor.plot()
    fit(Counted(), monitor, data=torch.zeros(1, 1))
    lines = monitor.plot().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["layers.0", "layers.1"]
    assert lines[1].count("█") == 2 * lines[2].count("█") == 48
    assert monitor.plot(tmp_path / "bars.png") is None
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_module_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="cannot see what a module that is compiled as a whole saves"):
        fit(torch.compile(Net(), backend="eager"), lt.ActivationMemoryMonitor())


def test_an_error_leaves_nothing_on_the_module() -> None:
    module = Net(fail_at=1)
    with pytest.raises(RuntimeError, match="boom"):
        fit(module, lt.ActivationMemoryMonitor())
    assert "training_step" not in vars(module)
