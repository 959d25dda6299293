"""Recompute several blocks from one input: activation memory that grows with the square root of the depth.

N blocks are cut into segments of s. The forward pass keeps the input of each segment's first block, the backward pass
recomputes a segment as a whole when it needs the first of its activations. N/s inputs are held, and while a segment is
in its backward the activations of s blocks: least in sum at ``s = sqrt(N * input bytes / block bytes)``.

The forward that runs the blocks may be anybody's. Nothing of it is replaced: while a block runs, what autograd saves is
dropped and a ticket kept in its place (`torch.autograd.graph.saved_tensors_hooks`). A block that is given what the
block before it returned, the very same tensor, joins that block's segment; any other begins a new one.

Reference:
    Chen, Xu, Zhang, Guestrin (2016), "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 4.2.

Differs:
    The paper takes s = sqrt(N), which is best where a block saves no more than its input; the length here follows from
    measured bytes, rounded up, since of two lengths that cost alike the longer holds less between the passes.

Cost:
    One more forward pass of the blocks, as for checkpointing each of them. Between the passes N/s inputs and the random
    state of each block (5 kB, and that of its accelerator).

Sharding:
    Each rank recomputes its own. FSDP2 hands each of its units a tensor of its own, so that a segment ends where a unit
    does.
"""

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten  # torch 2.13: as in replay.py

from lightning_tricks.functional.replay import Replay, Surroundings, tensors_of
from lightning_tricks.functional.saved_tensors import SavedTensor, is_parameter, storages_of

__all__ = ["Segment", "SegmentChain", "best_segment_length"]


def best_segment_length(num_blocks: int, input_bytes: float, block_bytes: float) -> int:
    """Return how many blocks a segment has so that inputs held and activations recomputed are least in sum.

    Args:
        num_blocks: N, 1 or more.
        input_bytes: of one block's input.
        block_bytes: what one block saves for its backward.

    Returns:
        ``ceil(sqrt(num_blocks * input_bytes / block_bytes))``, from 1 to `num_blocks`.

    Example:
        >>> best_segment_length(64, input_bytes=4, block_bytes=24), best_segment_length(64, 1, 1)
        (4, 8)
    """
    if block_bytes <= 0:
        return num_blocks
    length = math.ceil(math.sqrt(num_blocks * input_bytes / block_bytes) - 1e-9)
    return min(max(length, 1), num_blocks)


class SegmentChain:
    """The segments of a model's blocks, told apart while they run.

    Args:
        num_blocks: how many blocks there are.
        length: the most blocks in a segment, or ``"auto"``: measured as the blocks run for the first time.
    """

    def __init__(self, num_blocks: int, length: int | Literal["auto"]) -> None:
        self.num_blocks = num_blocks
        self.fixed_length = None if length == "auto" else length
        self._measured = 0  # blocks that have run
        self._input_bytes = 0
        self._block_bytes = 0
        self._forget()

    def _forget(self) -> None:
        self._segment: weakref.ref[Segment] | None = None
        self._outputs: list[tuple[weakref.ref[Tensor], int]] = []  # of the last block, with their versions

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: not what is going on."""
        return {**vars(self), "_segment": None, "_outputs": []}

    @property
    def length(self) -> int:
        """The most blocks in a segment, as far as is known."""
        if self.fixed_length is not None:
            return self.fixed_length
        return best_segment_length(self.num_blocks, self._input_bytes, self._block_bytes)

    def run(self, replay: Replay, values: tuple[Any, ...]) -> Any:
        """Run a block for the first time, and keep what is needed to run it again.

        Args:
            replay: the block.
            values: its arguments.

        Returns:
            What the block returns.
        """
        outputs = [reference() for reference, version in self._outputs if _is_unchanged(reference(), version)]
        segment = None if self._segment is None else self._segment()
        if segment is None or segment.num_blocks >= self.length or not segment.can_take(values, outputs):
            segment, outputs = Segment(), []
        learns = self.fixed_length is None and self._measured < self.num_blocks
        saved: dict[Any, int] = {}
        output = segment.run(replay, values, outputs, saved if learns else None)
        if learns:
            self._measured += 1
            self._input_bytes += sum(one.nbytes for one in _first_moving(values))
            self._block_bytes += sum(saved.values())
        self._segment = weakref.ref(segment)
        self._outputs = [(weakref.ref(one), one._version) for one in tensors_of(output)]
        return output


class _Ticket:
    """Stands in the autograd graph for a tensor that the backward pass will recompute."""

    def __init__(self, segment: "Segment") -> None:
        self.segment = segment


@dataclass
class _Call:
    """One block of a segment, and how to come by its arguments again.

    Args:
        replay: the block.
        surroundings: the random states and autocast settings it ran under.
        leaves: its arguments, None where a tensor was.
        spec: their structure.
        sources: for each tensor, its place among the leaves, and among the last block's outputs or the kept tensors.
        kept: an autograd node that holds the tensors that no block of the segment made.
    """

    replay: Replay
    surroundings: Surroundings
    leaves: list[Any]
    spec: Any
    sources: list[tuple[int, bool, int]]
    kept: Tensor | None

    def run(self, outputs: list[Tensor]) -> list[Tensor]:
        kept = () if self.kept is None else self.kept.grad_fn.saved_tensors  # type: ignore[union-attr]
        leaves = list(self.leaves)
        for place, is_output, index in self.sources:
            leaves[place] = outputs[index] if is_output else kept[index]
        with self.surroundings.restored():
            return tensors_of(self.replay(*tree_unflatten(leaves, self.spec)))


class _Keep(torch.autograd.Function):
    """Holds tensors as autograd does: it notices writes to them, and hooks that see saved tensors see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("what holds the tensors is no part of a loss")


class _Done(BaseException):
    """Everything that was asked for is recomputed. Not an Exception, which a forward may catch."""


class Segment:
    """Blocks that are recomputed together.

    Args:
        timed: what to run each recomputation in.
    """

    def __init__(self, timed: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._calls: list[_Call] = []
        self._tickets: list[weakref.ref[_Ticket]] = []
        self._looks: list[tuple[Any, ...]] = []  # shape, dtype and device of each saved tensor
        self._recomputed: weakref.WeakKeyDictionary[_Ticket, SavedTensor] = weakref.WeakKeyDictionary()
        self._filled = 0
        self._kept: set[int] = set()  # identities of the tensors that the first block was given
        self._timed = timed

    @property
    def num_blocks(self) -> int:
        """How many blocks it has."""
        return len(self._calls)

    def can_take(self, values: Any, outputs: list[Tensor | None]) -> bool:
        """Whether a block with these arguments follows the last one.

        Args:
            values: its arguments.
            outputs: what the last block returned and nobody wrote to since.
        """
        ours = {id(output) for output in outputs}
        tensors = tensors_of(values)
        # What depends on the segment's blocks by another way would be kept by the graph that it belongs to, for ever.
        return any(id(one) in ours for one in tensors) and all(
            id(one) in ours or id(one) in self._kept or one.grad_fn is None for one in tensors
        )

    def run(
        self, replay: Replay, values: tuple[Any, ...], outputs: list[Tensor | None], saved: dict[Any, int] | None
    ) -> Any:
        """Run a block and drop what autograd saves.

        Args:
            replay: the block.
            values: its arguments.
            outputs: what the last block of the segment returned.
            saved: takes the bytes of each storage that is saved, parameters left out; None to not look.
        """
        leaves, spec = tree_flatten(values)
        places = {id(output): index for index, output in enumerate(outputs)}
        sources: list[tuple[int, bool, int]] = []
        keep: list[Tensor] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                is_output = id(leaf) in places
                sources.append((place, is_output, places[id(leaf)] if is_output else len(keep)))
                if not is_output:
                    keep.append(leaf)
        if not self._calls:
            self._kept = {id(one) for one in keep}
        anchor = torch.empty((), requires_grad=True)
        kept = _Keep.apply(anchor, *keep) if keep else None  # type: ignore[no-untyped-call]
        without = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._calls.append(_Call(replay, Surroundings(values), without, spec, sources, kept))
        del leaves, keep

        def pack(tensor: Tensor) -> _Ticket:
            if saved is not None and not is_parameter(tensor):
                saved.update(storages_of(tensor))
            ticket = _Ticket(self)
            self._tickets.append(weakref.ref(ticket))
            self._looks.append((tensor.shape, tensor.dtype, tensor.device))
            return ticket

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            output = replay(*values)
        replay.containers.clear()  # each recomputation gets fresh ones
        return output

    def value(self, ticket: _Ticket) -> Tensor:
        """Return the tensor that a ticket stands for, recomputed.

        Args:
            ticket: one of this segment's.
        """
        if ticket not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(ticket).value()

    def _recompute(self) -> None:
        self._filled = 0
        outputs: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(self._fill, SavedTensor.value)
        try:
            with self._timed(), torch.enable_grad(), hooks:
                for call in self._calls:
                    outputs = call.run(outputs)
        except _Done:
            return
        raise RuntimeError(
            f"{self._names()} saved {len(self._tickets)} tensors in the forward pass and {self._filled} when it was "
            "recomputed: expected a forward that does the same each time. Do not checkpoint these blocks"
        )

    def _fill(self, tensor: Tensor) -> SavedTensor:
        if self._filled < len(self._tickets):
            index, self._filled = self._filled, self._filled + 1
            looks = (tensor.shape, tensor.dtype, tensor.device)
            if looks != self._looks[index]:
                raise RuntimeError(
                    f"{self._names()} saved a tensor of {self._looks[index]} in the forward pass and one of {looks} "
                    "when it was recomputed: expected a forward that does the same each time. Do not checkpoint these "
                    "blocks"
                )
            ticket = self._tickets[index]()
            if ticket is not None:  # else its part of the graph is gone already
                self._recomputed[ticket] = SavedTensor(tensor)
        if self._filled == len(self._tickets):
            raise _Done
        return SavedTensor(tensor)

    def _names(self) -> str:
        return ", ".join(repr(call.replay.memory.name) for call in self._calls)


def _unpack(ticket: _Ticket) -> Tensor:
    if torch.is_grad_enabled():  # in a backward pass only where a graph of it is asked for
        raise RuntimeError(
            f"{ticket.segment._names()} are recomputed as a segment, which a backward pass with create_graph=True "
            '(double backward, a gradient penalty) cannot go through. Use ActivationCheckpointing(mode="blocks") there'
        )
    return ticket.segment.value(ticket)


def _is_unchanged(output: Tensor | None, version: int) -> bool:
    return output is not None and output._version == version


def _first_moving(values: Any) -> list[Tensor]:
    """The block's input proper: the first tensor that gradients flow through, else the first tensor."""
    tensors = tensors_of(values)
    return ([one for one in tensors if one.requires_grad] or tensors)[:1]
