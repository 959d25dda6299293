"""Cut a batch into micro-batches, whatever it is made of, and put what was computed on them together again.

The samples lie along the first dimension of the batch's tensors. All tensors of a batch have the same first dimension
N, or 1 for what all samples share. Sequences without a tensor hold one entry a sample; plain values go to every part.

**Cost**: the parts' tensors are views.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["describe", "join_outputs", "num_samples", "parts_needed", "split_batch"]

_MOST_SHOWN = 12


def num_samples(batch: Any) -> int:
    """Count the samples of a batch.

    Args:
        batch: a tensor, or a list, tuple, named tuple, mapping or dataclass of what may be in a batch, at any depth.

    Raises:
        TypeError: there is no tensor with a dimension in it, or an object that is none of these.
        ValueError: its tensors do not agree.

    Example:
        >>> num_samples({"x": torch.zeros(4, 3), "names": ["a", "b", "c", "d"], "temperature": 0.1})
        4
    """
    return _layout(batch)[0]


def parts_needed(samples: int, max_size: int) -> int:
    """Return into how many parts so many samples are to be cut so that none is larger than `max_size`, at least 1.

    Args:
        samples: how many.
        max_size: the most in a part.

    Example:
        >>> parts_needed(10, 4), parts_needed(0, 4)
        (3, 1)
    """
    return max(math.ceil(samples / max_size), 1)


def split_batch(batch: Any, num_parts: int) -> tuple[list[Any], list[int]]:
    """Cut a batch into parts of the same structure whose sizes differ by one at most.

    Args:
        batch: as for `num_samples`.
        num_parts: how many, at most the number of samples.

    Returns:
        The parts, and how many samples each has.

    Raises:
        TypeError, ValueError: as `num_samples`; there are fewer samples than parts.

    Example:
        >>> split_batch({"x": torch.arange(3), "scale": 2.0}, 2)
        ([{'x': tensor([0, 1]), 'scale': 2.0}, {'x': tensor([2]), 'scale': 2.0}], [2, 1])
    """
    samples, lists_hold_samples = _layout(batch)
    if num_parts > samples:
        raise ValueError(f"expected at least as many samples as parts, got {samples} samples for {num_parts} parts")
    ends = [samples * part // num_parts for part in range(num_parts + 1)]
    # The larger parts come first, as in `torch.tensor_split`.
    sizes = sorted((end - start for start, end in itertools.pairwise(ends)), reverse=True)
    starts = [sum(sizes[:part]) for part in range(num_parts)]
    parts = [
        _slice(batch, start, start + size, samples, lists_hold_samples)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return parts, sizes


def join_outputs(outputs: Sequence[Any], shares: Sequence[float], sizes: Sequence[int]) -> Any:
    """Put what a step returned for each part together, as if it had been called once.

    Args:
        outputs: of each part, all of one structure.
        shares: the part's share of the batch, for the mean of scalars.
        sizes: the part's number of samples, by which tensors of one entry a sample are told.

    Returns:
        Tensors of one entry a sample are joined along the first dimension, scalars of floats are averaged by `shares`;
        mappings, lists and tuples are joined by their entries; of what is equal in all parts one is returned; of
        anything else a list with an entry for each part.

    Example:
        >>> join_outputs([{"n": torch.ones(2)}, {"n": torch.zeros(1)}], [2 / 3, 1 / 3], [2, 1])
        {'n': tensor([1., 1., 0.])}
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.dim() and all(one.shape[:1] == (size,) for one, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if not first.dim() and first.is_floating_point():
            return sum(one * share for one, share in zip(outputs, shares, strict=True))
    elif isinstance(first, float):
        return sum(one * share for one, share in zip(outputs, shares, strict=True))
    elif isinstance(first, Mapping):
        if all(one.keys() == first.keys() for one in outputs):
            joined = {key: join_outputs([one[key] for one in outputs], shares, sizes) for key in first}
            return _mapping_like(first, joined)
    elif isinstance(first, list) and all(len(one) == size for one, size in zip(outputs, sizes, strict=True)):
        return [entry for one in outputs for entry in one]
    elif isinstance(first, (list, tuple)) and len({len(one) for one in outputs}) == 1:
        return _sequence_like(first, [join_outputs(one, shares, sizes) for one in zip(*outputs, strict=True)])
    elif (first is None or isinstance(first, (str, int))) and all(one == first for one in outputs):
        return first
    return list(outputs)


def describe(batch: Any, *, depth: int = 0) -> str:
    """Return the types and shapes of a batch in one line, for error messages.

    Args:
        batch: anything.
        depth: how deep in a batch it lies.

    Example:
        >>> describe({"x": torch.zeros(2, 3), "n": [1, 2]})
        'dict(x=Tensor[2, 3], n=list(int, int))'
    """
    name = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"{name}{list(batch.shape)}"
    if depth > 4 or isinstance(batch, str):
        return name
    entries = list(_children(batch))
    if not entries:
        return name
    named = not isinstance(batch, (list, tuple))
    shown = [
        f"{key}={describe(one, depth=depth + 1)}" if named else describe(one, depth=depth + 1)
        for key, one in entries[:_MOST_SHOWN]
    ]
    return f"{name}({', '.join(shown)}{', ...' if len(entries) > _MOST_SHOWN else ''})"


def _children(batch: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, (list, tuple)):
        yield from enumerate(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))


def _is_container(batch: Any) -> bool:
    return isinstance(batch, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    )


def _is_array(batch: Any) -> bool:
    """Whether it is an array or a scalar of numpy."""
    return type(batch).__module__.split(".")[0] == "numpy" and hasattr(batch, "shape")


def _is_value(batch: Any) -> bool:
    """Whether it is of no sample in particular."""
    return batch is None or isinstance(batch, (str, bytes, bool, int, float, complex, torch.dtype, torch.device))


def _holds_tensors(batch: Any) -> bool:
    return isinstance(batch, Tensor) or any(_holds_tensors(one) for _, one in _children(batch))


def _layout(batch: Any) -> tuple[int, bool]:
    """The number of samples, and whether lists inside of the batch hold one entry a sample though they hold tensors.

    Such are the images and targets of a detector. They are told by tensors that do not agree.
    """
    found: dict[str, int] = {}
    for lists_hold_samples in (False, True):
        sizes = dict(_sizes(batch, "", lists_hold_samples, depth=0))
        counts = set(sizes.values())
        if not counts:
            raise TypeError(
                f"expected a batch with at least one tensor whose first dimension counts the samples, got "
                f"{describe(batch)}"
            )
        samples = counts - {1} or {1}
        if len(samples) == 1:
            (size,) = samples
            if not lists_hold_samples:
                _refuse_two_readings(batch, size)
            _refuse_other_lengths(batch, "", size, lists_hold_samples, whole=batch)
            return size, lists_hold_samples
        found = found or sizes
    shown = ", ".join(f"{path.lstrip('.') or 'it'}: {size}" for path, size in list(found.items())[:_MOST_SHOWN])
    raise ValueError(
        f"expected a batch whose tensors agree on the number of samples, their first dimension, got {shown} in "
        f"{describe(batch)}. Put what belongs to all samples into a tensor without a dimension or with a first one of 1"
    )


def _refuse_two_readings(batch: Any, samples: int) -> None:
    """Raise if lists of images could as well be read as one entry a sample, with another number of samples."""
    try:
        others = set(dict(_sizes(batch, "", True, depth=0)).values())
    except TypeError:
        return
    if others != {samples} and len(others) == 1 and _holds_lists_of_images(batch):
        raise ValueError(
            f"expected a batch that can be read in one way, got {describe(batch)}: the samples may be the {samples} of "
            f"the tensors' first dimension or the {others.pop()} of the lists' length. Stack the tensors of a list, or "
            "add one with an entry for each sample to the batch"
        )


def _holds_lists_of_images(batch: Any) -> bool:
    """Whether a list inside of a batch holds nothing but tensors of three dimensions."""
    lists = [one for _, one in _children(batch) if isinstance(one, (list, tuple)) and one]
    return any(all(isinstance(one, Tensor) and one.dim() == 3 for one in entries) for entries in lists) or any(
        _holds_lists_of_images(one) for _, one in _children(batch)
    )


def _sizes(batch: Any, path: str, lists_hold_samples: bool, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(batch, Tensor) and (batch.is_nested or batch.layout != torch.strided):
        raise TypeError(
            f"expected a batch of dense tensors, got {'a nested' if batch.is_nested else 'a sparse'} one at "
            f"{path.lstrip('.') or 'the top'}: it cannot be cut"
        )
    if isinstance(batch, Tensor):
        if batch.dim():
            yield path, batch.shape[0]
    elif _is_container(batch) and not isinstance(batch, PackedSequence):
        if lists_hold_samples and depth and isinstance(batch, (list, tuple)) and _holds_tensors(batch):
            yield path, len(batch)
            return
        for key, one in _children(batch):
            yield from _sizes(one, f"{path}.{key}", lists_hold_samples, depth + 1)
    elif _is_array(batch):
        if len(batch.shape):
            yield path, batch.shape[0]
    elif not _is_value(batch):
        raise TypeError(
            "expected a batch of tensors, numbers and strings in lists, tuples, named tuples, mappings and "
            f"dataclasses, got {describe(batch)} at {path.lstrip('.') or 'the top'}: it cannot be cut"
        )


def _refuse_other_lengths(batch: Any, path: str, samples: int, lists_hold_samples: bool, whole: Any) -> None:
    """Raise if a sequence without a tensor holds neither one entry a sample nor containers."""
    whole_values = isinstance(batch, (list, tuple)) and len(batch) and all(_is_value(one) for one in batch)
    if whole_values and not _is_split(batch, samples):
        raise ValueError(
            f"expected one entry for each of {samples} samples, got a {type(batch).__name__} of {len(batch)} at "
            f"{path.lstrip('.') or 'the top'} of {describe(whole)}: whether it belongs to all of them cannot be told"
        )
    for key, one in _children(batch):
        _refuse_other_lengths(one, f"{path}.{key}", samples, lists_hold_samples, whole)


def _is_split(batch: Sequence[Any], samples: int) -> bool:
    return len(batch) == samples and all(_is_value(one) for one in batch)


def _slice(batch: Any, start: int, end: int, samples: int, lists_hold_samples: bool, depth: int = 0) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:end] if batch.dim() and batch.shape[0] == samples else batch
    cut: Callable[[Any], Any] = lambda one: _slice(one, start, end, samples, lists_hold_samples, depth + 1)  # noqa: E731
    if isinstance(batch, (list, tuple)):
        by_sample = lists_hold_samples and depth > 0 and _holds_tensors(batch)
        if by_sample or _is_split(batch, samples):
            return batch[start:end]
        return _sequence_like(batch, [cut(one) for one in batch])
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {key: cut(one) for key, one in batch.items()})
    if dataclasses.is_dataclass(batch):
        part = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(part, field.name, cut(getattr(batch, field.name)))  # also of frozen ones
        return part
    return batch[start:end] if _is_array(batch) and batch.shape[:1] == (samples,) else batch


def _sequence_like(batch: Any, entries: list[Any]) -> Any:
    if hasattr(batch, "_fields"):
        return type(batch)(*entries)
    return type(batch)(entries)


def _mapping_like(batch: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """The same kind of mapping; one that cannot be built from a dict, such as a defaultdict, is copied and filled."""
    if hasattr(batch, "default_factory"):
        part = copy.copy(batch)
        part.update(entries)  # type: ignore[attr-defined]
        return part
    return type(batch)(entries)  # type: ignore[call-arg]
