"""Run a block's forward a second time as it ran the first time.

What a recomputation needs to be the first pass again, whatever the block does: buffers that the block writes
(BatchNorm's statistics, spectral norm's vectors) are seen as the first pass saw them, and are written once
(pytorch#96136); lists and dictionaries that it is given are as they were; a fresh Hugging Face cache is left out, since
it would be filled twice. Random state and autocast are `Surroundings`, for callers whom torch's `checkpoint` does not
serve.

Cost:
    A copy of each buffer that a block writes, for each block, until its backward.

Sharding:
    Knows nothing of it.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # torch 2.13: no public way to walk what a forward is given
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_tricks.functional.activation_memory import active_measurements, recomputed_for

__all__ = ["BlockMemory", "Replay", "Surroundings", "cached_positions", "tensors_of", "training_flags", "without_cache"]


@dataclass
class BlockMemory:
    """What the wrapper of a block keeps between calls.

    Args:
        name: of the block, for messages.
        forward: the instance's own `forward` from before, None where the class has it.
        written: the buffers that a forward pass writes, by the training flags of the block's modules.
    """

    name: str = ""
    forward: Any = None
    written: dict[tuple[bool, ...], list[str]] = field(default_factory=dict)

    def forward_of(self, block: nn.Module) -> Any:
        """Return what the block would run without its wrapper."""
        # Looked up at each call: FSDP2 swaps the class of a module in place.
        return self.forward or functools.partial(type(block).forward, block)


def training_flags(block: nn.Module) -> tuple[bool, ...]:
    """Return the training flag of each module in a block: what it does may depend on them.

    Args:
        block: any module.

    Example:
        >>> training_flags(nn.Sequential(nn.Linear(2, 2).eval()))
        (True, False)
    """
    return tuple(module.training for module in block.modules())


def tensors_of(values: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists, dictionaries and what else is registered with pytree.

    Args:
        values: the arguments of a forward, or what it returned.

    Example:
        >>> len(tensors_of((torch.ones(1), {"mask": None, "states": [torch.ones(2)]})))
        2
    """
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Replay:
    """The forward pass of a block at its first call, its recomputation at every later one."""

    def __init__(self, block: nn.Module, memory: BlockMemory, forward: Any, keywords: tuple[str, ...]) -> None:
        self.block = block
        self.memory = memory
        self.forward = forward
        self.keywords = keywords
        self.before: dict[str, Tensor] | None = None
        self.containers: dict[int, Any] = {}
        self.measurements = active_measurements()

    def __call__(self, *values: Any) -> Any:
        """Run the block with these arguments, its keywords' values last."""
        if self.before is None:
            # A block may write to a list or dictionary that it is given; the recomputation needs it as it was.
            self.containers = {i: _copied(value) for i, value in enumerate(values) if isinstance(value, (list, dict))}
            return self._first(values)
        values = tuple(_copied(self.containers.get(i, value)) for i, value in enumerate(values))
        with _buffers_replaced(self.block, self.before), recomputed_for(self.measurements):
            return self._run(values)

    def _run(self, values: tuple[Any, ...]) -> Any:
        split = len(values) - len(self.keywords)
        return self.forward(*values[:split], **dict(zip(self.keywords, values[split:], strict=True)))

    def _first(self, values: tuple[Any, ...]) -> Any:
        buffers = dict(self.block.named_buffers())
        modes = training_flags(self.block)
        known = self.memory.written.get(modes)
        # Which buffers a forward pass writes is learned at the first one in these modes; until then all are copied.
        watched = buffers if known is None else {name: buffers[name] for name in known if name in buffers}
        self.before = {name: buffer.detach().clone() for name, buffer in watched.items()}
        versions = {name: buffer._version for name, buffer in buffers.items()}
        inputs = [tensor for tensor in tensors_of(values) if not tensor.is_inference()]
        input_versions = [tensor._version for tensor in inputs]
        output = self._run(values)
        if [tensor._version for tensor in inputs] != input_versions:
            raise RuntimeError(
                f"{type(self.block).__name__} {self.memory.name!r} is checkpointed, and writes into its input in "
                "place, from which it could not be recomputed then. Let it write into a copy (such as "
                "nn.ReLU(inplace=False)), or do not checkpoint this block"
            )
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


class Surroundings:
    """The random states and autocast settings of this moment, to run something under them later.

    Args:
        values: what will be run is given these; random states are kept of the devices that their tensors are on.
    """

    def __init__(self, values: Any) -> None:
        tensors = tensors_of(values)
        kinds = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
        self._device_type = kinds.pop() if len(kinds) == 1 else None
        self._random_state = torch.get_rng_state()
        self._devices: list[int] = []
        self._device_states: list[Tensor] = []
        if self._device_type is not None:
            self._devices, self._device_states = get_device_states(*{one.device: one for one in tensors}.values())
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", self._device_type)
            if kind is not None and torch.amp.is_autocast_available(kind)
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under them; the random states of before are back afterwards."""
        kind = self._device_type or "cpu"
        with ExitStack() as around:
            around.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
            torch.set_rng_state(self._random_state)
            if self._devices:
                set_device_states(self._devices, self._device_states, device_type=kind)
            for device_type, enabled, dtype in self._autocast:
                around.enter_context(
                    torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                )
            yield


def cached_positions(block: nn.Module, value: Any) -> int | None:
    """Return how many positions a Hugging Face key-value cache holds for a block, None for what is no cache.

    Args:
        block: what is given it.
        value: an argument of its forward.

    Example:
        >>> cached_positions(nn.Linear(2, 2), 3) is None
        True
    """
    if not hasattr(value, "get_seq_length") or not any(base.__name__ == "Cache" for base in type(value).__mro__):
        return None  # in this order, since the compiler does not walk the bases of a bool
    layer = next((part.layer_idx for part in block.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    try:
        return int(value.get_seq_length(layer))  # other layers may have filled their own part in this same pass
    except ValueError:  # a recurrent layer's part has no length
        return 0


def without_cache(block: nn.Module, value: Any) -> Any:
    """Return None for a fresh Hugging Face key-value cache, which serves generation, and anything else as it is.

    Args:
        block: what is given it.
        value: an argument of its forward.

    Raises:
        RuntimeError: the cache holds something for this block: a recomputation would append to it again.

    Example:
        >>> without_cache(nn.Linear(2, 2), 3)
        3
    """
    length = cached_positions(block, value)
    if length is None:
        return value
    if length:
        raise RuntimeError(
            f"{type(block).__name__} is checkpointed and was given a cache of {length} positions: recomputing the "
            "block would append to it again. Train with use_cache=False, or do not checkpoint this block."
        )
    return None
