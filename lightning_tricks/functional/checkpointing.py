"""Activation checkpointing of an unmodified model: recompute a block's activations in the backward pass.

The forward pass of a checkpointed block keeps the block's inputs only; the backward pass runs the block again to get
what it needs. N blocks then hold N inputs and the activations of one block, instead of the activations of N. Blocks can
be recomputed one by one, in segments (see `segments`), or but for their expensive operations (see
`selective_checkpointing`); and which of them are can follow from a budget (see `activation_budget`).

Reference:
    Chen, Xu, Zhang, Guestrin (2016), "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 4.

Differs:
    Built on `torch.utils.checkpoint` in its non-reentrant form, which keeps random state and autocast alike in both
    passes. In three points this goes further. Names, types and state-dict keys stay, since only the instance's
    `forward` is replaced. Buffers that a block writes (BatchNorm's statistics, spectral norm's vectors) are written
    once: the recomputation sees them as the forward pass saw them, and its own writes are thrown away (pytorch#96136).
    A fresh Hugging Face cache is not filled, since the recomputation would fill it twice.

Cost:
    One more forward pass of the blocks: at most a third more FLOPs, on a GPT 15 to 21% (the recomputation stops as
    soon as it has what is asked for). A copy of each buffer that a block writes, for each block, until its backward.

Sharding:
    Applied before sharding or on sharded blocks, the collectives of a block stay outside of what is recomputed.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry  # torch 2.13: no public way to ask
from torch.utils.checkpoint import checkpoint

from lightning_tricks.functional.activation_budget import ActivationBudget
from lightning_tricks.functional.blocks import BlockSelector, find_blocks, repeated_blocks, validate_selector
from lightning_tricks.functional.patching import Patch, patch_
from lightning_tricks.functional.replay import BlockMemory, Replay, training_flags, without_cache
from lightning_tricks.functional.segments import SegmentChain
from lightning_tricks.functional.selective_checkpointing import selective_contexts

__all__ = [
    "MODES",
    "ActivationCheckpointingHandle",
    "CheckpointedBlock",
    "Mode",
    "apply_activation_checkpointing",
    "checkpointed_block",
    "checkpointed_forward",
]

Mode = Literal["blocks", "segments", "selective"]
MODES: tuple[Mode, ...] = ("blocks", "segments", "selective")
"""How `apply_activation_checkpointing` may recompute."""


@dataclass
class ActivationCheckpointingHandle:
    """What was wrapped, and the way back.

    Attributes:
        wrapped: names of the blocks that are now checkpointed.
        already: names of matching blocks that somebody else had checkpointed, left alone.
        budget: what says which blocks are checkpointed, None where all wrapped ones are.
    """

    wrapped: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    budget: ActivationBudget | None = None
    _before: set[nn.Module] = field(default_factory=set, repr=False)
    _module: nn.Module | None = field(default=None, repr=False)
    _patches: list[Patch] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Give every block its own `forward` back, copies of blocks in the module too. A second call does nothing."""
        for patch in self._patches:
            patch.remove()
        for part in self._module.modules() if self._patches and self._module else ():
            memory = checkpointed_block(part)
            if memory is not None and part not in self._before:  # a deep copy, made while the original was checkpointed
                del part.forward
                if memory.forward is not None:
                    part.forward = memory.forward
        self._patches.clear()


def apply_activation_checkpointing(
    module: nn.Module,
    blocks: BlockSelector | Sequence[BlockSelector] = "auto",
    *,
    mode: Mode = "blocks",
    every: int = 1,
    segment_length: int | Literal["auto"] = "auto",
    matmul_share: float = 0.5,
    with_budget: bool = False,
) -> ActivationCheckpointingHandle:
    """Checkpoint blocks of a model, in place. Without gradients (evaluation) a block runs as it always did.

    Args:
        module: the model to edit.
        blocks: which modules, as for `find_blocks`; in segments ``"auto"`` also takes the children of an
            `nn.Sequential` where nothing repeats.
        mode: ``"blocks"`` recomputes each block from its input; ``"segments"`` several from the first one's;
            ``"selective"`` each block but for its attention and a share of its matrix multiplications.
        every: checkpoint each n-th of them only, from the first; 1 or more.
        segment_length: the most blocks in a segment, 1 or more; ``"auto"`` measures what is best.
        matmul_share: the share of matrix multiplications that ``"selective"`` keeps, from 0 to 1.
        with_budget: whether the handle's `budget` says which blocks are checkpointed; all, as long as it does not.

    Returns:
        A handle that names the wrapped blocks; its `remove()` undoes the edit.

    Raises:
        TypeError: `blocks` is not a selector.
        ValueError: nothing matches, or a number is out of its range. While running, a RuntimeError for a block that
            writes into its input, and with segments in a compiled parent and in a double backward.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        >>> handle = apply_activation_checkpointing(model)
        >>> handle.wrapped
        ['0', '1', '2']
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> handle.remove()
    """
    if every < 1:
        raise ValueError(f"expected `every` to be 1 or more, got {every}")
    if mode not in MODES:
        raise ValueError(f"expected `mode` to be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if segment_length != "auto" and segment_length < 1:
        raise ValueError(f'expected `segment_length` to be 1 or more, or "auto", got {segment_length}')
    if not 0 <= matmul_share <= 1:
        raise ValueError(f"expected `matmul_share` to be from 0 to 1, got {matmul_share}")
    handle = ActivationCheckpointingHandle(_module=module)
    handle._before.update(part for part in module.modules() if checkpointed_block(part) is not None)
    done = _already_checkpointed(module)
    found = _blocks_of_segments(module, blocks) if mode == "segments" else find_blocks(module, blocks)
    chosen = {name: block for name, block in list(found.items())[::every] if block not in done}
    handle.already += [name for name, block in found.items() if block in done]
    chain = SegmentChain(len(chosen), segment_length) if mode == "segments" and chosen else None
    handle.budget = ActivationBudget(list(chosen)) if with_budget else None
    for name, block in chosen.items():
        memory = CheckpointedBlock(
            name,
            vars(block).get("forward"),
            chain=chain,
            matmul_share=matmul_share if mode == "selective" else None,
            budget=handle.budget,
        )
        run = functools.partial(checkpointed_forward, block, memory)
        handle._patches.append(patch_(block, "forward", run))
        handle.wrapped.append(name)
    return handle


@dataclass
class CheckpointedBlock(BlockMemory):
    """How a block is checkpointed.

    Args:
        chain: of its segments, None where it is recomputed alone.
        matmul_share: of what is kept, None where everything is recomputed.
        overwritten: the operations whose results the block writes into, by its training flags.
        budget: what says whether it is checkpointed, None where it always is.
    """

    chain: SegmentChain | None = None
    matmul_share: float | None = None
    overwritten: dict[tuple[bool, ...], set[int]] = field(default_factory=dict)
    budget: ActivationBudget | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the block takes part in a measurement now."""
        return self.budget is not None and self.budget.measurement is not None


def checkpointed_block(module: nn.Module) -> CheckpointedBlock | None:
    """Return how a module is checkpointed, None if it is not, or not by this package.

    Args:
        module: any module.

    Example:
        >>> checkpointed_block(nn.Linear(2, 2)) is None
        True
    """
    forward = vars(module).get("forward")
    if not isinstance(forward, functools.partial) or forward.func is not checkpointed_forward:
        return None
    memory = forward.args[1]
    assert isinstance(memory, CheckpointedBlock)
    return memory


def checkpointed_forward(block: nn.Module, memory: CheckpointedBlock, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block as it is checkpointed: what stands in the place of its `forward`.

    Args:
        block: the block.
        memory: how it is checkpointed.
        args: for its own `forward`.
        kwargs: likewise.

    Returns:
        What that returns.

    Example:
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> checkpointed_forward(nn.Tanh(), CheckpointedBlock("tanh"), x).shape
        torch.Size([1, 2])
    """
    forward = memory.forward_of(block)
    budget = memory.budget
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if budget is not None and budget.measurement is None and memory.name not in budget.chosen:
        return forward(*args, **kwargs)
    args = tuple(without_cache(block, value) for value in args)
    kwargs = {key: without_cache(block, value) for key, value in kwargs.items()}
    recomputed = functools.partial(checkpoint, use_reentrant=False)
    if memory.matmul_share is not None:
        recomputed = functools.partial(recomputed, context_fn=_selective(block, memory, memory.matmul_share))
    if torch.compiler.is_compiling():  # the compiler writes buffers once by itself
        if memory.chain is not None:
            _refuse_compiled_parent(memory.name)
        return recomputed(functools.partial(forward, **kwargs), *args)
    # Keywords travel by position: none is taken for an option of `checkpoint`, and their tensors are saved as those of
    # the others are, so that autograd notices when one is written to before the recomputation.
    replay, values = Replay(block, memory, forward, tuple(kwargs)), (*args, *kwargs.values())
    if budget is not None and budget.measurement is not None:
        return budget.measurement.run(replay, values)
    if memory.chain is not None:
        return memory.chain.run(replay, values)
    return recomputed(replay, *values)


def _selective(block: nn.Module, memory: CheckpointedBlock, matmul_share: float) -> Any:
    if torch.compiler.is_compiling():
        return functools.partial(selective_contexts, matmul_share, set(), False)
    modes = training_flags(block)
    is_first = modes not in memory.overwritten
    return functools.partial(selective_contexts, matmul_share, memory.overwritten.setdefault(modes, set()), is_first)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiled_parent(name: str) -> None:
    raise RuntimeError(
        f"{name!r} is recomputed in a segment, which a compiled parent would not see. Compile the blocks instead "
        '(ModelCompilation), or use ActivationCheckpointing(mode="blocks")'
    )


def _blocks_of_segments(module: nn.Module, blocks: BlockSelector | Sequence[BlockSelector]) -> dict[str, nn.Module]:
    """As `find_blocks`; where nothing repeats, ``"auto"`` takes the children of the longest `nn.Sequential`."""
    validate_selector(blocks)
    if blocks != "auto" or repeated_blocks(module):
        return find_blocks(module, blocks)
    sequences = [(name, one) for name, one in module.named_modules() if isinstance(one, nn.Sequential) and len(one) > 1]
    if not sequences:
        return find_blocks(module, blocks)  # which says what there is
    name, longest = max(sequences, key=lambda pair: len(pair[1]))
    return {f"{name}.{child}".removeprefix("."): one for child, one in longest.named_children()}


def _already_checkpointed(module: nn.Module) -> set[nn.Module]:
    """Modules that are checkpointed by anybody, or lie inside of one that is."""
    done: set[nn.Module] = set()
    for candidate in module.modules():
        hugging_face = hasattr(candidate, "_gradient_checkpointing_func") and bool(candidate.gradient_checkpointing)
        wrapper = any(base.__name__ == "CheckpointWrapper" for base in type(candidate).__mro__)
        composable = "checkpoint" in (_get_registry(candidate) or {})
        if checkpointed_block(candidate) is not None or hugging_face or wrapper or composable:
            done.update(candidate.modules())
    return done
