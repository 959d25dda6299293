"""Gradients that are freed when their step is over."""

import ctypes

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_tricks as lt
from tests.models import ManualNet, Net, TwoOptimizers, fit, seeded
from tests.models import trainer as quiet_trainer


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def bytes_in_use() -> int:
    """What the process has allocated and not freed: in glibc's heaps, and in maps of their own."""
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


class Wide(pl.LightningModule):
    """4 million parameters, and what is in use when a forward is at its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4)))
        self.peaks: list[int] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch.repeat(1, 1000)).square().mean()
        self.peaks.append(bytes_in_use())
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def peak_growths() -> tuple[int, list[int]]:
    """The number of parameters, and by how much the last forward's peak is above the first's: without, and with."""
    plain, released = Wide(), Wide()
    quiet_trainer().fit(plain)
    quiet_trainer(lt.EarlyGradientRelease()).fit(released)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    return parameters, [module.peaks[-1] - module.peaks[0] for module in (plain, released)]


def test_case_33_the_forward_peak_is_four_bytes_a_parameter_lower() -> None:
    parameters, (plain, released) = peak_growths()
    assert plain - released == pytest.approx(4 * parameters, rel=0.01)


class Gradients(pl.Callback):
    """Which batches end with gradients in place, after every other callback."""

    def __init__(self) -> None:
        self.held: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx:
            self.held.append(any(parameter.grad is not None for parameter in pl_module.parameters()))


@pytest.mark.parametrize(
    ("module", "options", "held"),
    [
        (Net, {}, [False] * 6),
        (Net, {"accumulate_grad_batches": 3}, [True, True, False, True, True, False]),
        (ManualNet, {}, [False] * 6),
        (TwoOptimizers, {}, [True] * 6),  # each backward reaches the other one's parameters
    ],
)
def test_only_what_is_over_is_dropped(module, options, held: list[bool]) -> None:
    gradients = Gradients()
    fit(seeded(module), lt.EarlyGradientRelease(), gradients, **options)
    assert gradients.held == held


def test_a_window_that_is_open_keeps_its_gradients() -> None:
    gradients = Gradients()
    fit(Net(), lt.EarlyGradientRelease(), lt.GradientAccumulation({0: 2, 1: 3}), gradients)
    assert gradients.held == [True, False, True, True, False, True]


def test_gradients_that_a_manual_module_adds_after_its_step_stay() -> None:
    class AddsLater(ManualNet):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.manual_backward(self.loss(batch))

    gradients = Gradients()
    fit(AddsLater(), lt.EarlyGradientRelease(), gradients)
    assert gradients.held == [True] * 6


def test_the_table_says_how_much(capsys) -> None:
    quiet_trainer(lt.EarlyGradientRelease()).fit(Wide())
    assert "15.3 MiB of gradients freed" in capsys.readouterr().out
