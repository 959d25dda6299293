"""Count how often the value of a tensor is read: on an accelerator each time is a wait for the device."""

import torch


def count_reads(monkeypatch) -> list[str]:
    """Return a list that grows by the name of the method at each read."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counting(self, *args, name=name, original=original):
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    return reads
