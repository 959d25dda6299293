"""The strategy strings."""

import warnings

import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from lightning_tricks.strategies import PRESETS
from lightning_tricks.strategies.registry import register_

SETTINGS = {
    "fsdp2": (lt.FSDP2Strategy, {"reshard_after_forward": True, "replicate_size": 1, "cpu_offload": False}),
    "fsdp2_offload": (lt.FSDP2Strategy, {"reshard_after_forward": True, "cpu_offload": True}),
    "hsdp": (lt.FSDP2Strategy, {"reshard_after_forward": True, "replicate_size": "num_nodes"}),
    "zero1": (lt.ZeRO1Strategy, {}),
    "zero2": (lt.FSDP2Strategy, {"reshard_after_forward": False, "replicate_size": 1}),
    "zero3": (lt.FSDP2Strategy, {"reshard_after_forward": True, "replicate_size": 1, "cpu_offload": False}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_string_is_a_preset_of_a_class(name: str) -> None:
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    kind, settings = SETTINGS[name]
    assert type(strategy) is kind
    assert {key: getattr(strategy, key) for key in settings} == settings


def test_every_string_is_tested() -> None:
    assert {preset.name for preset in PRESETS} == {*SETTINGS, "dp"}


def test_the_string_dp_explains_itself() -> None:
    with pytest.raises(MisconfigurationException, match=r'DataParallel.*strategy="ddp".*"fsdp2"'):
        pl.Trainer(strategy="dp", accelerator="cpu", devices=2)


def test_ddp_stays_lightnings() -> None:
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy


def test_a_string_that_is_taken_is_left_alone() -> None:
    registry = _StrategyRegistry()
    registry.register("zero2", DDPStrategy)
    with pytest.warns(UserWarning, match=r"'zero2' belongs to lightning.pytorch.*DDPStrategy.*Use "
                      r"strategy=lightning_tricks.FSDP2Strategy\(reshard_after_forward=False\)"):  # fmt: skip
        register_(PRESETS, registry)
    assert registry["zero2"]["strategy"] is DDPStrategy
    assert registry["zero3"]["strategy"] is lt.FSDP2Strategy


def test_registering_twice_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_(PRESETS)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"replicate_size": 0}, ValueError, "`replicate_size` to be at least 1, got 0"),
        ({"replicate_size": "nodes"}, TypeError, "`replicate_size` to be an int, got 'nodes'"),
        ({"reshard_after_forward": 0}, ValueError, "`reshard_after_forward` to be at least 1, got 0"),
        ({"mp_policy": "bf16"}, ValueError, "`mp_policy` to be one of 'auto', 'autocast', 'fsdp', got 'bf16'"),
        ({"async_checkpoint": True}, ValueError, "`save_distributed_checkpoint=True` beside `async_checkpoint=True`"),
        ({"policy": 3}, TypeError, "got 3"),
        ({"timeout": 30}, TypeError, "`timeout` to be a timedelta or None, got 30"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, words: str) -> None:
    with pytest.raises(error, match=words):
        lt.FSDP2Strategy(**arguments)


def test_a_timeout_of_another_kind_is_refused_by_zero1_too() -> None:
    with pytest.raises(TypeError, match="`timeout`"):
        lt.ZeRO1Strategy(timeout=30)
