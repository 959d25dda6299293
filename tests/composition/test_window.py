"""The accumulation window on its own."""

import torch

from lightning_tricks.composition.window import Window


def filled(*pairs: tuple[float | None, float]) -> Window:
    window = Window()
    for weight, loss in pairs:
        window.begin_batch()
        window.weight = weight
        window.add(torch.tensor(loss))
    return window


def test_the_mean_is_weighted() -> None:
    window = filled((1.0, 4.0), (3.0, 8.0))
    assert window.weight_sum == 4.0
    assert window.mean_loss(divisor=1, world_size=1) == 7.0
    assert window.mean_loss(divisor=2, world_size=1) == 14.0  # Lightning had divided each by 2


def test_ranks_give_their_part_of_the_mean_of_all() -> None:
    one, other = filled((1.0, 4.0)), filled((3.0, 8.0))
    for window in (one, other):
        window.total_weight = 4.0
    assert (one.mean_loss(1, 2) + other.mean_loss(1, 2)) / 2 == 7.0


def test_without_weights_each_counts_one() -> None:
    assert filled((None, 4.0), (None, 8.0)).mean_loss(1, 1) == 6.0


def test_what_counts_nothing_may_be_nan() -> None:
    window = filled((0.0, float("nan")), (2.0, 3.0))
    assert window.mean_loss(1, 1) == 3.0
    assert filled((0.0, float("nan"))).mean_loss(1, 1) is None
    assert filled((0.0, float("nan"))).has_loss


def test_a_batch_that_failed_is_taken_back() -> None:
    window = filled((1.0, 4.0), (3.0, 8.0))
    window.forget_batch()
    assert (window.weight_sum, window.num_losses) == (1.0, 1)
    window.add(torch.tensor(2.0))
    assert window.mean_loss(1, 1) == 10 / 4


def test_a_closure_that_is_evaluated_again_begins_the_batch_again() -> None:
    window = filled((1.0, 4.0), (1.0, 8.0))
    assert window.mean_loss(1, 1) == 6.0
    window.add(torch.tensor(2.0))
    assert window.mean_loss(1, 1) == 3.0
    assert window.num_losses == 2


def test_closing_begins_another() -> None:
    window = filled((1.0, 4.0))
    before = window.number
    window.close()
    assert not window.has_loss
    assert window.mean_loss(1, 1) is None
    assert window.number == before + 1
