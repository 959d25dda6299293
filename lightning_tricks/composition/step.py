"""One optimizer step under observation, from the first look at its gradients to its verdict.

How a step is left out depends on the optimizer. A plain one is asked to step without gradients, which every torch
optimizer does by touching neither weights nor moments; that needs the host to know, one scalar read. A fused one reads
``found_inf`` on the device inside of its kernel, the way the loss scaler uses it, so that nobody has to wait.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._lightning import unscales_by_itself
from lightning_tricks.composition.ledger import OptimizerLedger, Verdict

__all__ = ["OptimizerStep"]


class OptimizerStep:
    """What tricks see of the step that is being taken, and the way to veto it.

    Args:
        index: the optimizer's index in ``trainer.optimizers``.
        optimizer: the torch optimizer.
        scaler: the loss scaler in use, None without one.

    Attributes:
        verdict: None while the step runs; afterwards its verdict, or None still where only the device knows it.
        loss: this rank's loss of the window, unscaled, a scalar on the device; kept where a trick `reads_loss`. In
            manual optimization the sum of what was backpropagated since the last step of any optimizer, None if
            nothing was.
        weight: what the micro-batches of all ranks count together, by the trick that weighs them; None without one.
        judged: whether a guard owns the verdict on gradients that are not finite, so that nobody else need look.
    """

    def __init__(self, index: int, optimizer: Optimizer, scaler: Any) -> None:
        self.index = index
        self.optimizer = optimizer
        self.scaler = scaler
        self.verdict: Verdict | None = None
        self.loss: Tensor | None = None
        self.judged = False
        self.weight: float | None = None
        self._measured: dict[Any, Tensor] = {}
        self._fused = unscales_by_itself(optimizer)
        self._moved = False
        self._empty = False
        self._vetoed_on_host = False
        self._overflowed_on_host = False
        self._unscaled = False
        self._veto: Tensor | None = None
        self._overflow: Tensor | None = None

    # For tricks, while the step runs

    def parameters(self) -> list[Tensor]:
        """Return the optimizer's parameters that have a gradient, unscaled; none once the step is vetoed."""
        if self._fused and self.scaler is not None and not self._unscaled and not self._empty:
            # Lightning unscales for all but fused optimizers, whose gradients would be seen, and clipped, scaled.
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of `parameters`."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def measured(self, measure: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return ``measure(gradients, *arguments)``, computed once a step, before any clipper.

        Args:
            measure: a function of a list of tensors, the same object for all who mean the same.
            arguments: its further arguments, hashable.
        """
        key = measure, arguments
        if key not in self._measured:
            self._measured[key] = measure(self.gradients(), *arguments)
        return self._measured[key]

    def veto(self, flag: bool | Tensor) -> bool:
        """Leave the step out where `flag` is true: the weights, the moments and the schedules stay as they are.

        Args:
            flag: a bool, or a scalar tensor that is true or above zero (nan is neither); the same on every rank.

        Returns:
            True if the step is known to be left out. False too where only the device knows: a fused optimizer.
        """
        if isinstance(flag, Tensor) and self._fused and not _momentum_is_unset(self.optimizer):
            flag = (flag > 0).float()  # the kernel counts found_inf off its steps, so it must be 0 or 1
            self._veto = flag if self._veto is None else torch.maximum(self._veto, flag)
            if self.scaler is None:
                self.optimizer.found_inf = self._veto  # type: ignore[attr-defined]
            return False
        is_number = isinstance(flag, Tensor) and flag.dtype != torch.bool
        if bool(flag > 0 if is_number else flag):
            self.parameters()  # a scaler wants to have seen the gradients, if only to unscale them
            self._vetoed_on_host = True
            self._drop_gradients()
        return self._vetoed_on_host

    def leave_empty(self) -> None:
        """Leave the step out since there is nothing to step on: the gradients are of no sample."""
        self.parameters()  # as in `veto`
        self._empty = True
        self._drop_gradients()

    # For the verdict's readers, once it has ended

    @property
    def applied(self) -> bool | Tensor:
        """Whether the optimizer moved: a bool, or a 0/1 tensor where only the device knows."""
        if self.verdict is not None:
            return self.verdict == "applied"
        overflow, veto = self._device_flags()
        return ((overflow <= 0) & (veto <= 0)).float()

    @property
    def overflowed(self) -> bool | Tensor:
        """Whether the loss scaler left the step out: a bool, or a 0/1 tensor where only the device knows."""
        if self.verdict is not None:
            return self.verdict == "skipped_overflow"
        return (self._device_flags()[0] > 0).long()

    # For the conductor

    def prepare(self, has_loss: bool) -> None:
        """Leave the step out if there was no loss to step on.

        Args:
            has_loss: whether there was one.
        """
        # An optimizer that evaluates its closure again begins again: what counts is the last look at the gradients.
        self.abandon()
        self._vetoed_on_host = self._empty = self.judged = False
        self._veto = None
        self._measured.clear()
        if not has_loss or all(p.grad is None for group in self.optimizer.param_groups for p in group["params"]):
            self._empty = True
            self._drop_gradients()

    def on_step(self) -> None:
        """Combine the scaler's verdict with a veto; called as a torch hook right before the optimizer's own code."""
        overflow = getattr(self.optimizer, "found_inf", None) if self.scaler is not None else None
        if overflow is None:  # no scaler: this comes before the closure, and `veto` sets the flag itself
            return
        self._overflow = torch.as_tensor(overflow)
        if self._vetoed_on_host or _momentum_is_unset(self.optimizer):
            self._overflowed_on_host = bool(self._overflow > 0)
            if self._overflowed_on_host:
                self._drop_gradients()
        elif self._veto is not None:
            self.optimizer.found_inf = torch.maximum(self._overflow, self._veto)  # type: ignore[attr-defined]

    def on_stepped(self) -> None:
        """Note that the optimizer's own code ran; called as a torch hook."""
        self._moved = True
        self.abandon()

    def abandon(self) -> None:
        """Take the flag of a veto back off the optimizer."""
        if self.scaler is None and self._veto is not None:
            vars(self.optimizer).pop("found_inf", None)

    def settle(self, ledger: OptimizerLedger) -> None:
        """Give the verdict to the ledger.

        Args:
            ledger: the optimizer's.
        """
        if self._empty:
            self.verdict = "skipped_empty"
        elif self._overflowed_on_host or (not self._moved and self.scaler is not None):
            self.verdict = "skipped_overflow"
        elif self._vetoed_on_host:
            self.verdict = "skipped_guard"
        elif self._overflow is None and self._veto is None:
            self.verdict = "applied"
        if self.verdict is None:
            ledger.count_on_device(*self._device_flags())
        else:
            ledger.count(self.verdict)

    def _device_flags(self) -> tuple[Tensor, Tensor]:
        known = self._overflow if self._overflow is not None else self._veto
        assert known is not None
        overflow = self._overflow if self._overflow is not None else torch.zeros_like(known)
        veto = self._veto if self._veto is not None else torch.zeros_like(known)
        return overflow, veto.to(overflow.device)

    def _drop_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _momentum_is_unset(optimizer: Optimizer) -> bool:
    """Whether a fused SGD has yet to set its momentum: skipped on the device it would keep uninitialised memory.

    Seen in torch 2.13: the buffer is allocated before the kernel returns early, and taken as filled at the next step.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for p in group["params"]
    )
