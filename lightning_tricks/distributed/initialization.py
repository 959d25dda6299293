"""Give every rank the same weights before they are divided.

Ranks that were seeded differently begin with different weights. Sharding such a model silently makes a mixture of
them, and hybrid sharding copies that drift apart: so rank 0's weights are sent to all, unit by unit.

A model on the meta device has no weights yet. Its modules are filled one after another, each by its own
``reset_parameters``, in the order in which their constructors finished: the draws are those of a model that was built
with memory, from the same random state. No rank holds more than one unit beside its shards.

**Cost**: one broadcast a tensor, once. Memory: one unit.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Materializer", "broadcast_from_first_rank_", "has_meta_tensors"]


def has_meta_tensors(module: nn.Module, *, recurse: bool = True) -> bool:
    """Whether a parameter or buffer of the module has a shape but no memory.

    Args:
        module: the module to look at.
        recurse: whether to look into its submodules too.

    Example:
        >>> has_meta_tensors(nn.Linear(2, 2, device="meta"))
        True
    """
    tensors = [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]
    return any(tensor.is_meta for tensor in tensors)


def broadcast_from_first_rank_(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite each tensor by rank 0's, and move it to the device. A collective: on every rank, in the same order.

    Args:
        tensors: of any shape and dtype, the same on every rank.
        device: one that the process group's backend can send from.
    """
    for tensor in tensors:
        with torch.no_grad():
            tensor.data = tensor.detach().to(device).contiguous()  # neither a broadcast nor FSDP2 takes others
            dist.broadcast(tensor.detach(), src=0)


class Materializer:
    """Gives the modules of a meta-device model memory and values, one module at a time.

    Args:
        model: all of it, to see which of its modules share parameters.
        device: where the memory is to be.
        provided: names of parameters and buffers whose values come from elsewhere later, so that no reset need fill
            them.

    Example:
        >>> linear = nn.Linear(2, 2, device="meta")
        >>> Materializer(linear, torch.device("cpu")).fill_("", linear)
        >>> linear.weight.device.type
        'cpu'
    """

    def __init__(self, model: nn.Module, device: torch.device, provided: Collection[str] = ()) -> None:
        self.device = device
        self.provided = provided
        holders = Counter(id(one) for part in model.modules() for one in part.parameters(recurse=False))
        # By the id of what they were on meta. Of these alone: holding on to others would keep what is sharded.
        self._shared: dict[int, Tensor | None] = {key: None for key, count in holders.items() if count > 1}

    def fill_(self, name: str, module: nn.Module) -> None:
        """Fill the parameters and buffers that the module itself holds, by its ``reset_parameters``.

        Of modules that share a parameter the first one's values stay.

        Args:
            name: the module's name in the model, for messages and `provided`.
            module: not filled recursively.

        Raises:
            ValueError: a parameter or buffer has no value afterwards, and none is provided.
        """
        if not has_meta_tensors(module, recurse=False):
            return
        before = dict(module.named_parameters(recurse=False))
        module.to_empty(device=self.device, recurse=False)
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        with torch.no_grad():
            for tensor in own.values():
                _mark(tensor)
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        prefix = f"{name}." if name else ""
        unfilled = [prefix + key for key, one in own.items() if prefix + key not in self.provided and _is_marked(one)]
        if unfilled:
            lacks = "fills" if callable(reset) else "is there to fill"
            raise ValueError(
                f"expected every parameter and buffer of a model on the meta device to be filled, got none for "
                f"{', '.join(unfilled)}: no reset_parameters of {type(module).__name__} {lacks} it. Give the class a "
                "`reset_parameters`, build the model without the meta device, or load its weights "
                "(`FSDP2Strategy(weights=...)`)"
            )
        for key, meta in before.items():
            if id(meta) in self._shared:
                first = self._shared[id(meta)]
                if first is None:
                    self._shared[id(meta)] = own[key]
                else:
                    setattr(module, key, first)


def _mark(tensor: Tensor) -> None:
    """Fill with what no reset leaves behind."""
    bits, mark = _bits_and_mark(tensor)
    bits.fill_(mark)


def _is_marked(tensor: Tensor) -> bool:
    bits, mark = _bits_and_mark(tensor)
    return bool((bits.isnan() if math.isnan(mark) else bits == mark).any())


def _bits_and_mark(tensor: Tensor) -> tuple[Tensor, float]:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor, math.nan
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8), 2
    limits = torch.iinfo(tensor.dtype)
    return tensor, limits.min if limits.min < 0 else limits.max
