"""Split the groups of an optimizer: parameters without weight decay, learning rates by depth.

**Weight decay** pulls weights towards zero, which is meant for the matrices: a normalisation's scale at zero is no
simpler a model, a bias cannot overfit, and of an embedding's rows most get no gradient in a step but all of the decay.
Which parameter is what is told by the type of its module first, then by its rank, then by its name.

**Layer-wise learning-rate decay** moves the layers near the input, whose features are general, less than those near the
output. Formula: with N blocks, block i from 0 has its rate times d^(N-i), embeddings d^(N+1), the head 1.

Reference:
    Loshchilov, Hutter (2019), "Decoupled Weight Decay Regularization", arXiv:1711.05101. That biases and normalisation
    are spared: Goyal et al. (2017), arXiv:1706.02677, section 5.3; He et al. (2019), "Bag of Tricks", arXiv:1812.01187,
    section 3.1. Layer-wise decay: Clark et al. (2020), "ELECTRA", arXiv:2003.10555; Bao et al. (2022), "BEiT",
    arXiv:2106.08254.

Cost:
    A few more parameter groups.

Sharding:
    By names and types, so the same on every rank.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks.functional.blocks import BlockSelector, find_blocks
from lightning_tricks.functional.exclusion import find_head

__all__ = [
    "CATEGORIES",
    "GroupSplit",
    "depth_scales",
    "parameter_categories",
    "rescale_rates_",
    "rescale_scheduler_",
    "split_further",
    "split_groups_",
]

CATEGORIES = ("bias", "norm", "embedding")
"""What a parameter can be besides a weight that decays."""

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_MATRICES = (nn.Linear, nn.modules.conv._ConvNd)
_NORM_TYPE = re.compile(r"norm(\d+d)?(_?fp32|gated)?$", re.IGNORECASE)
_EMBEDDING_TYPE = re.compile(r"embed|positional|position(al)?enc", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(^|_)bias(_|$)")
_NORM_NAME = re.compile(r"(^|_)(layer|batch|group|rms)?_?norm(_|$)|^(gamma|beta|ls)_?\d*$")
_EMBEDDING_NAME = re.compile(
    r"(^|_)(pos|position|positional|rel_pos|relative_position|absolute_pos)(_|$)|embed|_tokens?$|^tokens?$|prompt"
)
# In schedulers, lists with a number for each group; and in a group what OneCycleLR keeps there.
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
_RATES_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


def parameter_categories(module: nn.Module) -> dict[str, set[str]]:
    """Say of each parameter what it is besides a weight, by its module's type, then its rank, then its name.

    Args:
        module: the model.

    Returns:
        By the first name of each parameter, in order, those of `CATEGORIES` that it is; the empty set for a weight. A
        parameter that is shared is all that it is anywhere.

    Example:
        >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.RMSNorm(2))
        >>> {name: sorted(one) for name, one in parameter_categories(model).items()}
        {'0.weight': ['embedding'], '1.weight': [], '1.bias': ['bias'], '2.weight': ['norm']}
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, set[str]] = {name: set() for name in first.values()}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            found[first[id(parameter)]] |= set(_categories(owner, name, parameter))
    return found


def _categories(owner: nn.Module, name: str, parameter: Tensor) -> Iterator[str]:
    is_bias = bool(_BIAS_NAME.search(name))
    kind = type(owner).__name__
    if isinstance(owner, _NORMS) or (_NORM_TYPE.search(kind) and not _has_children_with_parameters(owner)):
        yield "norm"
    elif isinstance(owner, _EMBEDDINGS):
        yield "embedding"
    elif _EMBEDDING_TYPE.search(kind) and parameter.ndim > 1 and not isinstance(owner, _MATRICES):
        yield "embedding"  # a table of its own; what a patch embedding multiplies with is a matrix
    elif parameter.ndim <= 1 and not is_bias:
        yield "norm"  # a scale or a shift of its own, as LayerScale's or PReLU's
    elif _NORM_NAME.search(name):
        yield "norm"
    if _EMBEDDING_NAME.search(name) and not is_bias:
        yield "embedding"
    if is_bias:
        yield "bias"


def _has_children_with_parameters(module: nn.Module) -> bool:
    """A block may have "norm" in its name and matrices of its own: PreNormAttention."""
    return any(next(child.parameters(), None) is not None for child in module.children())


def depth_scales(
    module: nn.Module,
    decay: float,
    *,
    min_scale: float = 0.0,
    blocks: BlockSelector | Sequence[BlockSelector] = "auto",
) -> dict[str, float]:
    """Return what to multiply each parameter's learning rate with, by the depth of the repeated blocks.

    Args:
        module: the model. Depth is the order in which it registers its parts.
        decay: d in the formula, in (0, 1].
        min_scale: what no scale falls below, in [0, 1].
        blocks: which modules are the blocks, as in `find_blocks`. Stacks that follow one another count on.

    Returns:
        The scale by the first name of each parameter. What comes before the first block, and embeddings anywhere, are
        embeddings; what comes after the last one, and the layer that predicts, is the head; what lies between two
        blocks is as deep as the one before.

    Raises:
        ValueError: there are no such blocks.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Sequential(block(), block()), nn.Linear(2, 1))
        >>> {name: one for name, one in depth_scales(model, 0.5).items() if "weight" in name}
        {'0.weight': 0.125, '1.0.0.weight': 0.25, '1.1.0.weight': 0.5, '2.weight': 1.0}
    """
    stack = list(find_blocks(module, blocks))
    head = find_head(module)
    categories = parameter_categories(module)
    scales, behind = {}, 0  # how many blocks have begun
    inside = _block_of(stack, list(categories))
    last = max((place for place, block in enumerate(inside) if block is not None), default=-1)
    for place, (name, kinds) in enumerate(categories.items()):
        block = inside[place]
        if block is not None:
            behind = max(behind, block + 1)
            depth = block + 1
        elif "embedding" in kinds:
            depth = 0
        elif place > last or (head is not None and name.startswith(f"{head}.")):
            depth = len(stack) + 1
        else:
            depth = behind
        scales[name] = max(min_scale, decay ** (len(stack) + 1 - depth))
    return scales


def _block_of(stack: list[str], names: list[str]) -> list[int | None]:
    numbers = {block: number for number, block in enumerate(stack)}
    prefixes = [[name[: match.start()] for match in re.finditer(r"\.", name)] for name in names]
    return [next((numbers[one] for one in of if one in numbers), None) for of in prefixes]


@dataclass(frozen=True)
class _Part:
    """A part of a group: which one, the places of its parameters there, what they have in common, the rate's factor."""

    group: int
    places: list[int]
    key: Any
    factor: float


@dataclass(frozen=True)
class GroupSplit:
    """How the groups of an optimizer were split, so that schedulers and older states can be.

    Args:
        before: number of parameters of each group before.
        parts: of each group now, what became of which part of those before.
        change: changes the settings of a group, as it was given.
    """

    before: list[int]
    parts: list["_Part"]
    change: Callable[[dict[str, Any], Any], None]

    @property
    def after(self) -> list[int]:
        """Number of parameters of each group now."""
        return [len(part.places) for part in self.parts]

    def adapt_scheduler_(self, scheduler: Any) -> None:
        """Give a scheduler of the groups before, or its state dict, an entry for each group now.

        Args:
            scheduler: the scheduler or the dict; those inside of it are changed too.
        """
        values = scheduler if isinstance(scheduler, dict) else vars(scheduler)
        own = not isinstance(scheduler, dict) and not type(scheduler).__module__.startswith("torch.")
        for name, value in values.items():
            unknown = isinstance(value, (list, tuple)) and name not in (*_PER_GROUP, "_schedulers")
            if own and unknown and len(value) == len(self.before) != len(self.after):
                raise ValueError(
                    f"expected a scheduler of torch, or one that keeps nothing for each parameter group, got a "
                    f"{type(scheduler).__name__} whose {name!r} has {len(value)} entries, as there were groups before "
                    f"they were split into {len(self.after)}: it cannot be told what they are"
                )
        for name in _PER_GROUP:
            entries = values.get(name)
            if isinstance(entries, list) and len(entries) == len(self.before):
                new = [entries[part.group] for part in self.parts]
                if name in _RATES_PER_GROUP:
                    new = [rate * part.factor for rate, part in zip(new, self.parts, strict=True)]
                values[name] = new
        for inner in values.get("_schedulers", ()):
            self.adapt_scheduler_(inner)

    def adapt_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of an optimizer of the groups before as one of the groups now.

        Args:
            state: what `Optimizer.state_dict` returned then, its parameters by number or by name.
        """
        saved = state["param_groups"]
        groups = []
        for part in self.parts:
            new = _copied(saved[part.group], part.places)
            if part.places:
                self.change(new, part.key)
            groups.append(new)
        return {**state, "param_groups": groups}


def split_groups_(
    optimizer: Optimizer,
    key_of: Callable[[Tensor, dict[str, Any]], Any],
    change: Callable[[dict[str, Any], Any], None],
) -> GroupSplit:
    """Split each group of an optimizer by a key of its parameters, in the order of the keys.

    Args:
        optimizer: which has not stepped yet, or goes on with its state.
        key_of: takes a parameter and its group, and returns what can be sorted and written out.
        change: takes the settings of a new group and its key, and changes them.

    Returns:
        What was split how.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        >>> set_decay = lambda group, ndim: group.update(weight_decay=ndim)
        >>> split = split_groups_(optimizer, lambda parameter, group: parameter.ndim, set_decay)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups], split.before
        ([(1, 1), (1, 2)], [2])
    """
    before = [len(group["params"]) for group in optimizer.param_groups]
    parts: list[_Part] = []
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        places: dict[Any, list[int]] = {}
        for place, parameter in enumerate(group["params"]):
            places.setdefault(key_of(parameter, group), []).append(place)
        for key in sorted(places):
            new = _copied(group, places[key])
            if len(places) > 1 and "name" in new:  # LearningRateMonitor wants each to have its own
                new["name"] = f"{new['name']}/{key}"
            change(new, key)
            parts.append(_Part(index, places[key], key, new.get("lr_scale", 1.0) / group.get("lr_scale", 1.0)))
            groups.append(new)
        if not places:
            parts.append(_Part(index, [], None, 1.0))
            groups.append(group)
    optimizer.param_groups[:] = groups
    return GroupSplit(before, parts, change)


def split_further(
    splits: Sequence[GroupSplit],
    state: dict[str, Any],
    changes: Sequence[Callable[[dict[str, Any], Any], None]],
    marks: Sequence[str | None],
) -> GroupSplit | None:
    """Return the split that turns groups which some of several splits made, or none, into those that all of them make.

    Args:
        splits: of one optimizer, in the order in which they were made.
        state: the optimizer's state dict, of whichever groups.
        changes: what each split changed in the settings of a group, by its key there.
        marks: the setting that each split leaves in groups, which tells it from others of the same sizes, or None.

    Returns:
        The split from the state's groups to those of all splits; None if the state is of no subset of them.

    Example:
        >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        >>> older = optimizer.state_dict()
        >>> change = lambda group, ndim: group.update(lr=ndim)
        >>> split = split_groups_(optimizer, lambda parameter, group: parameter.ndim, change)
        >>> further = split_further([split], older, [change], [None])
        >>> [(group["params"], group["lr"]) for group in further.adapt_state(older)["param_groups"]]
        [([1], 1), ([0], 2)]
    """
    saved = state["param_groups"]
    sizes = [len(group["params"]) for group in saved]
    numbers = iter(range(sum(splits[0].before)))
    undivided = [[next(numbers) for _ in range(size)] for size in splits[0].before]
    keys, final = _keys_of(splits, undivided)
    for made in sorted(product((True, False), repeat=len(splits)), key=sum, reverse=True):
        groups = undivided
        for one, is_made in zip(keys, made, strict=True):
            groups = _divided(groups, one) if is_made else groups
        marked = [
            is_made == any(mark in group for group in saved) for mark, is_made in zip(marks, made, strict=True) if mark
        ]
        if [len(group) for group in groups] != sizes or not all(marked):
            continue
        missing = [place for place, is_made in enumerate(made) if not is_made]

        def change(group: dict[str, Any], key: Any, missing: list[int] = missing) -> None:
            for place in missing:
                changes[place](group, key[place])

        parts = []
        empty = iter([index for index, one in enumerate(groups) if not one])
        for group in final:
            if not group:
                parts.append(_Part(next(empty), [], None, 1.0))
                continue
            source = next(index for index, one in enumerate(groups) if group[0] in one)
            key = [one[group[0]] for one in keys]
            settings = _copied(saved[source], [])
            change(settings, key)
            factor = settings.get("lr_scale", 1.0) / saved[source].get("lr_scale", 1.0)
            parts.append(_Part(source, [groups[source].index(number) for number in group], key, factor))
        return GroupSplit(sizes, parts, change)
    return None


def _keys_of(splits: Sequence[GroupSplit], groups: list[list[int]]) -> tuple[list[dict[int, Any]], list[list[int]]]:
    """The key of each parameter in each split, and the groups after all of them."""
    keys = []
    for split in splits:
        divided = [[groups[part.group][place] for place in part.places] for part in split.parts]
        pairs = zip(split.parts, divided, strict=True)
        keys.append({number: part.key for part, numbers in pairs for number in numbers})
        groups = divided
    return keys, groups


def _divided(groups: list[list[int]], keys: dict[int, Any]) -> list[list[int]]:
    found = []
    for group in groups:
        of_key: dict[Any, list[int]] = {}
        for number in group:
            of_key.setdefault(keys[number], []).append(number)
        found += [of_key[key] for key in sorted(of_key)] or [[]]
    return found


def rescale_rates_(group: dict[str, Any], scale: float) -> None:
    """Multiply the learning rates of a parameter group, once: the scale is kept in it as ``lr_scale``.

    Args:
        group: the group, or its settings in a state dict.
        scale: the factor; replaces the one that the group has.

    Example:
        >>> group = {"lr": 1.0}
        >>> rescale_rates_(group, 0.5), rescale_rates_(group, 0.5), group
        (None, None, {'lr': 0.5, 'lr_scale': 0.5})
    """
    factor = scale / group.get("lr_scale", 1.0)
    for name in _RATES:
        if name in group:
            group[name] = group[name] * factor
    group["lr_scale"] = scale


def rescale_scheduler_(scheduler: Any, factors: Sequence[float]) -> None:
    """Multiply the learning rates that a scheduler keeps for each parameter group.

    Args:
        scheduler: of torch; those inside of it are changed too.
        factors: by group.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> rescale_scheduler_(scheduler, [0.5])
        >>> scheduler.base_lrs
        [0.5]
    """
    for name in _RATES_PER_GROUP:
        rates = vars(scheduler).get(name)
        if isinstance(rates, list) and len(rates) == len(factors):
            setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=True)])
    for inner in getattr(scheduler, "_schedulers", ()):
        rescale_scheduler_(inner, factors)


def _copied(group: dict[str, Any], places: list[int]) -> dict[str, Any]:
    new = {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
    for name in ("params", "param_names"):
        if name in group:
            new[name] = [group[name][place] for place in places]
    return new
