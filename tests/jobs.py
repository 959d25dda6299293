"""Jobs of two ranks that are killed: each rank a process of its own, forked from one that has imported everything."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.jobs_worker import work
from tests.pool import CONTEXT, free_port


class Job:
    """Two ranks that train with checkpoints and resume from the last one."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.started = folder / "started"
        self.started.unlink(missing_ok=True)
        port = free_port()
        self.ranks = [CONTEXT.Process(target=work, args=(rank, port, str(folder), options)) for rank in range(2)]
        for rank in self.ranks:
            rank.start()

    def wait_for_batches(self, batches: int, timeout: float = 60.0) -> None:
        """Wait until this run has begun so many batches."""
        deadline = time.monotonic() + timeout
        while not self.started.exists() or self.started.stat().st_size < batches:
            assert time.monotonic() < deadline, "the job did not begin to train"
            assert any(rank.is_alive() for rank in self.ranks), "the job ended before it trained"
            time.sleep(0.005)

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.pid is not None and rank.is_alive():
                os.kill(rank.pid, signal.SIGKILL)
        self.join()

    def join(self, timeout: float = 90.0) -> list[int | None]:
        """Exit codes; whoever has not ended in time is killed."""
        deadline = time.monotonic() + timeout
        for rank in self.ranks:
            rank.join(max(deadline - time.monotonic(), 0.1))
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        return codes


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
