"""Free the gradients of a step as soon as it is over.

Lightning zeroes gradients after the next forward, so that the last step's lie beside all of its activations: 4 bytes a
parameter at the peak, for nothing.

**Cost**: none. **Sharding**: each rank frees its shards.
"""

from torch.optim import Optimizer

__all__ = ["release_gradients_"]


def release_gradients_(optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters.

    Args:
        optimizer: any.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> weight.sum().backward()
        >>> release_gradients_(optimizer)
        >>> weight.grad is None
        True
    """
    optimizer.zero_grad(set_to_none=True)
