"""A pool of processes that share a gloo group and stay up, so that a two-process test costs no start of its own.

Each process looks to Lightning as if torchrun had started it. A function is sent by reference, with its arguments, and
runs on every rank at once; what it returns comes back by rank.
"""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class ProcessPool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Run `function` on every rank and return its results in the order of ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.world_size
        failure = None
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                self.close()
                raise failure or TimeoutError(f"rank {rank} gave no answer within {timeout} s")
            done, results[rank] = pipe.recv()
            if not done and failure is None:
                failure = AssertionError(f"rank {rank} failed:\n{results[rank]}")
                deadline = min(deadline, time.monotonic() + 10.0)  # the others may wait for it for ever
        if failure is not None:
            self.close()  # whatever it left in the group would reach the next test
            raise failure
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _work(rank: int, world_size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
    )
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
