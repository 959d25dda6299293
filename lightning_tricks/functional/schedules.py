"""Learning-rate schedules as pure functions of the step.

A schedule maps the number of applied optimizer steps to a multiple of the base learning rate. Nothing is kept between
steps, so a resume, a longer run and a skipped step need no special case.

Formula, for a warmup of W steps in a run of T:
    k < W:   s + (1 - s) * k / W                         linear warmup from the start factor s
    else:    m + (1 - m) * (1 + cos(pi * p)) / 2         p = (k - W) / (T - W), held at 1 from T on

Reference:
    Linear warmup: Goyal et al. (2017), "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2.
    Cosine decay: Loshchilov, Hutter (2017), "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983,
    equation 5, without restarts.

Differs:
    From SGDR in the multiple `m` that the curve ends at, and in that it stays there past the end of the run.

Cost:
    A few Python floats a step.

Sharding:
    Every rank computes the same number.
"""

import math

__all__ = ["even_start_factor", "resolve_duration", "warmup_cosine"]


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


def resolve_duration(duration: float, total_steps: int) -> int:
    """Turn a duration into steps: an int is a count, a float a fraction of the run.

    Args:
        duration: an int, 0 or more, or a float in [0, 1).
        total_steps: length of the run in steps.

    Returns:
        A number of steps. A fraction is rounded down.

    Example:
        >>> resolve_duration(100, total_steps=1000), resolve_duration(0.03, total_steps=1000)
        (100, 30)
    """
    return duration if isinstance(duration, int) else int(duration * total_steps)


def warmup_cosine(
    step: int, *, warmup_steps: int, total_steps: int, start_factor: float = 0.0, min_ratio: float = 0.0
) -> float:
    """Rise linearly over the warmup, then fall along half a cosine to `min_ratio` at `total_steps`.

    Args:
        step: applied steps so far, 0 or more.
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
    if step < warmup_steps:
        return start_factor + (1.0 - start_factor) * step / warmup_steps
    if step >= total_steps:
        return min_ratio
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
