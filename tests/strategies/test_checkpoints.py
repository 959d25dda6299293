"""Checkpoints move between strategies, numbers of ranks, and stock Lightning."""

import functools
from pathlib import Path

import pytest
import torch

from lightning_tricks.__main__ import main
from tests import checkpoint_cases as cases
from tests.models import assert_same

OPTIMIZERS = ["adamw", "sgd"]  # with state and groups, and without any state
FILES = ["fsdp2 file", "zero1", "zero2", "ddp"]
FOLDERS = ["fsdp2 folder", "fsdp2 async folder"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, two_processes, four_processes) -> str:
    """A folder of checkpoints, saved by one, two and four ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    cases.save_all(["one process"], OPTIMIZERS, folder)
    two_processes.run(cases.save_all, [*FILES, *FOLDERS], OPTIMIZERS, folder)
    four_processes.run(cases.save_all, ["hsdp", "fsdp2 folder", "zero1"], OPTIMIZERS, folder)
    return folder


@functools.cache
def expected(path: str, optimizer: str) -> dict[str, torch.Tensor]:
    return cases.resume([("one process", optimizer, path)])[0]


def check(pool, folder: str, readers: list[str], savers: list[tuple[str, int]]) -> None:
    jobs = [
        (reader, optimizer, f"{folder}/{saver}-{optimizer}-{ranks}.ckpt")
        for reader in readers
        for saver, ranks in savers
        for optimizer in OPTIMIZERS
    ]
    for rank in pool.run(cases.resume, jobs):
        for job, result in zip(jobs, rank, strict=True):
            want = expected(f"{folder}/one process-{job[1]}-1.ckpt", job[1])
            assert_same(result, want, rtol=0, atol=1e-6)


ORDINARY = [("one process", 1), *((saver, 2) for saver in FILES), ("hsdp", 4), ("zero1", 4)]
SHARDED = [*((saver, 2) for saver in FOLDERS), ("fsdp2 folder", 4)]


def test_case_24_one_process_file_with_groups_resumed_on_two_ranks(saved: str, two_processes) -> None:
    check(two_processes, saved, ["fsdp2 file"], [("one process", 1)])


def test_ordinary_files_resume_on_two_ranks(saved: str, two_processes) -> None:
    check(two_processes, saved, ["fsdp2 file", "fsdp2 folder", "zero1", "ddp"], ORDINARY)


def test_ordinary_files_resume_on_four_ranks(saved: str, four_processes) -> None:
    check(four_processes, saved, ["hsdp", "zero1"], ORDINARY[:2])


def test_ordinary_files_resume_in_one_process(saved: str) -> None:
    for saver, ranks in ORDINARY:
        for optimizer in OPTIMIZERS:
            path = f"{saved}/{saver}-{optimizer}-{ranks}.ckpt"
            want = expected(f"{saved}/one process-{optimizer}-1.ckpt", optimizer)
            assert_same(cases.resume([("one process", optimizer, path)])[0], want, rtol=0, atol=1e-6)


def test_folders_resume_on_other_numbers_of_ranks(saved: str, two_processes, four_processes) -> None:
    check(two_processes, saved, ["fsdp2 file"], SHARDED)
    check(four_processes, saved, ["hsdp"], SHARDED)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_folder_becomes_an_ordinary_file(saved: str, optimizer: str, tmp_path: Path) -> None:
    file = tmp_path / "one.ckpt"
    main(["consolidate", f"{saved}/fsdp2 folder-{optimizer}-4.ckpt", str(file)])
    want = torch.load(f"{saved}/one process-{optimizer}-1.ckpt", weights_only=True)
    found = torch.load(file, weights_only=True)
    assert found.keys() == want.keys()
    assert_same(found["state_dict"], want["state_dict"], rtol=0, atol=1e-6)
    (optimizer_state,), (other,) = found["optimizer_states"], want["optimizer_states"]
    assert optimizer_state["param_groups"] == other["param_groups"]
    assert optimizer_state["state"].keys() == other["state"].keys()
    resumed = cases.resume([("one process", optimizer, str(file))])[0]
    assert_same(resumed, expected(f"{saved}/one process-{optimizer}-1.ckpt", optimizer), rtol=0, atol=1e-6)


def test_consolidate_says_what_it_lacks(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(SystemExit, match=r"expected a complete checkpoint folder, with meta.pt and .metadata, got"):
            main(["consolidate", str(folder), str(tmp_path / "file")])


def test_groups_may_come_in_another_order(saved: str, two_processes) -> None:
    want = expected(f"{saved}/one process-adamw-1.ckpt", "adamw")
    for result in two_processes.run(cases.resume_in_other_order, f"{saved}/fsdp2 folder-adamw-2.ckpt"):
        assert_same(result, want, rtol=0, atol=1e-6)


def test_stock_lightning_resumes_ours_and_we_its_files(two_processes, tmp_path: Path) -> None:
    results = {}
    for saver in ("one process", "fsdp2 file", "fsdp2 folder"):
        path = str(tmp_path / saver)
        if saver == "one process":
            cases.train_by_hand(saver, path)
            results[saver] = cases.train_by_hand(saver, path, seed=5, resumes=True)
        else:
            two_processes.run(cases.train_by_hand, saver, path)
            results[saver] = two_processes.run(cases.train_by_hand, "stock", path, seed=5, resumes=True)[0]
        assert_same(results[saver], results["one process"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("saver", ["fsdp2 file", "fsdp2 folder", "fsdp2 async folder", "zero1"])
def test_model_checkpoint_keeps_the_best_the_last_and_every_fourth(saver: str, two_processes, tmp_path: Path) -> None:
    plain, _ = two_processes.run(cases.kept_checkpoints, "ddp", str(tmp_path / "ddp"))[0]
    for checkpoints, rest in two_processes.run(cases.kept_checkpoints, saver, str(tmp_path / "ours")):
        assert checkpoints == plain
        assert len(checkpoints) == 5
        assert rest == []


@pytest.mark.parametrize("saver", ["fsdp2 file", "fsdp2 folder"])
def test_weights_only_is_honoured(saver: str, two_processes, tmp_path: Path) -> None:
    for rank in two_processes.run(cases.needs_trust, saver, str(tmp_path / "a.ckpt")):
        assert rank == ["refused", "refused", "resumed"]


def test_an_interrupted_save_leaves_the_last_one_whole(two_processes, tmp_path: Path) -> None:
    for names in two_processes.run(cases.interrupted_save, str(tmp_path / "last.ckpt")):
        assert [name for name in names if not name.startswith(".")] == ["last.ckpt"]
