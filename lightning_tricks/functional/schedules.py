"""Learning-rate schedules as pure functions of the step.

A schedule maps the number of applied optimizer steps to a multiple of the base learning rate. Nothing is kept between
steps, so a resume, a longer run and a skipped step need no special case.

Formula, for a warmup of W steps in a run of T, from the start factor s to the multiple m at the end:
    k < W:          s + (1 - s) * k / W
    else:           m + (1 - m) * shape(p), with p = (k - W) / (T - W), and m from T on
    cosine:         shape(p) = (1 + cos(pi * p)) / 2
    restarts:       shape(p) = (1 + cos(pi * (C * p mod 1))) / 2, for C cycles
    polynomial:     shape(p) = (1 - p) ^ power; linear with a power of 1
    stable, decay:  1 until T - D, then m + (1 - m) * shape(q), with q = (k - T + D) / D and shape(q) of 1 - q,
                    (1 + cos(pi * q)) / 2 or 1 - sqrt(q)
    inverse sqrt:   max(m, sqrt(S / (k - W + S))), with the time scale S = W, or 10000 without a warmup; no end

Reference:
    Linear warmup: Goyal et al. (2017), "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2.
    Cosine decay, restarts: Loshchilov, Hutter (2017), "SGDR", arXiv:1608.03983, equation 5.
    Inverse square root: Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, equation 3; with the time
    scale of Zhai et al. (2022), "Scaling Vision Transformers", arXiv:2106.04560.
    Stable, then decay: Hu et al. (2024), "MiniCPM", arXiv:2404.06395, section 4; its shape 1 - sqrt: Hägele et al.
    (2024), "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392.
    Polynomial: Devlin et al. (2019), "BERT", arXiv:1810.04805, in its code.

Differs:
    From SGDR in that cycles are equally long, and in the multiple `m` that each ends at. With s = m = 0 each equals the
    function of its name in `transformers` at every step of the run; past its end these hold m.

Cost:
    A few Python floats a step.

Sharding:
    Every rank computes the same number.
"""

import math
import re
from collections.abc import Callable

__all__ = [
    "DECAY_SHAPES",
    "duration_unit",
    "even_start_factor",
    "resolve_duration",
    "warmup_cosine",
    "warmup_cosine_restarts",
    "warmup_factor",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_polynomial",
    "warmup_stable_decay",
]

_TIME_SCALE_WITHOUT_WARMUP = 10_000
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d*)?(e\+?\d+)?)\s+(?P<unit>samples|tokens)")


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": _half_cosine,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""How `warmup_stable_decay` falls from 1 to 0 over the decay."""


def even_start_factor(warmup_steps: int) -> float:
    """Return the start factor of a warmup in even steps whose first one is above zero: 1 / (W + 1).

    Args:
        warmup_steps: length of the warmup, 0 or more.

    Example:
        >>> start = even_start_factor(4)
        >>> [round(warmup_cosine(k, warmup_steps=4, total_steps=8, start_factor=start), 3) for k in range(5)]
        [0.2, 0.4, 0.6, 0.8, 1.0]
    """
    return 1.0 / (warmup_steps + 1)


def duration_unit(duration: float | str) -> str | None:
    """Return what a duration counts: "steps", "samples" or "tokens"; None for a fraction of the run.

    Args:
        duration: an int, a float, or a number and a unit in one string.

    Raises:
        ValueError: a string that is no positive number and one of these units.

    Example:
        >>> duration_unit(100), duration_unit("2e9 tokens"), duration_unit(0.1)
        ('steps', 'tokens', None)
    """
    if not isinstance(duration, str):
        return "steps" if isinstance(duration, int) else None
    match = _AMOUNT.fullmatch(duration.strip())
    if match is None:
        raise ValueError(
            f'expected an int, a fraction of the run, or a number and a unit as "2e9 tokens" or "50000 samples", got '
            f"{duration!r}"
        )
    return match["unit"]


def resolve_duration(duration: float | str, total_steps: int) -> int:
    """Turn a duration into steps: an int is a count, a float a fraction of the run.

    Args:
        duration: an int, 0 or more, a float in [0, 1], or a string as in `duration_unit`.
        total_steps: length of the run, in steps or in the string's unit.

    Returns:
        A number of steps, or of the string's unit. A fraction is rounded down.

    Example:
        >>> resolve_duration(100, total_steps=1000), resolve_duration(0.03, total_steps=1000)
        (100, 30)
        >>> resolve_duration("2e3 tokens", total_steps=10_000)
        2000
    """
    if isinstance(duration, str):
        duration_unit(duration)
        return int(float(duration.split()[0]))
    return duration if isinstance(duration, int) else int(duration * total_steps)


def warmup_factor(step: float, *, warmup_steps: int, start_factor: float = 0.0) -> float:
    """Rise linearly over the warmup, then stay at 1.

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, 0 or more.
        start_factor: the multiple at step 0, in [0, 1].

    Returns:
        The multiple of the learning rate to use for the next step.

    Example:
        >>> [warmup_factor(k, warmup_steps=2, start_factor=0.5) for k in range(4)]
        [0.5, 0.75, 1.0, 1.0]
    """
    return 1.0 if step >= warmup_steps else start_factor + (1.0 - start_factor) * step / warmup_steps


def warmup_cosine(
    step: float, *, warmup_steps: int, total_steps: int, start_factor: float = 0.0, min_ratio: float = 0.0
) -> float:
    """Rise linearly over the warmup, then fall along half a cosine to `min_ratio` at `total_steps`.

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, from 0 to `total_steps`.
        total_steps: where the curve ends, positive.
        start_factor: the multiple at step 0, in [0, 1].
        min_ratio: the multiple at and after `total_steps`, in [0, 1].

    Returns:
        The multiple of the base learning rate to use for the next step.

    Example:
        >>> [round(warmup_cosine(k, warmup_steps=2, total_steps=6, min_ratio=0.1), 3) for k in range(0, 9, 2)]
        [0.0, 1.0, 0.55, 0.1, 0.1]
    """
    return _warmup_then(_half_cosine, step, warmup_steps, total_steps, start_factor, min_ratio)


def warmup_cosine_restarts(
    step: float,
    *,
    warmup_steps: int,
    total_steps: int,
    start_factor: float = 0.0,
    min_ratio: float = 0.0,
    num_cycles: int = 1,
) -> float:
    """Rise linearly over the warmup, then fall along half a cosine `num_cycles` times, each from the top again.

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, from 0 to `total_steps`.
        total_steps: where the curve ends, positive.
        start_factor: the multiple at step 0, in [0, 1].
        min_ratio: the multiple that each cycle ends at, and that of all steps from `total_steps` on, in [0, 1].
        num_cycles: how often it falls, 1 or more.

    Returns:
        The multiple of the base learning rate to use for the next step.

    Example:
        >>> [round(warmup_cosine_restarts(k, warmup_steps=0, total_steps=4, num_cycles=2), 3) for k in range(5)]
        [1.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _warmup_then(
        lambda progress: _half_cosine(num_cycles * progress % 1.0),
        step,
        warmup_steps,
        total_steps,
        start_factor,
        min_ratio,
    )


def warmup_linear(
    step: float, *, warmup_steps: int, total_steps: int, start_factor: float = 0.0, min_ratio: float = 0.0
) -> float:
    """Rise linearly over the warmup, then fall linearly to `min_ratio` at `total_steps`.

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, from 0 to `total_steps`.
        total_steps: where the curve ends, positive.
        start_factor: the multiple at step 0, in [0, 1].
        min_ratio: the multiple at and after `total_steps`, in [0, 1].

    Returns:
        The multiple of the base learning rate to use for the next step.

    Example:
        >>> [warmup_linear(k, warmup_steps=2, total_steps=6) for k in range(0, 9, 2)]
        [0.0, 1.0, 0.5, 0.0, 0.0]
    """
    return _warmup_then(DECAY_SHAPES["linear"], step, warmup_steps, total_steps, start_factor, min_ratio)


def warmup_polynomial(
    step: float,
    *,
    warmup_steps: int,
    total_steps: int,
    start_factor: float = 0.0,
    min_ratio: float = 0.0,
    power: float = 1.0,
) -> float:
    """Rise linearly over the warmup, then fall as a power of what is left of the run.

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, from 0 to `total_steps`.
        total_steps: where the curve ends, positive.
        start_factor: the multiple at step 0, in [0, 1].
        min_ratio: the multiple at and after `total_steps`, in [0, 1].
        power: the exponent, positive.

    Returns:
        The multiple of the base learning rate to use for the next step.

    Example:
        >>> [warmup_polynomial(k, warmup_steps=0, total_steps=4, power=2.0) for k in range(5)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    return _warmup_then(
        lambda progress: (1.0 - progress) ** power, step, warmup_steps, total_steps, start_factor, min_ratio
    )


def warmup_stable_decay(
    step: float,
    *,
    warmup_steps: int,
    total_steps: int,
    start_factor: float = 0.0,
    min_ratio: float = 0.0,
    decay_steps: int,
    decay_shape: str = "linear",
) -> float:
    """Rise linearly over the warmup, stay at 1, and fall to `min_ratio` over the last `decay_steps` (WSD).

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, 0 or more.
        total_steps: where the curve ends; at least `warmup_steps` + `decay_steps`.
        start_factor: the multiple at step 0, in [0, 1].
        min_ratio: the multiple at and after `total_steps`, in [0, 1].
        decay_steps: length of the decay, 0 or more.
        decay_shape: a key of `DECAY_SHAPES`.

    Returns:
        The multiple of the base learning rate to use for the next step.

    Example:
        >>> [warmup_stable_decay(k, warmup_steps=1, total_steps=6, decay_steps=2) for k in range(7)]
        [0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_steps or step < total_steps - decay_steps:
        return warmup_factor(step, warmup_steps=warmup_steps, start_factor=start_factor)
    shape = DECAY_SHAPES[decay_shape]
    return _warmup_then(shape, step, total_steps - decay_steps, total_steps, start_factor, min_ratio)


def warmup_inverse_sqrt(
    step: float, *, warmup_steps: int, total_steps: int = 0, start_factor: float = 0.0, min_ratio: float = 0.0
) -> float:
    """Rise linearly over the warmup, then fall as one over the square root of the step.

    Args:
        step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
        warmup_steps: length of the warmup, and the time scale of the fall: at 4 times as many steps it is at one half.
        total_steps: for the form of the other schedules; the curve has no end.
        start_factor: the multiple at step 0, in [0, 1].
        min_ratio: the multiple that the curve never falls below, in [0, 1].

    Returns:
        The multiple of the base learning rate to use for the next step.

    Example:
        >>> [warmup_inverse_sqrt(k, warmup_steps=2) for k in (1, 2, 8, 32)]
        [0.5, 1.0, 0.5, 0.25]
    """
    if step < warmup_steps:
        return warmup_factor(step, warmup_steps=warmup_steps, start_factor=start_factor)
    scale = warmup_steps or _TIME_SCALE_WITHOUT_WARMUP
    return max(min_ratio, 1.0 / math.sqrt((step - warmup_steps + scale) / scale))


def _warmup_then(
    shape: Callable[[float], float], step: float, warmup: int, total: int, start_factor: float, min_ratio: float
) -> float:
    if step < warmup:
        return warmup_factor(step, warmup_steps=warmup, start_factor=start_factor)
    if step >= total:
        return min_ratio
    return min_ratio + (1.0 - min_ratio) * shape((step - warmup) / (total - warmup))
