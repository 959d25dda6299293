"""Wrong arguments: refused where they are given, with the argument's name and what came."""

import math

import pytest
import torch

import lightning_tricks as lt

NAN = float("nan")

WRONG = [
    (lt.GradientAccumulation, {"steps": 0}, ValueError, "`steps` of at least 1 micro-batch a window, got 0 in 0"),
    (lt.GradientAccumulation, {"steps": 2.5}, TypeError, "`steps` to be an int, a mapping .* got 2.5"),
    (lt.GradientAccumulation, {"steps": True}, TypeError, "`steps` .* got True"),
    (lt.GradientAccumulation, {"steps": None}, TypeError, "`steps` .* got None"),
    (lt.GradientAccumulation, {"steps": {}}, ValueError, "keys of `steps` to begin with 0 and to ascend, got {}"),
    (lt.GradientAccumulation, {"steps": {1: 2}}, ValueError, "begin with 0 and to ascend, got {1: 2}"),
    (lt.GradientAccumulation, {"steps": {0: 1, 9: 2, 5: 4}}, ValueError, "ascend, got {0: 1, 9: 2, 5: 4}"),
    (lt.GradientAccumulation, {"steps": {-1: 2, 0: 1}}, ValueError, "begin with 0"),
    (lt.GradientAccumulation, {"steps": {0: -2}}, ValueError, "at least 1 micro-batch a window, got -2"),
    (lt.GradientAccumulation, {"steps": {"epoch": {1: 2}}}, ValueError, "begin with 0"),
    (lt.GradientAccumulation, {"steps": {"epochs": 2}}, TypeError, "got {'epochs': 2}"),
    (lt.GradientAccumulation, {"weigh_by": 3}, TypeError, "`weigh_by` .* got 3"),
    (lt.GradientAccumulation, {"weigh_by": "tokens"}, ValueError, "`weigh_by` .* got 'tokens'"),
    (lt.GradientAccumulation, {"carry_over": 1}, TypeError, "`carry_over` to be True or False, got 1"),
    (lt.ActivationCheckpointing, {"mode": "segment"}, ValueError, "`mode` to be one of 'blocks', .* got 'segment'"),
    (lt.ActivationCheckpointing, {"every": 0}, ValueError, "`every` to be at least 1, got 0"),
    (lt.ActivationCheckpointing, {"every": 2, "mode": "segments"}, ValueError, "pass segment_length=2"),
    (lt.ActivationCheckpointing, {"segment_length": 0}, ValueError, "`segment_length` to be at least 1, got 0"),
    (lt.ActivationCheckpointing, {"segment_length": "all"}, ValueError, "`segment_length` .* got 'all'"),
    (lt.ActivationCheckpointing, {"segment_length": 3}, ValueError, "segment_length=3 to go with mode=.segments."),
    (lt.ActivationCheckpointing, {"matmul_share": 0.4}, ValueError, "matmul_share=0.4 to go with mode=.selective."),
    (lt.ActivationCheckpointing, {"matmul_share": 1.5}, ValueError, "`matmul_share` .* at most 1.0, got 1.5"),
    (lt.ActivationCheckpointing, {"budget": 0.0}, ValueError, "`budget` to be above 0.0 and at most 1.0, got 0.0"),
    (lt.ActivationCheckpointing, {"budget": 1.5}, ValueError, "`budget` .* at most 1.0, got 1.5"),
    (lt.ActivationCheckpointing, {"budget": 0}, ValueError, "`budget` to be at least 1, got 0"),
    (lt.ActivationCheckpointing, {"budget": True}, TypeError, "`budget` .* got True"),
    (lt.ActivationCheckpointing, {"budget": "half"}, TypeError, "`budget` to be a number, got 'half'"),
    (
        lt.ActivationCheckpointing,
        {"budget": 0.5, "mode": "segments"},
        ValueError,
        "budget=0.5 to go with mode=.blocks.",
    ),
    (lt.MicroBatching, {"max_size": 0}, ValueError, "`max_size` to be at least 1, got 0"),
    (lt.MicroBatching, {"max_size": 2.0}, TypeError, "`max_size` to be an int, got 2.0"),
    (lt.MicroBatching, {"max_size": None}, TypeError, "`max_size` to be an int, got None"),
    (lt.MicroBatching, {"max_size": "Auto"}, ValueError, "an int or \"auto\", got 'Auto'"),
    (lt.MicroBatching, {"min_size": 0}, ValueError, "`min_size` to be at least 1, got 0"),
    (lt.MicroBatching, {"max_size": 2, "min_size": 3}, ValueError, "`min_size` to be at most `max_size`=2, got 3"),
    (lt.GradientNoiseScaleMonitor, {"decay": 1.0}, ValueError, "`decay` to be below 1.0, got 1.0"),
    (lt.GradientNoiseScaleMonitor, {"decay": 0}, ValueError, "`decay` to be above 0.0 .* got 0"),
    (lt.GradientNormClipping, {"max_norm": -1.0}, ValueError, "`max_norm` to be above 0.0, got -1.0"),
    (lt.GradientNormClipping, {"max_norm": 0}, ValueError, "`max_norm` to be above 0.0, got 0"),
    (lt.GradientNormClipping, {"max_norm": NAN}, ValueError, "`max_norm` .* got nan"),
    (lt.GradientNormClipping, {"max_norm": "1"}, TypeError, "`max_norm` to be a number, got '1'"),
    (lt.GradientNormClipping, {"max_norm": True}, TypeError, "`max_norm` to be a number, got True"),
    (lt.GradientNormClipping, {"max_norm": None}, TypeError, "`max_norm` to be a number, got None"),
    (lt.GradientNormClipping, {"max_norm": {}}, ValueError, "`max_norm` to name at least one"),
    (lt.GradientNormClipping, {"max_norm": {-1: 1.0}}, ValueError, "got -1"),
    (lt.GradientNormClipping, {"max_norm": {"a": 1.0}}, TypeError, "got 'a'"),
    (lt.GradientNormClipping, {"max_norm": {0: -1.0}}, ValueError, "`max_norm` .* got -1.0"),
    (lt.GradientNormClipping, {"norm_type": 0.0}, ValueError, "`norm_type` .* got 0.0"),
    (lt.GradientNormClipping, {"nonfinite": "drop"}, ValueError, "`nonfinite` to be one of 'skip', .* got 'drop'"),
    (lt.GradientValueClipping, {"max_value": -0.5}, ValueError, "`max_value` to be above 0.0, got -0.5"),
    (lt.GradientValueClipping, {"max_value": NAN}, ValueError, "`max_value` .* got nan"),
    (lt.GradientValueClipping, {"max_value": 1.0, "nonfinite": 1}, ValueError, "`nonfinite` .* got 1"),
    (lt.AdaptiveGradientClipping, {"clip_factor": 0.0}, ValueError, "`clip_factor` to be above 0.0, got 0.0"),
    (lt.AdaptiveGradientClipping, {"eps": -1}, ValueError, "`eps` to be above 0.0, got -1"),
    (lt.AdaptiveGradientClipping, {"exclude": 3}, TypeError, "`exclude` .* got 3"),
    (lt.AdaptiveGradientClipping, {"exclude": [int]}, TypeError, "`exclude` .* got <class 'int'>"),
    (lt.ZScoreGradientClipping, {"z_threshold": 0}, ValueError, "`z_threshold` to be above 0.0, got 0"),
    (lt.ZScoreGradientClipping, {"decay": 1.0}, ValueError, "`decay` to be below 1.0, got 1.0"),
    (lt.ZScoreGradientClipping, {"decay": 0.0}, ValueError, "`decay` to be above 0.0 and at most 1.0, got 0.0"),
    (lt.ZScoreGradientClipping, {"warmup_steps": 0}, ValueError, "`warmup_steps` to be at least 1, got 0"),
    (lt.ZScoreGradientClipping, {"max_norm": 0.0}, ValueError, "`max_norm` to be above 0.0, got 0.0"),
    (lt.PercentileGradientClipping, {"percentile": 101}, ValueError, "`percentile` .* at most 100.0, got 101"),
    (lt.PercentileGradientClipping, {"history_steps": 0}, ValueError, "`history_steps` to be at least 1, got 0"),
    (lt.PercentileGradientClipping, {"history_steps": 5}, ValueError, "`warmup_steps` to be at most .*=5, got 25"),
    (lt.NonFiniteGuard, {"action": "drop"}, ValueError, "`action` to be one of 'skip', .* got 'drop'"),
    (lt.NonFiniteGuard, {"max_consecutive": 0}, ValueError, "`max_consecutive` to be at least 1, got 0"),
    (lt.LossSpikeGuard, {"action": "raise"}, ValueError, "`action` to be one of .* got 'raise'"),
    (lt.LossSpikeGuard, {"z_threshold": 0.0}, ValueError, "`z_threshold` to be above 0.0, got 0.0"),
    (lt.LossSpikeGuard, {"window_steps": 1}, ValueError, "`window_steps` to be at least 2, got 1"),
    (lt.LossSpikeGuard, {"window_steps": 16}, ValueError, "`warmup_steps` to be at most `window_steps`=16, got 32"),
    (lt.LossSpikeGuard, {"warmup_steps": 1}, ValueError, "`warmup_steps` to be at least 2, got 1"),
    (lt.LossSpikeGuard, {"snapshot_every_steps": 0}, ValueError, "`snapshot_every_steps` .* got 0"),
    (lt.LossSpikeGuard, {"num_snapshots": 0}, ValueError, "`num_snapshots` to be at least 1, got 0"),
    (lt.LossSpikeGuard, {"events_path": 3}, TypeError, "`events_path` to be a path or None, got 3"),
    (lt.LossSpikeGuard, {"lr_factor": 1.5}, ValueError, "`lr_factor` .* at most 1.0, got 1.5"),
    (lt.LossSpikeGuard, {"lr_factor": 0.0}, ValueError, "`lr_factor` to be above 0.0 .* got 0.0"),
    (lt.GradientMonitor, {"every_n_steps": 0}, ValueError, "`every_n_steps` to be at least 1, got 0"),
    (lt.GradientMonitor, {"blocks": 3}, TypeError, "`blocks` .* got 3"),
    (lt.GradientMonitor, {"vanishing_below": -1.0}, ValueError, "`vanishing_below` to be at least 0.0, got -1.0"),
    (lt.GradientMonitor, {"exploding_above": 0}, ValueError, "`exploding_above` to be above 0.0, got 0"),
    (lt.VanishingUpdateMonitor, {"every_n_steps": 0}, ValueError, "`every_n_steps` to be at least 1, got 0"),
    (lt.LossScaleMonitor, {"alarm_after_skips": 0}, ValueError, "`alarm_after_skips` to be at least 1, got 0"),
    (lt.LossScaleMonitor, {"alarm_after_skips": 2.5}, TypeError, "`alarm_after_skips` to be an int, got 2.5"),
    (lt.WarmupCosineScheduler, {"warmup": -1}, ValueError, "`warmup` to be at least 0, got -1"),
    (lt.WarmupCosineScheduler, {"warmup": 1.0}, ValueError, "`warmup` .* below 1.0, got 1.0"),
    (lt.WarmupCosineScheduler, {"warmup": NAN}, ValueError, "`warmup` .* got nan"),
    (
        lt.WarmupCosineScheduler,
        {"warmup": "3%"},
        ValueError,
        "`warmup`: expected an int, a fraction of the run.*got '3%'",
    ),
    (lt.WarmupCosineScheduler, {"warmup": None}, TypeError, "`warmup` to be a number, got None"),
    (lt.WarmupCosineScheduler, {"total_steps": "9 steps"}, ValueError, "`total_steps`: .*got '9 steps'"),
    (lt.WarmupLinearScheduler, {"warmup": -1}, ValueError, "`warmup` to be at least 0, got -1"),
    (lt.WarmupStableDecayScheduler, {"decay": 1.0}, ValueError, "`decay` .* below 1.0, got 1.0"),
    (lt.WarmupStableDecayScheduler, {"decay": -5}, ValueError, "`decay` to be at least 0, got -5"),
    (lt.WarmupStableDecayScheduler, {"decay_shape": "step"}, ValueError, "`decay_shape` .*'sqrt', got 'step'"),
    (lt.WarmupInverseSqrtScheduler, {"start_factor": -0.1}, ValueError, "`start_factor` .* got -0.1"),
    (lt.WarmupCosineRestartsScheduler, {"num_cycles": 0}, ValueError, "`num_cycles` to be at least 1, got 0"),
    (lt.WarmupCosineRestartsScheduler, {"num_cycles": 1.5}, TypeError, "`num_cycles` to be an int, got 1.5"),
    (lt.WarmupPolynomialScheduler, {"power": 0}, ValueError, "`power` to be above 0.0, got 0"),
    (lt.LearningRateWarmup, {"warmup": 1.5}, ValueError, "`warmup` .* below 1.0, got 1.5"),
    (lt.LearningRateWarmup, {"warmup": "9"}, TypeError, "`warmup` to be a number, got '9'"),
    (lt.LearningRateWarmup, {"warmup": 9, "start_factor": 1.1}, ValueError, "`start_factor` .* got 1.1"),
    (lt.LearningRateWarmup, {"warmup": 9, "total_steps": 0}, ValueError, "`total_steps` .* got 0"),
    (lt.LearningRateWarmup, {"warmup": 9, "optimizers": "0"}, TypeError, "`optimizers` .* got '0'"),
    (lt.HyperparameterScheduler, {"target": 3, "schedule": abs}, TypeError, "`target` .* got 3"),
    (lt.HyperparameterScheduler, {"target": "a b", "schedule": abs}, ValueError, "`target` .* got 'a b'"),
    (lt.HyperparameterScheduler, {"target": "x", "schedule": 0.1}, TypeError, "`schedule` .* got 0.1"),
    (lt.HyperparameterScheduler, {"target": "x", "schedule": abs, "optimizers": []}, ValueError, "`optimizers`"),
    (lt.DropoutScheduler, {"mode": "middle", "steps": 1}, ValueError, "`mode` .*got 'middle'"),
    (lt.DropoutScheduler, {"steps": -1}, ValueError, "`steps` to be at least 0, got -1"),
    (lt.DropoutScheduler, {"steps": 1.0}, ValueError, "`steps` .* below 1.0, got 1.0"),
    (lt.DropoutScheduler, {"steps": 1, "total_steps": 1.5}, TypeError, "`total_steps` to be an int, got 1.5"),
    (lt.WeightDecayGroups, {"weight_decay": -0.1}, ValueError, "`weight_decay` .* got -0.1"),
    (lt.WeightDecayGroups, {"weight_decay": True}, TypeError, "`weight_decay` to be a number, got True"),
    (lt.WeightDecayGroups, {"exclude": 3}, TypeError, "`exclude` .* got 3"),
    (lt.WeightDecayGroups, {"exclude": [int]}, TypeError, "`exclude` .* got <class 'int'>"),
    (lt.LayerwiseLearningRateDecay, {"decay": 0.0}, ValueError, "`decay` to be above 0.0 .* got 0.0"),
    (lt.LayerwiseLearningRateDecay, {"decay": 1.1}, ValueError, "`decay` .* at most 1.0, got 1.1"),
    (lt.LayerwiseLearningRateDecay, {"min_scale": 2}, ValueError, "`min_scale` .* got 2"),
    (lt.LayerwiseLearningRateDecay, {"blocks": []}, ValueError, "`blocks` .* empty list"),
    (lt.ExponentialMovingAverage, {"decay": 0.0}, ValueError, "`decay` to be above 0.0 .* got 0.0"),
    (lt.ExponentialMovingAverage, {"decay": 1.0}, ValueError, "`decay` to be below 1.0, got 1.0"),
    (lt.ExponentialMovingAverage, {"decay": 1}, ValueError, "`decay` to be below 1.0, got 1"),
    (lt.ExponentialMovingAverage, {"decay": 1.5}, ValueError, "`decay` .* got 1.5"),
    (lt.ExponentialMovingAverage, {"decay": NAN}, ValueError, "`decay` .* got nan"),
    (lt.ExponentialMovingAverage, {"decay": "0.9"}, TypeError, "`decay` to be a number, got '0.9'"),
    (lt.ExponentialMovingAverage, {"half_life_steps": 0}, ValueError, "`half_life_steps` to be above 0.0, got 0"),
    (lt.ExponentialMovingAverage, {"half_life_steps": 1e17}, ValueError, "`half_life_steps` .* got 1e.17"),
    (lt.ExponentialMovingAverage, {"half_life_steps": 1e-9}, ValueError, "`half_life_steps` .* got 1e-09"),
    (lt.WeightDecayGroups, {"weight_decay": math.inf}, ValueError, "`weight_decay` to be finite, got inf"),
    (lt.WarmupPolynomialScheduler, {"power": math.inf}, ValueError, "`power` to be finite, got inf"),
    (lt.WarmupLinearScheduler, {"min_lr": math.inf}, ValueError, "`min_lr` to be finite, got inf"),
    (lt.WarmupLinearScheduler, {"optimizers": torch.tensor(0.1)}, TypeError, "`optimizers` .* got tensor"),
    (
        lt.HyperparameterScheduler,
        {"target": "optimizer.eps", "schedule": lt.WarmupLinearScheduler(2, optimizers=[5])},
        ValueError,
        "`schedule` without `optimizers`",
    ),
    (lt.ExponentialMovingAverage, {"half_life_steps": math.inf}, ValueError, "`half_life_steps` to be finite, got inf"),
    (lt.ExponentialMovingAverage, {"start_step": -1}, ValueError, "`start_step` to be at least 0, got -1"),
    (lt.ExponentialMovingAverage, {"start_step": 0.5}, TypeError, "`start_step` to be an int, got 0.5"),
    (lt.ExponentialMovingAverage, {"decay_warmup": 1}, TypeError, "`decay_warmup` .* got 1"),
    (lt.ExponentialMovingAverage, {"validate_with_average": None}, TypeError, "`validate_with_average` .* got None"),
    (lt.ExponentialMovingAverage, {"average_buffers": "no"}, TypeError, "`average_buffers` .* got 'no'"),
    (lt.ExponentialMovingAverage, {"device": 3.5}, TypeError, "`device` .* got 3.5"),
    (lt.ExponentialMovingAverage, {"device": "gpu0"}, ValueError, "`device` .* got 'gpu0'"),
    (lt.StochasticWeightAverage, {"start": 1.0}, ValueError, "`start` .* below 1.0, got 1.0"),
    (lt.StochasticWeightAverage, {"every_n_steps": 0}, ValueError, "`every_n_steps` to be at least 1, got 0"),
    (lt.StochasticWeightAverage, {"update_batchnorm": 0}, TypeError, "`update_batchnorm` .* got 0"),
    (lt.StochasticWeightAverage, {"total_steps": -3}, ValueError, "`total_steps` .* got -3"),
    (lt.WarmupCosineScheduler, {"warmup": True}, TypeError, "`warmup` to be an int, got True"),
    (lt.WarmupCosineScheduler, {"min_lr_ratio": 1.5}, ValueError, "`min_lr_ratio` .* at most 1.0, got 1.5"),
    (lt.WarmupCosineScheduler, {"min_lr": -1e-6}, ValueError, "`min_lr` .* got -1e-06"),
    (lt.WarmupCosineScheduler, {"start_factor": 2.0}, ValueError, "`start_factor` .* got 2.0"),
    (lt.WarmupCosineScheduler, {"total_steps": 0}, ValueError, "`total_steps` to be at least 1, got 0"),
    (lt.WarmupCosineScheduler, {"total_steps": 1e4}, TypeError, "`total_steps` to be an int, got 10000.0"),
    (lt.WarmupCosineScheduler, {"total_steps": {0: -1}}, ValueError, "`total_steps` .* got -1"),
    (lt.WarmupCosineScheduler, {"total_steps": {"a": 1}}, TypeError, "got 'a'"),
    (lt.WarmupCosineScheduler, {"optimizers": []}, ValueError, "`optimizers` to name at least one"),
    (lt.WarmupCosineScheduler, {"optimizers": [0.5]}, TypeError, "got 0.5"),
    (lt.WarmupCosineScheduler, {"optimizers": 0}, TypeError, "`optimizers` .* got 0"),
    (lt.ActivationCheckpointing, {"blocks": 3}, TypeError, "`blocks` .* got 3"),
    (lt.ActivationCheckpointing, {"blocks": []}, ValueError, "`blocks` .* empty list"),
    (lt.ActivationCheckpointing, {"every": 0}, ValueError, "`every` to be at least 1, got 0"),
    (lt.ActivationCheckpointing, {"every": 1.5}, TypeError, "`every` to be an int, got 1.5"),
]


@pytest.mark.parametrize(("trick", "arguments", "error", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_refused(trick, arguments: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        trick(**arguments)


@pytest.mark.parametrize(
    ("trick", "arguments"),
    [
        (lt.GradientNormClipping, {"max_norm": math.inf}),
        (lt.GradientNormClipping, {"max_norm": 1, "norm_type": math.inf}),
        (lt.GradientValueClipping, {"max_value": 1}),
        (lt.WarmupCosineScheduler, {"warmup": 0.0, "min_lr": 0.0, "start_factor": 0.0}),
        (lt.WarmupCosineScheduler, {"warmup": 0, "min_lr_ratio": 1, "optimizers": [0, 1]}),
    ],
)
def test_edges_are_allowed(trick, arguments: dict) -> None:
    trick(**arguments)


def test_names_defaults_and_order_are_as_promised() -> None:
    import inspect

    signatures = {
        "GradientNormClipping": "(max_norm=1.0, *, norm_type=2.0, nonfinite='skip')",
        "GradientValueClipping": "(max_value, *, nonfinite='skip')",
        "AdaptiveGradientClipping": "(clip_factor=0.01, *, eps=0.001, exclude='head', nonfinite='skip')",
        "ZScoreGradientClipping": "(z_threshold=2.5, *, decay=0.97, warmup_steps=25, max_norm=None, nonfinite='skip')",
        "PercentileGradientClipping": "(percentile=10, *, history_steps=1000, warmup_steps=25, nonfinite='skip')",
        "NonFiniteGuard": "(action='skip', *, max_consecutive=10)",
        "LossSpikeGuard": "(action='skip', *, z_threshold=6.0, window_steps=128, warmup_steps=32, "
        "snapshot_every_steps=100, num_snapshots=2, lr_factor=1.0, events_path=None)",
        "GradientMonitor": "(*, every_n_steps=50, blocks='auto', vanishing_below=0.0001, exploding_above=1000.0)",
        "VanishingUpdateMonitor": "(*, every_n_steps=200)",
        "LossScaleMonitor": "(*, alarm_after_skips=10)",
        "WarmupCosineScheduler": "(warmup=0.03, *, min_lr_ratio=0.1, min_lr=None, start_factor=None, "
        "total_steps=None, optimizers=None)",
        "WarmupLinearScheduler": "(warmup=0.03, *, min_lr_ratio=0.1, min_lr=None, start_factor=None, "
        "total_steps=None, optimizers=None)",
        "WarmupInverseSqrtScheduler": "(warmup=0.03, *, min_lr_ratio=0.1, min_lr=None, start_factor=None, "
        "total_steps=None, optimizers=None)",
        "WarmupStableDecayScheduler": "(warmup=0.03, decay=0.1, decay_shape='linear', *, min_lr_ratio=0.1, "
        "min_lr=None, start_factor=None, total_steps=None, optimizers=None)",
        "WarmupCosineRestartsScheduler": "(warmup=0.03, *, num_cycles=1, min_lr_ratio=0.1, min_lr=None, "
        "start_factor=None, total_steps=None, optimizers=None)",
        "WarmupPolynomialScheduler": "(warmup=0.03, *, power=1.0, min_lr_ratio=0.1, min_lr=None, start_factor=None, "
        "total_steps=None, optimizers=None)",
        "LearningRateWarmup": "(warmup, *, start_factor=None, total_steps=None, optimizers=None)",
        "HyperparameterScheduler": "(target, schedule, *, optimizers=None)",
        "DropoutScheduler": "(mode='early', *, steps, total_steps=None)",
        "WeightDecayGroups": "(weight_decay=None, *, exclude=('bias', 'norm', 'embedding'))",
        "LayerwiseLearningRateDecay": "(decay=0.75, *, min_scale=0.0, blocks='auto')",
        "ExponentialMovingAverage": "(decay=0.9999, *, half_life_steps=None, start_step=0, decay_warmup=True, "
        "validate_with_average=True, average_buffers=False, device=None)",
        "StochasticWeightAverage": "(start=0.75, *, every_n_steps=1, update_batchnorm=True, total_steps=None, "
        "device=None)",
        "ScheduleFree": "()",
        "ActivationMemoryMonitor": "()",
        "ActivationCheckpointing": "(blocks='auto', *, mode='blocks', every=1, segment_length='auto', "
        "matmul_share=0.5, budget=None)",
        "ExactResume": "()",
    }
    for name, expected in signatures.items():
        signature = inspect.signature(getattr(lt, name))
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == expected
