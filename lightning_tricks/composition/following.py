"""Follow the applied steps of an optimizer without waiting for the device on the way."""

from collections.abc import Callable

from lightning_tricks.composition.ledger import OptimizerLedger

__all__ = ["Follower"]


class Follower:
    """Calls a function with the number of applied steps after each step, whatever its verdict.

    At once where the host knows the verdict; where only the device does, when `catch_up` is called: before the next
    batch, where reading it stalls least.

    Args:
        ledger: the optimizer's.
        act: takes the number of applied steps. Called again with the same number where a step was left out.

    Example:
        >>> ledger = OptimizerLedger()
        >>> follower = Follower(ledger, print)
        >>> ledger.count("applied")
        >>> follower.step()
        1
    """

    def __init__(self, ledger: OptimizerLedger, act: Callable[[int], None]) -> None:
        self.ledger = ledger
        self.behind = False
        self._act = act

    def act(self) -> None:
        """Call the function now. Synchronises where only the device knows the last step's verdict."""
        self.behind = False
        self._act(self.ledger.applied)

    def step(self) -> None:
        """Call the function if that costs no synchronisation now; else it is called by `catch_up`."""
        self.behind = not self.ledger.known_on_host
        if not self.behind:
            self.act()

    def catch_up(self) -> None:
        """Call the function if a verdict is outstanding."""
        if self.behind:
            self.act()
