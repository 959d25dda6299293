"""Batches cut into micro-batches within a step."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests import accumulation_cases, micro_batching_cases
from tests.accumulation_cases import Transformer, count_tokens, large_batch_run, largest_relative_error, token_batches
from tests.micro_batching_cases import CONTAINERS, EXTRAS, Limited, Run, faults_of_all, fit_run
from tests.models import Net, assert_same, fit, fp16, loader, seeded, weights
from tests.models import trainer as quiet_trainer

runs = st.builds(
    Run,
    structure=st.lists(st.sampled_from(sorted(CONTAINERS)), min_size=1, max_size=4).map(tuple),
    extra=st.sampled_from(sorted(EXTRAS)),
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple),
    capacity=st.integers(1, 9),
    fails_on=st.integers(0, 1),
    at_call=st.integers(0, 4),
    in_backward=st.booleans(),
)
many = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@many
@given(batch=st.lists(runs, min_size=20, max_size=20))
def test_case_30_out_of_memory_on_one_rank_changes_nothing(batch: list[Run], two_processes) -> None:
    """200 runs, of random structures and sizes; an error on one rank, at what is too large or at any call."""
    for faults in two_processes.run(faults_of_all, batch, "ddp"):
        assert faults == []


def test_out_of_memory_in_one_process() -> None:
    run = Run(("dict", "tuple"), "words", (9, 4, 7), capacity=2, fails_on=0, at_call=1, in_backward=True)
    assert faults_of_all([run], "auto") == []


def test_the_size_is_remembered_and_larger_ones_are_tried(monkeypatch) -> None:
    monkeypatch.setattr("lightning_tricks.callbacks.micro_batching._GROW_AFTER", 3)
    run = Run(("list",), "nothing", (8,) * 14, capacity=4, fails_on=0, at_call=0, in_backward=False)
    micro_batching = lt.MicroBatching()
    sizes = []

    class Sizes(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            sizes.append(int(trainer.callback_metrics["microbatch/size"]))

    module = fit_run(run, micro_batching, Sizes(), fails=True)
    # After 3 batches 8 is tried, and fails; then after 6.
    assert micro_batching.state_dict() == {"size": 4, "since": 5, "wait": 12, "retries": 3, "ceiling": 8}
    assert sizes == [4] * 14
    assert set(module.sizes) == {4}


def test_the_size_is_part_of_a_checkpoint(tmp_path) -> None:
    run = Run(("list",), "nothing", (8, 8), capacity=4, fails_on=0, at_call=0, in_backward=False)
    data = DataLoader(micro_batching_cases.batches_of(run, 0), batch_size=None)
    first = quiet_trainer(lt.MicroBatching())
    first.fit(seeded(lambda: Limited(run)).double(), data)
    first.save_checkpoint(tmp_path / "end.ckpt")
    micro_batching, module = lt.MicroBatching(), seeded(lambda: Limited(run)).double()
    quiet_trainer(micro_batching, max_epochs=2).fit(module, data, ckpt_path=tmp_path / "end.ckpt", weights_only=True)
    assert module.calls == len(module.sizes) == 4  # none of them failed
    assert micro_batching.state_dict()["retries"] == 1


def test_growth_that_fits_is_kept(monkeypatch) -> None:
    monkeypatch.setattr("lightning_tricks.callbacks.micro_batching._GROW_AFTER", 2)
    run = Run(("list",), "nothing", (8,) * 6, capacity=8, fails_on=0, at_call=1, in_backward=False)
    module = fit_run(run, lt.MicroBatching(), fails=True)
    assert module.sizes == [4] * 4 + [8] * 4


def test_an_error_at_the_smallest_size_is_raised() -> None:
    run = Run(("list",), "nothing", (8,), capacity=1, fails_on=0, at_call=0, in_backward=False)
    with pytest.raises(torch.OutOfMemoryError, match=r"min_size=2 to fit .*Tried to allocate 2.00 GiB.*Checkpointing"):
        fit_run(run, lt.MicroBatching(min_size=2), fails=True)


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize("size", ["auto", 8])
def test_other_errors_pass_through(error: type[Exception], size) -> None:
    run = Run(("list",), "nothing", (8,), capacity=4, fails_on=0, at_call=0, in_backward=False)
    module = Limited(run, error).double()
    data = DataLoader(micro_batching_cases.batches_of(run, 0), batch_size=None)
    words = "CUDA out of memory" if error is ValueError else "no memory here"
    module.training_step = _raises(error, words)  # of a kind that says nothing of memory
    with pytest.raises(error, match=words):
        quiet_trainer(lt.MicroBatching(size)).fit(module, data)


def _raises(error: type[Exception], words: str):
    def training_step(batch, batch_idx):
        raise error(words)

    return training_step


@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("steps", [1, 2])
def test_parts_are_weighed_as_the_batches_are(size, steps: int) -> None:
    """By tokens, in fp64, with a batch and a part that have none."""
    data = token_batches(6, empty=(2,))
    data[3]["labels"][:1] = accumulation_cases.IGNORED
    tricks = [lt.MicroBatching(size), accumulation_cases.tokens(steps)]
    _, module = accumulation_cases.run(data, *tricks, dtype=torch.float64)
    windows = [data[i : i + steps] for i in range(0, 6, steps)]
    full = [window for window in windows if sum(count_tokens(batch) for batch in window)]
    assert largest_relative_error(module, large_batch_run(full, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2"])
def test_they_are_on_two_ranks(strategy: str, two_processes) -> None:
    for error in two_processes.run(accumulation_cases.error_in_parts, strategy):
        assert error < 1e-12


def test_they_are_on_two_ranks_under_a_loss_scaler(two_processes) -> None:
    for strategy in ("ddp", "fsdp2"):
        for error in two_processes.run(accumulation_cases.error_in_parts, strategy, scaled=True):
            assert error < 3e-2


@pytest.mark.parametrize("size", [2, "auto"])
def test_backwards_run_outside_of_autocast(size) -> None:
    class Looks(Net):
        def loss(self, batch):
            self.forward_is_cast = torch.is_autocast_enabled("cpu")
            loss = super().loss(batch)
            loss.register_hook(lambda gradient: self.seen.append(torch.is_autocast_enabled("cpu")))
            return loss

    module = Looks()
    module.seen = []
    fit(module, lt.MicroBatching(size), precision="bf16-mixed", limit_train_batches=1)
    assert module.forward_is_cast
    assert module.seen == [False] * (2 if size == 2 else 1)


def test_under_a_loss_scaler_and_windows() -> None:
    data = token_batches(6)
    tricks = [lt.MicroBatching(1), accumulation_cases.tokens(3)]
    module = seeded(lambda: Transformer(lr=1e-3))
    accumulation_cases.run(data, *tricks, module=module, plugins=[fp16(2.0**10)])
    reference = large_batch_run([data[:3], data[3:]], dtype=torch.float32, lr=1e-3)
    assert largest_relative_error(module, reference) < 2e-2


def test_parts_alone_are_weighed_by_their_samples() -> None:
    """10 samples in parts of 4, 3 and 3."""
    parts, whole = (seeded(lambda: Net(optimizer="sgd")).double() for _ in range(2))
    data = DataLoader(
        [[torch.randn(10, 8, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)]], batch_size=None
    )
    fit(parts, lt.MicroBatching(4), data=data)
    fit(whole, data=data)
    assert len(parts.losses) == 3
    assert_same(weights(parts), weights(whole), rtol=0, atol=1e-15)


def test_auto_without_an_error_is_the_plain_run_bit_for_bit() -> None:
    ours = seeded(lambda: Net(dropout=0.2, batchnorm=True))
    fit(ours, lt.MicroBatching(), max_epochs=2, accumulate_grad_batches=3)
    plain = seeded(lambda: Net(dropout=0.2, batchnorm=True))
    fit(plain, max_epochs=2, accumulate_grad_batches=3)
    assert_same(weights(ours), weights(plain))


def test_sharded_parameters_refuse_auto_and_uneven_batches(two_processes) -> None:
    for auto, uneven in two_processes.run(accumulation_cases.refusals_when_sharded):
        assert all(words in auto for words in ("MicroBatching", "all-gather", "Pass an int"))
        assert "at least 4 samples on every rank" in uneven


# What the Trainer sees


class Returns(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {
            "loss": loss,
            "inputs": batch[0],
            "size": float(len(batch[0])),
            "mean": batch[0].mean(),
            "kind": "train",
        }


def test_the_outputs_are_joined() -> None:
    class Outputs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            self.outputs, self.batch = outputs, batch

    parts, whole = Outputs(), Outputs()
    fit(seeded(Returns), lt.MicroBatching(3), parts, limit_train_batches=1)
    fit(seeded(Returns), whole, limit_train_batches=1)
    torch.testing.assert_close(parts.outputs["loss"], whole.outputs["loss"])
    torch.testing.assert_close(parts.outputs["mean"], whole.outputs["mean"])
    assert torch.equal(parts.outputs["inputs"], parts.batch[0])
    assert (parts.outputs["size"], parts.outputs["kind"]) == (2.0, "train")


def test_what_only_some_parts_return_is_kept() -> None:
    class ReturnsSome(Net):
        def training_step(self, batch, batch_idx):
            more = {"few": batch[0].mean()} if len(batch[0]) == 1 else {}
            return {"loss": super().training_step(batch, batch_idx), "inputs": batch[0], **more}

    class Outputs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            self.outputs, self.batch = outputs, batch

    seen = Outputs()
    data = DataLoader([[torch.randn(3, 8), torch.randn(3, 1)]], batch_size=None)
    fit(ReturnsSome(), lt.MicroBatching(2), seen, data=data)
    assert torch.equal(seen.outputs["inputs"], seen.batch[0])
    torch.testing.assert_close(seen.outputs["few"], seen.batch[0][2:].mean())


def logged(*tricks: lt.Trick, module: pl.LightningModule, data=None) -> dict[str, float]:
    trainer = fit(module, *tricks, data=data, max_epochs=1, limit_train_batches=3)
    return {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("own")}


class LogsMuch(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own/mean", loss, on_epoch=True)
        self.log("own/count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"own/max": batch[0].max(), "own/named": loss}, on_epoch=True, reduce_fx="max", batch_size=1)
        return loss


@pytest.mark.parametrize("size", [3, "auto"])
def test_what_training_step_logs_is_that_of_the_whole_batch(size) -> None:
    data = loader(batch_size=10)
    whole = logged(module=seeded(LogsMuch), data=data)
    parts = logged(lt.MicroBatching(size), module=seeded(LogsMuch), data=data)
    different = {"own/named", "own/named_step", "own/named_epoch"}  # the largest of the parts' means
    assert {key: parts[key] for key in parts.keys() - different} == pytest.approx(
        {key: whole[key] for key in whole.keys() - different}, rel=1e-5
    )
    assert parts["own/count"] == 28.0


def test_an_attempt_that_fails_logs_nothing() -> None:
    class FailsThenLogs(Limited):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("own", float(self.calls), on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

    run = Run(("list",), "nothing", (8,), capacity=8, fails_on=0, at_call=1, in_backward=True)
    module = seeded(lambda: FailsThenLogs(run)).double()
    trainer = quiet_trainer(lt.MicroBatching())
    trainer.fit(module, DataLoader(micro_batching_cases.batches_of(run, 0), batch_size=None))
    assert float(trainer.callback_metrics["own"]) == 2 + 3


def test_logs_that_communicate_do_so_once_a_batch(two_processes) -> None:
    """Ranks that cut into another number of parts, or of which one runs out of memory, would wait for ever."""
    for found in two_processes.run(micro_batching_cases.logged_over_ranks):
        assert found == [pytest.approx(found[0], rel=1e-12)] * 3


def test_a_forward_that_communicates_refuses_auto() -> None:
    module = Net()
    module.norm = nn.SyncBatchNorm(8)  # which has no forward on CPUs
    with pytest.raises(MisconfigurationException, match=r"SyncBatchNorm communicates.*Pass an int"):
        lt.MicroBatching().on_fit_start(SimpleNamespace(world_size=2), module)
    lt.MicroBatching(2).on_fit_start(SimpleNamespace(world_size=2), module)


def test_a_buffer_that_the_forward_replaces_is_put_back() -> None:
    class Replaces(Limited):
        def training_step(self, batch, batch_idx):
            self.seen = self.seen + 1
            return super().training_step(batch, batch_idx)

    run = Run(("list",), "nothing", (8,), capacity=8, fails_on=0, at_call=1, in_backward=False)
    module = seeded(lambda: Replaces(run)).double()
    quiet_trainer(lt.MicroBatching()).fit(module, DataLoader(micro_batching_cases.batches_of(run, 0), batch_size=None))
    assert module.seen == 8 + 2  # both parts of the attempt that went well


def test_a_batch_that_cannot_be_cut_shows_what_it_is() -> None:
    data = DataLoader([{"x": torch.zeros(4, 8), "graph": object()}], batch_size=None)
    with pytest.raises(TypeError, match=r"got object at graph: it cannot be cut"):
        fit(Net(), lt.MicroBatching(3), data=data)


def test_parts_that_give_no_loss_count_nothing() -> None:
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)

    ours, first_half = seeded(lambda: Skips(optimizer="sgd")).double(), seeded(lambda: Net(optimizer="sgd")).double()
    x, y = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    fit(ours, lt.MicroBatching(2), data=DataLoader([[x, y]], batch_size=None))
    fit(first_half, data=DataLoader([[x[:2], y[:2]]], batch_size=None))
    assert_same(weights(ours), weights(first_half), rtol=0, atol=1e-15)


def test_a_module_that_gives_no_loss_at_all_skips_the_step() -> None:
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None

    trainer = fit(Skips(), lt.MicroBatching(2))
    assert lt.step_ledger(trainer)[0].skipped_empty == 7


def test_batchnorm_is_named() -> None:
    with pytest.warns(UserWarning, match=r"3 BatchNorm layer\(s\) see micro-batches.*net\.0\.norm"):
        fit(Net(batchnorm=True), lt.MicroBatching(2))


def test_reentrant_checkpointing_works_in_parts() -> None:
    class Checkpointed(Net):
        def loss(self, batch):
            x, y = batch
            hidden = torch.utils.checkpoint.checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=True)
            return (self.net[3](hidden) - y).square().mean()

    parts, whole = seeded(Checkpointed), seeded(Net)
    fit(parts, lt.MicroBatching("auto"))
    fit(whole)
    assert_same(weights(parts), weights(whole), rtol=0, atol=1e-6)


# What a module may do


@pytest.mark.parametrize("size", [2, "auto"])
def test_hooks_of_parameters_see_the_gradient_of_the_batch_once(size) -> None:
    def trained(*tricks: lt.Trick) -> tuple[Net, list]:
        module = seeded(lambda: Net(optimizer="sgd")).double()
        weight, seen = module.net[3].weight, []
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
        data = [torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)]
        fit(module, *tricks, data=DataLoader([data], batch_size=None))
        return module, seen

    torch.manual_seed(1)
    module, seen = trained(lt.MicroBatching(size))
    torch.manual_seed(1)
    plain, expected = trained()
    assert_same(weights(module), weights(plain), rtol=0, atol=1e-14)
    torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize("size", [2, "auto"])
def test_a_loss_of_one_element_is_one(size) -> None:
    class OneElement(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).reshape(1)

    parts, plain = seeded(lambda: OneElement(optimizer="sgd")), seeded(lambda: OneElement(optimizer="sgd"))
    fit(parts, lt.MicroBatching(size))
    fit(plain)
    assert_same(weights(parts), weights(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("returned", [{"x": 1}, 1.5, (torch.ones(()), 1)])
def test_what_is_no_loss_is_an_error_as_without(returned) -> None:
    class Returns(Net):
        def training_step(self, batch, batch_idx):
            return returned

    with pytest.raises(MisconfigurationException, match=r"a dict with the key 'loss', or None, got"):
        fit(Returns(), lt.MicroBatching(2))


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_that_are_not_dense_are_refused(kind: str) -> None:
    x = torch.eye(4).to_sparse() if kind == "sparse" else torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match=rf"dense tensors, got a {kind} one at x: it cannot be cut"):
        fit(Net(), lt.MicroBatching(2), data=DataLoader([{"x": x}], batch_size=None))
