"""Checkpoint files that are whole or not there, for all strategies of the package."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_tricks._lightning import is_local_path
from lightning_tricks.distributed.publishing import save_file

__all__ = ["AtomicCheckpointIO"]


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
        save_file(checkpoint, Path(path))

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not is_local_path(path) or not Path(path).exists():
            return super().load_checkpoint(path, map_location, weights_only)
        content: dict[str, Any] = torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)
        return content
