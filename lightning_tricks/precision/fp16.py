"""fp16 training with a loss scaler whose settings are yours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._lightning import torch_optimizer
from lightning_tricks._validation import check_int, check_number
from lightning_tricks.functional.loss_scale import DelayedRead, IterationScaler

__all__ = ["FP16Precision"]

_PROGRESS = ("scale", "_growth_tracker")


class FP16Precision(MixedPrecision):
    """Autocast to fp16 with a loss scaler: ``Trainer(plugins=[FP16Precision()])`` in the place of ``"16-mixed"``.

    The scale changes once an iteration, however many optimizers step in it and how often; gradients that wait for a
    later step are brought along. Lightning's own plugin changes it after each optimizer, so that the second one divides
    by another scale than its loss was multiplied with. It runs on the CPU too, where ``"16-mixed"`` silently means
    bf16.

    Args:
        init_scale: the first scale, above 0 and not below `min_scale`.
        growth_factor: what the scale grows by after `growth_interval` iterations without an overflow, above 1.
        backoff_factor: what it shrinks by at an overflow, in (0, 1).
        growth_interval: iterations, 1 or more.
        min_scale: a scale below this is an error: gradients are inf or nan by themselves, and steps would be left out
            for ever. 0 lets it fall.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.
        RuntimeError: in training: the scale fell below `min_scale`.

    Cost:
        That of Lightning's plugin. The scale is read after each iteration that stepped, without waiting for the device:
        a scale that is too low may be noticed some iterations late there.

    Reference:
        Micikevicius et al. (2018), "Mixed Precision Training", arXiv:1710.03740, section 3.2.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_tricks import FP16Precision
        >>> trainer = pl.Trainer(plugins=[FP16Precision(init_scale=2.0**12)], accelerator="cpu", logger=False)
        >>> trainer.precision
        '16-mixed'
    """

    scaler: IterationScaler

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
    ) -> None:
        self.min_scale = check_number("min_scale", min_scale)
        check_number("init_scale", init_scale, above=True)
        if init_scale < min_scale:
            raise ValueError(f"expected `init_scale` to be at least `min_scale`={min_scale}, got {init_scale}")
        check_number("growth_factor", growth_factor, minimum=1.0, above=True)
        check_number("backoff_factor", backoff_factor, above=True, maximum=1.0)
        if backoff_factor == 1.0:
            raise ValueError("expected `backoff_factor` to be below 1.0, got 1.0: the scale would never fall")
        self._options: dict[str, Any] = {
            "init_scale": float(init_scale),
            "growth_factor": float(growth_factor),
            "backoff_factor": float(backoff_factor),
            "growth_interval": check_int("growth_interval", growth_interval, minimum=1),
        }
        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if accelerator is None else accelerator.type
        super().__init__("16-mixed", device, IterationScaler(device, **self._options))
        self._scale_read = DelayedRead()
        self._stepped: dict[int, int] = {}
        self._moment = self._last_backward = 0
        self._optimizers: list[Optimizer] = []

    @override
    def connect(self, model: Any, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        module = model if isinstance(model, pl.LightningModule) else model.module
        device = module.trainer.strategy.root_device.type
        if device != self.device:  # a Trainer that leaves the accelerator alone
            self.device, self.scaler = device, IterationScaler(device, **self._options)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint and MixedPrecision.__qualname__ in checkpoint:
            self.load_state_dict(checkpoint[MixedPrecision.__qualname__])  # saved under precision="16-mixed"

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # the scale and how long it has stood; how it goes on is the user's to say
            super().load_state_dict({**self.scaler.state_dict(), **{k: state_dict[k] for k in _PROGRESS}})

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self._moment += 1
        self._last_backward = self._moment
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        self._refuse_collapse()
        output = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._moment += 1
        self._stepped[id(torch_optimizer(optimizer))] = self._moment
        self._optimizers = model.trainer.optimizers
        if model.automatic_optimization:
            self._end_iteration()
        return output

    @contextmanager
    @override
    def train_step_context(self) -> Iterator[None]:
        """One iteration: in manual optimization all steps happen within."""
        with super().train_step_context():
            with self.scaler.iteration():
                yield
                before = self._scale() if self._stepped else None
            if before is not None:
                # Those that did not step, and those that may have got gradients again since.
                waiting = [one for one in self._optimizers if self._stepped.get(id(one), 0) < self._last_backward]
                self.scaler.rescale_waiting_(waiting, before)
                self._end_iteration()

    def _scale(self) -> Tensor:
        """The scale, on the device that gradients are on."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        device = next(parameter.device for group in groups for parameter in group["params"])
        return self.scaler.scale(torch.ones((), device=device))

    def _end_iteration(self) -> None:
        self._stepped.clear()
        self._scale_read.put(self._scale())
        self._refuse_collapse()

    def _refuse_collapse(self) -> None:
        scale = self._scale_read.take()
        if scale is not None and scale < self.min_scale:
            raise RuntimeError(
                f"expected a loss scale of at least min_scale={self.min_scale}, but it fell to {scale}: gradients are "
                "inf or nan by themselves, so that every step would be left out. The weights are those of the last "
                "step that was taken. Look for a division by zero, log or sqrt in the loss, lower the learning rate, "
                'or train with precision="bf16-mixed", whose range needs no scaling'
            )
