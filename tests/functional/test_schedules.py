"""The schedule against torch's own, and the promises of its shape."""

import math
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    PolynomialLR,
    SequentialLR,
)

from lightning_tricks.functional.schedules import (
    even_start_factor,
    resolve_duration,
    warmup_cosine,
    warmup_cosine_restarts,
    warmup_factor,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
)

# Each of our curves, and the function of the same name in transformers, by the arguments of both.
BY_TRANSFORMERS = {
    "linear": (warmup_linear, {}, transformers.get_linear_schedule_with_warmup, {}),
    "cosine": (warmup_cosine, {}, transformers.get_cosine_schedule_with_warmup, {}),
    "restarts 1": (warmup_cosine_restarts, {}, transformers.get_cosine_with_hard_restarts_schedule_with_warmup, {}),
    "restarts 3": (
        warmup_cosine_restarts,
        {"num_cycles": 3},
        transformers.get_cosine_with_hard_restarts_schedule_with_warmup,
        {"num_cycles": 3},
    ),
    "polynomial 1": (warmup_polynomial, {}, transformers.get_polynomial_decay_schedule_with_warmup, {"lr_end": 0.0}),
    "polynomial 2.5": (
        warmup_polynomial,
        {"power": 2.5},
        transformers.get_polynomial_decay_schedule_with_warmup,
        {"lr_end": 0.0, "power": 2.5},
    ),
    "inverse sqrt": (warmup_inverse_sqrt, {}, transformers.get_inverse_sqrt_schedule, {}),
    **{
        f"stable decay {ours}": (
            warmup_stable_decay,
            {"decay_steps": 7, "decay_shape": ours},
            transformers.get_wsd_schedule,
            {"num_decay_steps": 7, "decay_type": theirs},
        )
        for ours, theirs in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt"))
    },
}


def optimizer_of(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (1, 50), (10, 100), (993, 1000)])
def test_equals_the_function_of_transformers_at_every_step(name: str, warmup: int, total: int) -> None:
    ours, own, theirs, other = BY_TRANSFORMERS[name]
    optimizer = optimizer_of(0.3)
    sizes = {"num_warmup_steps": warmup, "num_training_steps": total}
    if theirs is transformers.get_inverse_sqrt_schedule:
        sizes.pop("num_training_steps")
    reference = theirs(optimizer, **sizes, **other)
    for step in range(total + 1):
        rate = 0.3 * ours(step, warmup_steps=warmup, total_steps=total, **own)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=0, abs=1e-12), step
        optimizer.step()
        reference.step()


@pytest.mark.parametrize(
    ("ours", "own", "theirs", "cycle"),
    [
        (warmup_polynomial, {"power": 2.0}, lambda o: PolynomialLR(o, total_iters=30, power=2.0), 30),
        (warmup_linear, {"min_ratio": 0.25}, lambda o: LinearLR(o, 1.0, 0.25, total_iters=30), 30),
        (warmup_cosine_restarts, {"num_cycles": 3}, lambda o: CosineAnnealingWarmRestarts(o, T_0=10), 29),
    ],
)
def test_equals_the_scheduler_of_torch_after_a_warmup(ours, own: dict, theirs, cycle: int) -> None:
    """`cycle` steps of the decay: torch's restarts begin a fourth cycle where ours end."""
    optimizer = optimizer_of(0.3)
    parts = [LinearLR(optimizer, start_factor=0.01, total_iters=10), theirs(optimizer)]
    reference = SequentialLR(optimizer, parts, milestones=[10])
    for step in range(10 + cycle + 1):
        rate = 0.3 * ours(step, warmup_steps=10, total_steps=40, start_factor=0.01, **own)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=0, abs=1e-12), step
        optimizer.step()
        reference.step()


def test_every_curve_ends_at_its_ratio_and_stays() -> None:
    for curve, own in (
        (warmup_linear, {}),
        (warmup_cosine_restarts, {"num_cycles": 2}),
        (warmup_polynomial, {"power": 3.0}),
        (warmup_stable_decay, {"decay_steps": 4, "decay_shape": "sqrt"}),
    ):
        values = [curve(k, warmup_steps=2, total_steps=12, min_ratio=0.2, **own) for k in range(15)]
        assert values[12:] == [0.2] * 3
        assert min(values[2:]) == 0.2
        assert max(values) == values[2] == 1.0


def test_the_floor_of_the_inverse_square_root() -> None:
    values = [warmup_inverse_sqrt(k, warmup_steps=4, min_ratio=0.5) for k in (4, 9, 16, 400)]
    assert values == pytest.approx([1.0, 2 / 3, 0.5, 0.5])


def test_a_decay_without_room_for_a_plateau() -> None:
    values = [warmup_stable_decay(k, warmup_steps=2, total_steps=4, decay_steps=2) for k in range(5)]
    assert values == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert [warmup_stable_decay(k, warmup_steps=0, total_steps=2, decay_steps=0) for k in range(3)] == [1.0, 1.0, 0.0]


def test_warmup_alone() -> None:
    assert [warmup_factor(k, warmup_steps=4, start_factor=0.2) for k in range(6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    )
    assert warmup_factor(0, warmup_steps=0, start_factor=0.5) == 1.0


@pytest.mark.parametrize(("warmup", "total"), [(1000, 10000), (1, 50), (7, 8)])
def test_equals_torchs_sequence_of_schedulers_at_every_step(warmup: int, total: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-4)
    reference = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.01, total_iters=warmup),
            CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=1e-6),
        ],
        milestones=[warmup],
    )
    for step in range(total + 1):
        ours = 1e-4 * warmup_cosine(
            step, warmup_steps=warmup, total_steps=total, start_factor=0.01, min_ratio=1e-6 / 1e-4
        )
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=0, abs=1e-12), step
        optimizer.step()
        reference.step()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), total=st.integers(1, 300), start=st.floats(0, 1), floor=st.floats(0, 1))
def test_rises_then_never_climbs(data, total: int, start: float, floor: float) -> None:
    warmup = data.draw(st.integers(0, total))
    curve = [
        warmup_cosine(step, warmup_steps=warmup, total_steps=total, start_factor=start, min_ratio=floor)
        for step in range(total + 20)
    ]
    assert all(math.isfinite(value) and -1e-12 <= value <= 1 + 1e-12 for value in curve)
    rise = curve[: warmup + 1] if warmup < total else curve[:warmup]  # without a decay it falls to the floor at once
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(rise))
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(curve[warmup:]))
    assert curve[total:] == [floor] * 20


def test_even_warmup_starts_above_zero_and_ends_at_the_top() -> None:
    start = even_start_factor(4)
    curve = [warmup_cosine(k, warmup_steps=4, total_steps=9, start_factor=start) for k in range(5)]
    assert curve == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_durations() -> None:
    assert resolve_duration(12, 100) == 12
    assert resolve_duration(0.5, 101) == 50
    assert resolve_duration(0.0, 101) == 0
