"""Segments: how long they are, where they end, and that what is held grows with the square root of the depth."""

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import apply_activation_checkpointing, checkpointed_block
from lightning_tricks.functional.segments import best_segment_length
from tests.models import Block


class MLPBlock(nn.Module):
    """Saves its input and five tensors of its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.nn.functional.gelu(self.up(x))))


class Iterated(nn.Module):
    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(MLPBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    """The most saved bytes at once in a step."""
    with measure_saved_activations(leave_out=[x]) as saved:
        model(x).sum().backward()
    return saved.peak_bytes


@pytest.mark.parametrize("num_blocks", [16, 64, 100])
@pytest.mark.parametrize("block_bytes", [1, 6, 30])
def test_length_is_the_best_but_for_whole_numbers(num_blocks: int, block_bytes: int) -> None:
    """Against a slow search over lengths, whole or not: inputs between the passes, and one segment's activations."""
    best = min(num_blocks / length + length * block_bytes for length in torch.linspace(1, num_blocks, 4096).tolist())
    length = best_segment_length(num_blocks, 1, block_bytes)
    assert num_blocks / length + length * block_bytes <= best + block_bytes  # one block more at most
    assert length == math.ceil(math.sqrt(num_blocks / block_bytes))


def test_length_stays_in_its_bounds() -> None:
    assert best_segment_length(8, 1, 0) == 8
    assert best_segment_length(8, 1, 1e9) == 1
    assert best_segment_length(8, 1e9, 1) == 8


def sizes_of_segments(model: Iterated, x: Tensor) -> list[int]:
    """How many blocks each segment has, in a step."""
    seen: list[weakref.ref] = []
    sizes: list[int] = []
    chain = checkpointed_block(model.blocks[0]).chain

    def note(*_) -> None:
        segment = chain._segment()
        if not seen or seen[-1]() is not segment:
            seen.append(weakref.ref(segment))
            sizes.append(0)
        sizes[-1] += 1

    handles = [block.register_forward_hook(note) for block in model.blocks]
    output = model(x)
    for handle in handles:
        handle.remove()
    output.sum().backward()
    return sizes


def test_segments_of_a_loop_that_the_user_wrote() -> None:
    model = Iterated(7)
    apply_activation_checkpointing(model, mode="segments", segment_length=3)
    assert sizes_of_segments(model, torch.randn(4, 16)) == [3, 3, 1]


def test_measured_length_follows_from_the_sizes() -> None:
    model, x = Iterated(24), torch.randn(64, 16)
    apply_activation_checkpointing(model, mode="segments")
    model(x).sum().backward()  # measures
    # A block saves its input (1), up's output and gelu's (2 + 2), and tanh's (1).
    assert checkpointed_block(model.blocks[0]).chain.length == math.ceil(math.sqrt(24 / 6)) == 2
    assert sizes_of_segments(model, x) == [2] * 12


class Scales(Iterated):
    """Each block is given a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * 0.5)
        return x


class WritesBetween(Iterated):
    """Each block is given what the one before returned, written into."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5)
        return x


@pytest.mark.parametrize("kind", [Scales, WritesBetween])
def test_falls_back_to_one_block_a_segment(kind: type[Iterated]) -> None:
    model = kind(4)
    apply_activation_checkpointing(model, mode="segments", segment_length=4)
    assert sizes_of_segments(model, torch.randn(4, 16)) == [1, 1, 1, 1]


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x)) * torch.sin(self.other(memory))


class TwoStreams(nn.Module):
    """An encoder's output goes into each block of a decoder, as in T5: it depends on no block of the segment."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Cross() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        for layer in self.layers:
            x = layer(x, memory=memory)
        return x


def test_what_every_block_is_given_does_not_end_a_segment() -> None:
    model = TwoStreams()
    apply_activation_checkpointing(model, Cross, mode="segments", segment_length=4)
    output = model(torch.randn(3, 8))
    assert checkpointed_block(model.layers[0]).chain._segment().num_blocks == 4
    output.sum().backward()


def test_sequential_without_repeated_blocks_is_cut_too() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 1))
    handle = apply_activation_checkpointing(model, mode="segments", segment_length=2)
    assert handle.wrapped == ["0", "1", "2", "3", "4"]
    model(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_held_bytes_grow_with_the_square_root_of_the_depth() -> None:
    x = torch.randn(256, 16)

    def exponent(**options) -> float:
        held = []
        for depth in (16, 128):
            model = Iterated(depth)
            if options:
                apply_activation_checkpointing(model, **options)
                model(x).sum().backward()  # measures its blocks
            held.append(peak_bytes(model, x))
        return math.log2(held[1] / held[0]) / 3

    assert exponent(mode="segments") <= 0.6
    assert exponent() == pytest.approx(1.0, abs=0.02)
    assert exponent(mode="blocks") > 0.7


@pytest.mark.parametrize("goes_back", [True, False])
def test_nothing_is_held_when_the_graph_is_gone(goes_back: bool) -> None:
    model = Iterated(6)
    apply_activation_checkpointing(model, mode="segments", segment_length=3)
    output = model(torch.randn(4, 16))
    segment = weakref.ref(checkpointed_block(model.blocks[0]).chain._segment())
    assert segment() is not None
    if goes_back:
        output.sum().backward()
    del output
    assert segment() is None


def test_each_block_is_recomputed_once() -> None:
    model = Iterated(6)
    apply_activation_checkpointing(model, mode="segments", segment_length=3)
    calls = [0] * 6
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    model(torch.randn(4, 16)).sum().backward()
    assert calls == [2] * 6


def test_compiled_parent_is_refused_at_the_place() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    apply_activation_checkpointing(model, mode="segments")
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="'0' is recomputed in a segment, which a compiled parent would not see"):
        compiled(torch.randn(2, 8))


def test_write_into_what_is_saved_is_noticed_in_what_is_recomputed() -> None:
    """A block that is an error without segments is one with them, not a wrong gradient."""

    class WritesWhatIsSaved(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(self.linear(x))
            return torch.sin(y.mul_(2))

    model = nn.Sequential(WritesWhatIsSaved(), WritesWhatIsSaved())
    apply_activation_checkpointing(model, mode="segments", segment_length=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 8)).sum().backward()
