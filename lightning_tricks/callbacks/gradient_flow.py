"""A monitor of how gradients fare on their way back through the blocks of a model."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._lightning import logged_step
from lightning_tricks._validation import check_int, check_number
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, current_step
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.blocks import validate_selector
from lightning_tricks.functional.gradient_flow import (
    ADVICE,
    BlockHealth,
    block_of_parameters,
    diagnose,
    gradient_sums,
    update_sums_,
)
from lightning_tricks.functional.update_rounding import copy_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GradientMonitor", "Look"]

_MOST_KEPT = 1000


@dataclass(frozen=True)
class Look:
    """What was measured in one step.

    Args:
        step: the Trainer's ``global_step`` before it.
        optimizer: the optimizer's index.
        blocks: the blocks that it stepped, in the order of the forward pass.
    """

    step: int
    optimizer: int
    blocks: tuple[BlockHealth, ...]


@dataclass
class _Unfinished:
    parameters: list[Tensor]
    numbers: list[int]
    before: list[Tensor]
    gradients: Tensor


class GradientMonitor(Trick):
    """Show the gradient of each block, and tell a vanishing from an exploding network.

    On every n-th step, for each block: the norm of its gradient, the ratio of the step's update to its weights (for any
    optimizer), and the share of gradient elements that are zero or not finite. It warns once, with the block where the
    trouble begins on the way back from the loss, the word vanishing, exploding, dead or non-finite, and what usually
    helps.

    Logs to the Trainer's loggers ``grad/block_norm/<block>``, ``update/ratio/<block>``, ``grad/zero_share/<block>`` and
    ``grad/nonfinite_share/<block>``; for optimizer i > 0 with ``/i`` behind. `history` keeps the last 1000 of them.

    Args:
        every_n_steps: optimizer steps from one look to the next, 1 or more; the first step is looked at.
        blocks: ``"auto"`` for the repeated blocks, and for what is outside of them the module that holds it; or as for
            `ActivationCheckpointing`.
        vanishing_below: a block is vanishing if its gradient norm is a smaller share than this of the largest block's,
            0 or more.
        exploding_above: a block is exploding if its gradient norm is above this, above 0.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; `blocks` matches nothing (at the start
            of fit).

    Cost:
        On the steps that are looked at a copy of the weights, a few operations a parameter and one transfer of six
        numbers a block.

    Reference:
        Pascanu, Mikolov, Bengio (2013), arXiv:1211.5063; Glorot, Bengio (2010), AISTATS.

    Example:
        >>> from lightning_tricks import GradientMonitor
        >>> monitor = GradientMonitor(every_n_steps=100)
    """

    touches = Touches.GRADIENTS_READ
    job = "monitor the gradients of blocks"
    buys = "which block vanishes, explodes or is dead, and what helps"
    costs = "a copy of the weights and one transfer, every 50 steps"

    def __init__(
        self,
        *,
        every_n_steps: int = 50,
        blocks: str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[str | type[nn.Module]] = "auto",
        vanishing_below: float = 1e-4,
        exploding_above: float = 1e3,
    ) -> None:
        self.every_n_steps = check_int("every_n_steps", every_n_steps, minimum=1)
        validate_selector(blocks)
        self.blocks = blocks
        self.vanishing_below = check_number("vanishing_below", vanishing_below)
        self.exploding_above = check_number("exploding_above", exploding_above, above=True)
        self.reset()

    @override
    def reset(self) -> None:
        self.history: deque[Look] = deque(maxlen=_MOST_KEPT)
        self._steps: dict[int, int] = {}
        self._looks: dict[int, _Unfinished] = {}
        self._names: list[str] = []
        self._number: dict[int, int] = {}
        self._sparse: set[str] = set()
        self._zero: dict[int, set[str]] = {}
        self._warned = False

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assigned = block_of_parameters(module, self.blocks)
        self._names = list(dict.fromkeys(assigned.values()))
        numbers = {name: number for number, name in enumerate(self._names)}
        self._number = {id(one): numbers[assigned[name]] for name, one in module.named_parameters()}
        # Most rows of an embedding have no gradient in a batch, and that is well.
        modules = dict(module.named_modules())
        self._sparse = {name for name in self._names if name in modules and _embeddings(modules[name])}

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = current_step(trainer, optimizer)
        if self._steps.get(step.index, 0) % self.every_n_steps == 0 and step.parameters():
            parameters = [one for one in step.parameters() if id(one) in self._number]
            numbers = [self._number[id(one)] for one in parameters]
            gradients = [one.grad for one in parameters if one.grad is not None]
            sums = gradient_sums(gradients, numbers, len(self._names))
            self._looks[step.index] = _Unfinished(parameters, numbers, copy_of(parameters), sums)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        self._steps[step.index] = self._steps.get(step.index, 0) + 1
        look = self._looks.pop(step.index, None)
        if look is None:
            return
        updates = update_sums_(look.before, look.parameters, look.numbers, len(self._names))
        device = look.gradients.device
        overflowed = torch.as_tensor(step.overflowed, device=device).double().expand(len(self._names), 1)
        rows = torch.cat([look.gradients, updates.to(device), overflowed], dim=1).tolist()  # the one transfer
        healths = [_health(name, *row[:6]) for name, row in zip(self._names, rows, strict=True) if row[3]]
        self.history.append(Look(trainer.global_step, step.index, tuple(healths)))
        self._log(trainer, step.index, healths)
        if not rows[0][6]:  # an overflow is how a loss scaler finds its scale
            self._warn(step.index, healths)

    def _log(self, trainer: pl.Trainer, index: int, healths: Sequence[BlockHealth]) -> None:
        values = {}
        for one in healths:
            values[key_of(f"grad/block_norm/{one.name}", index)] = one.gradient_norm
            values[key_of(f"update/ratio/{one.name}", index)] = one.update_ratio
            values[key_of(f"grad/zero_share/{one.name}", index)] = one.zero_share
            values[key_of(f"grad/nonfinite_share/{one.name}", index)] = one.nonfinite_share
        for logger in trainer.loggers:  # past `self.log`, which takes half a millisecond a key
            logger.log_metrics(values, step=logged_step(trainer))

    def _warn(self, index: int, healths: Sequence[BlockHealth]) -> None:
        if self._warned:
            return
        # Zero twice in a row: blocks behind a layer that starts at zero have no gradient in the first step.
        zero = {one.name for one in healths if one.zero_share == 1.0}
        alive = {one.name for one in healths} - (zero & self._zero.get(index, set()))
        self._zero[index] = zero
        found = diagnose(healths, self.vanishing_below, self.exploding_above, self._sparse | alive)
        if found is None:
            return
        self._warned = True
        symptom, block = found
        largest = max(one.gradient_norm for one in healths)
        rank_zero_warn(
            f"GradientMonitor: the gradient of block {block.name!r} is {symptom} (norm {block.gradient_norm:.3g}, the "
            f"largest of a block {largest:.3g}; {block.zero_share:.0%} zeros, {block.nonfinite_share:.0%} not finite). "
            f"What usually helps: {ADVICE[symptom]}."
        )

    def plot(self, optimizer: int = 0) -> "Figure":
        """Draw a heat-map of the gradient norms, block by step.

        Args:
            optimizer: the index of the optimizer.

        Returns:
            A matplotlib figure, with the blocks in the order of the forward pass from top to bottom.

        Raises:
            ModuleNotFoundError: matplotlib is not installed: ``pip install lightning_tricks[plot]``.
            RuntimeError: nothing was measured yet.
        """
        looks = [one for one in self.history if one.optimizer == optimizer]
        looks = [one for one in looks if len(one.blocks) == len(looks[-1].blocks)]  # since the last was unfrozen
        if not looks:
            raise RuntimeError(f"expected measurements of optimizer {optimizer} to draw, there are none yet: fit first")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("expected matplotlib for plot(): pip install lightning_tricks[plot]") from error
        return _heat_map(Figure(layout="constrained"), looks)

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(f"{len(self._names)} blocks, every {self.every_n_steps} steps")

    @override
    def state_dict(self) -> dict[str, Any]:
        # Tensors, since as objects a thousand looks take megabytes and a quarter of a second to copy.
        history = [(one.step, one.optimizer, *_as_tensor(one.blocks)) for one in self.history]
        return {"steps": dict(self._steps), "warned": self._warned, "history": history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = dict(state_dict["steps"])
        self._warned = state_dict["warned"]
        self.history = deque(maxlen=_MOST_KEPT)
        for step, index, names, values in state_dict["history"]:
            blocks = zip(names.split("\n") if names else [], values.tolist(), strict=True)
            self.history.append(Look(step, index, tuple(BlockHealth(name, *row) for name, row in blocks)))


def _as_tensor(blocks: Sequence[BlockHealth]) -> tuple[str, Tensor]:
    rows = [[one.gradient_norm, one.update_ratio, one.zero_share, one.nonfinite_share] for one in blocks]
    return "\n".join(one.name for one in blocks), torch.tensor(rows, dtype=torch.float64)


def _embeddings(block: nn.Module) -> list[nn.Module]:
    return [one for one in block.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]


def _health(
    name: str, squares: float, zeros: float, nonfinite: float, elements: float, weights: float, updates: float
) -> BlockHealth:
    ratio = sqrt(updates / weights) if weights > 0 else nan
    return BlockHealth(name, sqrt(squares) if squares >= 0 else nan, ratio, zeros / elements, nonfinite / elements)


def _heat_map(figure: "Figure", looks: Sequence[Look]) -> "Figure":
    names = [block.name for block in looks[0].blocks]
    norms = torch.tensor([[block.gradient_norm for block in look.blocks] for look in looks]).T
    axes = figure.subplots()
    axes.set_facecolor("lightgrey")  # what is zero or not finite has no logarithm
    image = axes.imshow(torch.where(norms > 0, norms, nan).log10(), aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(names)), names)
    ticks = range(0, len(looks), max(len(looks) // 8, 1))
    axes.set_xticks(list(ticks), [str(looks[tick].step) for tick in ticks])
    axes.set_xlabel("step")
    figure.colorbar(image, ax=axes, label="log10 of the gradient norm")
    return figure
