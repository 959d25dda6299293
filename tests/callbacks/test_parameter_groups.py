"""Weight decay by group and rates by depth in a Trainer: schedulers, older checkpoints, strategies."""

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_tricks as lt
from tests.group_cases import TRICKS, Scheduled, Settings, built_by_command_line, grouped, grouped_under
from tests.models import Net, TwoOptimizers, assert_same, fit, loader, seeded, trainer, weights

CLOSE = {"rtol": 0, "atol": 1e-6}


class OwnNorm(nn.Module):
    """RMSNorm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.scale * nn.functional.rms_norm(x, x.shape[-1:])


class Named(nn.BatchNorm1d):
    """BatchNorm whose weight is called otherwise."""

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.scale * super().forward(x)


class Scales(Net):
    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.net = nn.Sequential(nn.Linear(8, 8), Named(8), OwnNorm(8), nn.Linear(8, 1))


def test_case_28_norms_whose_weight_is_named_scale_are_not_decayed() -> None:
    settings = Settings()
    fit(Scales(), lt.WeightDecayGroups(0.1), settings)
    decays = {name: decay for name, (_, decay) in settings.seen[0].items()}
    assert decays == {
        "net.0.weight": 0.1,
        "net.0.bias": 0.0,
        "net.1.scale": 0.0,
        "net.2.scale": 0.0,
        "net.3.weight": 0.1,
        "net.3.bias": 0.0,
    }


def test_exclusions_by_word_glob_and_class() -> None:
    def decayed(**options) -> set[str]:
        settings = Settings()
        fit(Net(), lt.WeightDecayGroups(0.1, **options), settings)
        return {name for name, (_, decay) in settings.seen[0].items() if decay == 0.1}

    everything = {name for name, _ in Net().named_parameters()}
    assert decayed(exclude=()) == everything
    assert decayed(exclude="bias") == {name for name in everything if "bias" not in name}
    assert decayed(exclude=["norm", "head"]) == {n for n in everything if "norm" not in n and "net.3" not in n}
    assert decayed(exclude=nn.Linear) == {name for name in everything if "norm" in name}
    assert decayed(exclude="net.0.*") == {name for name in everything if "net.0" not in name}


def test_groups_without_decay_beside_others_stay_so() -> None:
    class Own(Net):
        def configure_optimizers(self):
            blocks = [{"params": self.net[0].parameters(), "weight_decay": 0.0}, {"params": self.net[1:].parameters()}]
            return torch.optim.AdamW(blocks, lr=0.01, weight_decay=0.2)

    for given, rest in ((None, 0.2), (0.5, 0.5)):
        settings = Settings()
        fit(Own(), lt.WeightDecayGroups(given), settings)
        decays = {name: decay for name, (_, decay) in settings.seen[0].items()}
        assert decays["net.0.linear.weight"] == 0.0
        assert decays["net.1.linear.weight"] == rest
        assert decays["net.1.linear.bias"] == 0.0


def test_two_optimizers_are_split_each() -> None:
    module = TwoOptimizers()
    groups = []
    module.on_train_start = lambda: groups.extend(len(one.param_groups) for one in module.optimizers())
    run = fit(module, lt.WeightDecayGroups(0.1))
    assert groups == [2, 2]
    assert lt.step_ledger(run)[1].applied == 4


def test_the_assignment_is_printed(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    fit(Net(), lt.WeightDecayGroups(0.1), lt.LayerwiseLearningRateDecay(0.5))
    printed = capsys.readouterr().out
    assert "group 4: weight decay 0 on 3 tensors (2 bias, 1 norm), 24 elements" in printed
    assert "0.125: 6 tensors" not in printed  # there are no embeddings
    for scale, first in ((0.125, "net.0"), (0.25, "net.1"), (0.5, "net.2"), (1, "net.3")):
        assert f"{scale:g}: {2 if scale == 1 else 4} tensors, {first}." in printed


def test_nothing_to_change_is_said() -> None:
    class NoDecay(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    with pytest.warns(UserWarning, match=r"WeightDecayGroups changed nothing: no group has weight decay"):
        fit(NoDecay(), lt.WeightDecayGroups())
    with pytest.warns(UserWarning, match=r"changed nothing: with decay=1.0"):
        fit(Net(), lt.LayerwiseLearningRateDecay(1.0))


def test_names_of_groups_stay_apart_for_the_monitor(tmp_path) -> None:
    class NamedGroups(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW([{"params": self.parameters(), "name": "all"}], lr=0.01)

    logger = CSVLogger(tmp_path)
    run = fit(NamedGroups(), lt.WeightDecayGroups(), lt.WarmupLinearScheduler(2), LearningRateMonitor(), logger=logger)
    assert {"lr-AdamW/all/decay", "lr-AdamW/all/no_decay"} <= set(run.callback_metrics)


@pytest.mark.parametrize("schedule", [lambda: lt.WarmupCosineScheduler(2), lambda: lt.LearningRateWarmup(3)])
def test_our_schedules_keep_the_ratios(schedule) -> None:
    settings, own = Settings(), Settings()
    fit(Net(), lt.LayerwiseLearningRateDecay(0.5), schedule(), settings)
    fit(Net(), schedule(), own)
    for split, whole in zip(settings.seen, own.seen, strict=True):
        for name, (rate, _) in split.items():
            scale = 0.5 ** (3 - int(name.split(".")[1]))
            assert rate == pytest.approx(whole[name][0] * scale, rel=1e-12)


def test_a_checkpoint_with_other_groups_is_refused(tmp_path) -> None:
    class Three(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW([{"params": block.parameters()} for block in self.net], lr=0.01)

    fit(Three()).save_checkpoint(tmp_path / "a.ckpt")
    run = trainer(lt.WeightDecayGroups(), max_epochs=2)
    with pytest.raises(MisconfigurationException, match=r"groups of \[4, 10\].*or of \[14\].*groups of \[4, 4, 4, 2\]"):
        run.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")


def test_a_module_that_keeps_its_optimizer_is_split_once() -> None:
    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [torch.optim.SGD(self.parameters(), lr=1.0)]

        def configure_optimizers(self):
            return self.kept[0]

    module, settings = Keeps(), Settings()
    for _ in range(2):
        fit(module, lt.LayerwiseLearningRateDecay(0.5), settings)
    assert settings.seen[0] == settings.seen[-1]


SPLITS = {"decay": lambda: lt.WeightDecayGroups(0.3), "rates": lambda: lt.LayerwiseLearningRateDecay(0.5)}


@pytest.mark.parametrize("before", [(), ("decay",), ("rates",), ("decay", "rates"), ("rates", "decay")])
@pytest.mark.parametrize("after", [("decay", "rates"), ("rates", "decay")])
def test_a_checkpoint_of_some_of_the_splits_goes_on_with_all(before: tuple, after: tuple, tmp_path) -> None:
    fit(Scheduled(), *(SPLITS[one]() for one in before)).save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    moments = sorted(float(one["exp_avg"].abs().sum()) for one in saved.values())
    settings, whole = Settings(), Settings()
    run = trainer(*(SPLITS[one]() for one in after), settings, max_epochs=2)
    module = Scheduled()
    found = []
    module.on_train_start = lambda: found.extend(
        float(run.optimizers[0].state[one]["exp_avg"].abs().sum()) for one in module.parameters()
    )
    run.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
    fit(Scheduled(), *(SPLITS[one]() for one in after), whole, max_epochs=2)
    assert settings.seen == whole.seen[7:]
    assert sorted(found) == pytest.approx(moments)


def test_other_arguments_of_a_resumed_run_hold(tmp_path) -> None:
    """A checkpoint brings back the groups of then; what this run asks for is done all the same."""
    fit(Scheduled(), lt.WeightDecayGroups(0.3), lt.LayerwiseLearningRateDecay(0.5)).save_checkpoint(tmp_path / "a.ckpt")
    settings, whole = Settings(), Settings()
    tricks = lambda: [lt.WeightDecayGroups(0.1), lt.LayerwiseLearningRateDecay(0.9)]  # noqa: E731
    run = trainer(*tricks(), settings, max_epochs=2)
    run.fit(Scheduled(), loader(), ckpt_path=tmp_path / "a.ckpt")
    fit(Scheduled(), *tricks(), whole, max_epochs=2)
    for seen, expected in zip(settings.seen, whole.seen[7:], strict=True):
        for name, pair in seen.items():
            assert pair == pytest.approx(expected[name], rel=1e-12)


def test_a_decay_of_zero_does_not_stick(tmp_path) -> None:
    fit(Net(), lt.WeightDecayGroups(0.0)).save_checkpoint(tmp_path / "a.ckpt")
    settings = Settings()
    run = trainer(lt.WeightDecayGroups(0.1), settings, max_epochs=2)
    run.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert {
        name: decay for name, (_, decay) in settings.seen[0].items() if "weight" in name and "norm" not in name
    } == {
        **{f"net.{i}.linear.weight": 0.1 for i in range(3)},
        "net.3.weight": 0.1,
    }


class Norms(Net):
    """Two blocks of one shape and kind: splits by depth and by decay are of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.LayerNorm(8), nn.Tanh())  # noqa: E731
        self.net = nn.Sequential(block(), block())

    def loss(self, batch):
        return (self.net(batch[0]).sum(1, keepdim=True) - batch[1]).square().mean()


@pytest.mark.parametrize("before", ["rates", "decay"])
def test_splits_of_the_same_sizes_are_told_apart(before: str, tmp_path) -> None:
    tricks = {
        "rates": lambda: lt.LayerwiseLearningRateDecay(0.5),
        "decay": lambda: lt.WeightDecayGroups(0.1, exclude="bias"),
    }
    first, moments = Norms(), {}
    run = fit(first, tricks[before]())
    states = {id(one): state for one, state in run.optimizers[0].state.items()}
    moments.update({name: states[id(one)]["exp_avg"].clone() for name, one in first.named_parameters()})
    run.save_checkpoint(tmp_path / "a.ckpt")
    module, found = Norms(), {}
    resumed = trainer(*(build() for build in tricks.values()), max_epochs=2)
    module.on_train_start = lambda: found.update(
        {name: resumed.optimizers[0].state[one]["exp_avg"].clone() for name, one in module.named_parameters()}
    )
    resumed.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(found, moments)


class WithScheduler(Net):
    def __init__(self, build) -> None:
        super().__init__()
        self.build = build

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.build(optimizer), "interval": "step"}]


class KeepsLists(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer) -> None:
        super().__init__(optimizer, 1)
        self.per_group = [1.0]


def test_floors_above_a_rate_and_lists_nobody_knows_are_refused() -> None:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    fit(WithScheduler(lambda o: cosine(o, 14, eta_min=0.001)), lt.LayerwiseLearningRateDecay(0.5))
    with pytest.raises(MisconfigurationException, match=r"CosineAnnealingLR\(eta_min=0.002\).*from 0.00125: lower"):
        fit(WithScheduler(lambda o: cosine(o, 14, eta_min=0.002)), lt.LayerwiseLearningRateDecay(0.5))
    with pytest.raises(ValueError, match=r"KeepsLists whose 'per_group' has 1 entries.*split into 2"):
        fit(WithScheduler(KeepsLists), lt.WeightDecayGroups())


def test_swalr_keeps_the_ratios() -> None:
    settings = Settings()
    build = lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2)  # noqa: E731
    fit(WithScheduler(build), lt.LayerwiseLearningRateDecay(0.5), settings)
    for name, (rate, _) in settings.seen[-1].items():
        assert rate == pytest.approx(0.05 * 0.5 ** (3 - int(name.split(".")[1])))


# Under strategies, and from older checkpoints


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[str, dict]:
    """One process: the runs with each choice of tricks, and a checkpoint of the run without."""
    path = str(tmp_path_factory.mktemp("groups") / "plain.ckpt")
    runs = {tricks: grouped(tricks, "auto", rank=0, world_size=1) for tricks in TRICKS}
    grouped("none", "auto", save=path, rank=0, world_size=1)
    runs["resumed"] = grouped("both", "auto", resume=path, rank=0, world_size=1)
    return path, runs


def test_settings_are_the_modules_own_but_for_what_the_tricks_change(reference) -> None:
    _, runs = reference
    for tricks, run in runs.items():
        plain = runs["none"]["settings"][-len(run["settings"]) :]
        for own, seen in zip(plain, run["settings"], strict=True):
            assert own.keys() == seen.keys()
            for name, (rate, decay) in seen.items():
                scale = 0.5 ** (3 - int(name.split(".")[1])) if tricks in ("rates", "both", "resumed") else 1.0
                assert rate == pytest.approx(own[name][0] * scale, rel=1e-12)
                spared = "bias" in name or "norm" in name
                split = tricks in ("decay", "both", "resumed")
                assert decay == ((0.0 if spared else 0.3) if split else 0.01)


def test_an_older_checkpoint_goes_on_with_its_state(reference) -> None:
    """Each parameter has the state that it had, wherever its group lies now."""
    path, runs = reference
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    module = Scheduled()
    order = [name for name, _ in module.named_parameters()]
    state_of = {name: saved["state"][number] for name, number in zip(order, numbers, strict=True)}

    class Compare(pl.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            optimizer = trainer.optimizers[0]
            found = {name: optimizer.state[parameter] for name, parameter in pl_module.named_parameters()}
            for name, state in state_of.items():
                for key, value in state.items():
                    assert torch.equal(found[name][key], value), (name, key)

    run = trainer(*TRICKS["both"](), Compare(), max_epochs=2)
    run.fit(module, loader(), ckpt_path=path)
    assert len(runs["resumed"]["settings"]) == 4


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2", "zero2"])
def test_under_a_strategy_it_equals_one_process(strategy: str, reference, two_processes, tmp_path) -> None:
    path, expected = reference
    for found in two_processes.run(grouped_under, strategy, path, str(tmp_path / "folder")):
        assert found.keys() == expected.keys() | ({"from folder"} if strategy == "fsdp2" else set())
        for tricks, run in found.items():
            one = expected["resumed" if tricks == "from folder" else tricks]
            assert_same(run["weights"], one["weights"], **CLOSE)
            assert run["settings"] == one["settings"]


def test_from_a_yaml_of_the_command_line(reference, tmp_path) -> None:
    callbacks = [
        {"class_path": "lightning_tricks.WeightDecayGroups", "init_args": {"weight_decay": 0.3}},
        {"class_path": "lightning_tricks.LayerwiseLearningRateDecay", "init_args": {"decay": 0.5}},
    ]
    config = {
        "trainer": {
            "callbacks": callbacks,
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert built_by_command_line(str(tmp_path / "run.yaml")) == reference[1]["both"]["settings"]


def test_after_fit_the_module_configures_as_before() -> None:
    module = seeded(Net)
    fit(module, lt.WeightDecayGroups())
    assert "configure_optimizers" not in vars(module)
    assert len(module.configure_optimizers().param_groups) == 1
    assert weights(module)
