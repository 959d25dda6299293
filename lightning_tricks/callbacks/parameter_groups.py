"""Splits of parameter groups as callbacks: what is not decayed, and learning rates by depth."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException
from lightning_tricks._split_groups import SplitsGroups, schedulers_in
from lightning_tricks._validation import check_number
from lightning_tricks.composition import Summary
from lightning_tricks.functional.blocks import BlockSelector, validate_selector
from lightning_tricks.functional.exclusion import excluded_parameters, validate_exclusion
from lightning_tricks.functional.parameter_groups import (
    CATEGORIES,
    depth_scales,
    parameter_categories,
    rescale_rates_,
)

__all__ = ["LayerwiseLearningRateDecay", "WeightDecayGroups"]

_DECAYED, _SPARED = "decay", "no_decay"


class WeightDecayGroups(SplitsGroups):
    """Take the weight decay off what should not have it: biases, normalisations, embeddings, and what you name.

    Right after `configure_optimizers` each group of the module's optimizers is split in two; the settings of the group,
    its schedulers and the optimizer's state go on. A parameter is told by the type of its module (every normalisation,
    and classes that end with "Norm"; embeddings and positional tables), then its rank (of one dimension or none: a
    scale), then its name. A checkpoint of a run without this callback is resumed with it.

    Args:
        weight_decay: the decay of all other parameters, 0 or more; None for that of each group. A group without decay
            beside others that have one is left as the module made it.
        exclude: what is not decayed: ``"bias"``, ``"norm"``, ``"embedding"``, a glob over names of modules and
            parameters in the LightningModule, a module class or its name, or a sequence of these.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; a pattern matches nothing (when the
            optimizers are configured, with the module types there are).
        MisconfigurationException: an optimizer has no weight decay; a checkpoint has other parameter groups.

    Cost:
        A parameter group more.

    Reference:
        Loshchilov, Hutter (2019), arXiv:1711.05101; Goyal et al. (2017), arXiv:1706.02677, section 5.3.

    Example:
        >>> from lightning_tricks import WeightDecayGroups
        >>> groups = WeightDecayGroups(0.1, exclude=("bias", "norm", "embedding", "model.head.*"))
    """

    job = "choose what is decayed"
    buys = "weight decay on the matrices alone, not on biases, normalisations and embeddings"
    costs = "a parameter group more"

    def __init__(
        self,
        weight_decay: float | None = None,
        *,
        exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] = CATEGORIES,
    ) -> None:
        self.weight_decay = None if weight_decay is None else check_number("weight_decay", weight_decay, finite=True)
        validate_exclusion(exclude)
        self.exclude = exclude
        self.reset()

    @override
    def reset(self) -> None:
        super().reset()
        self._spared: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._decays = False  # whether any group of the module's own does
        self._left_alone: set[int] = set()  # parameters of groups that do not, beside others that do
        self._rows: list[str] = []

    @override
    def prepare(self, module: pl.LightningModule, optimizers: list[Optimizer]) -> None:
        entries = [self.exclude] if isinstance(self.exclude, (str, type)) else list(self.exclude)
        categories = parameter_categories(module)
        patterns = [entry for entry in entries if entry not in CATEGORIES]
        named = excluded_parameters(module, patterns) if patterns else set()
        parameters = dict(module.named_parameters())
        spared = {name: sorted(kinds.intersection(entries)) for name, kinds in categories.items()}
        self._kinds = {id(parameters[name]): (kinds or ["named"])[0] for name, kinds in spared.items()}
        self._spared = {id(parameters[name]) for name, kinds in spared.items() if kinds or name in named}
        for index, optimizer in enumerate(optimizers):
            if any("weight_decay" not in group for group in optimizer.param_groups):
                raise MisconfigurationException(
                    f"{type(self).__name__} expected optimizers with weight decay, got optimizer {index}, a "
                    f"{type(optimizer).__name__}, which has none: use another one, or drop {type(self).__name__}"
                )
        decays = [group["weight_decay"] for optimizer in optimizers for group in optimizer.param_groups]
        self._decays = any(decays)
        undecayed = [g for optimizer in optimizers for g in optimizer.param_groups if not g["weight_decay"]]
        self._left_alone = {id(one) for group in undecayed for one in group["params"]} if self._decays else set()

    @override
    def key_of(self, parameter: Tensor, group: dict[str, Any]) -> str:
        if not self._decays and self.weight_decay is None:
            return _DECAYED  # there is nothing to take off
        return _SPARED if id(parameter) in self._spared or id(parameter) in self._left_alone else _DECAYED

    @override
    def change(self, group: dict[str, Any], key: str) -> None:
        if key == _SPARED:
            group["weight_decay"] = 0.0
        elif self.weight_decay is not None:
            group["weight_decay"] = self.weight_decay

    @override
    def _why_nothing(self) -> str:
        if not self._decays and self.weight_decay is None:
            return "no group has weight decay. Pass weight_decay=..., or give it to the optimizer"
        return "the module has no parameter that is spared, or none that is not"

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._rows = [
            f"optimizer {index}, group {number}: weight decay {group['weight_decay']:g} on {self._described(group)}"
            for index, optimizer in enumerate(trainer.optimizers)
            for number, group in enumerate(optimizer.param_groups)
        ]

    def _described(self, group: dict[str, Any]) -> str:
        parameters = group["params"]
        kinds = Counter(self._kinds.get(id(one), "named") for one in parameters if id(one) in self._spared)
        of = f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if kinds else ""
        return f"{len(parameters)} tensors{of}, {sum(one.numel() for one in parameters):,} elements"

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary("\n".join(self._rows))


class LayerwiseLearningRateDecay(SplitsGroups):
    """Lower the learning rate of each repeated block by its distance from the head, as in fine-tuning.

    Of N blocks, block i from 0 has its groups' rates times ``decay ** (N - i)``, embeddings (and what else the module
    has before the first block) times ``decay ** (N + 1)``, the head (and what comes after the last block) its own. It
    happens right after `configure_optimizers`; the module's schedulers, and ours, keep the ratios, but for floors that
    they give as a rate, which are the same for all layers. A checkpoint of a run without this callback is resumed with
    it.

    Args:
        decay: in (0, 1].
        min_scale: what no scale falls below, in [0, 1].
        blocks: which modules are the blocks: ``"auto"`` for the repeated ones, or a class, the name of a class, a glob
            over the modules' names in the LightningModule, a predicate of (name, module), or a list of these. Their
            depth is the order in which the module has them; stacks that follow one another count on.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; there are no such blocks (when the
            optimizers are configured, with the module types there are).
        MisconfigurationException: a checkpoint has other parameter groups; the floor of a scheduler lies above a
            layer's rate.

    Cost:
        A parameter group for each depth.

    Reference:
        Clark et al. (2020), "ELECTRA", arXiv:2003.10555, appendix B; Bao et al. (2022), "BEiT", arXiv:2106.08254.

    Example:
        >>> from lightning_tricks import LayerwiseLearningRateDecay
        >>> rates = LayerwiseLearningRateDecay(0.8, blocks="model.encoder.layer.*")
    """

    job = "scale the learning rate by depth"
    mark = "lr_scale"
    rank = 1  # whatever the order in the list: a checkpoint depends on the order of the groups
    buys = "fine-tuning that moves general features less than the head"
    costs = "a parameter group for each depth"

    def __init__(
        self,
        decay: float = 0.75,
        *,
        min_scale: float = 0.0,
        blocks: str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[BlockSelector] = "auto",
    ) -> None:
        self.decay = check_number("decay", decay, maximum=1.0, above=True)
        self.min_scale = check_number("min_scale", min_scale, maximum=1.0)
        validate_selector(blocks)
        self.blocks = blocks
        self.reset()

    @override
    def reset(self) -> None:
        super().reset()
        self._scales: dict[int, float] = {}
        self._names: dict[int, str] = {}

    @override
    def prepare(self, module: pl.LightningModule, optimizers: list[Optimizer]) -> None:
        scales = depth_scales(module, self.decay, min_scale=self.min_scale, blocks=self.blocks)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._scales = {key: scales[name] for key, name in self._names.items()}

    @override
    def split(self, module: pl.LightningModule, configured: Any) -> None:
        super().split(module, configured)
        for scheduler in schedulers_in(configured):
            floor = getattr(scheduler, "eta_min", 0.0)
            rates = [group["lr"] for group in scheduler.optimizer.param_groups]
            if any(0 < rate < floor for rate in rates):
                raise MisconfigurationException(
                    f"{type(self).__name__} expected a scheduler whose floor lies below all rates, got "
                    f"{type(scheduler).__name__}(eta_min={floor:g}), which would raise the deepest layers from "
                    f"{min(rates):g}: lower eta_min, or use a schedule with min_lr_ratio, such as WarmupCosineScheduler"
                )

    @override
    def key_of(self, parameter: Tensor, group: dict[str, Any]) -> float:
        return self._scales.get(id(parameter), 1.0)

    @override
    def change(self, group: dict[str, Any], key: float) -> None:
        rescale_rates_(group, key)

    @override
    def _why_nothing(self) -> str:
        return f"with decay={self.decay} and min_scale={self.min_scale} all parameters have the same scale"

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        by_scale: dict[float, list[str]] = {}
        for key, scale in sorted(self._scales.items(), key=lambda one: one[1]):
            by_scale.setdefault(scale, []).append(self._names[key])
        return Summary(
            "\n".join(f"{scale:.3g}: {len(names)} tensors, {names[0]} ..." for scale, names in by_scale.items())
        )
