"""Write, then publish."""

import os
from pathlib import Path

import pytest

from lightning_tricks.distributed import publishing
from lightning_tricks.distributed.publishing import publish, recover, save_file, scratch_beside


def write(path: Path, content: str) -> Path:
    path.mkdir()
    for name in ("part", "meta.pt", ".metadata"):
        (path / name).write_text(content)
    return path


def content(path: Path) -> str:
    return (path / "part").read_text() if path.is_dir() else path.read_text()


@pytest.mark.parametrize("before", ["nothing", "file", "folder"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_publishing_replaces_what_is_there(before: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for one, text in ((before, "old"), (kind, "new")):
        scratch = scratch_beside(path)
        if one == "folder":
            publish(write(scratch, text), path)
        elif one == "file":
            scratch.write_text(text)
            publish(scratch, path)
    assert content(path) == "new"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_scratch_is_no_checkpoint_to_lightning(tmp_path: Path) -> None:
    scratch = scratch_beside(tmp_path / "last.ckpt")
    assert "last" not in scratch.name
    assert scratch.name.startswith(".")
    assert scratch.parent == tmp_path
    assert scratch != scratch_beside(tmp_path / "best.ckpt")


def test_scratch_of_an_interrupted_save_goes(tmp_path: Path) -> None:
    write(scratch_beside(tmp_path / "a"), "half")
    assert not scratch_beside(tmp_path / "a").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_file({"a": 1}, path)
    before = path.read_bytes()

    def fail(what, file) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_file({"a": 2}, path, save=fail)
    assert path.read_bytes() == before


def test_between_the_renames_the_old_folder_is_found(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "last.ckpt"
    publish(write(scratch_beside(path), "old"), path)
    monkeypatch.setattr(publishing.os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        publish(write(scratch_beside(path), "new"), path)
    assert not path.exists()
    assert content(recover(path)) == "old"
    monkeypatch.undo()
    publish(write(scratch_beside(path), "newer"), path)
    assert content(recover(path)) == "newer"


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(IsADirectoryError, match="expected the path of a checkpoint to be free"):
        save_file({"a": 1}, tmp_path)
    assert (tmp_path / "precious").read_text() == "data"
