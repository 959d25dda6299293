"""Training under each strategy equals one process on the same global batch."""

import pytest

from tests.models import assert_same
from tests.strategy_cases import VARIANTS, expected, trained_weights

ALL = [(variant, optimizer) for variant in VARIANTS for optimizer in ("momentum", "adamw")]
HALF = [(variant, ("momentum", "adamw")[i % 2]) for i, variant in enumerate(VARIANTS)]
# On four ranks what the number of ranks bears on: each optimizer, the groups, the units, and all tricks at once.
MOST = [pair for pair in HALF if "by" not in pair[0] and pair[0] != "Lightning's clipping"]
FEW = [("all at once", "momentum"), ("frozen", "adamw"), ("GPT-2", "adamw"), ("Llama", "adamw")]


@pytest.mark.parametrize(
    ("strategy", "pairs"), [("fsdp2", ALL), ("zero1", HALF), ("zero2", HALF), ("zero3", FEW), ("fsdp2_offload", FEW)]
)
def test_two_processes_equal_one(strategy: str, pairs: list[tuple[str, str]], two_processes) -> None:
    check(two_processes, strategy, pairs)


@pytest.mark.parametrize(
    ("strategy", "pairs"), [("fsdp2", FEW), ("hsdp 2 x 2", MOST), ("zero1", MOST), ("zero2", FEW), ("zero3", MOST)]
)
def test_four_processes_equal_one(strategy: str, pairs: list[tuple[str, str]], four_processes) -> None:
    check(four_processes, strategy, pairs)


def check(pool, strategy: str, pairs: list[tuple[str, str]]) -> None:
    ranks = pool.run(trained_weights, strategy, pairs, timeout=240)
    for pair in pairs:
        for rank in ranks:
            assert_same(rank[pair], ranks[0][pair])
        try:
            assert_same(ranks[0][pair], expected(*pair), rtol=0, atol=1e-6)
        except AssertionError as error:
            raise AssertionError(f"{strategy}, {pair}: {error}") from error
