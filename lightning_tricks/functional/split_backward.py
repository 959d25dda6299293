"""Backpropagate the parts of a batch one after another, and hand on one loss that stands for all of them.

The gradients of the parts are summed up aside, so that whatever was accumulated before stays as it is until the loss
that is returned is itself backpropagated: it gives the sum to each parameter's gradient, through the hooks by which
data parallelism communicates. Until then nothing has happened, so a batch that runs out of memory can be done again.

**Cost**: the sum, 4 bytes a parameter, while the batch runs; activations of one part at a time.

**Differs** from calling ``backward`` in `training_step`, which Lightning's later ``zero_grad`` would wipe out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from lightning_tricks.functional.accumulation import discard_gradient_of
from lightning_tricks.functional.clipping import scale_gradients_

__all__ = ["SavedBuffers", "loss_of", "run_parts"]


class SavedBuffers:
    """Copies of a module's buffers, for a batch that may have to be done again.

    Args:
        module: the model. Running statistics and counters are written by its forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()  # by name: a forward may put another tensor there
            if buffer is not None
        ]

    @torch.no_grad()
    def restore_(self) -> None:
        """Put the buffers back where they were, with the values that they had."""
        for owner, name, buffer, before in self._saved:
            buffer.copy_(before)
            owner._buffers[name] = buffer


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what `training_step` returned: a tensor, a mapping with "loss", or None.

    Args:
        output: what it returned.

    Example:
        >>> loss_of({"loss": torch.tensor(2.0), "logits": None}), loss_of(None)
        (tensor(2.), None)
    """
    return output.get("loss") if isinstance(output, Mapping) else output


def run_parts(
    step: Callable[[int, Any], Any],
    parts: Sequence[Any],
    weights: Sequence[float],
    parameters: Iterable[nn.Parameter],
    *,
    backward: Callable[[Tensor], Any],
    scale: float | Tensor = 1.0,
    keep_last: bool = True,
) -> tuple[Tensor | None, list[Any], list[RemovableHandle]]:
    """Run the parts of a batch, and return their weighted mean loss with one gradient for all of them.

    Args:
        step: gets a part's index and the part, and returns what `loss_of` understands.
        parts: of the batch.
        weights: what each counts, from 0 on; what counts nothing changes nothing, also where its loss is nan.
        parameters: whose gradients to sum.
        backward: backpropagates a loss.
        scale: what the returned loss will be multiplied by before its backward: the loss scaler's, a window's.
            The parts are multiplied by it at once.
        keep_last: whether the last part is left to the backward of the loss that is returned, which then overlaps with
            communication. If not, that backward allocates next to nothing.

    Returns:
        The mean loss, None if no part gave one; what the steps returned besides it; and what to remove after the
        backward.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> parts = torch.tensor([1.0, 2.0]), torch.tensor([6.0])
        >>> mean = lambda index, part: (part * weight).mean()
        >>> loss, *_ = run_parts(mean, parts, [2, 1], [weight], backward=torch.Tensor.backward)
        >>> loss.backward()
        >>> float(loss), weight.grad
        (3.0, tensor([3.]))
    """
    trained = [one for one in parameters if one.requires_grad]
    before = [one.grad for one in trained]
    hooks = _take_hooks_(trained)  # they are to see the batch's gradient, once
    _set_gradients(trained, [None] * len(trained))
    total = sum(weights) or 1.0
    outputs: list[Any] = [None] * len(parts)
    # What counts nothing zeroes all that reaches a parameter in its backward, so it must not be the one that is left.
    last = max((index for index, weight in enumerate(weights) if weight > 0), default=len(parts) - 1)
    order = [*(index for index in range(len(parts)) if index != last), last]
    mean: Tensor | None = None
    live: tuple[Tensor, float] | None = None
    handles: list[RemovableHandle] = []
    counted = 0.0
    try:
        for index in order:
            output = step(index, parts[index])
            loss = loss_of(output)
            outputs[index] = _without_graph(output)
            if loss is None:
                continue
            share = weights[index] / total
            counted += share
            if share:
                mean = loss.detach() * share if mean is None else mean + loss.detach() * share
            else:
                mean = torch.zeros_like(loss) if mean is None else mean
                handles += discard_gradient_of(loss, trained)
            if keep_last and index == last:
                live = loss, share
                break
            del output
            backward(loss * (scale * share))
            del loss
            while handles:
                handles.pop().remove()
        summed = [one.grad for one in trained]
    except BaseException:
        while handles:
            handles.pop().remove()
        raise
    finally:
        _set_gradients(trained, before)
        for dictionary, taken in hooks:
            dictionary.update(taken)
    if mean is None:
        return None, outputs, handles
    counted = counted or 1.0
    used = [(one, gradient) for one, gradient in zip(trained, summed, strict=True) if gradient is not None]
    kept, kept_share = (None, None) if live is None else (live[0], live[1] / counted)
    sums = [gradient for _, gradient in used]
    arguments = (mean / counted, kept, kept_share, sums, scale * counted, *(one for one, _ in used))
    return _Inject.apply(*arguments), outputs, handles  # type: ignore[no-untyped-call]


class _Inject(torch.autograd.Function):
    """A scalar whose backward adds gradients that are known already, and goes on into the last part's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        live: Tensor | None,
        share: float | None,
        sums: list[Tensor],
        divisor: Any,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.share, ctx.sums, ctx.divisor = share, sums, divisor
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sums, ctx.sums = ctx.sums, None
        scale_gradients_(sums, gradient.sum() / ctx.divisor)  # of one element, whatever its shape
        return None, None if ctx.share is None else gradient * ctx.share, None, None, None, *sums


def _take_hooks_(parameters: Sequence[nn.Parameter]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Empty the dictionaries of the parameters' own hooks, which autograd holds on to, and return what was in them.

    Private names of torch 2.13. DDP's hooks are others, of the graph's last nodes.
    """
    kinds = (hooks for one in parameters for hooks in (one._backward_hooks, one._post_accumulate_grad_hooks) if hooks)
    taken = [(hooks, dict(hooks)) for hooks in kinds]
    for hooks, _ in taken:
        hooks.clear()
    return taken


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _without_graph(output: Any) -> Any:
    """What a step returned besides the loss, so that it keeps no activations."""
    if isinstance(output, Tensor) or output is None:
        return None
    return {key: _detached(value) for key, value in output.items() if key != "loss"}


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_detached(one) for one in value)
    return value
