"""Cut each batch into micro-batches that fit the memory, within one step."""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks._batchnorm import warn_of_batchnorm
from lightning_tricks._deferred_log import DeferredLog
from lightning_tricks._lightning import (
    MisconfigurationException,
    free_memory_cache,
    is_out_of_memory,
    loss_scaler,
    takes_loader_iter,
)
from lightning_tricks._validation import check_int
from lightning_tricks.composition import Summary, Touches, Trick, current_window, weigh_batch
from lightning_tricks.distributed.scalars import RankReduction, close_group, host_group
from lightning_tricks.distributed.sharding import units_of
from lightning_tricks.functional.micro_batching import describe, join_outputs, num_samples, parts_needed, split_batch
from lightning_tricks.functional.patching import Removable
from lightning_tricks.functional.split_backward import SavedBuffers, run_parts

__all__ = ["MicroBatching"]

_GROW_AFTER = 100  # batches without an out-of-memory error; twice as many after each attempt that failed


class MicroBatching(Trick):
    """Cut each batch into micro-batches and accumulate their gradients within the step: the same step, less memory.

    `training_step` is called once for each micro-batch, with a part of the batch; the mean of the losses over all
    samples is what the Trainer sees. A batch may be a tensor, or lists, tuples, named tuples, mappings (Hugging Face's
    BatchEncoding too) and dataclasses of what may be in a batch. What `training_step` returns besides the loss is
    joined again, and what it logs is logged once, for the whole batch. Beside ``GradientAccumulation(weigh_by=f)`` the
    parts are weighed by ``f``, else by their samples.

    ``"auto"`` begins with whole batches. When any rank runs out of memory, all halve the size and do the same batch
    again, with parameters, gradients and buffers as they were, and nothing logged; what `training_step` did besides,
    such as updating a metric, is done again too. The size is kept, also in checkpoints, and a larger one is tried after
    100 batches. On several ranks `training_step` must not communicate, but for ``self.log(sync_dist=True)``.

    Logs ``microbatch/size``, the largest micro-batch allowed, and ``microbatch/retries``, how often a batch was done
    again in this run.

    Args:
        max_size: the most samples in a micro-batch, 1 or more, or ``"auto"``.
        min_size: where ``"auto"`` gives up: the error of a micro-batch of this size or below is raised. 1 or more.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; while training, a batch cannot be cut.
        MisconfigurationException: at the start of fit, in manual optimization; with ``"auto"`` where the forward
            communicates (sharded parameters, SyncBatchNorm), since a rank that fails within it leaves its peers
            waiting.
        torch.OutOfMemoryError: while training, `min_size` does not fit either.

    Cost:
        One call of `training_step` for each part; 4 bytes a parameter for the sum of their gradients. ``"auto"`` also
        copies the buffers, and with several ranks waits for one number of each host a batch and communicates gradients
        after the backward instead of during it. A function that weighs the parts is read once for each.

    Reference:
        Huang et al. (2019), "GPipe", arXiv:1811.06965, for the name; Lightning's issue PL#20994.

    Example:
        >>> from lightning_tricks import MicroBatching
        >>> micro_batching = MicroBatching(8)
    """

    touches = Touches.BATCH
    job = "cut batches into micro-batches"
    buys = "batches that do not fit, without a change of loader or module; finds the size that fits by itself"
    costs = "a call of training_step a part; 4 bytes a parameter"
    rewinds = False  # what fits the memory does not depend on the weights

    def __init__(self, max_size: int | Literal["auto"] = "auto", *, min_size: int = 1) -> None:
        if isinstance(max_size, str) and max_size != "auto":
            raise ValueError(f'expected `max_size` to be an int or "auto", got {max_size!r}')
        self.max_size = max_size if isinstance(max_size, str) else check_int("max_size", max_size, minimum=1)
        self.min_size = check_int("min_size", min_size, minimum=1)
        if isinstance(self.max_size, int) and min_size > self.max_size:
            raise ValueError(f"expected `min_size` to be at most `max_size`={max_size}, got {min_size}")
        self._undo: list[Removable] = []
        self._discarding: list[Any] = []
        self.reset()

    @override
    def reset(self) -> None:
        self._size = self.max_size if isinstance(self.max_size, int) else None  # None: whole batches
        self._retries = 0
        self._since = 0  # batches since the size changed
        self._wait = _GROW_AFTER
        self._grown = False  # whether the size is one that is tried
        self._ceiling = 0  # the largest batch of any rank when the size last changed
        self._largest = 0  # samples of the last batch
        self._warned = False
        self._group: Any = None
        self._is_sharded = False
        self._is_joint = False  # whether every rank has to run as many parts

    # Before the run

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name, module = type(self).__name__, type(pl_module).__name__
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{name} calls training_step for each part of a batch, but {module} optimizes manually and would step "
                "for each: cut the batch there, or set automatic_optimization = True"
            )
        if takes_loader_iter(pl_module):
            raise MisconfigurationException(
                f"{name} cuts the batch that training_step gets, but {module}.training_step takes dataloader_iter and "
                "fetches its own: take the batch"
            )
        self._is_sharded = bool(units_of(pl_module))
        synchronizes = any(isinstance(one, nn.SyncBatchNorm) for one in pl_module.modules())
        self._is_joint = trainer.world_size > 1 and (self._is_sharded or synchronizes)
        if self.max_size == "auto" and (self._is_sharded or self._is_joint):
            what = "parameters are sharded" if self._is_sharded else "SyncBatchNorm communicates"
            raise MisconfigurationException(
                f'{name}("auto") cannot be right where {what}: a rank that runs out of memory within a forward leaves '
                f"its peers waiting in a collective, such as an all-gather. Pass an int, such as {name}(8), or use "
                'strategy="ddp" or "zero1" without it'
            )

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._group = host_group()

    # Each batch

    @override
    def run_training_step(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        step: Callable[..., Any],
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return self._run_by_parts(trainer, module, lambda part: step(part, *args, **kwargs), batch)

    def _run_by_parts(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[[Any], Any], batch: Any
    ) -> Any:
        """Call `training_step` for the parts of a batch and return what one call would have."""
        self._largest = samples = num_samples(batch)
        if self.max_size != "auto":
            assert self._size is not None
            num_parts = self._parts_of_all_ranks(trainer, module, parts_needed(samples, self._size), samples)
            return step(batch) if num_parts == 1 else self._run(trainer, module, step, batch, num_parts)()
        if self._size is not None and self._since >= self._wait and self._size < self._ceiling:
            self._size, self._since, self._grown = self._size * 2, 0, True
        buffers = SavedBuffers(module)
        while True:
            num_parts = 1 if self._size is None else min(parts_needed(samples, self._size), max(samples, 1))
            output, error = self._attempt(trainer, module, step, batch, num_parts)
            if not self._any_rank(error is not None):
                self._since, self._grown = self._since + 1, False
                return output()
            del output
            buffers.restore_()  # also here, where it may have gone well
            free_memory_cache()
            self._shrink(samples, error)

    def _attempt(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[[Any], Any], batch: Any, num_parts: int
    ) -> tuple[Any, str | None]:
        """As `_run`, or the words of an error that says that memory ran out; nothing of the attempt is left then."""
        try:
            return self._run(trainer, module, step, batch, num_parts), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None, str(error)

    def _run(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[[Any], Any], batch: Any, num_parts: int
    ) -> Callable[[], Any]:
        """Run the parts, and return what logs for the batch and returns what one call of `training_step` would have."""
        parts, sizes = split_batch(batch, num_parts) if num_parts > 1 else ([batch], [1])
        weights = [float(size) for size in sizes]
        if num_parts > 1:
            if not self._warned:
                warn_of_batchnorm(self, module)
            self._warned = True
            given = [weigh_batch(trainer, part) for part in parts]
            weights = [size if weight is None else weight for weight, size in zip(given, weights, strict=True)]
        with DeferredLog(module) as log:
            loss, outputs, self._discarding = run_parts(
                functools.partial(_noted_step, log, step),
                parts,
                weights,
                module.parameters(),
                backward=functools.partial(_backward, trainer, module, self._is_sharded),
                scale=self._scale(trainer),
                keep_last=self.max_size != "auto",
            )
        total = sum(weights) or 1.0
        shares = [weight / total for weight in weights]
        return functools.partial(_output_of_batch, log, loss, outputs, shares, sizes)

    def _scale(self, trainer: pl.Trainer) -> float | Tensor:
        """What the batch's loss is multiplied by later on: shards take up the parts' gradients before it is."""
        share: float = current_window(trainer).gradient_share / trainer.accumulate_grad_batches
        scaler = loss_scaler(trainer)
        if scaler is None:
            return share
        scale: Tensor = scaler.scale(torch.ones((), device=trainer.strategy.root_device))
        return scale * share

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        while self._discarding:
            self._discarding.pop().remove()

    def _parts_of_all_ranks(self, trainer: pl.Trainer, module: pl.LightningModule, num_parts: int, samples: int) -> int:
        """Where parameters are gathered for each forward, every rank has to run as many."""
        if not self._is_joint:
            return num_parts
        agreed = int(RankReduction(num_parts, torch.device("cpu"), "max", group=self._group).value())
        if agreed > 1 and self._any_rank(agreed > samples):
            raise ValueError(
                f"expected batches of at least {agreed} samples on every rank, since another rank cuts its batch into "
                f"{agreed} parts of at most {self._size} and all have to run as many, got {samples} here. Use batches "
                "of similar sizes (drop_last=True), or a larger max_size"
            )
        return agreed

    def _any_rank(self, flag: bool) -> bool:
        return bool(RankReduction(float(flag), torch.device("cpu"), "max", group=self._group).value())

    def _shrink(self, samples: int, error: str | None) -> None:
        """Halve the size, on all ranks alike."""
        self._ceiling = int(RankReduction(samples, torch.device("cpu"), "max", group=self._group).value())
        tried = self._ceiling if self._size is None else min(self._size, self._ceiling)
        if tried <= self.min_size:
            raise torch.OutOfMemoryError(
                f"expected micro-batches of min_size={self.min_size} to fit the memory, got "
                f"{error or 'an error on another rank'}. Save memory otherwise (ActivationCheckpointing, "
                'EarlyGradientRelease, precision="bf16-mixed", a sharded strategy), or use a smaller model'
            )
        self._wait *= 2 if self._grown else 1
        self._size, self._since, self._grown = max(math.ceil(tried / 2), self.min_size), 0, False
        self._retries += 1
        rank_zero_info(f"{type(self).__name__}: out of memory; the batch is done again in parts of {self._size}")

    # After the run, and what others ask

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
        for handles in (self._discarding, self._undo):
            while handles:
                handles.pop().remove()
        close_group(self._group)
        self._group = None

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Any) -> Mapping[str, float | Tensor]:
        size = self._largest if self._size is None else self._size
        return {"microbatch/size": float(size), "microbatch/retries": float(self._retries)}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        if self.max_size == "auto":
            size = "whole batches" if self._size is None else f"at most {self._size} samples"
            return Summary(f"{size}, halved when memory runs out, down to {self.min_size}")
        return Summary(f"at most {self._size} samples at a time")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"size": self._size, "since": self._since, "wait": self._wait, "retries": self._retries,
                "ceiling": self._ceiling}  # fmt: skip

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.max_size == "auto":
            self._size = state_dict["size"]
        self._since, self._wait = state_dict["since"], state_dict["wait"]
        self._retries, self._ceiling = state_dict["retries"], state_dict["ceiling"]


def _noted_step(log: DeferredLog, step: Callable[[Any], Any], index: int, part: Any) -> Any:
    log.part = index
    output = step(part)
    has_loss = isinstance(output, Tensor) or (isinstance(output, Mapping) and "loss" in output)
    if not has_loss and output is not None:
        raise MisconfigurationException(
            f"expected training_step to return a tensor, a dict with the key 'loss', or None, got {describe(output)}"
        )
    return output


def _output_of_batch(
    log: DeferredLog, loss: Tensor | None, outputs: list[Any], shares: list[float], sizes: list[int]
) -> Any:
    log.replay(shares)
    returned = [index for index, output in enumerate(outputs) if output is not None]
    if loss is None or not returned:
        return loss
    if len(outputs) == 1:
        return {"loss": loss, **outputs[0]}
    extras = {}
    for key in dict.fromkeys(key for index in returned for key in outputs[index]):
        those = [index for index in returned if key in outputs[index]]
        total = sum(shares[index] for index in those) or 1.0
        extras[key] = join_outputs(
            [outputs[index][key] for index in those],
            [shares[index] / total for index in those],
            [sizes[index] for index in those],
        )
    return {"loss": loss, **extras}


def _backward(trainer: pl.Trainer, module: pl.LightningModule, is_sharded: bool, loss: Tensor) -> None:
    """Backpropagate a part without communication, and outside of the autocast that its forward ran in."""
    strategy = trainer.strategy
    with ExitStack() as around:
        if is_sharded and isinstance(strategy, ParallelStrategy):
            around.enter_context(strategy.block_backward_sync())
        around.enter_context(torch.autocast(strategy.root_device.type, enabled=False))
        module.backward(loss)
