import torch

from lightning_tricks.composition.per_optimizer import PerOptimizer


class Count:
    def __init__(self) -> None:
        self.count, self.device = 0, torch.device("cpu")

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict, device: torch.device) -> None:
        self.count, self.device = state["count"], device


def test_states_wait_until_the_device_is_known_and_are_not_lost_meanwhile() -> None:
    first = PerOptimizer(Count)
    for index in (0, 0, 1):
        first.get(index, torch.device("cpu")).count += 1
    assert first.state_dict() == {0: {"count": 2}, 1: {"count": 1}}

    second = PerOptimizer(Count)
    second.get(0, torch.device("cpu")).count = 9
    second.load_state_dict(first.state_dict())
    record = second.get(0, torch.device("meta"))
    assert (record.count, record.device.type) == (2, "meta")
    assert second.state_dict() == {0: {"count": 2}, 1: {"count": 1}}  # optimizer 1 has not stepped again yet
    assert second.get(2, torch.device("cpu")).count == 0
