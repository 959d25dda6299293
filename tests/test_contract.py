"""The contract that every public callback keeps, as one table: the rows stand in `contract_table.py`."""

import copy
import functools
import math
import pickle

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_tricks as lt
from tests.contract_table import ROWS, STRATEGIES, Row
from tests.distributed_cases import contract_runs, contract_under
from tests.models import (
    ManualNet,
    Net,
    TwoOptimizers,
    assert_same,
    dataset,
    fit,
    fp16,
    largest_difference,
    loader,
    seeded,
    trainer,
    weights,
)

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)

# How a run may differ: the module, and the Trainer's options. fp16 begins with a scale that overflows twice.
MODES = {
    "fp32": (Net, {}),
    "bf16": (Net, {"precision": "bf16-mixed"}),
    "fp16": (Net, {"plugins": lambda: fp16(2.0**18)}),
    "fp16 fused": (lambda **o: Net(fused=True, **o), {"plugins": lambda: fp16(2.0**18)}),
    "fused": (lambda **o: Net(fused=True, **o), {}),
    "accumulation 3": (Net, {"accumulate_grad_batches": 3, "max_epochs": 3}),
    "fp16 accumulation 3": (Net, {"accumulate_grad_batches": 3, "max_epochs": 3, "plugins": lambda: fp16(2.0**18)}),
    "fp16 fused accumulation 3": (
        lambda **o: Net(fused=True, **o),
        {"accumulate_grad_batches": 3, "max_epochs": 3, "plugins": lambda: fp16(2.0**18)},
    ),
    "fp16 fused momentum": (
        lambda **o: Net(**{"fused": True, "optimizer": "momentum", **o}),
        {"plugins": lambda: fp16(2.0**18)},
    ),
    "logged every 3 steps": (Net, {"log_every_n_steps": 3}),
    "manual": (ManualNet, {}),
    "manual fp16": (ManualNet, {"plugins": lambda: fp16(2.0**18)}),
    "two optimizers": (TwoOptimizers, {}),
    "two optimizers fp16": (TwoOptimizers, {"plugins": lambda: fp16(2.0**18)}),
}


def rows_by(modes, among=ROWS, every: int = 1) -> pytest.MarkDecorator:
    pairs = [
        (row, mode)
        for place, row in enumerate(among)
        for number, mode in enumerate(modes)
        if row.takes(number) and (place + number) % every == 0
    ]
    return pytest.mark.parametrize(("row", "mode"), pairs, ids=[f"{mode}-{row.name}" for row, mode in pairs])


rows_and_modes = rows_by(MODES)
# There a plain run steps on uninitialised memory, after a first step that overflows: nothing to compare with.
SOUND_MODES = [mode for mode in MODES if mode != "fp16 fused momentum"]
half_of_rows_and_modes = rows_by(SOUND_MODES, every=2)
neutral_rows_and_modes = rows_by(SOUND_MODES, [row for row in ROWS if row.neutral is not None])


def run_mode(
    mode: str, callbacks: list[pl.Callback], width: int = 8, optimizer: str | None = None, **more
) -> tuple[pl.Trainer, Net]:
    build, options = MODES[mode]
    made = {key: value() if callable(value) else value for key, value in options.items()}
    own = {} if optimizer is None else {"optimizer": optimizer}
    module = seeded(lambda: build(dropout=0.2, batchnorm=True, width=width, **own))
    return fit(module, *callbacks, **{"max_epochs": 2, **made, **more}), module


def check_refusal(row: Row, mode: str) -> None:
    with pytest.raises(MisconfigurationException, match=row.name):
        run_mode(mode, [row.build("acting")])


def is_manual(mode: str) -> bool:
    return "manual" in mode or "two" in mode


# 1. resume


@rows_and_modes
def test_resumed_run_equals_uninterrupted_one(row: Row, mode: str, tmp_path) -> None:
    """Epochs have 7 batches: inside the first, at its edge, inside the second, each at the edge of a window of 3.

    The rows and modes take the three places in turn, so that each row and each mode meets all of them.
    """
    if row.refuses(mode):
        return check_refusal(row, mode)
    save_at = (3, 7, 10)[(ROWS.index(row) + list(MODES).index(mode)) % 3]

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(), batch_size=4, shuffle=True)

    def callbacks() -> list[pl.Callback]:
        own = [] if row.name == "ExactResume" else [row.build("acting", manual=is_manual(mode))]
        return [*own, lt.ExactResume(), SaveAt(save_at, tmp_path / "middle.ckpt")]

    whole, module = run_mode(mode, callbacks(), **row.module, data=loader())
    expected, metrics = weights(module), dict(whole.callback_metrics)

    torch.manual_seed(999)  # another process knows nothing of the first one's random state
    build, options = MODES[mode]
    made = {key: value() if callable(value) else value for key, value in options.items()}
    resumed = build(dropout=0.2, batchnorm=True, **row.module)
    torch.rand(7)
    again = trainer(*callbacks(), **{"max_epochs": 2, **made})
    again.fit(resumed, loader(), ckpt_path=tmp_path / "middle.ckpt", weights_only=True)

    assert_same(weights(resumed), expected)
    assert [one.state_dict() for one in lt.step_ledger(again)] == [one.state_dict() for one in lt.step_ledger(whole)]
    assert {k: float(v) for k, v in again.callback_metrics.items()} == pytest.approx(
        {k: float(v) for k, v in metrics.items()}, rel=0, abs=0, nan_ok=True
    )


class SaveAt(pl.Callback):
    def __init__(self, batches: int, path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches and not self.path.exists():
            trainer.save_checkpoint(self.path)


# 2. neutral


@functools.cache
def plain_run(mode: str, **options) -> tuple[pl.Trainer, Net]:
    """A run without a trick, to compare with."""
    return run_mode(mode, [], **options)


@neutral_rows_and_modes
def test_neutral_settings_change_nothing(row: Row, mode: str) -> None:
    if row.refuses(mode):
        return check_refusal(row, mode)
    trainer_of_plain, plain = plain_run(mode, **row.module)
    run, module = run_mode(mode, [row.build("neutral", manual=is_manual(mode))], **row.module)
    assert_same(weights(module), weights(plain))
    assert module.losses == plain.losses
    assert run.global_step == trainer_of_plain.global_step


@half_of_rows_and_modes
def test_acting_settings_act(row: Row, mode: str) -> None:
    """The other half of the neutral test: it could not tell if the trick were not listed at all.

    Every row in every second mode, and the other way round: the resumes run all of them with these settings.
    """
    if row.refuses(mode):
        return check_refusal(row, mode)
    _, plain = plain_run(mode, **row.module)
    run, module = run_mode(mode, [row.build("acting", manual=is_manual(mode))], **row.module)
    assert (largest_difference(weights(module), weights(plain)) == 0.0) == row.same_weights
    assert all(torch.isfinite(value).all() for value in weights(module).values())
    ledgers = list(lt.step_ledger(run))
    assert sum(ledger.total for ledger in ledgers) == run.global_step
    assert sum(ledger.applied for ledger in ledgers) > 0
    if "fp16" in mode:  # the scaler halves its scale each time, so that it tells how often that was
        overflows = math.log2(2.0**18 / run.precision_plugin.scaler.get_scale())
        assert sum(ledger.skipped_overflow for ledger in ledgers) == overflows > 0


# 3. exceptions


@rows
@pytest.mark.parametrize("where", ["training", "validation"])
def test_exception_leaves_the_module_as_a_plain_run_would(row: Row, where: str, tmp_path) -> None:
    faults = {"fail_at": 4} if where == "training" else {"fail_in_validation": True}

    def crash(*callbacks: pl.Callback) -> tuple[Net, dict]:
        module = seeded(lambda: row.net(**faults))
        folder = tmp_path / str(len(callbacks))
        run = trainer(
            *callbacks,
            OnExceptionCheckpoint(folder),
            val_check_interval=3,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
        )
        with pytest.raises(RuntimeError, match=f"boom in {where}"):
            run.fit(module, loader(), loader())
        assert "optimizer_step" not in vars(run.strategy)
        return module, torch.load(folder / "on_exception.ckpt", weights_only=True)

    plain, plain_checkpoint = crash()
    module, checkpoint = crash(row.build("acting"))
    assert checkpoint["state_dict"].keys() == plain_checkpoint["state_dict"].keys()
    held = checkpoint["state_dict"]
    if row.averages:
        raw = checkpoint["callbacks"][row.name]["raw"]
        assert all(not torch.equal(held[name], raw[name]) for name in raw)
        held = {**held, **raw}
    assert_same(held, weights(module))
    assert [set(vars(part)) for part in module.modules()] == [set(vars(part)) for part in plain.modules()]
    if row.same_weights:
        assert_same(weights(module), weights(plain))
    pickle.loads(pickle.dumps(module.net))


# 6. two processes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_equal_one_on_the_same_global_batch(strategy: str, two_processes) -> None:
    expected = contract_runs("one process", rank=0, world_size=1)
    by_name = {row.name: row for row in ROWS}
    expected = {name: run for name, run in expected.items() if by_name[name].runs_under(strategy)}
    ranks = two_processes.run(contract_runs, strategy)
    for key, (result, logged) in expected.items():
        for rank in ranks:
            row = by_name[key]
            assert_same(rank[key][0], result, rtol=0, atol=row.across_ranks)
            shared = {name: value for name, value in rank[key][1].items() if name not in row.by_ranks}
            same = {name: value for name, value in logged.items() if name not in row.by_ranks}
            assert shared == pytest.approx(same, rel=10 * row.across_ranks, abs=row.across_ranks)
            assert rank[key][1] == ranks[0][key][1]


@pytest.mark.parametrize("strategy", ["zero1", "fsdp2"])
def test_resume_and_neutral_hold_under_strategies(strategy: str, two_processes, tmp_path) -> None:
    for faults in two_processes.run(contract_under, strategy, str(tmp_path), timeout=240):
        assert faults == []


# 7. plumbing


@rows
def test_callback_and_module_pickle_and_copy(row: Row) -> None:
    callback = row.build("acting")
    keys = list(row.net().state_dict())
    for made in (callback, pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        module = seeded(row.net)
        run = fit(module, made)
        assert list(module.state_dict()) == keys
        pickle.loads(pickle.dumps(made))
        pickle.loads(pickle.dumps(run.callbacks))
        copy.deepcopy(module.net)
        assert lt.step_ledger(run)[0].total == row.num_steps(7)


@rows
def test_second_fit_goes_on(row: Row) -> None:
    module = seeded(row.net)
    run = fit(module, row.build("acting"), max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert run.global_step == lt.step_ledger(run)[0].total == 2 * row.num_steps(7)
    assert sum(type(callback).__name__ == row.name for callback in run.callbacks) == 1


@rows
def test_one_callback_serves_two_trainers(row: Row) -> None:
    callback = row.build("acting")
    results = []
    for _ in range(2):
        module = seeded(row.net)
        run = fit(module, callback)
        results.append((weights(module), {key: float(value) for key, value in run.callback_metrics.items()}))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@rows
def test_fast_dev_run_and_sanity_check(row: Row) -> None:
    trainer(row.build("acting"), fast_dev_run=True).fit(row.net(), loader(), loader())
    run = trainer(row.build("acting"), num_sanity_val_steps=2)
    run.fit(row.net(), loader(), loader())
    assert lt.step_ledger(run)[0].total == row.num_steps(7)


@rows
def test_evaluation_alone_changes_nothing(row: Row, tmp_path) -> None:
    module = seeded(row.net)
    run = trainer(row.build("acting"))
    score = run.validate(module, loader(), verbose=False)
    assert score == trainer().validate(module, loader(), verbose=False)
    run.fit(module, loader())
    assert run.validate(module, loader(), verbose=False) == trainer().validate(module, loader(), verbose=False)


class WithData(Net):
    def __init__(self, width: int = 8, optimizer: str = "adamw") -> None:
        super().__init__(width=width, optimizer=optimizer)

    def train_dataloader(self):
        return loader()


@rows
def test_built_by_the_command_line_from_yaml(row: Row, tmp_path) -> None:
    config = {
        "model": row.module,
        "trainer": {
            "callbacks": [{"class_path": f"lightning_tricks.{row.name}", "init_args": row.config or row.acting}],
            "max_epochs": 1,
            "default_root_dir": str(tmp_path),
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    cli = LightningCLI(WithData, args=["--config", str(tmp_path / "run.yaml")], run=False, save_config_callback=None)
    cli.trainer.fit(cli.model)
    assert lt.step_ledger(cli.trainer)[0].total == row.num_steps(7)
    assert cli.trainer.callback_metrics.keys() == fit(row.net(), row.build("acting")).callback_metrics.keys()


@rows
def test_checkpoint_has_the_plain_keys(row: Row, tmp_path) -> None:
    module = seeded(row.net)
    plain = list(module.state_dict())
    fit(module, row.build("acting"), ModelCheckpoint(tmp_path, every_n_train_steps=3), enable_checkpointing=True)
    path = next(tmp_path.glob("*.ckpt"))
    assert list(torch.load(path, weights_only=True)["state_dict"]) == plain
    row.net().load_state_dict(torch.load(path, weights_only=True)["state_dict"])


# 8. refusals


@rows
def test_what_cannot_be_right_is_refused_at_the_start(row: Row) -> None:
    assert row.refusals
    for run, words in row.refusals:
        # Lightning itself refuses a stateful callback that is listed twice, by a RuntimeError.
        with pytest.raises((ValueError, RuntimeError, MisconfigurationException), match=words):
            run()


def test_every_public_callback_has_a_row() -> None:
    public = {
        name for name in lt.__all__ if isinstance(getattr(lt, name), type) and issubclass(getattr(lt, name), lt.Trick)
    }
    assert public - {"Trick"} == {row.name for row in ROWS}
