"""Ranks and jobs that die: what is lost is time."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from tests.jobs import Job, seconds
from tests.models import assert_same


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    return finish(tmp_path_factory.mktemp("undisturbed"))


def finish(folder: Path, **options) -> dict[str, torch.Tensor]:
    """Let a job run to its end and return the weights."""
    job = Job(folder, **options)
    codes = job.join()
    assert codes == [0, 0], [path.read_text() for path in folder.glob("error-*")]
    return torch.load(folder / "final.pt", weights_only=True)


def began(folder: Path) -> list[int]:
    """The step at which each run of a job began."""
    return [int(line) for line in (folder / "began").read_text().splitlines()]


def test_a_job_killed_at_ten_random_moments_ends_with_the_same_weights(undisturbed, tmp_path: Path) -> None:
    moments = random.Random(0)
    formats = ["fsdp2 folder", "fsdp2 file", "fsdp2 async folder"]
    for attempt in range(10):
        job = Job(tmp_path, strategy=formats[attempt % 3])
        job.wait_for_batches(moments.randint(1, 3))
        time.sleep(moments.uniform(0.0, 0.05))  # into a step, a save, or what lies between
        job.kill()
    assert not (tmp_path / "final.pt").exists()
    assert_same(finish(tmp_path), undisturbed)
    steps = began(tmp_path)
    assert len(steps) == 11
    assert steps == sorted(steps)  # nothing that was saved is lost again
    assert steps[-1] > 5


def test_a_guarded_job_killed_at_random_moments_leaves_the_same_batches_out(tmp_path: Path) -> None:
    """Four of its thirty batches are bad, on one rank; it saves every third step."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir(), killed.mkdir()
    expected = finish(undisturbed, poisoned=True)
    moments = random.Random(1)
    for _ in range(4):
        job = Job(killed, strategy="fsdp2 file", poisoned=True)
        job.wait_for_batches(moments.randint(6, 9))
        job.kill()
    assert_same(finish(killed, poisoned=True), expected)
    assert began(killed)[-1] > 10
    bad = [left_out(folder) for folder in (undisturbed, killed)]
    assert set(bad[0]) == set(bad[1]) == {(0, 4), (1, 1), (1, 7), (2, 3)}


def left_out(folder: Path) -> list[tuple[int, int]]:
    events = map(json.loads, (folder / "guard_events.jsonl").read_text().splitlines())
    return [(event["epoch"], event["batch_idx"]) for event in events]


@pytest.mark.parametrize(
    ("strategy", "die"),
    [
        ("fsdp2 folder", "before it is published"),
        ("fsdp2 folder", "between the renames"),
        ("fsdp2 async folder", "between the renames"),
        ("fsdp2 file", "before it is published"),
    ],
)
def test_a_kill_inside_of_a_save_loses_nothing(undisturbed, strategy: str, die: str, tmp_path: Path) -> None:
    job = Job(tmp_path, strategy=strategy, die=die)
    job.ranks[0].join(60)
    assert job.ranks[0].exitcode == -9
    job.kill()
    assert_same(finish(tmp_path, strategy=strategy), undisturbed)
    assert began(tmp_path) == [0, 2]  # the third save was the one that did not come to its end


@pytest.mark.parametrize(
    ("strategy", "fault"), [("fsdp2 folder", "end_at"), ("fsdp2 folder", "hang_at"), ("zero1", "end_at")]
)
def test_a_rank_that_dies_ends_the_others_with_a_clear_error(undisturbed, strategy, fault: str, tmp_path: Path) -> None:
    job = Job(tmp_path, strategy=strategy, timeout=seconds(4), **{fault: 17})
    job.ranks[0].join(60)
    assert job.ranks[0].exitcode == 1
    job.kill()
    error = (tmp_path / "error-0").read_text()
    assert "Rank 0 lost contact with another rank, which has ended or hangs" in error
    assert "The last complete checkpoint resumes" in error
    resumed = finish(tmp_path, strategy=strategy)
    assert began(tmp_path) == [0, 17]
    if strategy != "zero1":
        assert_same(resumed, undisturbed)
    else:
        assert_same(resumed, undisturbed, rtol=0, atol=1e-6)
