"""The sharding policy, without a process group."""

import weakref

import pytest
import torch
from torch import nn

from lightning_tricks.distributed.policy import ShardingPolicy
from tests.models import Block
from tests.strategy_models import GPT2Module, LlamaModule, Tied


class Model(nn.Module):
    """Blocks, a small stem, and a head larger than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError  # planning runs nothing


def names(policy: ShardingPolicy, module: nn.Module, **options) -> list[str]:
    return [unit.name for unit in policy.plan(module, 2, **options).units]


def test_auto_takes_blocks_and_what_is_as_large() -> None:
    assert names(ShardingPolicy(), Model()) == ["blocks.0", "blocks.1", "blocks.2", "head", ""]


def test_every_parameter_belongs_to_one_unit() -> None:
    for module in (Model(), Tied(), GPT2Module(), LlamaModule()):
        plan = ShardingPolicy().plan(module, 2)
        held = [piece.name for unit in plan.units for piece in unit.parameters] + list(plan.replicated)
        assert sorted(held) == sorted(name for name, _ in module.named_parameters())


def test_tied_weights_stay_with_the_root() -> None:
    plan = ShardingPolicy().plan(Tied(), 2)
    assert [unit.name for unit in plan.units] == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert [piece.name for piece in plan.units[-1].parameters] == ["embedding.weight"]
    assert plan.replicated == ("temperature",)


def test_a_block_that_shares_a_parameter_is_no_unit() -> None:
    model = Model()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    # block 2 is the largest unit left, and the head still is as large as that
    assert names(ShardingPolicy(), model) == ["blocks.2", "head", ""]


def test_a_block_used_twice_is_one_unit() -> None:
    model = Model()
    model.blocks.append(model.blocks[0])
    assert names(ShardingPolicy(), model) == ["blocks.0", "blocks.1", "blocks.2", "head", ""]


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("Block", ["blocks.0", "blocks.1", "blocks.2", ""]),
        (Block, ["blocks.0", "blocks.1", "blocks.2", ""]),
        ("blocks.1", ["blocks.1", ""]),
        (["blocks.0", nn.Embedding, lambda name, _: name == "head"], None),
        (lambda name, module: isinstance(module, nn.Linear), [*(f"blocks.{i}.linear" for i in range(3)), ""]),
    ],
)
def test_units_by_selector(units, expected) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"found no 'Embedding' in Model; .*Linear \(5\).*Block \(3\)"):
            names(ShardingPolicy(units), Model())
    else:
        model = Model()
        expected = expected if not callable(units) or units is Block else ["stem", *expected[:-1], "head", ""]
        assert names(ShardingPolicy(units), model) == expected


def test_a_policy_that_splits_tied_weights_names_both_modules() -> None:
    with pytest.raises(ValueError, match=r"embedding.weight.*embedding \(unit embedding\).*head \(unit head\)"):
        ShardingPolicy(["embedding", "head"]).plan(Tied(), 2)
    with pytest.raises(ValueError, match=r"embedding \(unit embedding\) and head \(unit root\)"):
        ShardingPolicy("embedding").plan(Tied(), 2)


def test_minimum_size_leaves_small_modules_to_the_root() -> None:
    model = nn.ModuleList([Block(4), Block(8), Block(4), Block(8)])
    assert names(ShardingPolicy(), model) == ["0", "1", "2", "3", ""]
    assert names(ShardingPolicy(min_parameters=50), model) == ["1", "3", ""]


def test_frozen_parameters_can_be_left_out() -> None:
    model = Model()
    model.stem.requires_grad_(False)
    plan = ShardingPolicy(ignore="frozen").plan(model, 2)
    assert plan.ignored == ("stem.weight", "stem.bias")
    assert plan.units[-1].parameters == ()
    assert ShardingPolicy(ignore="stem").plan(model, 2) == plan
    with pytest.raises(ValueError, match=r"expected `ignore` to name frozen modules, got head.*head.weight is trained"):
        ShardingPolicy(ignore="head").plan(model, 2)


def test_only_the_last_unit_and_the_root_stay_gathered() -> None:
    plan = ShardingPolicy().plan(Model(), 2)
    assert [unit.reshards for unit in plan.units] == [True, True, True, False, False]
    plan = ShardingPolicy(reshard_last=True).plan(Model(), 2)
    assert [unit.reshards for unit in plan.units] == [True, True, True, True, False]


def test_without_a_root_every_child_is_a_unit() -> None:
    units = ShardingPolicy().plan(Model(), 2, root=False).units
    assert [unit.name for unit in units] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(unit.reshards for unit in units)
    with pytest.raises(ValueError, match=r"got scale, which belongs to no such module of Direct"):
        ShardingPolicy().plan(Direct(), 2, root=False)

    with pytest.raises(ValueError, match=r"got scales.0, which belongs to no such module of InAList"):
        ShardingPolicy().plan(InAList(), 2, root=False)


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))  # is kept whole, wherever it lies
        self.scale = nn.Parameter(torch.ones(3))


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(3)])


def test_a_plan_keeps_no_parameter_alive() -> None:
    model = Model()
    reference = weakref.ref(model.head.weight)
    plan = ShardingPolicy().plan(model, 2)
    model.head.weight = nn.Parameter(torch.zeros(2))
    assert reference() is None
    assert plan.units[3].num_parameters == 900


def test_nested_units_come_inner_first() -> None:
    plan = ShardingPolicy().plan(nn.Sequential(nn.ModuleDict({"a": Model()}), nn.Linear(2, 2)), 2, root=False)
    assert [unit.name for unit in plan.units] == [
        "0.a.blocks.0",
        "0.a.blocks.1",
        "0.a.blocks.2",
        "0.a.head",
        "0.a",
        "1",
    ]
    assert [piece.name for piece in plan.units[-2].parameters] == ["0.a.stem.weight", "0.a.stem.bias"]


def test_full_precision_modules_are_units_of_their_own() -> None:
    model = nn.Sequential(*(Block(batchnorm=True) for _ in range(2)))
    plan = ShardingPolicy().plan(model, 2, full_precision=(nn.BatchNorm1d,))
    assert [(unit.name, unit.full_precision) for unit in plan.units] == [
        ("0.norm", True), ("0", False), ("1.norm", True), ("1", False), ("", False),
    ]  # fmt: skip


@pytest.mark.parametrize("shard_size", [1, 2, 3, 4, 7])
def test_bytes_of_ranks_are_those_of_the_chunks(shard_size: int) -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    plan = ShardingPolicy().plan(model, shard_size)
    for unit in plan.units:
        for rank in range(shard_size):
            chunks = [parameters[piece.name].chunk(shard_size) for piece in unit.parameters]
            expected = sum(4 * c[rank].numel() for c in chunks if rank < len(c))
            assert unit.bytes_of_rank(shard_size, rank) == expected


def test_the_plan_prints_a_table() -> None:
    assert str(ShardingPolicy().plan(Model(), 4)).splitlines() == [
        "unit        parameters  bytes a rank",
        "blocks.0-2  3 x 88      3 x 88",
        "head        900         900",
        "root        24          24",
        "total       1,188       1,188 (4 ranks)",
    ]
    model = Tied()
    model.embedding.requires_grad_(False)
    lines = str(ShardingPolicy(ignore="frozen").plan(model, 2)).splitlines()
    assert lines[-2:] == ["left out: embedding.weight", "replicated: temperature"]


def test_planning_needs_no_memory() -> None:
    with torch.device("meta"):
        model = Model()
    assert str(ShardingPolicy().plan(model, 4)) == str(ShardingPolicy().plan(Model(), 4))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: ShardingPolicy(3), TypeError, "expected `blocks`"),
        (lambda: ShardingPolicy([]), ValueError, "at least one kind"),
        (lambda: ShardingPolicy(min_parameters=-1), ValueError, "`min_parameters` to be at least 0, got -1"),
        (lambda: ShardingPolicy(min_parameters=2.5), TypeError, "`min_parameters` to be an int, got 2.5"),
        (lambda: ShardingPolicy(ignore=7), TypeError, "got 7"),
    ],
)
def test_bad_arguments(build, error, words) -> None:
    with pytest.raises(error, match=words):
        build()


def test_equal_policies_are_equal() -> None:
    assert ShardingPolicy("Block") == ShardingPolicy("Block")
    assert ShardingPolicy("Block") != ShardingPolicy("Block", min_parameters=1)
