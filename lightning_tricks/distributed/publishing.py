"""Write, then publish: a checkpoint that was interrupted never looks whole.

What is being written lies beside its destination under a name that nobody takes for a checkpoint, and moves there in
one step once it is complete and on the disk. A folder cannot be replaced in one step: the old one moves aside first,
to a name that still says what it is, so that a kill between the two steps loses nothing.
"""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["META", "is_checkpoint_folder", "publish", "recover", "remove", "save_file", "scratch_beside"]

META = "meta.pt"
"""The file of a checkpoint folder that holds what is no tensor."""


def scratch_beside(path: Path) -> Path:
    """Return the place to write to before `path` is published: empty, on the same disk.

    Args:
        path: where the checkpoint is to be. Its parent is made. What an interrupted save left behind goes.

    Raises:
        IsADirectoryError: a folder is there that is no checkpoint.

    Example:
        >>> import tempfile
        >>> scratch_beside(Path(tempfile.mkdtemp()) / "last.ckpt").name.startswith(".writing-")
        True
    """
    if path.is_dir() and not is_checkpoint_folder(path):
        raise IsADirectoryError(f"expected the path of a checkpoint to be free, or an older one, got the folder {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lightning takes each file with "last" in its name for a checkpoint: the name must not be part of it.
    scratch = path.parent / f".writing-{zlib.crc32(path.name.encode()):08x}"
    remove(scratch)
    return scratch


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a complete folder of shards lies here.

    Args:
        path: of a file, a folder or nothing.

    Example:
        >>> is_checkpoint_folder(Path("."))
        False
    """
    return (path / META).is_file() and (path / ".metadata").is_file()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there.

    Args:
        path: of it.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def publish(scratch: Path, path: Path) -> None:
    """Move a complete checkpoint to its place, in one step where nothing or a file is there.

    Args:
        scratch: the file or folder that was written.
        path: where it is to be; what is there is replaced.
    """
    aside = _aside(path)
    if path.exists() and (path.is_dir() or scratch.is_dir()):
        remove(aside)
        os.rename(path, aside)
    os.replace(scratch, path)
    _sync(path.parent)
    remove(aside)


def recover(path: Path) -> Path:
    """Return where the checkpoint lies that was published as `path`.

    Args:
        path: of a checkpoint.

    Returns:
        `path`, or, where a kill came between the two steps of replacing a folder, the one that was moved aside.
    """
    aside = _aside(path)
    return aside if aside.exists() and not path.exists() else path


def save_file(content: Any, path: Path, save: Callable[[Any, Any], None] = torch.save) -> None:
    """Write one file and publish it.

    Args:
        content: what to save.
        path: where.
        save: writes `content` to an open file.
    """
    scratch = scratch_beside(path)
    with open(scratch, "wb") as file:
        save(content, file)
        file.flush()
        os.fsync(file.fileno())
    publish(scratch, path)


def _aside(path: Path) -> Path:
    """Where a folder goes while another takes its place: with a name that ``ckpt_path="last"`` finds too."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
