"""Capture and restore every random state that training draws from.

Python's `random`, NumPy's legacy generator (where NumPy is imported), torch's CPU generator and the generator of the
current accelerator. What is captured holds tensors and plain values only, so that it can be stored in a checkpoint that
is loaded with ``weights_only=True``.

Cost:
    About 10 kB a process; on an accelerator one copy of a few bytes from the device.

Sharding:
    Each rank has its own state: gather them to store, and give each rank its own back.
"""

import random
import sys
from typing import Any

import torch

__all__ = ["capture_random_state", "restore_random_state_"]


def capture_random_state() -> dict[str, Any]:
    """Read this process's random states.

    Returns:
        A dictionary of tensors, tuples, ints and strings, for `restore_random_state_`.

    Example:
        >>> state = capture_random_state()
        >>> first = torch.rand(2), random.random()
        >>> restore_random_state_(state)
        >>> second = torch.rand(2), random.random()
        >>> bool((first[0] == second[0]).all()), first[1] == second[1]
        (True, True)
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached)
    device = _accelerator()
    if device is not None:
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def restore_random_state_(state: dict[str, Any]) -> None:
    """Set this process's random states to what `capture_random_state` read.

    A part that was not captured, or that this machine has no generator for, is left alone.

    Args:
        state: what `capture_random_state` returned.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.cpu().numpy().astype("uint32"), position, has_gauss, cached))
    device = _accelerator()
    if device is not None and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"].cpu())


def _accelerator() -> torch.device | None:
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()
