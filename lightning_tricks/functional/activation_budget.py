"""Choose which blocks to checkpoint so that the activations fit a budget, at the least recomputation.

A block that is checkpointed frees what it saves less its inputs, and costs its recomputation. Both are measured in one
forward and backward pass in which every block is checkpointed; which to take is a knapsack problem:

    minimise  sum of seconds_b  over the blocks b that are checkpointed
    so that   total bytes - sum of freed_b  <=  budget

Reference:
    Martello, Toth (1990), "Knapsack Problems", section 2.6, for the list of undominated states; Chen et al. (2016),
    arXiv:1604.06174, for planning by a budget.

Differs:
    Bytes of storages that several blocks save, or that another block is given, count as not freed, so that what is
    predicted is never too little.

Cost:
    One training batch with every block checkpointed. Afterwards nothing.

Sharding:
    Each rank measures its own. The choice takes the largest figures of all ranks, so that it is the same and fits on
    each of them.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.functional.replay import Replay, tensors_of
from lightning_tricks.functional.saved_tensors import StorageKey, hooks_around, is_parameter, storages_of
from lightning_tricks.functional.segments import Segment

__all__ = ["ActivationBudget", "ActivationMeasurement", "BlockCosts", "choose_blocks", "greedy_choice"]

_MOST_STATES = 1 << 16  # of the knapsack's list; beyond, every second one is dropped


@dataclass(frozen=True)
class BlockCosts:
    """What checkpointing each block frees and costs, in the order of `names`.

    Args:
        names: of the blocks.
        total_bytes: saved without checkpointing, parameters left out.
        freed_bytes: by each block; negative where its input is larger than what it saves.
        seconds: of each block's recomputation.
    """

    names: tuple[str, ...]
    total_bytes: int
    freed_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def predicted(self, chosen: Iterable[str]) -> int:
        """Return the bytes that are held with these blocks checkpointed.

        Args:
            chosen: names of blocks.
        """
        chosen = set(chosen)
        return self.total_bytes - sum(
            freed for name, freed in zip(self.names, self.freed_bytes, strict=True) if name in chosen
        )

    @property
    def least_bytes(self) -> int:
        """What is held with every block checkpointed that frees something."""
        return self.total_bytes - sum(freed for freed in self.freed_bytes if freed > 0)

    def choose(self, budget_bytes: int) -> list[str] | None:
        """Return the blocks to checkpoint so that at most so many bytes are held, or None if that is out of reach.

        Args:
            budget_bytes: the most bytes held.
        """
        chosen = choose_blocks(self.freed_bytes, self.seconds, self.total_bytes - budget_bytes)
        return None if chosen is None else [self.names[index] for index in chosen]


def choose_blocks(freed_bytes: Sequence[int], seconds: Sequence[float], need: int) -> list[int] | None:
    """Solve the knapsack: the blocks that free at least `need` bytes in the least time.

    Args:
        freed_bytes: by each block.
        seconds: of each block.
        need: bytes to free.

    Returns:
        Indices of the blocks, ascending; None if all together free less. Exact while no more than 65536 states are
        undominated, and never worse than `greedy_choice`.

    Example:
        >>> choose_blocks([4, 3, 3], [3.0, 2.0, 2.0], need=6), choose_blocks([1, 1], [1.0, 1.0], need=3)
        ([1, 2], None)
    """
    if need <= 0:
        return []
    greedy = greedy_choice(freed_bytes, seconds, need)
    if greedy is None:
        return None
    bound = sum(seconds[index] for index in greedy)
    candidates = [index for index, freed in enumerate(freed_bytes) if freed > 0]
    # A state is a set of blocks: what it frees, at most `need`; what it costs; which blocks. None is kept that another
    # one beats in both.
    freed, cost = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    taken = torch.zeros(1, len(candidates), dtype=torch.bool)
    for place, index in enumerate(candidates):
        with_block = taken.clone()
        with_block[:, place] = True
        freed = torch.cat([freed, (freed + freed_bytes[index]).clamp(max=need)])
        cost = torch.cat([cost, cost + seconds[index]])
        taken = torch.cat([taken, with_block])
        order = torch.argsort(cost, stable=True)
        order = order[torch.argsort(freed[order], descending=True, stable=True)]
        freed, cost, taken = freed[order], cost[order], taken[order]
        # Sorted by what they free, the most first: undominated are those cheaper than all before.
        cheapest = torch.cat([cost.new_tensor([float("inf")]), torch.cummin(cost, 0).values[:-1]])
        keep = ((cost < cheapest) & (cost <= bound)).nonzero().flatten()
        if len(keep) > _MOST_STATES:
            keep = keep[::2]
        freed, cost, taken = freed[keep], cost[keep], taken[keep]
    if not len(freed) or freed[0] < need or float(cost[0]) >= bound:
        return greedy
    return [candidates[place] for place in taken[0].nonzero().flatten().tolist()]


def greedy_choice(freed_bytes: Sequence[int], seconds: Sequence[float], need: int) -> list[int] | None:
    """Take the blocks that free most bytes a second until there is enough, and leave out what turned out unneeded.

    Args:
        freed_bytes: by each block.
        seconds: of each block.
        need: bytes to free.

    Returns:
        As `choose_blocks`.

    Example:
        >>> greedy_choice([4, 3, 3], [3.0, 2.0, 2.0], need=6)
        [1, 2]
    """
    by_rate = sorted(
        (index for index, freed in enumerate(freed_bytes) if freed > 0),
        key=lambda index: freed_bytes[index] / max(seconds[index], 1e-12),
        reverse=True,
    )
    chosen, freed = [], 0
    for index in by_rate:
        if freed >= need:
            break
        chosen.append(index)
        freed += freed_bytes[index]
    if freed < need:
        return None
    for index in sorted(chosen, key=lambda index: seconds[index], reverse=True):
        if freed - freed_bytes[index] >= need:
            chosen.remove(index)
            freed -= freed_bytes[index]
    return sorted(chosen)


@dataclass
class _Record:
    """What was seen of one block.

    Args:
        saved: bytes of the storages that it saves.
        inputs: bytes of those that its arguments lie in.
        seconds: of its recomputations.
        recomputed: whether there was one.
    """

    saved: dict[StorageKey, int] = field(default_factory=dict)
    inputs: dict[StorageKey, int] = field(default_factory=dict)
    seconds: float = 0.0
    recomputed: bool = False
    events: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)


class ActivationMeasurement:
    """Runs every block checkpointed, and sees what it would save if it were not, and how long it takes to recompute.

    Args:
        names: of the blocks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._records = {name: _Record() for name in names}
        self._outside: dict[StorageKey, int] = {}
        self._is_in_block = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Look at what the forward pass inside saves outside of the blocks."""
        pack, unpack = hooks_around()

        def look(tensor: Tensor) -> Any:
            if not self._is_in_block and not is_parameter(tensor):
                self._outside.update(storages_of(tensor))
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(look, unpack):
            yield

    def run(self, replay: Replay, values: tuple[Any, ...]) -> Any:
        """Run a block, checkpointed.

        Args:
            replay: the block; its memory has the name.
            values: its arguments.

        Returns:
            What the block returns.
        """
        record = self._records[replay.memory.name]
        tensors = tensors_of(values)
        for tensor in tensors:
            if not is_parameter(tensor):
                record.inputs.update(storages_of(tensor))
        on_device = next((one.device for one in tensors if one.device.type != "cpu"), None)
        segment = Segment(lambda: _timed(record, on_device))
        self._is_in_block = True  # what the segment itself holds is no part of what the block would save
        try:
            return segment.run(replay, values, [], record.saved)
        finally:
            self._is_in_block = False

    def saved_bytes(self) -> tuple[int, list[int]]:
        """Return the bytes saved without checkpointing, and those that checkpointing each block frees."""
        records = list(self._records.values())
        savers = Counter(key for record in records for key in record.saved)
        givers = {key for record in records for key in record.inputs}
        everything = dict(self._outside)
        for record in records:
            everything.update(record.saved)
        freed = []
        for record in records:
            own = sum(
                size
                for key, size in record.saved.items()
                if savers[key] == 1 and key not in self._outside and key not in givers
            )
            more = sum(size for key, size in record.inputs.items() if key not in everything)
            freed.append(own - more)
        return sum(everything.values()), freed

    @property
    def is_complete(self) -> bool:
        """Whether every block that would free something was recomputed."""
        freed = self.saved_bytes()[1]
        return all(one.recomputed or size <= 0 for one, size in zip(self._records.values(), freed, strict=True))

    def costs(self) -> BlockCosts:
        """Return what was measured. Waits for the device."""
        for record in self._records.values():
            for start, end in record.events:
                end.synchronize()
                record.seconds += start.elapsed_time(end) / 1000
            record.events.clear()
        total, freed = self.saved_bytes()
        return BlockCosts(
            tuple(self._records), total, tuple(freed), tuple(one.seconds for one in self._records.values())
        )


@contextmanager
def _timed(record: _Record, device: torch.device | None) -> Iterator[None]:
    record.recomputed = True
    if device is None:
        begin = time.perf_counter()
        try:
            yield
        finally:
            record.seconds += time.perf_counter() - begin
        return
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    try:
        yield
    finally:
        end.record()
        record.events.append((start, end))


class ActivationBudget:
    """Which blocks of a model are checkpointed, as measured.

    Attributes:
        names: of all blocks.
        chosen: names of those that are checkpointed; all, until something is chosen.
        measurement: what measures now, None while nothing does.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.chosen = frozenset(names)
        self.measurement: ActivationMeasurement | None = None

    def begin(self) -> ActivationMeasurement:
        """Measure from the next forward pass on."""
        self.measurement = ActivationMeasurement(self.names)
        return self.measurement

    def settle(self, chosen: Iterable[str]) -> None:
        """Checkpoint these blocks from the next forward pass on.

        Args:
            chosen: their names.
        """
        self.measurement = None
        self.chosen = frozenset(chosen)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: not a measurement that goes on."""
        return {**vars(self), "measurement": None}
