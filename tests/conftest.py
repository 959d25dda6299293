import os
from collections.abc import Iterator

import pytest
import torch

from tests.pool import ProcessPool

torch.set_num_threads(1)  # tiny models: more threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so in the processes that tests start


@pytest.fixture(scope="session")
def one_process() -> Iterator[ProcessPool]:
    """A group of one, which distributed strategies need too, away from the process of the tests."""
    pool = ProcessPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_processes() -> Iterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_processes() -> Iterator[ProcessPool]:
    pool = ProcessPool(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
