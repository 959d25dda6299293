"""Finding blocks: what counts as one, and what does not."""

import pytest
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from lightning_tricks.functional.blocks import find_blocks
from tests.models import Block, Net


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)


class ResNet(nn.Module):
    """Stages are siblings of one class, but containers: the blocks are what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual(), Residual())
        self.head = nn.Linear(4, 2)


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 1)


class WithMetrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.metrics = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})


class Named(nn.Module):
    """Names its blocks as Hugging Face does, an embedding among them."""

    _no_split_modules = ("Block", "Embeddings")

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList([Block(), Block()])
        self.others = nn.ModuleList([Residual(), Residual()])


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(4, 8), nn.Embedding(4, 8)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Net, ["net.0", "net.1", "net.2"]),
        (ResNet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]),
        (Attributes, ["first", "second"]),
        (WithMetrics, ["blocks.0", "blocks.1"]),
        (Named, ["layers.0", "layers.1"]),
        (lambda: nn.ModuleList([nn.LSTM(2, 2), nn.LSTM(2, 2)]), ["0", "1"]),
        (lambda: nn.Sequential(plain_mlp(), plain_mlp()), ["0", "1"]),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3, enable_nested_tensor=False),
            ["layers.0", "layers.1", "layers.2"],
        ),
        # a block inside of a block: the outermost repeats
        (lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())), ["0", "1"]),
        # two stacks that differ inside are no kind, so their blocks are
        (
            lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(*[Block()] * 1, nn.ReLU())),
            ["0.0", "0.1"],
        ),
    ],
)
def test_auto(build, expected: list[str]) -> None:
    assert list(find_blocks(build())) == expected


@pytest.mark.parametrize("build", [plain_mlp, lambda: nn.Linear(2, 2), lambda: nn.Sequential(Block(), nn.ReLU())])
def test_nothing_repeats(build) -> None:
    with pytest.raises(ValueError, match=r"found no repeated blocks in .*the module types there are"):
        find_blocks(build())


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (Block, ["net.0", "net.1", "net.2"]),
        ("Block", ["net.0", "net.1", "net.2"]),
        ("net.?", ["net.0", "net.1", "net.2", "net.3"]),
        ("*.linear", ["net.0.linear", "net.1.linear", "net.2.linear"]),
        (nn.Linear, ["net.0.linear", "net.1.linear", "net.2.linear", "net.3"]),
        (lambda name, module: name.endswith("1"), ["net.1"]),
        (["net.1", nn.LayerNorm], ["net.0.norm", "net.1", "net.2.norm"]),
        (["auto", "net.3"], ["net.0", "net.1", "net.2", "net.3"]),
    ],
)
def test_selectors(blocks, expected: list[str]) -> None:
    assert list(find_blocks(Net(), blocks)) == expected


def test_shared_block_appears_once() -> None:
    block = Block()
    assert list(find_blocks(nn.ModuleList([block, Block(), block]), Block)) == ["0", "1"]


@pytest.mark.parametrize("blocks", ["encoder.*", nn.Conv2d, lambda name, module: False, [Block, "nowhere"]])
def test_what_matches_nothing_is_an_error_that_lists_the_types(blocks) -> None:
    with pytest.raises(ValueError, match=r"Sequential \(1\), Block \(3\), Linear \(4\)"):
        find_blocks(Net(), blocks)


@pytest.mark.parametrize("blocks", [3, None, [3], nn.Linear(1, 1), int])
def test_what_is_no_selector_is_a_type_error(blocks) -> None:
    with pytest.raises(TypeError, match="expected `blocks` to be"):
        find_blocks(Net(), blocks)


def test_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="empty list"):
        find_blocks(Net(), [])
