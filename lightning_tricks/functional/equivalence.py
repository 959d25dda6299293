"""Test whether a module's gradient is the same for a batch and for its micro-batches together.

It is for a loss that is a mean over samples which do not see each other. BatchNorm, sums, contrastive losses and random
augmentation break that, each in a way of its own; what is found is named.

**Cost**: two backward passes of the whole batch and one of its parts.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.functional.accumulation import batchnorm_layers
from lightning_tricks.functional.batch_weights import check_weight, resolve_weigher
from lightning_tricks.functional.micro_batching import split_batch
from lightning_tricks.functional.split_backward import SavedBuffers, loss_of

__all__ = ["assert_accumulation_equivalent"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 5e-2  # of 16 bits
_SHOWN = 5

_Gradients = dict[str, Tensor]


def assert_accumulation_equivalent(
    module: nn.Module,
    batch: Any,
    *,
    num_micro_batches: int,
    weigh_by: str | Callable[[Any], Any] = "samples",
) -> None:
    """Raise AssertionError unless accumulating over parts of a batch gives the gradient of the whole. For your tests.

    Gradients, buffers and torch's random state are left as they were, and so is the module's mode: call ``train()``
    before, for what training does.

    Args:
        module: a LightningModule, or any module with ``training_step(batch, batch_idx)``, whose loss has a gradient.
        batch: a training batch, on the module's device, of at least `num_micro_batches` samples.
        num_micro_batches: how many parts to cut it into, 2 or more.
        weigh_by: what a part counts, as for `GradientAccumulation`. Parts that count nothing are left out.

    Raises:
        AssertionError: names the parameters whose gradients differ most, and what is likely to be the reason.
        TypeError, ValueError: the module has no `training_step`, or the batch cannot be cut.

    Example:
        >>> class Mean(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).square().mean()
        >>> assert_accumulation_equivalent(Mean(3, 1), torch.randn(6, 3), num_micro_batches=4)
    """
    if not callable(getattr(module, "training_step", None)):
        raise TypeError(f"expected a module with a training_step, got {type(module).__name__}")
    if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 2:
        raise ValueError(f"expected `num_micro_batches` to be an int of at least 2, got {num_micro_batches!r}")
    parts, _ = split_batch(batch, num_micro_batches)
    weigh = resolve_weigher(weigh_by)
    weights = [1.0 if weigh is None else check_weight(weigh(one)) for one in parts]
    if not sum(weights):
        raise ValueError("expected a batch in which something counts, got weights of 0 for all of its parts")
    before = {one: one.grad for one in module.parameters()}
    buffers = SavedBuffers(module)

    step: Any = module.training_step
    more = [0] if len(inspect.signature(step).parameters) > 1 else []  # batch_idx may be left out

    def gradients(*batches: Any, shares: Sequence[float], seed: int = 0) -> _Gradients:
        module.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        for one, share in zip(batches, shares, strict=True):
            if not share:
                continue
            loss = loss_of(step(one, *more))
            if not isinstance(loss, Tensor):
                raise TypeError(f"expected training_step to return a loss, got {loss!r}")
            (loss * share).backward()  # type: ignore[no-untyped-call]
        buffers.restore_()
        return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}

    devices = sorted({one.device.index for one in module.parameters() if one.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.enable_grad():
        try:
            whole = gradients(batch, shares=[1.0])
            again = gradients(batch, shares=[1.0], seed=1)
            weighted = gradients(*parts, shares=[weight / sum(weights) for weight in weights])
            summed = gradients(*parts, shares=[float(weight > 0) for weight in weights])
        finally:
            buffers.restore_()
            for parameter, gradient in before.items():
                parameter.grad = gradient
    errors = _errors(whole, weighted)
    if max(errors.values(), default=0.0) <= 1.0:
        return
    reasons = list(_reasons(module, whole, again, summed))
    worst = sorted(errors, key=errors.__getitem__, reverse=True)
    shown = "\n".join(
        f"  {name}: differs by {errors[name] * _tolerance((weighted | whole)[name]):.2g} of its norm"
        for name in worst[:_SHOWN]
    )
    raise AssertionError(
        f"the gradient of {num_micro_batches} micro-batches is not that of the whole batch, in "
        f"{sum(error > 1.0 for error in errors.values())} of {len(errors)} parameters:\n{shown}\n" + "\n".join(reasons)
    )


def _reasons(module: nn.Module, whole: _Gradients, again: _Gradients, summed: _Gradients) -> Sequence[str]:
    found = []
    layers = [name for name in batchnorm_layers(module) if module.get_submodule(name).training]
    if layers:
        found.append(f"BatchNorm sees other samples: {', '.join(layers[:_SHOWN])}. GroupNorm does not")
    if max(_errors(whole, again).values(), default=0.0) > 1.0:
        found.append(
            "the step is random (dropout, augmentation): two passes over the whole batch differ as well. That does no "
            "harm in training; test in eval() mode, or with p=0"
        )
    if max(_errors(whole, summed).values(), default=0.0) <= 1.0:
        found.append("the loss is a sum over samples: return its mean")
    return found or [
        "the loss is not a mean over what weigh_by counts (a mean over tokens needs a function that counts them), or "
        "it compares samples with each other, as contrastive losses do"
    ]


def _errors(expected: _Gradients, got: _Gradients) -> dict[str, float]:
    """By parameter, the difference in units of what rounding may do."""
    total = torch.stack([one.detach().double().norm() for one in expected.values()]).norm() if expected else 0.0
    errors = {}
    for name in expected | got:
        present = [gradients[name] for gradients in (expected, got) if name in gradients]
        one, other = present[0], present[1] if len(present) > 1 else torch.zeros_like(present[0])
        norm = one.double().norm()
        difference = (one.double() - other.double()).norm()
        errors[name] = float(difference / (_tolerance(one) * norm.clamp(min=max(0.1 * float(total), 1e-30))))
        if errors[name] != errors[name]:
            errors[name] = float("inf")
    return errors


def _tolerance(gradient: Tensor) -> float:
    return _TOLERANCES.get(gradient.dtype, _COARSE)
