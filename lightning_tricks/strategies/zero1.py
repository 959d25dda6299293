"""ZeRO stage 1 as a strategy: DDP whose optimizers divide their state."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._checkpoint_io import with_atomic_files
from lightning_tricks._lightning import DEFAULT_TIMEOUT, torch_optimizer
from lightning_tricks._validation import check_timeout
from lightning_tricks.distributed.faults import explain_
from lightning_tricks.distributed.sharding import sharded_by
from lightning_tricks.distributed.zero_optimizer import (
    gather_optimizer_state,
    load_optimizer_state_,
    shard_optimizer_state,
)

__all__ = ["ZeRO1Strategy"]


class ZeRO1Strategy(DDPStrategy):
    """DDP with the optimizer state divided among the ranks; the module and its optimizers do not change.

    A checkpoint is that of DDP and loads under it, under any number of ranks, and in one process.

    Args:
        find_unused_parameters: whether a step may leave parameters without a gradient; see DDP.
        gradient_as_bucket_view: whether gradients lie in DDP's buckets, rather than in both: 4 bytes a parameter.
        static_graph: whether every step uses the same parameters; see DDP.
        timeout: how long a rank waits for the others before it ends with an error.

    Raises:
        ValueError: at the start of fit, an optimizer is LBFGS, whose step depends on all parameters at once.

    Cost:
        The communication of DDP and one broadcast of each parameter a step. Optimizer state falls to 1/W.

    Reference:
        Rajbhandari et al. (2020), "ZeRO", arXiv:1910.02054, section 5.1.

    Example:
        >>> from lightning_tricks import ZeRO1Strategy
        >>> strategy = ZeRO1Strategy(find_unused_parameters=True)
    """

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        check_timeout(timeout)
        super().__init__(
            timeout=timeout,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        how = None if self.lightning_module is None else sharded_by(self.lightning_module)
        if how is not None:
            raise ValueError(
                f"{type(self).__name__} expected a plain module, got one that is sharded ({how}), as FSDP2Strategy "
                "leaves it. Build the module anew and load its weights from a checkpoint"
            )
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        sharded = {id(one): shard_optimizer_state(one) for one in self.optimizers}
        for config in self.lr_scheduler_configs:
            for scheduler in _with_inner(config.scheduler):
                optimizer = sharded[id(scheduler.optimizer)]
                optimizer.step = _TrackedStep(optimizer)  # type: ignore[method-assign]
                scheduler.optimizer = optimizer
        self.optimizers = [sharded[id(one)] for one in self.optimizers]

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        sharded = torch_optimizer(optimizer)
        assert isinstance(sharded, ZeroRedundancyOptimizer)
        return gather_optimizer_state(sharded)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            assert isinstance(optimizer, ZeroRedundancyOptimizer)
            load_optimizer_state_(optimizer, state)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = with_atomic_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain_(exception, self.global_rank)


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)


class _TrackedStep:
    """The optimizer's step, marked as torch's schedulers mark it: they warn where the mark is missing."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        return type(self._optimizer).step(self._optimizer, *args, **kwargs)
