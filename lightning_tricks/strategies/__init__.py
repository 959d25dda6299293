"""Layer 2: strategies, each a thin shell over `distributed`. Importing this package registers their strings."""

from lightning_tricks.strategies.fsdp2 import FSDP2Strategy
from lightning_tricks.strategies.registry import Preset, refuse_dp, register_
from lightning_tricks.strategies.zero1 import ZeRO1Strategy

__all__ = ["PRESETS", "FSDP2Strategy", "ZeRO1Strategy"]

PRESETS = (
    Preset("fsdp2", FSDP2Strategy, "parameters, gradients and optimizer state sharded over all ranks"),
    Preset("fsdp2_offload", FSDP2Strategy, "fsdp2 with shards and optimizer state on the CPU", {"cpu_offload": True}),
    Preset(
        "hsdp",
        FSDP2Strategy,
        "fsdp2 within a node, a copy in each (on one node: fsdp2)",
        {"replicate_size": "num_nodes"},
    ),
    Preset("zero1", ZeRO1Strategy, "DDP with the optimizer state sharded over all ranks"),
    Preset("zero2", FSDP2Strategy, "fsdp2 that gathers once a step", {"reshard_after_forward": False}),
    Preset("zero3", FSDP2Strategy, "fsdp2 under the name of the paper"),
    Preset("dp", refuse_dp, "explains itself"),
)

register_(PRESETS)
