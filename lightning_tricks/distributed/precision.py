"""Which dtypes fully sharded training gathers and reduces in.

Autocast casts inside of operations: parameters are gathered as they are, in fp32. A policy of FSDP2 casts each shard
before it is gathered, which halves what is sent, and reduces gradients in fp32, so that their sum over ranks keeps its
bits. BatchNorm takes part in neither: its running statistics stall in 16 bits (an update of 1% or less of a value is
rounded away), and its kernels want weight and statistics alike.

**Reference**: Micikevicius et al. (2018), "Mixed Precision Training", arXiv:1710.03740, section 3.1; Zhao et al.
(2023), arXiv:2304.11277, section 4.4.
**Cost**: gathers of 2 bytes a parameter in place of 4; one cast of each shard a gather.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["FULL_PRECISION", "convert_", "mixed_precision_policy"]

FULL_PRECISION: tuple[type[nn.Module], ...] = (_BatchNorm,)
"""Modules that stay in fp32."""


def mixed_precision_policy(choice: MixedPrecisionPolicy | str, precision: str) -> MixedPrecisionPolicy | None:
    """Return the policy that a choice means under a precision; None for none.

    Args:
        choice: ``"auto"``, ``"autocast"``, ``"fsdp"``, or a policy, which is taken as it is.
        precision: as `Trainer(precision=...)` names it.

    Raises:
        ValueError: ``"fsdp"`` beside anything but ``"bf16-mixed"``; ``"64-true"``.

    Example:
        >>> mixed_precision_policy("fsdp", "bf16-mixed").param_dtype
        torch.bfloat16
    """
    if precision == "64-true":
        raise ValueError(
            "expected a precision of 32 bits or fewer, got 64-true, which holds and sends 8 bytes a parameter where "
            '32-true takes 4 and bf16-true 2. Use precision="32-true" or "bf16-mixed"'
        )
    if isinstance(choice, MixedPrecisionPolicy):
        return choice
    if choice == "fsdp":
        if precision != "bf16-mixed":
            raise ValueError(
                f'expected precision="bf16-mixed" beside mp_policy="fsdp", got {precision!r}. Use mp_policy="auto", or '
                "a MixedPrecisionPolicy"
            )
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if choice == "auto" and precision in ("bf16-true", "16-true"):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return None


def convert_(module: nn.Module, convert: Callable[[nn.Module], Any]) -> None:
    """Convert a module to 16 bits, but for what must stay in full precision, which becomes fp32.

    Args:
        module: the model.
        convert: changes the dtypes in place.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> convert_(model, nn.Module.bfloat16)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.bfloat16, torch.float32)
    """
    precise = [one for one in module.modules() if isinstance(one, FULL_PRECISION)]
    before = [{key: value.clone() for key, value in one.state_dict().items()} for one in precise]
    convert(module)
    for one, state in zip(precise, before, strict=True):
        one.float().load_state_dict(state)
