"""The number formats of training: what they can hold, and which of them a device multiplies at full speed.

A format of e exponent and m mantissa bits reaches from its smallest subnormal to its largest number, and resolves a
relative step of epsilon = 2^-m. fp16 has steps but no range, which is why its gradients need a loss scale; bf16 has the
range of fp32 and three digits; fp8 has neither, which is why every tensor gets a scale of its own.

Reference:
    IEEE 754-2019; Kalamkar et al. (2019), "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322;
    Micikevicius et al. (2022), "FP8 Formats for Deep Learning", arXiv:2209.05433, table 1.
"""

from dataclasses import dataclass

import torch

__all__ = ["FORMATS", "NumberFormat", "full_speed", "number_formats"]

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8 e4m3", "fp8 e5m2")

# From this compute capability on an NVIDIA GPU multiplies a format on its tensor cores (fp32: on its ordinary ones).
_CAPABILITY = {"fp32": (0, 0), "tf32": (8, 0), "fp16": (7, 0), "bf16": (8, 0), "fp8 e4m3": (8, 9), "fp8 e5m2": (8, 9)}


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    Args:
        name: as in `FORMATS`.
        bits: what one number takes; of tf32 in memory.
        largest: the largest finite number.
        smallest_normal: the smallest positive number with all its digits.
        smallest_subnormal: the smallest positive number.
        epsilon: the distance from 1 to the next number.
    """

    name: str
    bits: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float


def number_formats() -> list[NumberFormat]:
    """Compute the table of formats from torch.

    Returns:
        One entry for each of `FORMATS`.

    Example:
        >>> fp16 = next(one for one in number_formats() if one.name == "fp16")
        >>> fp16.largest, fp16.epsilon
        (65504.0, 0.0009765625)
    """
    return [_tf32() if name == "tf32" else _of_dtype(name, _DTYPES[name]) for name in FORMATS]


def full_speed(device: torch.device) -> dict[str, bool]:
    """Tell which formats a device multiplies in hardware, rather than by way of another.

    Args:
        device: the device.

    Returns:
        For each of `FORMATS`, whether it does; of an accelerator that is not NVIDIA's what torch says of bf16, and
        fp16.

    Example:
        >>> full_speed(torch.device("cpu"))["fp32"]
        True
    """
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        return {name: capability >= _CAPABILITY[name] for name in FORMATS}
    if device.type == "cpu":
        # Private in torch 2.13.
        amx = torch.cpu._is_amx_tile_supported()
        bf16 = amx or torch.cpu._is_avx512_bf16_supported()
        fast = {"fp32": True, "bf16": bf16, "fp16": torch.cpu._is_amx_fp16_supported()}
    else:
        bf16 = bool(getattr(torch.get_device_module(device), "is_bf16_supported", lambda: False)())
        fast = {"fp32": True, "fp16": True, "bf16": bf16}
    return {name: fast.get(name, False) for name in FORMATS}


def _of_dtype(name: str, dtype: torch.dtype) -> NumberFormat:
    info = torch.finfo(dtype)
    return NumberFormat(name, info.bits, info.max, info.smallest_normal, info.smallest_normal * info.eps, info.eps)


def _tf32() -> NumberFormat:
    """The exponent of fp32, the mantissa of fp16; torch has no dtype for it."""
    fp32, epsilon = torch.finfo(torch.float32), torch.finfo(torch.float16).eps
    largest = fp32.max * (2.0 - epsilon) / (2.0 - fp32.eps)
    return NumberFormat("tf32", 32, largest, fp32.smallest_normal, fp32.smallest_normal * epsilon, epsilon)
