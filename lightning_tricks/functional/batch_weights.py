"""What a batch counts beside others, where losses are means over what is counted: samples, or tokens."""

import importlib
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from lightning_tricks.functional.micro_batching import num_samples

__all__ = ["check_weight", "resolve_weigher"]


def check_weight(weight: Any) -> float:
    """Return what a batch counts as a number. Synchronises if it is a tensor on a device.

    Args:
        weight: what `weigh_by` returned.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, inf or nan.

    Example:
        >>> check_weight(3)
        3.0
    """
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):  # numpy's are, too
        raise TypeError(f"expected `weigh_by` to return a number or a tensor with one element, got {weight!r}")
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"expected `weigh_by` to return a number from 0 on, got {number} for a batch")
    return number


def resolve_weigher(weigh_by: Any) -> Callable[[Any], Any] | None:
    """Return the function that counts a batch; None where all count the same.

    Args:
        weigh_by: "samples", "batches", a function of the batch, or the import path of one.

    Raises:
        TypeError: it is none of these.
        ValueError: nothing can be imported from the path.

    Example:
        >>> import torch
        >>> resolve_weigher("samples")([torch.zeros(3, 2), torch.zeros(3)])
        3
    """
    if weigh_by == "samples":
        return _count_samples
    if weigh_by == "batches":
        return None
    if callable(weigh_by):
        return weigh_by  # type: ignore[no-any-return]
    expected = (
        'expected `weigh_by` to be "samples", "batches", a function of the batch, or the import path of one, such as '
        f'"my_package.count_tokens", got {weigh_by!r}'
    )
    if not isinstance(weigh_by, str):
        raise TypeError(expected)
    place, _, name = weigh_by.rpartition(".")
    try:
        weigh = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{expected}: {error}") from error
    if not callable(weigh):
        raise TypeError(f"{expected}, which is a {type(weigh).__name__}")
    return weigh  # type: ignore[no-any-return]


def _count_samples(batch: Any) -> int:
    try:
        return num_samples(batch)
    except (TypeError, ValueError) as error:
        advice = 'Pass weigh_by=..., a function of the batch, or "batches" to count each the same'
        raise type(error)(f"{error}. {advice}") from error
