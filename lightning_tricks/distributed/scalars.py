"""One number from every rank, on its way while the device is busy.

**Cost**: one all-reduce of 8 bytes. What is started before a forward pass is there, on a GPU, when that pass begins, so
that reading it later waits for no work that was queued since.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RankReduction", "close_group", "host_group", "largest_of_ranks"]


def host_group() -> Any:
    """Return a process group of all ranks that communicates between hosts, past the device. A collective.

    None, the default group, where that does so already, or where there is one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo")


def close_group(group: Any) -> None:
    """Give back what `host_group` returned.

    Args:
        group: that.
    """
    if group is not None:
        dist.destroy_process_group(group)


def largest_of_ranks(values: Sequence[float], group: Any = None) -> list[float]:
    """Return for each number the largest that a rank has. A collective, and waits for it.

    Args:
        values: this rank's, as many on every rank.
        group: what `host_group` returned.

    Example:
        >>> largest_of_ranks([2.0, -1.0])  # a run of one process
        [2.0, -1.0]
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return [float(number) for number in numbers]


class RankReduction:
    """Begin to sum a number over the ranks, or to take its maximum. A collective: on every rank.

    Args:
        value: this rank's.
        device: where collectives run.
        op: "sum" or "max".
        group: a process group of all ranks, None for the default one.

    Example:
        >>> RankReduction(2.0, torch.device("cpu")).value()  # a run of one process
        2.0
    """

    def __init__(
        self, value: float, device: torch.device, op: Literal["sum", "max"] = "sum", *, group: Any = None
    ) -> None:
        self._event: torch.Event | None = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self._host: Tensor | float = value
            return
        number = torch.full((), value, dtype=torch.float64, device=device)  # filled there: a copy would be waited for
        dist.all_reduce(number, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)
        if device.type == "cpu":
            self._host = number
            return
        self._host = torch.empty((), dtype=torch.float64, pin_memory=True).copy_(number, non_blocking=True)
        self._event = torch.Event(device)
        self._event.record()

    def value(self) -> float:
        """Wait for the number, and for nothing that was queued after it, and return it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._host)
