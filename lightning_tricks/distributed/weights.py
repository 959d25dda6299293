"""Weights that wait on disk until the module is sharded, so that no rank ever holds all of them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_tricks.distributed.full_state import load_full_state_
from lightning_tricks.distributed.sharded_checkpoint import load_sharded_state_, saved_names

__all__ = ["FileWeights", "FolderWeights"]


@dataclass(frozen=True)
class FileWeights:
    """An ordinary state dict, mapped into memory.

    Args:
        state: its tensors.
        strict: whether its names must be the module's.
    """

    state: Mapping[str, Any]
    strict: bool

    def names(self) -> Collection[str]:
        """What it has values for."""
        return self.state.keys()

    def load_(self, module: nn.Module) -> None:
        """Load into a module, sharded or not; each rank reads its part."""
        load_full_state_(module, self.state, strict=self.strict)


@dataclass(frozen=True)
class FolderWeights:
    """A checkpoint folder.

    Args:
        path: of it.
        strict: whether its names must be the module's.
    """

    path: Path
    strict: bool

    def names(self) -> Collection[str]:
        """What it has values for."""
        return saved_names(self.path)

    def load_(self, module: nn.Module) -> None:
        """Load into a sharded module; each rank reads its part. A collective: on every rank."""
        load_sharded_state_(module, self.path, strict=self.strict)
