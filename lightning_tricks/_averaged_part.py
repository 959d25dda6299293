"""The average of what one optimizer trains: when it begins and moves, and the swap of the weights for it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.composition.following import Follower
from lightning_tricks.functional.shards import local_tensor
from lightning_tricks.functional.weight_averaging import WeightAverage, put_back_

__all__ = ["AveragedPart"]


class AveragedPart:
    """The average of what one optimizer trains.

    Args:
        share: takes the number of updates before one, and returns how far it moves the average.
        takes: whether an update follows on so many applied steps since the begin.
        device: where the average lies; None for where its weights do.
    """

    def __init__(
        self, share: Callable[[int], float], takes: Callable[[int], bool], device: torch.device | None
    ) -> None:
        self.share, self.takes, self.device = share, takes, device
        self.module: nn.Module | None = None
        self.begin = 0
        self.names: list[str] = []
        self.live: list[Tensor] = []
        self.average: WeightAverage | None = None
        self.updates = 0
        self.begun_at = 0
        self.applied = 0
        self.held: list[Tensor] | None = None
        self.versions: list[int] = []
        self.buffers: list[str] = []
        self.follower: Follower

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module": None}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Average further tensors, from their present value on.

        Args:
            tensors: by name.
        """
        self.names += tensors
        self.live += tensors.values()
        if self.average is not None:
            self.average.add(tensors)

    def start(self) -> None:
        """Begin the average with the weights as they are."""
        self.average = WeightAverage(dict(zip(self.names, self.live, strict=True)), self.device)
        self.updates, self.begun_at = 0, self.applied

    def follow(self, applied: int) -> None:
        """Begin or move the average.

        Args:
            applied: steps of the optimizer.
        """
        if applied == self.applied:
            return  # the step was left out
        self.applied = applied
        self.find_buffers()
        if self.average is None:
            if applied >= self.begin:
                self.start()
        elif self.takes(applied - self.begun_at):
            self.average.update_(self.live, self.share(self.updates))
            self.updates += 1

    def show(self) -> None:
        """Let the weights be the average, if it has begun."""
        if self.average is not None and self.held is None:
            self.find_buffers()
            self.held = self.average.show_(self.live)

    def find_buffers(self) -> None:
        """Look buffers up anew: a module may put another tensor in a buffer's place."""
        for name in self.buffers:
            assert self.module is not None
            self.live[self.names.index(name)] = self.module.get_buffer(name)

    def put_back(self) -> None:
        """Undo `show`."""
        if self.held is not None:
            self.find_buffers()
            put_back_(self.live, self.held)
            self.held = None

    @property
    def is_untouched(self) -> bool:
        """Whether nobody wrote to the weights since `versions` were noted; of a shown average, nor moved them."""
        if self.versions != [one._version for one in self.live]:  # they may share memory with the average
            return False
        if self.average is None or self.held is None:
            return True
        pairs = zip(self.live, self.average.local, strict=True)
        return all(torch.equal(local_tensor(one.detach()), own.to(local_tensor(one))) for one, own in pairs)

    @property
    def raw(self) -> list[Tensor]:
        """This rank's parts of the weights that training goes on with."""
        return [local_tensor(one.detach()) for one in self.live] if self.held is None else self.held

    def is_narrow(self, name: str) -> bool:
        """Whether a parameter has fewer bits than its average.

        Args:
            name: the parameter's.
        """
        index = self.names.index(name)
        assert self.average is not None
        return self.live[index].dtype != self.average.local[index].dtype

    def shown(self) -> dict[str, Tensor]:
        """The average as the parameters would hold it."""
        if self.average is None:
            return {}
        pairs = zip(self.live, self.average.local, strict=True)
        return self.average.named([own.to(local_tensor(one.detach())) for one, own in pairs])

    def state(self) -> dict[str, Any]:
        """Return where the average is, as plain values."""
        return {
            "started": self.average is not None,
            "names": list(self.names),
            "updates": self.updates,
            "begun_at": self.begun_at,
            "applied": self.applied,
        }

    def go_back(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state, whose tensors were brought back already.

        Args:
            state: what `state` returned then.
        """
        self.updates, self.begun_at, self.applied = state["updates"], state["begun_at"], state["applied"]
        if not state["started"]:
            self.average = None
        if self.average is not None:
            for name, one, own in zip(self.names, self.live, self.average.local, strict=True):
                if name not in state["names"]:  # it joined since, and until then it stood still
                    own.copy_(local_tensor(one.detach()))
