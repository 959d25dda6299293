"""Activation checkpointing as a callback."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from torch import nn
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException, is_compiled
from lightning_tricks._validation import check_choice, check_int, check_number
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.distributed.scalars import close_group, host_group, largest_of_ranks
from lightning_tricks.functional.activation_budget import ActivationBudget, ActivationMeasurement, BlockCosts
from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.blocks import BlockSelector, validate_selector
from lightning_tricks.functional.checkpointing import (
    MODES,
    ActivationCheckpointingHandle,
    Mode,
    apply_activation_checkpointing,
)
from lightning_tricks.functional.replay import tensors_of

__all__ = ["ActivationCheckpointing", "BudgetChoice"]


@dataclass
class BudgetChoice:
    """What a budget led to.

    Args:
        blocks: names of the blocks that are checkpointed.
        budget: bytes allowed.
        predicted: bytes held with this choice, as measured of all blocks, the most of any rank.
        measured: bytes held on the batch after, the most of any rank; None before.
    """

    blocks: tuple[str, ...]
    budget: int
    predicted: int
    measured: int | None = None


class ActivationCheckpointing(Trick):
    """Hold the inputs of the model's blocks instead of all their activations, and recompute the rest in backward.

    The gradients are those without it, bit for bit: random state, autocast and buffers are the same in both passes.
    Names, types and state-dict keys stay; evaluation is untouched; after fit the module is as before.

    ``mode="blocks"`` recomputes each block from its input. ``"segments"`` recomputes several blocks from the first
    one's input, so that what is held grows with the square root of their number: for `nn.Sequential`, and for blocks
    that the module's own forward walks, where each is given what the one before returned (else, and under ``fsdp2``, a
    segment is one block). ``"selective"`` keeps attention (`ATTENTION_OPERATIONS`) and a share of the matrix
    multiplications (`MATMUL_OPERATIONS`), but for results that a block writes into.

    A budget, with ``"blocks"``, checkpoints the blocks that free enough at the least recomputation. The first batch is
    trained with all of them checkpointed, and what each would save and how long it takes to recompute is measured; what
    was chosen is printed, and `choice` has it. A batch with a larger shape than was measured is measured again.

    Args:
        blocks: which modules to checkpoint. ``"auto"`` takes the repeated blocks of the model (for Hugging Face models
            those of their ``_no_split_modules`` that repeat). Else a class, the name of a class, a glob over the
            modules' names in the LightningModule (``"model.layers.*"``), a predicate of (name, module), or a list of
            these. Of nested matches the outermost is taken. In segments ``"auto"`` also takes the children of an
            `nn.Sequential` where nothing repeats.
        mode: ``"blocks"``, ``"segments"`` or ``"selective"``.
        every: checkpoint each n-th of these blocks only, from the first; 1 or more. Not in segments.
        segment_length: the most blocks in a segment, 1 or more; ``"auto"`` is the square root of their number times
            the bytes of an input over those that a block saves, as measured in the first pass.
        matmul_share: the share of matrix multiplications that ``"selective"`` keeps, from 0 to 1.
        budget: a share of the bytes that the module would hold without checkpointing, above 0.0 and at most 1.0, or
            bytes as an int; of all that is saved within `training_step`, parameters left out, on one rank.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or nothing matches (at the start of
            fit, with the module types there are); in the first batch, the budget is less than is held with every block
            checkpointed.
        MisconfigurationException: at the start of fit, segments or a budget in a compiled module.
        RuntimeError: while training, a block writes into its input in place; with segments, a backward pass with
            ``create_graph=True``.

    Cost:
        15 to 33% more FLOPs, less for what is kept. Memory falls from all activations to one input a block and the
        activations of one block; in segments of s to one input of s blocks and the activations of s. A budget on
        several ranks communicates 8 bytes between hosts a batch.

    Reference:
        Chen, Xu, Zhang, Guestrin (2016), "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; Korthikanti
        et al. (2022), arXiv:2205.05198, section 5, for the selection.

    Example:
        >>> from lightning_tricks import ActivationCheckpointing
        >>> every_second_layer = ActivationCheckpointing("model.layers.*", every=2)
        >>> half_the_memory = ActivationCheckpointing(budget=0.5)
    """

    touches = Touches.MODULE
    job = "checkpoint activations"
    buys = "activation memory of one block instead of all, of the square root of all, or of a budget"
    costs = "15 to 33% more FLOPs"

    def __init__(
        self,
        blocks: str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[BlockSelector] = "auto",
        *,
        mode: Mode = "blocks",
        every: int = 1,
        segment_length: int | Literal["auto"] = "auto",
        matmul_share: float = 0.5,
        budget: float | int | None = None,
    ) -> None:
        validate_selector(blocks)
        check_choice("mode", mode, MODES)
        self.blocks = blocks
        self.mode: Mode = mode
        self.every = check_int("every", every, minimum=1)
        self.segment_length = segment_length
        self.matmul_share = check_number("matmul_share", matmul_share, minimum=0.0, maximum=1.0)
        self.budget = None if budget is None else _checked_budget(budget)
        if segment_length != "auto":
            if isinstance(segment_length, str):
                raise ValueError(f'expected `segment_length` to be an int or "auto", got {segment_length!r}')
            check_int("segment_length", segment_length, minimum=1)
            _only_with("segments", mode, f"segment_length={segment_length}")
        if every > 1 and mode == "segments":
            raise ValueError(f'expected `every` to be 1 with mode="segments", got {every}: pass segment_length={every}')
        if matmul_share != 0.5:
            _only_with("selective", mode, f"matmul_share={matmul_share}")
        if budget is not None:
            _only_with("blocks", mode, f"budget={budget}")
        self._handle = ActivationCheckpointingHandle()
        self._is_budgeted = False  # and the run goes on
        self._group: Any = None
        self.reset()

    @override
    def reset(self) -> None:
        self.choice: BudgetChoice | None = None
        self._shapes: list[list[torch.Size]] = []  # of the batches that were measured
        self._measurements: list[ActivationMeasurement] = []  # of this batch, one for each call of training_step
        self._measured = 0

    @property
    def _budget(self) -> ActivationBudget | None:
        return self._handle.budget

    @override
    def edit(self, module: pl.LightningModule) -> ActivationCheckpointingHandle:
        if (self.mode == "segments" or self.budget is not None) and is_compiled(module):
            what = "no segments" if self.mode == "segments" else "nothing of what a budget measures"
            raise MisconfigurationException(
                f"{type(self).__name__} cannot be right here: a module compiled as a whole sees {what}. Let "
                'ModelCompilation compile the blocks, or use mode="blocks" without a budget'
            )
        self._handle = apply_activation_checkpointing(
            module,
            self.blocks,
            mode=self.mode,
            every=self.every,
            segment_length=self.segment_length,
            matmul_share=self.matmul_share,
            with_budget=self.budget is not None,
        )
        if not self._handle.wrapped:
            rank_zero_warn(
                f"ActivationCheckpointing changed nothing: all {len(self._handle.already)} matching blocks are "
                "checkpointed already. Drop the callback, or turn the model's own checkpointing off."
            )
        return self._handle

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        found = f"{len(self._handle.wrapped)} blocks: {_abbreviate(self._handle.wrapped)}"
        if self.mode != "blocks":
            found += f"; {self.mode}"
        if self._handle.already:
            found += f"; left {len(self._handle.already)} alone that were checkpointed already"
        if self.budget is None:
            return Summary(found)
        return Summary(f"{found}; those that a budget of {self._budget_text()} asks for", "measures the first batch")

    # The budget

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._budget is None or not self._handle.wrapped:
            return
        self._is_budgeted = True
        self._group = host_group()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_budgeted or self._budget is None or self._budget.measurement is not None:
            return
        shapes = [one.shape for one in tensors_of(batch)]
        grew = not any(_covers(known, shapes) for known in self._shapes)
        if largest_of_ranks([float(grew)], self._group)[0]:
            self._shapes.append(shapes)
            self._measurements.clear()
            self._budget.begin()

    @override
    def run_training_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_budgeted or self._budget is None:
            return step(*args, **kwargs)
        if self._budget.measurement is not None:
            measurement = self._budget.begin()  # one for each call, since MicroBatching makes several
            self._measurements.append(measurement)
            with measurement.around():
                output = step(*args, **kwargs)
            if trainer.world_size == 1 and self.choice is None and output is not None:
                total, freed = measurement.saved_bytes()
                self._choose(BlockCosts(tuple(self._budget.names), total, tuple(freed), (0.0,) * len(freed)))
            return output
        if self.choice is None or self.choice.measured is not None:
            return step(*args, **kwargs)
        with measure_saved_activations() as saved:
            output = step(*args, **kwargs)
        self._measured = max(self._measured, saved.num_bytes)
        return output

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_budgeted or self._budget is None:
            return
        if self._budget.measurement is not None:
            self._settle(trainer, self._budget)
        elif self.choice is not None and self.choice.measured is None and self._measured:
            self.choice.measured = int(largest_of_ranks([self._measured], self._group)[0])
            _say(trainer, f"measured {_mib(self.choice.measured)} with a budget of {_mib(self.choice.budget)}")

    def _settle(self, trainer: pl.Trainer, budget: ActivationBudget) -> None:
        """Choose on all ranks alike, or go on measuring where a rank had no backward pass."""
        complete = bool(self._measurements) and all(one.is_complete for one in self._measurements)
        if largest_of_ranks([float(not complete)], self._group)[0]:
            self._measurements.clear()
            return
        mine = max((one.costs() for one in self._measurements), key=lambda costs: costs.total_bytes)
        self._measurements.clear()
        size = len(budget.names)
        agreed = largest_of_ranks(
            [mine.total_bytes, *(-freed for freed in mine.freed_bytes), *mine.seconds], self._group
        )
        costs = BlockCosts(
            mine.names, int(agreed[0]), tuple(int(-freed) for freed in agreed[1 : size + 1]), tuple(agreed[size + 1 :])
        )
        self.choice = self._choose(costs)
        self._measured = 0
        budget.settle(self.choice.blocks)
        _say(
            trainer,
            f"checkpoints {len(self.choice.blocks)} of {size} blocks: {_abbreviate(self.choice.blocks)}; "
            f"predicted {_mib(self.choice.predicted)} of {_mib(costs.total_bytes)} without, with a budget of "
            f"{_mib(self.choice.budget)}",
        )

    def _choose(self, costs: BlockCosts) -> BudgetChoice:
        assert self.budget is not None
        allowed = self.budget if isinstance(self.budget, int) else int(self.budget * costs.total_bytes)
        chosen = costs.choose(allowed)
        if chosen is None:
            message = (
                f"expected `budget` to be at least the {costs.least_bytes} bytes that are held with every block "
                f"checkpointed, got {self._budget_text()}: {allowed} of {costs.total_bytes} bytes. Raise it, "
                'checkpoint larger blocks, use mode="segments", or smaller batches (MicroBatching)'
            )
            if self.choice is None:
                raise ValueError(message)
            # A batch that is larger than those before: what is out of reach is no reason to lose the run.
            rank_zero_warn(f"{message}. All blocks that free something are checkpointed from now on.")
            chosen = [name for name, freed in zip(costs.names, costs.freed_bytes, strict=True) if freed > 0]
        return BudgetChoice(tuple(chosen), allowed, costs.predicted(chosen))

    def _budget_text(self) -> str:
        return f"{self.budget:.0%}" if isinstance(self.budget, float) else f"{self.budget} bytes"

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._remove()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        self._is_budgeted = False
        close_group(self._group)
        self._group = None


def _checked_budget(budget: object) -> float | int:
    if isinstance(budget, int):
        return check_int("budget", budget, minimum=1)
    return check_number("budget", budget, maximum=1.0, above=True)


def _only_with(needed: str, mode: str, what: str) -> None:
    if mode != needed:
        raise ValueError(f'expected {what} to go with mode="{needed}", got mode="{mode}"')


def _covers(known: Sequence[torch.Size], shapes: Sequence[torch.Size]) -> bool:
    return len(known) == len(shapes) and all(
        len(most) == len(shape) and all(n <= m for n, m in zip(shape, most, strict=True))
        for most, shape in zip(known, shapes, strict=True)
    )


def _say(trainer: pl.Trainer, text: str) -> None:
    if trainer.is_global_zero:
        Console().print(f"ActivationCheckpointing: {text}", highlight=False, soft_wrap=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / 2**20:.1f} MiB)"


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
