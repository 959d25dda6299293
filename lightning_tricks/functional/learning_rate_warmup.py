"""Multiply an optimizer's learning rates while somebody else goes on setting them.

Schedulers read the rate that they find and write another one: a factor that stayed in the rate would be multiplied in
again and again. So the owner's rate is kept beside the one that is shown, put back while a scheduler of its owner
steps, and whatever that writes is taken as the new rate.

Formula: shown = own * (s + (1 - s) * min(1, k / W)), for a warmup of W steps from the start factor s.

Reference:
    Goyal et al. (2017), "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2.

Cost:
    A few Python floats a parameter group.

Sharding:
    Every rank computes the same numbers.
"""

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["MultipliedRates"]


class MultipliedRates:
    """The learning rates of an optimizer's groups: as their owner set them, and as they are shown to the optimizer.

    Args:
        optimizer: the optimizer, with its owner's rates.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> rates = MultipliedRates(optimizer)
        >>> rates.multiply_(0.5)
        >>> optimizer.param_groups[0]["lr"], rates.own
        (0.25, [0.5])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._own: list[float] = []
        self._shown: list[float] = []
        self._factor = 1.0
        self._look()

    @property
    def own(self) -> list[float]:
        """The owner's rates, by group."""
        self._look()
        return list(self._own)

    def multiply_(self, factor: float) -> None:
        """Show the owner's rates times `factor`; 1 puts them back.

        Args:
            factor: replaces the factor before.
        """
        if factor == self._factor == 1.0:
            return  # what is shown is the owner's, and need not be read from a device
        self._factor = factor
        self._look()
        for index, group in enumerate(self.optimizer.param_groups):
            rate = self._own[index] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self._shown[index] = float(group["lr"])

    def load(self, own: list[float]) -> None:
        """Take over the owner's rates of an earlier moment, whose shown rates are back in the groups.

        Args:
            own: what `own` was then.
        """
        self._own, self._factor = list(own), 0.0
        self._shown = [float(group["lr"]) for group in self.optimizer.param_groups][: len(own)]

    def _look(self) -> None:
        """Take as the owner's what is neither theirs nor ours: a rate that was written, a group that was added."""
        for index, group in enumerate(self.optimizer.param_groups):
            rate = float(group["lr"])
            if index == len(self._own):
                self._own.append(rate)
                self._shown.append(rate)
            elif rate != self._shown[index]:
                self._own[index] = self._shown[index] = rate
