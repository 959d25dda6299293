"""Learning-rate schedules as callbacks: each a curve of `functional.schedules` over the applied steps of the ledger."""

from typing_extensions import override

from lightning_tricks._schedule import Schedule
from lightning_tricks._validation import check_choice, check_int, check_number
from lightning_tricks.functional.schedules import (
    DECAY_SHAPES,
    resolve_duration,
    warmup_cosine,
    warmup_cosine_restarts,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
)

__all__ = [
    "WarmupCosineRestartsScheduler",
    "WarmupCosineScheduler",
    "WarmupInverseSqrtScheduler",
    "WarmupLinearScheduler",
    "WarmupPolynomialScheduler",
    "WarmupStableDecayScheduler",
]


class WarmupCosineScheduler(Schedule):
    """Raise the learning rate linearly over a warmup, then lower it along half a cosine until the end of the run.

    The rate is a closed form of the applied steps: a step that a loss scaler or a guard left out does not move it, a
    resumed run goes on where it was, and one that is resumed with a longer horizon follows the longer run's curve from
    there. Parameter groups keep their ratios. LearningRateMonitor sees it as ``lr-<optimizer>``.

    Args:
        warmup: an int is a number of steps, a float in [0, 1) a fraction of the run; ``"50000 samples"`` or
            ``"2e9 tokens"`` goes by what `GradientAccumulation` counts in the applied steps, and so must `total_steps`.
            A run that is resumed with another horizon keeps the number that a fraction gave at first, so that the rate
            never climbs again.
        min_lr_ratio: the rate at the end, as a share of each group's own, in [0, 1].
        min_lr: the rate at the end, the same for all groups; replaces `min_lr_ratio`.
        start_factor: the share of the rate at step 0, in [0, 1]. None: even steps whose first one is above zero,
            1 / (warmup + 1).
        total_steps: applied steps until the end of the curve; a mapping gives each optimizer its own. None: from the
            Trainer. Manual optimization must give it, since only the module knows when it steps.
        optimizers: indices of the optimizers to schedule; None for all.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the warmup is longer than the run, an
            optimizer does not exist (both at the start of fit).
        MisconfigurationException: the horizon cannot be known, or the module returns a scheduler of its own.

    Cost:
        A few Python floats a step. Where only the device knows a step's verdict (a fused optimizer beside a loss
        scaler, a clipper or a guard) one scalar read a step, at the start of the next batch.

    Reference:
        Goyal et al. (2017), arXiv:1706.02677; Loshchilov, Hutter (2017), arXiv:1608.03983.

    Example:
        >>> from lightning_tricks import WarmupCosineScheduler
        >>> schedule = WarmupCosineScheduler(1000, min_lr=1e-6)
    """

    buys = "warmup and cosine decay over the steps that were really taken"

    def __init__(
        self,
        warmup: int | float | str = 0.03,
        *,
        min_lr_ratio: float = 0.1,
        min_lr: float | None = None,
        start_factor: float | None = None,
        total_steps: int | str | dict[int, int] | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        super().__init__(
            warmup,
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            start_factor=start_factor,
            total_steps=total_steps,
            optimizers=optimizers,
        )

    @override
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        return warmup_cosine(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            start_factor=start_factor,
            min_ratio=min_ratio,
        )


class WarmupLinearScheduler(Schedule):
    """Raise the learning rate linearly over a warmup, then lower it linearly until the end of the run.

    Args:
        warmup: as in `WarmupCosineScheduler`, and so are the arguments that are not named here.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the warmup is longer than the run.
        MisconfigurationException: the horizon cannot be known, or the module returns a scheduler of its own.

    Cost:
        That of `WarmupCosineScheduler`.

    Reference:
        Devlin et al. (2019), "BERT", arXiv:1810.04805, appendix A.2.

    Example:
        >>> from lightning_tricks import WarmupLinearScheduler
        >>> schedule = WarmupLinearScheduler(500, min_lr_ratio=0.0)
    """

    buys = "warmup and linear decay"

    def __init__(
        self,
        warmup: int | float | str = 0.03,
        *,
        min_lr_ratio: float = 0.1,
        min_lr: float | None = None,
        start_factor: float | None = None,
        total_steps: int | str | dict[int, int] | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        super().__init__(
            warmup,
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            start_factor=start_factor,
            total_steps=total_steps,
            optimizers=optimizers,
        )

    @override
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        return warmup_linear(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            start_factor=start_factor,
            min_ratio=min_ratio,
        )


class WarmupStableDecayScheduler(Schedule):
    """Raise the learning rate over a warmup, hold it, and lower it over the last part of the run (WSD).

    A run can be resumed before its decay with a longer horizon and goes on at the same rate.

    Args:
        warmup: as in `WarmupCosineScheduler`, and so are the arguments that are not named here.
        decay: length of the last part: an int is a number of steps, a float in [0, 1) a fraction of the run.
        decay_shape: ``"linear"``, ``"cosine"`` (half of one) or ``"sqrt"`` (1 - sqrt(progress)).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; warmup and decay are longer than the
            run.
        MisconfigurationException: the horizon cannot be known, or the module returns a scheduler of its own.

    Cost:
        That of `WarmupCosineScheduler`.

    Reference:
        Hu et al. (2024), "MiniCPM", arXiv:2404.06395, section 4; Hägele et al. (2024), arXiv:2405.18392.

    Example:
        >>> from lightning_tricks import WarmupStableDecayScheduler
        >>> schedule = WarmupStableDecayScheduler(1000, 0.2, "sqrt")
    """

    buys = "warmup, a plateau to branch off from, and a decay at the end"

    def __init__(
        self,
        warmup: int | float | str = 0.03,
        decay: int | float | str = 0.1,
        decay_shape: str = "linear",
        *,
        min_lr_ratio: float = 0.1,
        min_lr: float | None = None,
        start_factor: float | None = None,
        total_steps: int | str | dict[int, int] | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        super().__init__(
            warmup,
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            start_factor=start_factor,
            total_steps=total_steps,
            optimizers=optimizers,
            decay=decay,
        )
        check_choice("decay_shape", decay_shape, tuple(DECAY_SHAPES))
        self.decay_shape = decay_shape

    def _decay_steps(self, total_steps: int) -> int:
        assert self.decay is not None
        return resolve_duration(self.decay, total_steps)

    @override
    def _too_long(self, warmup_steps: int, total_steps: int) -> str | None:
        decay = self._decay_steps(total_steps)
        if warmup_steps + decay <= total_steps:
            return None
        return (
            f"expected `warmup` and `decay` to be no longer than the run, got warmup={self.warmup} and "
            f"decay={self.decay}, {warmup_steps} and {decay} steps, and total_steps={total_steps}: shorten them, give "
            "fractions of the run, or train longer"
        )

    @override
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        return warmup_stable_decay(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            start_factor=start_factor,
            min_ratio=min_ratio,
            decay_steps=self._decay_steps(total_steps),
            decay_shape=self.decay_shape,
        )


class WarmupInverseSqrtScheduler(Schedule):
    """Raise the learning rate over a warmup, then lower it as one over the square root of the step.

    The time scale is the warmup: at 4 times as many steps the rate is one half. `min_lr_ratio` is a floor.

    Args:
        warmup: as in `WarmupCosineScheduler`, and so are the arguments that are not named here.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the warmup is longer than the run.
        MisconfigurationException: the horizon cannot be known, or the module returns a scheduler of its own.

    Cost:
        That of `WarmupCosineScheduler`.

    Reference:
        Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, equation 3.

    Example:
        >>> from lightning_tricks import WarmupInverseSqrtScheduler
        >>> schedule = WarmupInverseSqrtScheduler(4000, min_lr_ratio=0.0)
    """

    buys = "warmup and a decay that does not depend on how long the run is"

    def __init__(
        self,
        warmup: int | float | str = 0.03,
        *,
        min_lr_ratio: float = 0.1,
        min_lr: float | None = None,
        start_factor: float | None = None,
        total_steps: int | str | dict[int, int] | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        super().__init__(
            warmup,
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            start_factor=start_factor,
            total_steps=total_steps,
            optimizers=optimizers,
        )

    @override
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        return warmup_inverse_sqrt(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            start_factor=start_factor,
            min_ratio=min_ratio,
        )


class WarmupCosineRestartsScheduler(Schedule):
    """Raise the learning rate over a warmup, then lower it along half a cosine several times, each from the top.

    Args:
        warmup: as in `WarmupCosineScheduler`, and so are the arguments that are not named here.
        num_cycles: how many times, 1 or more.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the warmup is longer than the run.
        MisconfigurationException: the horizon cannot be known, or the module returns a scheduler of its own.

    Cost:
        That of `WarmupCosineScheduler`.

    Reference:
        Loshchilov, Hutter (2017), "SGDR", arXiv:1608.03983, equation 5.

    Example:
        >>> from lightning_tricks import WarmupCosineRestartsScheduler
        >>> schedule = WarmupCosineRestartsScheduler(100, num_cycles=3)
    """

    buys = "warmup and warm restarts"

    def __init__(
        self,
        warmup: int | float | str = 0.03,
        *,
        num_cycles: int = 1,
        min_lr_ratio: float = 0.1,
        min_lr: float | None = None,
        start_factor: float | None = None,
        total_steps: int | str | dict[int, int] | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        super().__init__(
            warmup,
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            start_factor=start_factor,
            total_steps=total_steps,
            optimizers=optimizers,
        )
        self.num_cycles = check_int("num_cycles", num_cycles, minimum=1)

    @override
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        return warmup_cosine_restarts(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            start_factor=start_factor,
            min_ratio=min_ratio,
            num_cycles=self.num_cycles,
        )


class WarmupPolynomialScheduler(Schedule):
    """Raise the learning rate over a warmup, then lower it as a power of what is left of the run.

    Args:
        warmup: as in `WarmupCosineScheduler`, and so are the arguments that are not named here.
        power: the exponent, above 0; 1 is linear.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the warmup is longer than the run.
        MisconfigurationException: the horizon cannot be known, or the module returns a scheduler of its own.

    Cost:
        That of `WarmupCosineScheduler`.

    Reference:
        Devlin et al. (2019), "BERT", arXiv:1810.04805, in its code.

    Example:
        >>> from lightning_tricks import WarmupPolynomialScheduler
        >>> schedule = WarmupPolynomialScheduler(100, power=2.0)
    """

    buys = "warmup and polynomial decay"

    def __init__(
        self,
        warmup: int | float | str = 0.03,
        *,
        power: float = 1.0,
        min_lr_ratio: float = 0.1,
        min_lr: float | None = None,
        start_factor: float | None = None,
        total_steps: int | str | dict[int, int] | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        super().__init__(
            warmup,
            min_lr_ratio=min_lr_ratio,
            min_lr=min_lr,
            start_factor=start_factor,
            total_steps=total_steps,
            optimizers=optimizers,
        )
        self.power = check_number("power", power, above=True, finite=True)

    @override
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        return warmup_polynomial(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            start_factor=start_factor,
            min_ratio=min_ratio,
            power=self.power,
        )
