"""The assertion that users put into their own tests."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_tricks as lt
from tests.accumulation_cases import Transformer, count_tokens, token_batches, union
from tests.models import Net, assert_same, dataset, seeded, weights


def batch(size: int = 10) -> list[torch.Tensor]:
    return list(dataset(size).tensors)


def fails(module: nn.Module, *, words: str, batch=None, **options) -> None:
    with pytest.raises(AssertionError, match=words):
        lt.assert_accumulation_equivalent(module, batch or globals()["batch"](), num_micro_batches=3, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_over_samples_is_equivalent(dtype: torch.dtype) -> None:
    module = seeded(Net).to(dtype)
    lt.assert_accumulation_equivalent(module, [one.to(dtype) for one in batch()], num_micro_batches=3)


def test_a_mean_over_tokens_is_so_by_tokens_only() -> None:
    data = union(token_batches(4))
    module = seeded(Transformer)
    lt.assert_accumulation_equivalent(module, data, num_micro_batches=3, weigh_by=count_tokens)
    fails(module, batch=data, words=r"(?s)norm2\.weight: differs by 0\.\d+ of its norm.*a function that counts them")


def test_batchnorm_is_named() -> None:
    fails(Net(batchnorm=True), words=r"BatchNorm sees other samples: net\.0\.norm, net\.1\.norm, net\.2\.norm")
    lt.assert_accumulation_equivalent(Net(batchnorm=True).eval(), batch(), num_micro_batches=3)


def test_a_random_step_is_named() -> None:
    fails(Net(dropout=0.5), words=r"the step is random.*test in eval\(\) mode")
    lt.assert_accumulation_equivalent(Net(dropout=0.5).eval(), batch(), num_micro_batches=3)


class Sums(Net):
    def loss(self, batch):
        return super().loss(batch) * len(batch[0])


class Contrasts(Net):
    def loss(self, batch):
        return -self.net(batch[0]).var()


def test_a_sum_is_named() -> None:
    fails(Sums(), words="the loss is a sum over samples: return its mean")


def test_a_loss_that_compares_samples_is_found() -> None:
    fails(Contrasts(), words="compares samples with each other")


def test_a_nan_in_one_part_is_found() -> None:
    data = [*batch()]
    data[1] = data[1].clone()

    class Divides(Net):
        def loss(self, batch):
            return super().loss(batch) * (0.0 if len(batch[0]) < 4 else 1.0) / (len(batch[0]) - 3)

    fails(Divides(), words="differs by inf")


def test_nothing_is_left_behind() -> None:
    module = seeded(lambda: Net(batchnorm=True, dropout=0.5))
    before = weights(module)
    module.net[0].linear.weight.grad = torch.ones_like(module.net[0].linear.weight)
    state = torch.get_rng_state()
    fails(module, words="BatchNorm")
    assert_same(weights(module), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert torch.equal(module.net[0].linear.weight.grad, torch.ones(8, 8))
    assert sum(parameter.grad is not None for parameter in module.parameters()) == 1


class Attends(nn.Module):
    """Softmax does not see the bias of the keys: its gradient is what rounding leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch):  # without batch_idx, which Lightning allows
        x, y = batch
        heads = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
        return (self.o(nn.functional.scaled_dot_product_attention(*heads)[:, 0]) - y).square().mean()


def test_gradients_that_are_rounding_alone_are_no_difference() -> None:
    data = [torch.randn(8, 5, 16), torch.randn(8, 5, 16)]
    lt.assert_accumulation_equivalent(seeded(Attends), data, num_micro_batches=4)


def test_a_loss_without_any_gradient_is_equivalent() -> None:
    class Zero(Net):
        def loss(self, batch):
            return super().loss(batch) * 0

    lt.assert_accumulation_equivalent(Zero(), batch(), num_micro_batches=2)


def test_a_parameter_that_only_parts_use_is_named() -> None:
    class Part(Net):
        def loss(self, batch):
            return super().loss(batch) + (self.extra.sum() if len(batch[0]) < 10 else 0)

    module = Part()
    module.extra = nn.Parameter(torch.ones(2))
    fails(module, words="extra: differs by")


def test_parts_that_count_nothing_are_left_out() -> None:
    data = union(token_batches(3, empty=(1,)))
    data["labels"][:2] = -100
    lt.assert_accumulation_equivalent(
        seeded(Transformer),
        data,
        num_micro_batches=len(data["labels"]),
        weigh_by="tests.accumulation_cases.count_tokens",
    )
    with pytest.raises(ValueError, match="weights of 0 for all"):
        lt.assert_accumulation_equivalent(Net(), batch(), num_micro_batches=2, weigh_by=lambda part: 0)


def test_it_works_without_a_trainer_in_a_module_that_logs() -> None:
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss)
            return {"loss": loss}

    lt.assert_accumulation_equivalent(Logs(), batch(), num_micro_batches=2)


@pytest.mark.parametrize(
    ("module", "options", "error", "words"),
    [
        (nn.Linear(8, 1), {}, TypeError, "a training_step, got Linear"),
        (Net(), {"num_micro_batches": 1}, ValueError, "at least 2, got 1"),
        (Net(), {"num_micro_batches": 11}, ValueError, "10 samples for 11 parts"),
        (pl.LightningModule(), {}, TypeError, "to return a loss, got None"),
    ],
)
def test_what_cannot_be_tested_says_so(module, options, error, words: str) -> None:
    with pytest.raises(error, match=words):
        lt.assert_accumulation_equivalent(module, batch(), **{"num_micro_batches": 2, **options})
