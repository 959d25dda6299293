"""Matrix products of linear layers in fp8, by torchao.

The three products of a linear layer (output, gradient of the input, gradient of the weight) take operands of 8 bits,
each scaled into their range by its largest element just before; weights, gradients and the optimizer stay as they are.
An H100 multiplies fp8 twice as fast as bf16, which pays for the scaling where layers are large.

Formula:
    x W^T  ~  s_x s_W * (fp8(x / s_x) fp8(W / s_W)^T),    s = max|.| / 448 for e4m3

    with one scale a tensor (``"tensorwise"``) or a row (``"rowwise"``: slower, and closer)

Reference:
    Micikevicius et al. (2022), "FP8 Formats for Deep Learning", arXiv:2209.05433, sections 3 and 4.

Differs:
    The layers stay what they are: the forward of each is replaced, so that names, classes and parameters do not change.
    What computes is torchao's `Float8Linear`, over the layer's own parameters.

Cost:
    One read of each operand for its scale, one to cast it. No memory but the casts.

Sharding:
    Scales of activations are those of a rank's own batch, so a run on two ranks differs from one on one by the rounding
    of fp8. Under FSDP2 weights are gathered as they are, and cast whole.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.functional.exclusion import Exclusion, excluded_parameters
from lightning_tricks.functional.patching import Patch, patch_

__all__ = ["LinearLayers", "apply_float8", "linear_layers", "refuse_hardware"]

RECIPES = ("tensorwise", "rowwise")
_MULTIPLE = 16
# Below these compute capabilities the kernels are missing.
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


@dataclasses.dataclass(frozen=True)
class LinearLayers:
    """The linear layers of a model, as far as fp8 is concerned.

    Args:
        suitable: names of those that can be converted.
        left_out: the others, with the reason.
    """

    suitable: tuple[str, ...]
    left_out: dict[str, str]


def linear_layers(module: nn.Module, exclude: Exclusion = "head") -> LinearLayers:
    """Find the linear layers that fp8 suits.

    Args:
        module: the model.
        exclude: what is left alone, as for `excluded_parameters`.

    Raises:
        ValueError: `exclude` matches nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(10, 16))
        >>> linear_layers(model)
        LinearLayers(suitable=('0',), left_out={'1': '32 x 10 does not divide by 16', '2': 'excluded'})
    """
    excluded = excluded_parameters(module, exclude)
    suitable, left_out = [], {}
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if f"{name}.weight" in excluded:
            left_out[name] = "excluded"
        elif "forward" in vars(layer) or "weight" not in layer._parameters:
            left_out[name] = "its forward or its weight has been replaced"
        elif type(layer) is not nn.Linear:
            left_out[name] = f"{type(layer).__name__} may compute something else"
        elif layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
            left_out[name] = f"{layer.in_features} x {layer.out_features} does not divide by {_MULTIPLE}"
        else:
            suitable.append(name)
    return LinearLayers(tuple(suitable), left_out)


def refuse_hardware(device: torch.device, recipe: str) -> None:
    """Raise if a device does not multiply in fp8.

    Args:
        device: where the model trains.
        recipe: "tensorwise" or "rowwise".

    Raises:
        RuntimeError: names what was found.

    Example:
        >>> refuse_hardware(torch.device("cpu"), "tensorwise")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: expected a GPU with fp8 matrix products ..., got cpu: ...
    """
    found = device.type
    if device.type == "cuda" and torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        if architecture.startswith(("gfx94", "gfx95", "gfx12")):
            return
        found = f"{torch.cuda.get_device_name(device)} ({architecture})"
    elif device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY[recipe]:
            return
        found = f"{torch.cuda.get_device_name(device)} of compute capability {capability[0]}.{capability[1]}"
    needed = ".".join(map(str, _CAPABILITY[recipe]))
    raise RuntimeError(
        f"expected a GPU with fp8 matrix products (compute capability {needed} or above for {recipe!r}, or an MI300), "
        f"got {found}: train in bf16 here, or pass emulate=True to try fp8's numbers, slowly, on any device"
    )


class _Edits:
    """The handle of converted layers."""

    def __init__(self, patches: list[Patch]) -> None:
        self._patches = patches

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for patch in self._patches:
            patch.remove()


def apply_float8(
    module: nn.Module, names: tuple[str, ...], recipe: str = "tensorwise", emulate: bool = False
) -> _Edits:
    """Let linear layers multiply in fp8.

    Args:
        module: the model.
        names: the layers, from `linear_layers`.
        recipe: "tensorwise" or "rowwise".
        emulate: compute in the layers' own dtype with operands rounded to fp8.

    Returns:
        A handle with ``remove()``.

    Raises:
        ModuleNotFoundError: torchao is not installed.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 16))
        >>> handle = apply_float8(model, ("0",), emulate=True)
        >>> model(torch.randn(16, 16)).shape, list(model.state_dict())
        (torch.Size([16, 16]), ['0.weight', '0.bias'])
        >>> handle.remove()
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected torchao for fp8: pip install lightning_tricks[fp8]") from error
    # Of the gradient of a weight the inner dimension is the number of rows, which a short batch need not divide by 16.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    patches = []
    for name in names:
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        with torch.device("meta"):
            twin = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        twin = convert_to_float8_training(twin, config=config)
        twin._parameters = layer._parameters  # the same dictionary: whoever swaps a parameter there swaps it for both
        patches.append(patch_(layer, "forward", functools.partial(_forward, twin)))
    return _Edits(patches)


def _forward(twin: Any, x: Tensor) -> Tensor:
    output: Tensor = twin.forward(x)
    return output
