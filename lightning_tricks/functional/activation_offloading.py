"""Keep what autograd saves for the backward pass in the host's memory.

Whole storages move, each once however many saved tensors lie in it, and the views are made anew on what comes back. On
CUDA the copies run on a stream of their own, beside the computation: out as soon as a tensor is saved, and back one
ahead of the backward pass. What is being copied out is kept until the copy is done, or until more than a few are on
their way; then the computation waits on the device, not the host.

Differs:
    `torch.autograd.graph.save_on_cpu` copies each saved tensor by itself, parameters and small ones too, and on the
    stream that computes.

Cost:
    The traffic of the bytes over the bus, twice; a Python call for each saved tensor. On a CPU a copy in place of the
    tensor, which frees nothing: it is there to be tested.

Sharding:
    Moves what this rank saves. Parameters, also gathered ones, stay.
"""

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_tricks.functional.saved_tensors import SavedTensor, StorageKey, hooks_around, is_parameter, storages_of

__all__ = ["OffloadedActivations", "offload_saved_activations"]

_ON_THEIR_WAY = 4
"""Copies to the host that may go on beside the computation."""


class _Copies(Protocol):
    """How the bytes of a storage move. A ticket stands for a copy that goes on, None for one that is done."""

    def to_host(self, data: Tensor) -> tuple[Tensor, Any]: ...

    def to_device(self, data: Tensor) -> tuple[Tensor, Any]: ...

    def is_done(self, ticket: Any) -> bool: ...

    def wait(self, ticket: Any) -> None:
        """Let what is computed from now on come after the copy."""


class _PlainCopies:
    """The host waits for each copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, data: Tensor) -> tuple[Tensor, Any]:
        return data.to("cpu", copy=True), None

    def to_device(self, data: Tensor) -> tuple[Tensor, Any]:
        return data.to(self._device), None

    def is_done(self, ticket: Any) -> bool:
        return True

    def wait(self, ticket: Any) -> None:
        pass


class _StreamCopies:
    """Copies on a stream of their own, to and from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, data: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        return host, self._copy(host, data)

    def to_device(self, data: Tensor) -> tuple[Tensor, Any]:
        back = torch.empty(data.shape, dtype=data.dtype, device=self._device)  # of the stream that computes
        return back, self._copy(back, data)

    def _copy(self, to: Tensor, data: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(data, non_blocking=True)
            return self._stream.record_event()

    def is_done(self, ticket: Any) -> bool:
        return bool(ticket.query())

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


@functools.cache
def _copies_of(device: torch.device) -> _Copies:
    return _StreamCopies(device) if device.type == "cuda" else _PlainCopies(device)


class _Offloaded:
    """A storage in the host's memory, and the way back.

    Args:
        data: all of it, as bytes.
        copies: what moves it.
        previous: the storage that went before, which the backward pass asks for next.
    """

    def __init__(self, data: Tensor, copies: _Copies, previous: "_Offloaded | None") -> None:
        self._copies = copies
        self._host: Tensor | None
        self._host, self.left = copies.to_host(data)
        self._back: Tensor | None = None
        self._arrival: Any = None
        self._is_here = False
        self._previous = None if previous is None else weakref.ref(previous)

    def begin(self) -> None:
        """Begin to bring it back, unless that was begun."""
        if self._host is not None:
            self._back, self._arrival = self._copies.to_device(self._host)
            self._host = None  # what pinned it waits for the copy

    def data(self) -> Tensor:
        """Return the bytes on the device, and begin to bring the storage before it back."""
        self.begin()
        if not self._is_here:
            self._copies.wait(self._arrival)
            self._is_here = True
            previous = None if self._previous is None else self._previous()
            if previous is not None:
                previous.begin()
        assert self._back is not None
        return self._back

    def __del__(self) -> None:
        if self._back is not None and not self._is_here:  # its memory must not be used again before the copy is done
            self._copies.wait(self._arrival)


@dataclass
class _View:
    """A saved tensor, by the storage that it lies in."""

    storage: _Offloaded
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        data = self.storage.data()
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass
class OffloadedActivations:
    """What a forward pass moved to the host.

    Attributes:
        num_bytes: of all storages that were moved.
        largest_bytes: of the largest storage that could be, moved or not.
    """

    num_bytes: int = 0
    largest_bytes: int = 0
    _storages: "weakref.WeakValueDictionary[tuple[StorageKey, int], _Offloaded]" = field(
        default_factory=weakref.WeakValueDictionary, repr=False
    )
    _leaving: "deque[tuple[SavedTensor, _Copies, Any]]" = field(default_factory=deque, repr=False)
    _last: "weakref.ref[_Offloaded] | None" = field(default=None, repr=False)

    def move(self, tensor: Tensor) -> _View:
        """Move the storage of a tensor, unless it was.

        Args:
            tensor: a dense one.

        Returns:
            What stands for the tensor.
        """
        storage = tensor.untyped_storage()
        key = (StorageKey(storage), tensor._version)
        offloaded = self._storages.get(key)
        if offloaded is None:
            self.let_go(_ON_THEIR_WAY - 1)
            copies = _copies_of(tensor.device)
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            offloaded = _Offloaded(data, copies, None if self._last is None else self._last())
            self._storages[key] = offloaded
            if offloaded.left is not None:
                self._leaving.append((SavedTensor(tensor), copies, offloaded.left))
            self._last = weakref.ref(offloaded)
            self.num_bytes += storage.nbytes()
        return _View(offloaded, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def let_go(self, at_most: int) -> None:
        """Let go of the storages that are copied.

        Args:
            at_most: how many copies may go on; the computation waits for the others.

        Raises:
            RuntimeError: one was written to meanwhile, and so may its copy be.
        """
        while self._leaving:
            saved, copies, ticket = self._leaving[0]
            if not copies.is_done(ticket):
                if len(self._leaving) <= at_most:
                    return
                copies.wait(ticket)
            self._leaving.popleft()
            saved.value()  # looks at the version


@contextmanager
def offload_saved_activations(
    min_bytes: int = 4 * 2**20, *, leave_out: Iterable[Tensor] = ()
) -> Iterator[OffloadedActivations]:
    """Keep what autograd saves inside of the block in the host's memory until the backward pass asks for it.

    Args:
        min_bytes: of a storage that moves, 1 or more. Parameters and their views stay, and so do tensors that wrap
            others (a DTensor), and one that is less than a quarter of the storage it lies in.
        leave_out: tensors whose storages stay too: those that somebody else keeps anyway.

    Yields:
        What was moved, complete when the block is left.

    Raises:
        ValueError: `min_bytes` is less than 1. A RuntimeError inside, where a saved tensor is written to while it is
            copied.

    Example:
        >>> x = torch.ones(256, requires_grad=True)
        >>> with offload_saved_activations(min_bytes=1024) as offloaded:
        ...     y = (2 * x).exp()
        >>> y.sum().backward()
        >>> offloaded.num_bytes
        1024
    """
    if min_bytes < 1:
        raise ValueError(f"expected `min_bytes` to be 1 or more, got {min_bytes}")
    stays = {key for tensor in leave_out for key in storages_of(tensor)}
    offloaded = OffloadedActivations()
    pack_around, unpack_around = hooks_around()

    def pack(tensor: Tensor) -> Any:
        if not _can_move(tensor) or (stays and not stays.isdisjoint(storages_of(tensor))):
            return pack_around(tensor)
        num_bytes = tensor.untyped_storage().nbytes()
        offloaded.largest_bytes = max(offloaded.largest_bytes, num_bytes)
        return offloaded.move(tensor) if num_bytes >= min_bytes else pack_around(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed.value() if isinstance(packed, _View) else unpack_around(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield offloaded
    offloaded.let_go(0)


def _can_move(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor  # not a wrapper, a parameter or a fake one of the compiler
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not is_parameter(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and 4 * tensor.nbytes >= tensor.untyped_storage().nbytes()
    )
