"""The strategy strings: each a preset of a class, registered when the package is imported."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks._lightning import MisconfigurationException

__all__ = ["Preset", "refuse_dp", "register_"]


@dataclass(frozen=True)
class Preset:
    """A strategy string.

    Args:
        name: the string.
        strategy: the class, or a function that raises.
        description: one line, for the registry.
        arguments: of the class.
    """

    name: str
    strategy: Callable[..., Any]
    description: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def use(self) -> str:
        """How to get the same without the string."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"lightning_tricks.{self.strategy.__name__}({arguments})"


def register_(presets: tuple[Preset, ...], registry: _StrategyRegistry = StrategyRegistry) -> None:
    """Register strategy strings. One that somebody has taken is left alone, with a warning.

    Args:
        presets: the strings.
        registry: Lightning's.
    """
    for preset in presets:
        if preset.name not in registry:
            registry.register(preset.name, preset.strategy, description=preset.description, **preset.arguments)
        elif registry[preset.name]["strategy"] is not preset.strategy:
            owner = registry[preset.name]["strategy"]
            rank_zero_warn(
                f"the strategy string {preset.name!r} belongs to {owner.__module__}.{owner.__qualname__} already, and "
                f"lightning_tricks leaves it alone. Use strategy={preset.use}"
            )


def refuse_dp() -> NoReturn:
    """Explain what became of ``strategy="dp"``.

    Raises:
        MisconfigurationException: always.
    """
    raise MisconfigurationException(
        'strategy="dp" (torch.nn.DataParallel) copied the module to each device at every step and computed the loss on '
        "one of them, in threads of one process; Lightning 2 dropped it and torch advises against it. Use "
        'strategy="ddp", one process a device, which is faster and changes nothing else, or "fsdp2" where the model '
        "does not fit one device"
    )
