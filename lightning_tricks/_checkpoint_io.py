"""Checkpoint files that are whole or not there, for all strategies of the package."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_tricks._lightning import is_local_path, wrapped_io
from lightning_tricks.distributed.publishing import save_file
from lightning_tricks.distributed.sharded_checkpoint import is_sharded_checkpoint

__all__ = ["AtomicCheckpointIO", "with_atomic_files"]


def with_atomic_files(io: CheckpointIO | None) -> CheckpointIO:
    """Return the plugin with which a strategy is to save and load, from what the user gave; None for nothing."""
    if io is not None and getattr(io, "checkpoint_io", io) is not None:
        return io  # complete already
    complete: CheckpointIO = wrapped_io(io, AtomicCheckpointIO())
    return complete


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but for local files: written beside their place, then moved; read without being copied.

    Lightning writes to the folder for temporary files and moves the file from there, which copies it where that is
    another disk: a kill in between leaves half a checkpoint.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or not is_local_path(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        save_file(checkpoint, Path(path).expanduser())

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        place = Path(path).expanduser()
        if not is_local_path(path) or not place.exists():
            return super().load_checkpoint(path, map_location, weights_only)
        if is_sharded_checkpoint(place):
            raise ValueError(
                f"expected a checkpoint of one file, got a folder of shards, which FSDP2Strategy reads: {path}. "
                "Make a file of it with `python -m lightning_tricks consolidate DIR FILE`"
            )
        content: dict[str, Any] = torch.load(place, map_location=map_location, mmap=True, weights_only=weights_only)
        return content
