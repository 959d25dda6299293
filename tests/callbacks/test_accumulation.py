"""Accumulation that equals the large batch."""

import torch

from tests.accumulation_cases import errors_under

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-7}


def test_each_step_equals_the_large_batch() -> None:
    for (_, dtype, *how), error in errors_under(["auto"]).items():
        assert error <= LIMITS[dtype], (dtype, how)


def test_each_step_equals_the_large_batch_of_all_ranks(two_processes) -> None:
    for errors in two_processes.run(errors_under, ["ddp", "fsdp2", "zero1"]):
        for (strategy, dtype, *how), error in errors.items():
            assert error <= LIMITS[dtype], (strategy, dtype, how)
