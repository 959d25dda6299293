"""What sharding costs and saves, by count."""

import pytest

from tests import cost_cases as cases

KINDS = ("parameters", "gradients", "optimizer state")


@pytest.mark.parametrize(
    ("strategy", "halves"),
    [("fsdp2", KINDS), ("zero3", KINDS), ("zero2", KINDS), ("zero1", ("optimizer state",)), ("ddp", ())],
)
def test_bytes_of_a_rank(strategy: str, halves: tuple[str, ...], two_processes) -> None:
    total = sum(parameter.numel() for parameter in cases.Model().parameters()) * 4
    for rank in two_processes.run(cases.costs, strategy):
        for kind in KINDS:
            whole = total * (2 if kind == "optimizer state" else 1)  # AdamW has two moments
            assert rank[kind] == pytest.approx(whole / 2 if kind in halves else whole, rel=0.02)
        if rank["units"]:
            assert rank["planned"] == rank["parameters"]


def test_bytes_of_hybrid_sharding_are_those_of_a_group(four_processes) -> None:
    total = sum(parameter.numel() for parameter in cases.Model().parameters()) * 4
    for rank in four_processes.run(cases.costs, "hsdp", replicate_size=2):
        assert rank["parameters"] == pytest.approx(total / 2, rel=0.02)
        assert rank["optimizer state"] == pytest.approx(total, rel=0.02)


def test_three_collectives_a_unit_or_two(two_processes) -> None:
    """Two gathers and a reduce-scatter of each unit; one gather of those that stay gathered."""
    for strategy in ("fsdp2", "zero2"):
        for rank in two_processes.run(cases.costs, strategy):
            units = rank["units"] - 1  # the root has no parameters of its own here
            once = rank["gathered once"] - 1 if strategy == "fsdp2" else units
            assert units == 8
            assert rank["collectives"] == [(2 * units - once, units)] * 6


@pytest.mark.parametrize("ours", [False, True])
def test_accumulation_reduces_once_a_window(ours: bool, two_processes) -> None:
    for rank in two_processes.run(cases.costs, "fsdp2", accumulation=3, ours=ours):
        assert [scatters for _, scatters in rank["collectives"]] == [0, 0, 8, 0, 0, 8]


def test_parts_of_a_batch_are_reduced_together(two_processes) -> None:
    for scatters in two_processes.run(cases.scatters_of_parts):
        assert scatters == [0, 0, 8, 0, 0, 8]
