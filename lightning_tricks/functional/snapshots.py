"""A ring of in-memory copies of what training changes, to go back to without a checkpoint.

A snapshot holds this rank's parts of weights, buffers and optimizer state, each in a tensor that is allocated once and
written over when its turn comes round again; and plain values beside them. It lies on the device where that leaves
room, in pinned host memory where not.

Cost:
    `num_snapshots` times the bytes of weights, buffers and optimizer state of a rank. Taking one is one copy of them;
    on an accelerator it does not wait.

Sharding:
    Each rank keeps and restores its own shards. No collectives; the ranks have to agree on when.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks.functional.shards import local_tensor

__all__ = ["SnapshotRing", "expected_state_bytes", "free_bytes", "num_bytes", "training_tensors"]


def training_tensors(
    module: nn.Module, optimizers: Sequence[Optimizer], more: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Collect what training changes, as this rank's parts.

    Args:
        module: the model.
        optimizers: its optimizers.
        more: further tensors that training changes, by a name each.

    Returns:
        The live tensors by a name that stays the same; of DTensors the local ones. Writing to them changes the model.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> list(training_tensors(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
        ['parameter weight', 'parameter bias']
    """
    found = {f"parameter {name}": local_tensor(one.detach()) for name, one in module.named_parameters()}
    found |= {f"buffer {name}": local_tensor(one.detach()) for name, one in module.named_buffers()}
    found |= {f"other {name}": local_tensor(one) for name, one in more.items()}
    for number, state in enumerate(_states(optimizers)):
        found |= {
            f"state {number} {key}": local_tensor(one.detach()) for key, one in state.items() if isinstance(one, Tensor)
        }
    return found


def num_bytes(tensors: dict[str, Tensor]) -> int:
    """Count the bytes of tensors.

    Args:
        tensors: as from `training_tensors`.

    Example:
        >>> num_bytes({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
        16
    """
    return sum(one.numel() * one.element_size() for one in tensors.values())


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that can still be had on a device, or on the host for the CPU; None where nobody tells.

    Args:
        device: the device.

    Example:
        >>> free = free_bytes(torch.device("cpu"))
        >>> free is None or free > 0
        True
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return None
        cached = module.memory_reserved(device) - module.memory_allocated(device)  # torch's own, to be had again
        return int(module.mem_get_info(device)[0]) + int(cached)
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found += [1024 * int(line.split()[1]) for line in meminfo.read_text().splitlines() if "MemAvailable" in line]
    group = Path("/sys/fs/cgroup")
    limit, used, statistics = (group / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and used.exists() and statistics.exists() and limit.read_text().strip().isdigit():
        lines = dict(line.split() for line in statistics.read_text().splitlines())
        in_use = int(used.read_text()) - int(lines.get("inactive_file", 0))  # the cache of files makes room
        found.append(int(limit.read_text()) - in_use)
    return min(found, default=None)


def expected_state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Estimate the state that optimizers will have once they have stepped; 0 for those that have.

    Args:
        optimizers: the optimizers. Those with ``betas`` keep two numbers a weight (three with ``amsgrad``), those with
            ``momentum`` one, others are taken to keep none.

    Example:
        >>> weight = nn.Parameter(torch.zeros(10))
        >>> expected_state_bytes([torch.optim.AdamW([weight])]), expected_state_bytes([torch.optim.SGD([weight], lr=1)])
        (80, 0)
    """
    total = 0
    for optimizer in (getattr(one, "optim", one) for one in optimizers):
        for group in optimizer.param_groups:
            copies = 2 + bool(group.get("amsgrad")) if "betas" in group else int(bool(group.get("momentum")))
            new = {
                str(number): local_tensor(one)
                for number, one in enumerate(group["params"])
                if not optimizer.state.get(one)
            }
            total += copies * num_bytes(new)
    return total


@dataclass
class _Snapshot:
    tensors: dict[str, Tensor]
    """Storage; more than `present` where a state that was there before is gone."""
    present: set[str] = field(default_factory=set)
    values: Any = None
    states: list[dict[str, Any]] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)


class SnapshotRing:
    """The last few snapshots of a module and its optimizers, the newest at the end.

    Args:
        num_snapshots: how many, 1 or more.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> ring = SnapshotRing(2)
        >>> ring.take(model, [optimizer], values={"step": 0})
        >>> before = model.weight.item()
        >>> _ = nn.init.zeros_(model.weight)
        >>> ring.restore_(model, [optimizer]), model.weight.item() == before
        ({'step': 0}, True)
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.storage: torch.device | None = None
        self.expected_bytes = 0
        self._snapshots: list[_Snapshot] = []
        self._spare: list[_Snapshot] = []

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def bytes_of_one(self) -> int:
        """Bytes of the newest snapshot; before there is one those that `shortage` expected."""
        return num_bytes(self._snapshots[-1].tensors) if self._snapshots else self.expected_bytes

    @torch.no_grad()
    def take(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        values: Any = None,
        more: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Take a snapshot, in the place of the oldest one if the ring is full.

        Args:
            module: the model.
            optimizers: its optimizers.
            values: plain values to keep beside; copied.
            more: further tensors to copy, as in `training_tensors`.

        Raises:
            MemoryError: the ring would not fit the free memory. Nothing was copied.
        """
        shortage = self.shortage(module, optimizers, more)
        if shortage:
            raise MemoryError(shortage)
        live = training_tensors(module, optimizers, more)
        held = self._next_tensors()
        if self._spare:
            self._spare.pop()
        elif len(self._snapshots) == self.num_snapshots:
            self._snapshots.pop(0)
        for name, one in _missing(live, held).items():
            held[name] = self._like(one)
        _copy([held[name] for name in live], list(live.values()))
        states = [
            {key: copy.deepcopy(one) for key, one in state.items() if not isinstance(one, Tensor)}
            for state in _states(optimizers)
        ]
        groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]
        self._snapshots.append(_Snapshot(held, set(live), copy.deepcopy(values), states, groups))

    @torch.no_grad()
    def restore_(
        self, module: nn.Module, optimizers: Sequence[Optimizer], more: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Any:
        """Bring the newest snapshot back. It stays in the ring.

        Args:
            module: the model that it was taken of.
            optimizers: its optimizers.
            more: further tensors to write to.

        Returns:
            The plain values that were kept beside.

        Raises:
            RuntimeError: there is no snapshot.
        """
        if not self._snapshots:
            raise RuntimeError("expected a snapshot to restore, but none was taken yet: call take first")
        snapshot = self._snapshots[-1]
        for number, (state, plain) in enumerate(zip(_states(optimizers), _padded(snapshot.states), strict=False)):
            for key in list(state):
                if isinstance(state[key], Tensor) and f"state {number} {key}" in snapshot.present:
                    continue
                del state[key]  # it came after the snapshot, or is a plain value
            state.update(copy.deepcopy(plain))
        live = training_tensors(module, optimizers, more)
        # What came, or changed its shape, after the snapshot stays as it is.
        known = [name for name in live if name in snapshot.present and snapshot.tensors[name].shape == live[name].shape]
        _copy([live[name] for name in known], [snapshot.tensors[name] for name in known])
        for optimizer, groups in zip(optimizers, snapshot.groups, strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                for key, value in saved.items():
                    if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = copy.deepcopy(value)
        return copy.deepcopy(snapshot.values)

    def drop_newest(self) -> None:
        """Forget the newest snapshot, unless it is the only one; its memory is used again."""
        if len(self._snapshots) > 1:
            self._spare.append(self._snapshots.pop())

    def clear(self) -> None:
        """Forget all snapshots and free their memory."""
        self._snapshots.clear()
        self._spare.clear()

    def shortage(
        self, module: nn.Module, optimizers: Sequence[Optimizer], more: Mapping[str, Tensor] = MappingProxyType({})
    ) -> str:
        """Say why the ring does not fit the free memory, "" if it does. Chooses where the snapshots are to lie.

        Args:
            module: the model.
            optimizers: its optimizers; state that they have not made yet is estimated.
            more: further tensors that are to be copied.
        """
        live = training_tensors(module, optimizers, more)
        missing = _missing(live, self._next_tensors())
        if not missing:
            return ""
        self.expected_bytes = num_bytes(live) + expected_state_bytes(optimizers)
        to_come = self.num_snapshots - len(self._snapshots) - len(self._spare) - 1
        needed = num_bytes(missing) + self.expected_bytes - num_bytes(live) + max(to_come, 0) * self.expected_bytes
        device = next(iter(live.values())).device
        free = free_bytes(device)
        if device.type != "cpu" and (free is None or 2 * needed > free):
            device, free = torch.device("cpu"), free_bytes(torch.device("cpu"))
        self.storage = device
        if free is None or needed <= free:
            return ""
        return (
            f"expected the {self.num_snapshots} snapshot(s) to fit the free memory of {device}, but they need "
            f"{needed:,} bytes more and {free:,} are free: keep fewer, or use an action without snapshots"
        )

    def _next_tensors(self) -> dict[str, Tensor]:
        """Storage that the next snapshot writes over."""
        if self._spare:
            return self._spare[-1].tensors
        return self._snapshots[0].tensors if len(self._snapshots) == self.num_snapshots else {}

    def _like(self, tensor: Tensor) -> Tensor:
        assert self.storage is not None
        if tensor.device.type == "cpu" or self.storage.type != "cpu":
            return torch.empty_like(tensor)
        return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _missing(live: dict[str, Tensor], held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in live.items() if name not in held or held[name].shape != one.shape}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }


def _states(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    """The state of each parameter, in the order of groups. One that wraps another keeps it there, as ZeRO-1's does."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "optim", optimizer)
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield inner.state.get(parameter, {})


def _padded(states: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from states
    while True:  # a group that was added after the snapshot
        yield {}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
