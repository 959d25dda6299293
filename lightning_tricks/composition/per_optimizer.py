"""State that a trick keeps for each optimizer: built when it is first used, where the optimizer's tensors are."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

__all__ = ["PerOptimizer"]


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None: ...


T = TypeVar("T", bound=_Stateful)


class PerOptimizer(Generic[T]):
    """One record for each optimizer, and the states of a checkpoint until the device is known.

    Args:
        build: makes a new record.
    """

    def __init__(self, build: Callable[[], T]) -> None:
        self._build = build
        self._records: dict[int, T] = {}
        self._saved: dict[int, dict[str, Any]] = {}

    def get(self, index: int, device: torch.device) -> T:
        """Return the record of optimizer `index`.

        Args:
            index: the optimizer's index.
            device: where its tensors are.
        """
        if index not in self._records:
            self._records[index] = self._build()
            if index in self._saved:
                self._records[index].load_state_dict(self._saved.pop(index), device)
        return self._records[index]

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the records' states by the optimizer's index."""
        return {**self._saved, **{index: record.state_dict() for index, record in self._records.items()}}

    def load_state_dict(self, states: dict[int, dict[str, Any]]) -> None:
        """Take states over from a checkpoint.

        Args:
            states: what `state_dict` returned.
        """
        self._records.clear()
        self._saved = dict(states)
