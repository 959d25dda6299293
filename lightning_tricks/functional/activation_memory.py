"""Measure the activation bytes that a forward pass holds for its backward pass, and where they come from.

Autograd saves tensors for the backward pass; `torch.autograd.graph.saved_tensors_hooks` shows each of them. Several may
share one storage, and parameters are saved too although they take no further memory, so storages are counted once and
those of parameters left out. What selective checkpointing keeps goes past those hooks, and is counted as its policy
decides (see `note_kept`). What a checkpointed block recomputes is not held, and counts while it is alive only (see
`recomputed_for`).

Cost:
    One Python call for each saved tensor while measuring.

Sharding:
    Counts what this rank holds.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.functional.saved_tensors import StorageKey, hooks_around, is_parameter, storages_of

__all__ = [
    "OUTSIDE",
    "SavedActivations",
    "active_measurements",
    "measure_saved_activations",
    "note_kept",
    "recomputed_for",
]

OUTSIDE = "(outside of blocks)"
"""The name under which `SavedActivations.by_block` counts what no block saved."""


@dataclass
class SavedActivations:
    """Storages that autograd holds, counted while `measure_saved_activations` was active.

    Attributes:
        by_block: bytes by the block that saved a storage first; what no block saved is under `OUTSIDE`.
        peak_bytes: the most bytes that were alive at once.
    """

    by_block: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    _seen: set[StorageKey] = field(default_factory=set, repr=False)
    _alive: dict[StorageKey, int] = field(default_factory=dict, repr=False)  # how often each is held
    _live_bytes: int = field(default=0, repr=False)
    _block: list[str] = field(default_factory=lambda: [OUTSIDE], repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages seen."""
        return sum(self.by_block.values())

    def add(self, tensor: Tensor) -> dict[StorageKey, int]:
        """Count a tensor's storages for the block that runs now.

        Args:
            tensor: one that is kept.

        Returns:
            As `storages_of`.
        """
        storages = storages_of(tensor)
        for key, num_bytes in storages.items():
            if key not in self._seen:
                self._seen.add(key)
                self.by_block[self._block[-1]] = self.by_block.get(self._block[-1], 0) + num_bytes
        return storages

    def _hold(self, storages: dict[StorageKey, int]) -> None:
        for key, num_bytes in storages.items():
            self._alive[key] = self._alive.get(key, 0) + 1
            if self._alive[key] == 1:
                self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _release(self, storages: dict[StorageKey, int]) -> None:
        for key, num_bytes in storages.items():
            self._alive[key] -= 1
            if not self._alive[key]:
                del self._alive[key]
                self._live_bytes -= num_bytes


class _Held:
    """A saved tensor, as long as the graph holds it.

    Args:
        saved: where it counts as alive.
        storages: of it.
        packed: what the hooks around made of it.
    """

    __slots__ = ("packed", "saved", "storages")

    def __init__(self, saved: SavedActivations, storages: dict[StorageKey, int], packed: Any) -> None:
        self.saved = saved
        self.storages = storages
        self.packed = packed
        saved._hold(storages)

    def __del__(self) -> None:
        self.saved._release(self.storages)


_ACTIVE: list[SavedActivations] = []


def note_kept(tensors: Iterable[Tensor]) -> None:
    """Count tensors that are kept for the backward pass where no hook of autograd sees it.

    Args:
        tensors: those.

    Example:
        >>> with measure_saved_activations() as saved:
        ...     note_kept([torch.ones(2)])
        >>> saved.num_bytes
        8
    """
    for saved in _ACTIVE:
        for tensor in tensors:
            saved._hold(saved.add(tensor))


@contextmanager
def measure_saved_activations(
    leave_out: Iterable[Tensor] = (), *, blocks: dict[str, nn.Module] | None = None
) -> Iterator[SavedActivations]:
    """Count the bytes that autograd saves inside of the block.

    Args:
        leave_out: tensors whose storages do not count, besides parameters: buffers, the batch.
        blocks: modules to tell apart, by name. Of nested ones the innermost counts.

    Yields:
        The count, complete when the block is left, but for `peak_bytes`, which a later backward pass raises where it
        recomputes.

    Example:
        >>> x = torch.ones(256, requires_grad=True)
        >>> with measure_saved_activations(leave_out=[x]) as saved:
        ...     y = x.exp()
        >>> saved.num_bytes
        1024
    """
    known = {key for tensor in leave_out for key in storages_of(tensor)}
    saved = SavedActivations()

    def look(tensor: Tensor) -> dict[StorageKey, int]:
        return {} if known and not known.isdisjoint(storages_of(tensor)) else saved.add(tensor)

    hooks = []
    for name, block in (blocks or {}).items():
        hooks.append(block.register_forward_pre_hook(_entering(saved, name)))
        hooks.append(block.register_forward_hook(_left(saved), always_call=True))
    _ACTIVE.append(saved)
    try:
        with _held_by(saved, look):
            yield saved
    finally:
        _ACTIVE.remove(saved)
        for hook in hooks:
            hook.remove()


def active_measurements() -> list[SavedActivations]:
    """Return the counts that are being taken now, for `recomputed_for`.

    Example:
        >>> with measure_saved_activations() as saved:
        ...     active_measurements() == [saved]
        True
    """
    return list(_ACTIVE)


@contextmanager
def recomputed_for(measurements: Iterable[SavedActivations]) -> Iterator[None]:
    """Count what is saved inside as alive, not as saved: it is what a forward pass under these counts dropped.

    Args:
        measurements: from `active_measurements` at that time.

    Example:
        >>> with measure_saved_activations() as saved:
        ...     pass
        >>> with recomputed_for([saved]):
        ...     y = torch.ones(256, requires_grad=True).exp()
        >>> saved.num_bytes, saved.peak_bytes
        (0, 1024)
    """
    with ExitStack() as stack:
        for saved in measurements:
            stack.enter_context(_held_by(saved, storages_of))
        yield


def _held_by(saved: SavedActivations, look: Callable[[Tensor], dict[StorageKey, int]]) -> AbstractContextManager[None]:
    """Hooks that count what is saved as alive, but for parameters, and leave the saving to the hooks around them."""
    pack, unpack = hooks_around()

    def hold(tensor: Tensor) -> _Held:
        return _Held(saved, {} if is_parameter(tensor) else look(tensor), pack(tensor))

    return torch.autograd.graph.saved_tensors_hooks(hold, lambda held: unpack(held.packed))


def _entering(saved: SavedActivations, name: str) -> Callable[..., None]:
    return lambda *_: saved._block.append(name)


def _left(saved: SavedActivations) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        saved._block.pop()

    return leave
