import pytest
import torch

from lightning_tricks.functional.update_rounding import vanished_and_due


@pytest.mark.parametrize(
    ("dtype", "step", "vanished"),
    [
        (torch.float16, 1e-9, True),  # the textbook's case
        (torch.float16, 1e-3, False),
        (torch.bfloat16, 1e-3, True),
        (torch.bfloat16, 1e-2, False),
        (torch.float32, 1e-9, True),
        (torch.float32, 1e-6, False),
    ],
)
def test_one_minus_a_step(dtype: torch.dtype, step: float, vanished: bool) -> None:
    before = torch.ones(1, dtype=dtype)
    counts = vanished_and_due([before], [before - torch.tensor(step).to(dtype)], [torch.ones(1, dtype=dtype)])
    assert counts.tolist() == [float(vanished), 1.0]


def test_only_weights_with_a_gradient_are_due() -> None:
    before, after = torch.ones(4), torch.tensor([1.0, 1.0, 2.0, 2.0])
    assert vanished_and_due([before], [after], [torch.tensor([0.0, 1.0, 1.0, 0.0])]).tolist() == [1.0, 2.0]
    assert vanished_and_due([], [], []).tolist() == [0.0, 0.0]


def test_equals_a_slow_loop() -> None:
    torch.manual_seed(0)
    before = [torch.randn(50).bfloat16(), torch.randn(4, 4)]
    gradients = [torch.randn(50).bfloat16() * (torch.rand(50) < 0.5), torch.randn(4, 4)]
    after = [w - 0.003 * g for w, g in zip(before, gradients, strict=True)]
    due = vanished = 0
    for w, new, g in zip(before, after, gradients, strict=True):
        for a, b, c in zip(w.flatten().tolist(), new.flatten().tolist(), g.flatten().tolist(), strict=True):
            due += c != 0
            vanished += c != 0 and a == b
    assert vanished_and_due(before, after, gradients).tolist() == [vanished, due]
    assert 0 < vanished < due
