"""Take the running statistics of BatchNorm anew, for weights that no forward pass of training has seen.

An average of weights has activations of its own: their mean and variance are those of no iterate. They are measured as
the mean over some batches of the statistics of each.

Reference:
    Izmailov et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407,
    section 3.2; the computation is that of ``torch.optim.swa_utils.update_bn``.

Cost:
    A forward pass over the batches.

Sharding:
    Each rank has the statistics of its own batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["fresh_statistics", "layers_with_statistics"]


def layers_with_statistics(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the layers of BatchNorm that keep running statistics.

    Args:
        module: the model.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
        >>> [layer is model[0] for layer in layers_with_statistics(model)]
        [True]
    """
    layers = [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    return [one for one in layers if one.running_mean is not None]


@contextmanager
def fresh_statistics(module: nn.Module) -> Iterator[None]:
    """Reset the running statistics of layers in training mode, and let each forward pass count the same.

    Layers in evaluation mode, which training left alone, are left alone. One that no forward pass reached has its
    statistics back afterwards, and so have all after an error.

    Args:
        module: the model.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> with fresh_statistics(layer):
        ...     _ = layer(torch.tensor([[0.0], [2.0]])), layer(torch.tensor([[4.0], [6.0]]))
        >>> layer.running_mean, layer.momentum
        (tensor([3.]), 0.1)
    """
    layers = [layer for layer in layers_with_statistics(module) if layer.training]
    before = [(layer.momentum, {name: one.clone() for name, one in layer.named_buffers()}) for layer in layers]
    done = False
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    try:
        yield
        done = True
    finally:
        for layer, (momentum, buffers) in zip(layers, before, strict=True):
            layer.momentum = momentum
            if not done or not layer.num_batches_tracked:
                for name, buffer in layer.named_buffers():
                    buffer.copy_(buffers[name])
