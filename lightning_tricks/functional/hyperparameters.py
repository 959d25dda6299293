"""Numbers of a model or an optimizer that are set while training: found by a target, read, written, put back.

A target is a dotted path. ``"optimizer.weight_decay"`` is that number of every parameter group, and
``"optimizer.betas[0]"`` an element of one. Anything else is a glob over names of modules and ends with an attribute:
``"model.*.dropout.p"``.

Reference:
    Dropout for a part of the run: Liu, Xu, Jin, Shen, Darrell (2023), "Dropout Reduces Underfitting", arXiv:2303.01500,
    section 4.

Differs:
    Nothing in what early and late dropout are; the linear decrease that the paper tries as well is a schedule of the
    rate like any other.

Cost:
    A Python assignment a place and change.

Sharding:
    Every rank sets the same numbers.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Place", "Target", "dropout_factor", "dropout_places", "group_places", "module_places", "parse_target"]

_TARGET = re.compile(r"(?:(?P<path>.+)\.)?(?P<name>[A-Za-z_]\w*)(?:\[(?P<index>-?\d+)\])?")
_OPTIMIZER = "optimizer"
_DROPS = re.compile(r"drop")


@dataclass(frozen=True)
class Target:
    """What to set.

    Args:
        path: a glob over names of modules, "" for the model itself; None for parameter groups.
        name: of the attribute, or of the setting of the groups.
        index: of an element of it, None for the whole.
    """

    path: str | None
    name: str
    index: int | None


def parse_target(target: str) -> Target:
    """Read a target.

    Args:
        target: as described above.

    Raises:
        TypeError: it is no string.
        ValueError: it does not end with a name, or with one and an index in brackets; or it names parameters.

    Example:
        >>> parse_target("optimizer.betas[0]")
        Target(path=None, name='betas', index=0)
        >>> parse_target("model.*.dropout.p")
        Target(path='model.*.dropout', name='p', index=None)
    """
    if not isinstance(target, str):
        raise TypeError(f'expected `target` to be a string such as "optimizer.weight_decay", got {target!r}')
    match = _TARGET.fullmatch(target)
    if match is None or target == "optimizer.params":
        raise ValueError(
            'expected `target` to be "optimizer.NAME", or a glob over module names and an attribute as '
            f'"model.*.dropout.p", either with an index as "betas[0]" or without, got {target!r}'
        )
    path, index = match["path"], match["index"]
    return Target(None if path == _OPTIMIZER else path or "", match["name"], None if index is None else int(index))


class Place:
    """One number that can be set.

    Args:
        owner: a module, or the dict of a parameter group.
        name: of its attribute or entry.
        index: of an element of that; None for the whole.
        label: what to call it.

    Attributes:
        own: the value that it had at first.

    Example:
        >>> dropout = nn.Dropout(0.5)
        >>> place = Place(dropout, "p")
        >>> place.set(0.1), dropout.p, place.restore(), dropout.p
        (None, 0.1, None, 0.5)
    """

    def __init__(self, owner: Any, name: str, index: int | None = None, label: str = "") -> None:
        self.owner, self.name, self.index, self.label = owner, name, index, label
        if index is not None and index < 0:
            self.index = index + len(self._holder())
        self.own = self.get()
        self._before = self._holder()
        if isinstance(self._before, Tensor):
            self._before = self._before.clone()

    def get(self) -> float:
        """Return the number. Synchronises if it is a tensor on a device."""
        value = self._holder()
        return float(value if self.index is None else value[self.index])

    def set(self, value: float) -> None:
        """Set the number.

        Args:
            value: the new one. A tensor is written to in place.
        """
        holder = self._holder()
        if self.index is not None:
            elements = list(holder)
            elements[self.index] = value
            self._put(type(holder)(elements))
        elif isinstance(holder, Tensor):
            holder.fill_(value)
        else:
            self._put(value)

    def put_own(self, settings: dict[str, Any]) -> None:
        """Put the number's own value into a copy of the dict that it lies in, which may share tensors with it.

        Args:
            settings: the copy.
        """
        value = settings[self.name]
        if self.index is not None:
            elements = list(value)
            elements[self.index] = self.own
            settings[self.name] = type(value)(elements)
        else:
            settings[self.name] = torch.full_like(value, self.own) if isinstance(value, Tensor) else self.own

    @property
    def is_tensor(self) -> bool:
        """Whether the number is a tensor by itself, such as a buffer."""
        return self.index is None and isinstance(self._holder(), Tensor)

    def own_tensor(self) -> Tensor:
        """Return the own value as a tensor like the one that holds the number."""
        return torch.full_like(self._holder(), self.own)

    def restore(self) -> None:
        """Put back what was there at first."""
        if self.index is not None or isinstance(self._before, Tensor):
            self.set(self.own)
        else:
            self._put(self._before)

    @property
    def key(self) -> tuple[int, str, int | None]:
        """What tells it from other places."""
        return id(self.owner), self.name, self.index

    def _holder(self) -> Any:
        return self.owner[self.name] if isinstance(self.owner, dict) else getattr(self.owner, self.name)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


def group_places(target: Target, optimizer: Optimizer, number: int) -> list[Place]:
    """Find the places of a target in an optimizer.

    Args:
        target: of parameter groups.
        optimizer: the optimizer.
        number: which one it is, for the labels.

    Returns:
        One for each group.

    Raises:
        ValueError: a group has no such number.

    Example:
        >>> optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
        >>> [place.own for place in group_places(parse_target("optimizer.betas[1]"), optimizer, 0)]
        [0.999]
    """
    places = []
    for index, group in enumerate(optimizer.param_groups):
        if target.name not in group or not _is_number(group[target.name], target.index):
            numbers = ", ".join(sorted(name for name in group if name != "params" and _has_numbers(group[name])))
            raise ValueError(
                f"expected a number {_shown(target)} in the groups of optimizer {number}, a "
                f"{type(optimizer).__name__}, which has {numbers}"
            )
        label = f"{_shown(target)} of optimizer {number}, group {index}"
        places.append(Place(group, target.name, target.index, label))
    return places


def module_places(target: Target, module: nn.Module) -> list[Place]:
    """Find the places of a target in a model.

    Args:
        target: of a module.
        module: the model.

    Returns:
        One for each module whose name matches and that has such a number; each module once.

    Raises:
        ValueError: there is none that can be set: a property or a parameter cannot.

    Example:
        >>> model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.2)))
        >>> [(place.label, place.own) for place in module_places(parse_target("*.p"), model)]
        [('0.p', 0.1), ('1.0.p', 0.2)]
    """
    assert target.path is not None
    places, matched = [], []
    for name, one in module.named_modules():
        if not fnmatchcase(name, target.path):
            continue
        matched.append(name)
        value = getattr(one, target.name, None)
        fixed = isinstance(getattr(type(one), target.name, None), property) or isinstance(value, nn.Parameter)
        if _is_number(value, target.index) and not fixed:
            label = f"{name}.{_shown(target)}" if name else _shown(target)
            places.append(Place(one, target.name, target.index, label))
    if not places:
        found = f"{len(matched)} modules match, none with a number {_shown(target)}" if matched else "no module matches"
        names = ", ".join(name for name, _ in list(module.named_modules())[1:6])
        raise ValueError(
            f"expected `target` {target.path}.{_shown(target)} to name numbers of {type(module).__name__}, but "
            f"{found}; its modules are {names}, ..."
        )
    return places


def dropout_places(module: nn.Module) -> list[Place]:
    """Find every rate of dropout in a model.

    Args:
        module: the model.

    Returns:
        ``p`` of the modules whose class is of dropout or stochastic depth, and the numbers from 0 to 1 of any module
        whose names tell of dropping: `nn.MultiheadAttention`'s ``dropout``, ``attention_dropout``, ``drop_prob``.

    Example:
        >>> model = nn.ModuleList([nn.Dropout2d(0.1), nn.MultiheadAttention(4, 2, dropout=0.2), nn.Linear(1, 1)])
        >>> [(place.label, place.own) for place in dropout_places(model)]
        [('0.p', 0.1), ('1.dropout', 0.2)]
    """
    places = []
    for prefix, one in module.named_modules():
        drops = isinstance(one, nn.modules.dropout._DropoutNd) or type(one).__name__ == "StochasticDepth"
        for name, value in list(vars(one).items()):
            is_rate = isinstance(value, float) or (name == "p" and isinstance(value, int))
            if ((name == "p" and drops) or _DROPS.search(name)) and is_rate and 0 <= value <= 1:
                places.append(Place(one, name, label=f"{prefix}.{name}" if prefix else name))
    return places


def dropout_factor(step: int, *, mode: str, steps: int) -> float:
    """Return 1 where dropout is on, and 0 where it is off.

    Args:
        step: applied steps so far, 0 or more.
        mode: "early" for the first steps only, "late" for all after them, "constant" for the whole run.
        steps: how many are the first ones.

    Example:
        >>> [[dropout_factor(k, mode=mode, steps=2) for k in range(4)] for mode in ("early", "late")]
        [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """
    return 1.0 if mode == "constant" or (step < steps) == (mode == "early") else 0.0


def _is_number(value: Any, index: int | None) -> bool:
    if index is not None:
        if not isinstance(value, (list, tuple)) or not -len(value) <= index < len(value):
            return False
        value = value[index]
    if isinstance(value, Tensor):
        return index is None and value.ndim == 0 and value.is_floating_point()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_numbers(value: Any) -> bool:
    return _is_number(value, None) or (isinstance(value, (list, tuple)) and any(_is_number(one, None) for one in value))


def _shown(target: Target) -> str:
    return target.name if target.index is None else f"{target.name}[{target.index}]"
