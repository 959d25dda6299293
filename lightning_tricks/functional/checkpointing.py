"""Activation checkpointing of an unmodified model: recompute a block's activations in the backward pass.

The forward pass of a checkpointed block keeps the block's inputs only; the backward pass runs the block again to get
what it needs. N blocks then hold N inputs and the activations of one block, instead of the activations of N.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry  # torch 2.13: no public way to ask
from torch.utils.checkpoint import checkpoint

from lightning_tricks.functional.blocks import BlockSelector, find_blocks
from lightning_tricks.functional.patching import Patch, patch_

__all__ = ["ActivationCheckpointingHandle", "apply_activation_checkpointing"]


@dataclass
class ActivationCheckpointingHandle:
    """What was wrapped, and the way back.

    Attributes:
        wrapped: names of the blocks that are now checkpointed.
        already: names of matching blocks that somebody else had checkpointed, left alone.
    """

    wrapped: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    _before: set[nn.Module] = field(default_factory=set, repr=False)
    _module: nn.Module | None = field(default=None, repr=False)
    _patches: list[Patch] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Give every block its own `forward` back, copies of blocks in the module too. A second call does nothing."""
        for patch in self._patches:
            patch.remove()
        patched = [part for part in self._module.modules() if _is_ours(part)] if self._patches and self._module else []
        for part in patched:
            if part not in self._before:  # a deep copy, made while the original was checkpointed
                original = vars(part)["forward"].args[1].forward
                del part.forward
                if original is not None:
                    part.forward = original
        self._patches.clear()


def apply_activation_checkpointing(
    module: nn.Module, blocks: BlockSelector | Sequence[BlockSelector] = "auto", *, every: int = 1
) -> ActivationCheckpointingHandle:
    """Checkpoint blocks of a model, in place. Without gradients (evaluation) a block runs as it always did.

    Args:
        module: the model to edit.
        blocks: which modules, as for `find_blocks`.
        every: checkpoint each n-th of them only, from the first; 1 or more.

    Returns:
        A handle that names the wrapped blocks; its `remove()` undoes the edit.

    Raises:
        TypeError: `blocks` is not a selector.
        ValueError: nothing matches, or `every` is below 1.

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
    handle = ActivationCheckpointingHandle(_module=module)
    handle._before.update(part for part in module.modules() if _is_ours(part))
    done = _already_checkpointed(module)
    for index, (name, block) in enumerate(find_blocks(module, blocks).items()):
        if block in done:
            handle.already.append(name)
        elif index % every == 0:
            run = functools.partial(_checkpointed_forward, block, _BlockMemory(vars(block).get("forward")))
            handle._patches.append(patch_(block, "forward", run))
            handle.wrapped.append(name)
    return handle


@dataclass
class _BlockMemory:
    """What a block's wrapper keeps between calls.

    Attributes:
        forward: the instance's own `forward` from before, None where the class has it.
        written: the buffers that a forward pass writes, by the training flags of the block's modules.
    """

    forward: Any = None
    written: dict[tuple[bool, ...], list[str]] = field(default_factory=dict)


def _checkpointed_forward(block: nn.Module, memory: _BlockMemory, *args: Any, **kwargs: Any) -> Any:
    # Looked up at each call: FSDP2 swaps the class of a module in place.
    forward = memory.forward or functools.partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args = tuple(_without_cache(block, value) for value in args)
    kwargs = {key: _without_cache(block, value) for key, value in kwargs.items()}
    if torch.compiler.is_compiling():  # the compiler writes buffers once by itself
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)
    # Keywords travel by position: none is taken for an option of `checkpoint`, and their tensors are saved as those of
    # the others are, so that autograd notices when one is written to before the recomputation.
    return checkpoint(_Replay(block, memory, forward, tuple(kwargs)), *args, *kwargs.values(), use_reentrant=False)


class _Replay:
    """The forward pass of a block at its first call, its recomputation at every later one."""

    def __init__(self, block: nn.Module, memory: _BlockMemory, forward: Any, keywords: tuple[str, ...]) -> None:
        self.block = block
        self.memory = memory
        self.forward = forward
        self.keywords = keywords
        self.before: dict[str, Tensor] | None = None
        self.containers: dict[int, Any] = {}

    def __call__(self, *values: Any) -> Any:
        if self.before is None:
            # A block may write to a list or dictionary that it is given; the recomputation needs it as it was.
            self.containers = {i: _copied(value) for i, value in enumerate(values) if isinstance(value, (list, dict))}
            return self._first(values)
        values = tuple(_copied(self.containers.get(i, value)) for i, value in enumerate(values))
        with _buffers_replaced(self.block, self.before):
            return self._run(values)

    def _run(self, values: tuple[Any, ...]) -> Any:
        split = len(values) - len(self.keywords)
        return self.forward(*values[:split], **dict(zip(self.keywords, values[split:], strict=True)))

    def _first(self, values: tuple[Any, ...]) -> Any:
        buffers = dict(self.block.named_buffers())
        modes = tuple(module.training for module in self.block.modules())
        known = self.memory.written.get(modes)
        # Which buffers a forward pass writes is learned at the first one in these modes; until then all are copied.
        watched = buffers if known is None else {name: buffers[name] for name in known if name in buffers}
        self.before = {name: buffer.detach().clone() for name, buffer in watched.items()}
        versions = {name: buffer._version for name, buffer in buffers.items()}
        output = self._run(values)
        if known is not None:
            # Written for the first time only now: too late to recompute from its old value, but not to write it once.
            owners = {_owner(name) for name, buffer in buffers.items() if buffer._version != versions[name]}
            late = [name for name in buffers if name not in self.before and _owner(name) in owners]
            known += late
            self.before.update({name: buffers[name].detach().clone() for name in late})
        else:
            written = _written_buffers(self.block, watched, self.before, versions)
            self.memory.written[modes] = written
            self.before = {name: self.before[name] for name in written}
        return output


def _written_buffers(
    block: nn.Module, buffers: dict[str, Tensor], before: dict[str, Tensor], versions: dict[str, int]
) -> list[str]:
    """Names of the buffers that were written, and of all others of their modules.

    A kernel may write a buffer without counting up its version (BatchNorm's does), and may write the value that was
    there; a module that keeps statistics shows in at least one of its buffers.
    """
    after = dict(block.named_buffers())
    owners = {
        _owner(name)
        for name, buffer in buffers.items()
        if after.get(name) is not buffer or buffer._version != versions[name] or not torch.equal(buffer, before[name])
    }
    return [name for name in buffers if _owner(name) in owners]


def _owner(name: str) -> str:
    """The name of the module that holds a buffer."""
    return name.rpartition(".")[0]


def _copied(value: Any) -> Any:
    """Copies of lists and dictionaries, nested ones too, that hold the same tensors."""
    if type(value) is list:
        return [_copied(one) for one in value]
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    return value


@contextmanager
def _buffers_replaced(block: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Run with copies of `values` in place of the block's buffers of those names."""
    owners = [(block.get_submodule(_owner(name)), name.rpartition(".")[2], name) for name in values]
    current = [getattr(owner, attribute) for owner, attribute, _ in owners]
    try:
        for owner, attribute, name in owners:
            setattr(owner, attribute, values[name].clone())
        yield
    finally:  # also when the recomputation stops early, which torch does by raising
        for (owner, attribute, _), buffer in zip(owners, current, strict=True):
            setattr(owner, attribute, buffer)


def _without_cache(block: nn.Module, value: Any) -> Any:
    """None for a fresh Hugging Face key-value cache: it serves generation, and a recomputation would fill it twice."""
    if not any(base.__name__ == "Cache" for base in type(value).__mro__) or not hasattr(value, "get_seq_length"):
        return value
    layer = next((part.layer_idx for part in block.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    try:
        length = int(value.get_seq_length(layer))  # other layers may have filled their own part in this same pass
    except ValueError:  # a recurrent layer's part has no length
        length = 0
    if length:
        raise RuntimeError(
            f"{type(block).__name__} is checkpointed and was given a cache of {length} positions: recomputing the "
            "block would append to it again. Train with use_cache=False, or do not checkpoint this block."
        )
    return None


def _is_ours(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _checkpointed_forward


def _already_checkpointed(module: nn.Module) -> set[nn.Module]:
    """Modules that are checkpointed by anybody, or lie inside of one that is."""
    done: set[nn.Module] = set()
    for candidate in module.modules():
        hugging_face = hasattr(candidate, "_gradient_checkpointing_func") and bool(candidate.gradient_checkpointing)
        wrapper = any(base.__name__ == "CheckpointWrapper" for base in type(candidate).__mro__)
        composable = "checkpoint" in (_get_registry(candidate) or {})
        if _is_ours(candidate) or hugging_face or wrapper or composable:
            done.update(candidate.modules())
    return done
