"""Checks of constructor arguments that several tricks share: one sentence each, with the name and what came."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from lightning_tricks.functional.schedules import duration_unit

__all__ = [
    "check_amount",
    "check_bool",
    "check_choice",
    "check_duration",
    "check_indices",
    "check_int",
    "check_number",
    "check_timeout",
    "refuse_missing_optimizers",
]


def check_number(
    name: str,
    value: object,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    above: bool = False,
    finite: bool = False,
) -> float:
    """Return `value` if it is a number in the range, else raise.

    Args:
        name: the argument's name, for the message.
        value: what the user passed.
        minimum: the smallest value allowed.
        maximum: the largest value allowed.
        above: whether `minimum` itself is refused.
        finite: whether infinity is.

    Raises:
        TypeError: it is no number.
        ValueError: it is nan or out of range.

    Example:
        >>> check_number("max_norm", -1.0)
        Traceback (most recent call last):
        ValueError: expected `max_norm` to be at least 0.0, got -1.0
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected `{name}` to be a number, got {value!r}")
    if math.isnan(value) or value < minimum or value > maximum or (above and value == minimum):
        lower = f"above {minimum}" if above else f"at least {minimum}"
        upper = "" if math.isinf(maximum) else f" and at most {maximum}"
        raise ValueError(f"expected `{name}` to be {lower}{upper}, got {value!r}")
    if finite and math.isinf(value):
        raise ValueError(f"expected `{name}` to be finite, got {value!r}")
    return value if isinstance(value, int) else float(value)  # numpy's floats cannot be read back from a checkpoint


def check_int(name: str, value: object, *, minimum: int) -> int:
    """Return `value` if it is an int of at least `minimum`, else raise TypeError or ValueError.

    Args:
        name: the argument's name, for the message.
        value: what the user passed.
        minimum: the smallest value allowed.

    Example:
        >>> check_int("every", 2, minimum=1)
        2
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected `{name}` to be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"expected `{name}` to be at least {minimum}, got {value}")
    return value


def check_duration(name: str, value: object) -> int | float:
    """Return a duration: an int is a number of steps, a float in [0, 1) a fraction of the run. Else raise.

    Args:
        name: the argument's name, for the message.
        value: what the user passed.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.

    Example:
        >>> check_duration("warmup", 100), check_duration("warmup", 0.05)
        (100, 0.05)
    """
    if isinstance(value, int):
        return check_int(name, value, minimum=0)
    fraction = check_number(name, value)
    if fraction >= 1:
        raise ValueError(f"expected `{name}` to be an int or a fraction of the run below 1.0, got {value!r}")
    return fraction


def check_amount(name: str, value: object) -> int | float | str:
    """Return a duration as `check_duration` does, or one in samples or tokens: a number and the unit in a string.

    Args:
        name: the argument's name, for the message.
        value: what the user passed.

    Raises:
        TypeError: it is neither a number nor a string.
        ValueError: it is out of range, or a string of another form.

    Example:
        >>> check_amount("warmup", "2e9 tokens")
        '2e9 tokens'
    """
    if not isinstance(value, str):
        return check_duration(name, value)
    try:
        duration_unit(value)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from None
    return value


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise TypeError.

    Args:
        name: the argument's name, for the message.
        value: what the user passed.

    Example:
        >>> check_bool("carry_over", 1)
        Traceback (most recent call last):
        TypeError: expected `carry_over` to be True or False, got 1
    """
    if not isinstance(value, bool):
        raise TypeError(f"expected `{name}` to be True or False, got {value!r}")
    return value


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`.

    Args:
        name: the argument's name, for the message.
        value: what the user passed.
        choices: what is allowed.

    Example:
        >>> check_choice("nonfinite", "skip", ("skip", "raise"))
    """
    if value not in choices:
        raise ValueError(f"expected `{name}` to be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_timeout(timeout: object) -> None:
    """Raise TypeError unless `timeout` is a timedelta or None.

    Args:
        timeout: what the user passed.

    Example:
        >>> check_timeout(30)
        Traceback (most recent call last):
        TypeError: expected `timeout` to be a timedelta or None, got 30
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"expected `timeout` to be a timedelta or None, got {timeout!r}")


def check_indices(name: str, indices: object) -> frozenset[int]:
    """Return optimizer indices as a set, or raise TypeError or ValueError.

    Args:
        name: the argument's name, for the message.
        indices: what the user passed.

    Example:
        >>> check_indices("optimizers", [0, 1]) == {0, 1}
        True
    """
    if not isinstance(indices, (list, tuple, set, frozenset, range, Mapping)):
        raise TypeError(f"expected `{name}` to be a list of optimizer indices, got {indices!r}")
    found = frozenset(check_int(f"an optimizer index in {name}", index, minimum=0) for index in indices)
    if not found:
        raise ValueError(f"expected `{name}` to name at least one optimizer index, got none")
    return found


def refuse_missing_optimizers(name: str, indices: Iterable[int] | None, num_optimizers: int) -> None:
    """Raise ValueError if an optimizer index does not exist in this run.

    Args:
        name: the argument's name, for the message.
        indices: the indices asked for; None for all there are.
        num_optimizers: how many there are.
    """
    for index in sorted(indices or ()):
        if index >= num_optimizers:
            raise ValueError(
                f"expected `{name}` to name optimizers of this run, which has {num_optimizers} "
                f"(indices 0 to {num_optimizers - 1}), got index {index}"
            )
