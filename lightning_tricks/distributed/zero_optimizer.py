"""ZeRO stage 1: each rank keeps the optimizer state of its share of the parameters.

Gradients are averaged over all ranks as in DDP. Each rank then steps the parameters that are its own, with an optimizer
of the user's kind, and sends them to the others.

**Reference**: Rajbhandari et al. (2020), "ZeRO", arXiv:1910.02054, section 5.1. The engine is torch's
``ZeroRedundancyOptimizer``.
**Differs** from it in how the state is loaded: by the user's optimizer, whose rules for its state hold.
**Cost**: optimizer state / W; one broadcast a parameter and step.
**Sharding**: whole parameters, the largest first, each to the rank that has least.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, Optimizer

__all__ = ["gather_optimizer_state", "load_optimizer_state_", "shard_optimizer_state"]


def shard_optimizer_state(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """Return an optimizer of the same kind, groups and settings whose state is divided among the ranks.

    Args:
        optimizer: of a model whose parameters and gradients are the same on every rank; it has taken no step yet.

    Raises:
        ValueError: the optimizer computes one direction from all parameters (LBFGS).
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "expected an optimizer that steps each parameter by itself, got LBFGS, whose step depends on all of them: "
            'a rank that holds a part of its state would take another step. Use strategy="ddp"'
        )
    # Whoever shows the optimizer's name, such as LearningRateMonitor, shows the user's.
    kind = type(type(optimizer).__name__, (ZeroRedundancyOptimizer,), {})
    sharded: ZeroRedundancyOptimizer = kind(optimizer.param_groups, _Like(optimizer), **optimizer.defaults)
    vars(sharded).update(_hooks(optimizer))
    optimizer.state.clear()  # what a constructor put there is with the rank that owns it
    return sharded


def gather_optimizer_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Gather the whole state on rank 0's CPU. A collective: on every rank.

    Args:
        optimizer: what `shard_optimizer_state` returned.

    Returns:
        On rank 0 what the state dict of an optimizer would be that was never divided; on the others nothing.
    """
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if optimizer.rank == 0 else {}
    # A private name of torch 2.13: it would hold the whole state until the next time.
    optimizer._all_state_dicts = []  # type: ignore[attr-defined]
    return state


def load_optimizer_state_(optimizer: ZeroRedundancyOptimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer that was never divided; each rank keeps its part.

    Args:
        optimizer: what `shard_optimizer_state` returned.
        state: what `Optimizer.state_dict` returns.

    Raises:
        ValueError: its groups are not those of the optimizer.
    """
    saved, groups = state["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in one] for one in (groups, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"expected a state of groups of {sizes[0]} parameters, got one of groups of {sizes[1]}")
    parameters = chain.from_iterable(group["params"] for group in groups)
    numbers = chain.from_iterable(group["params"] for group in saved)
    number_of = {id(parameter): number for parameter, number in zip(parameters, numbers, strict=True)}
    own = optimizer.optim.param_groups
    own_numbers = [[number_of[id(parameter)] for parameter in group["params"]] for group in own]
    optimizer.optim.load_state_dict(
        {
            "state": {n: state["state"][n] for n in chain.from_iterable(own_numbers) if n in state["state"]},
            "param_groups": [{**group, "params": of} for group, of in zip(saved, own_numbers, strict=True)],
        }
    )
    for group, settings in zip(groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def _hooks(optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name.startswith("_optimizer_step_") and name.endswith("_hooks")
    }


class _Like:
    """In the place of an optimizer class: builds one like another, for other parameters.

    A class would have to be called with arguments that only its author knows.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, param_groups: list[dict[str, Any]], **defaults: Any) -> Optimizer:
        like = self._optimizer
        built = object.__new__(type(like))
        hooks: dict[str, Any] = {
            name: OrderedDict() for name in _hooks(like)
        }  # those of the user go to the optimizer of all
        parameters = [parameter for group in param_groups for parameter in group["params"]]
        state = defaultdict(dict, {one: like.state[one] for one in parameters if one in like.state})
        built.__dict__.update(vars(like), **hooks, state=state, param_groups=param_groups)
        vars(built).pop("step", None)  # schedulers wrap the method of the instance
        return built
