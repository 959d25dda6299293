"""Find the blocks of a model: the layers that repeat.

A deep network is a stack of equal blocks, and the techniques that work block by block (checkpointing, sharding,
compiling, learning rates by depth) need to know which modules those are. ``"auto"`` finds modules that repeat as
siblings: of one class, in one `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict`, with parameters, and made of further
modules (a lone `nn.Linear` saves nothing when recomputed; recurrent layers count as blocks although they are made of
none). Only where no container holds any are attributes of one parent compared (``self.block1``, ``self.block2``).

A Hugging Face model names its blocks in ``_no_split_modules``. Those names are honoured for classes that repeat as
siblings: the lists of BERT and ViT name their embeddings too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["BlockSelector", "find_blocks", "inner_first", "repeated_blocks", "validate_selector"]

BlockSelector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A class, a class name, a glob over module names, or a predicate of (name, module)."""

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(module: nn.Module, blocks: BlockSelector | Sequence[BlockSelector] = "auto") -> dict[str, nn.Module]:
    """Find blocks of a model by rule, class, name or predicate.

    Args:
        module: the model. It is never a block itself.
        blocks: ``"auto"`` for the repeated blocks; or a class, the name of a class or of one of its bases, a glob over
            the modules' names in `module` (``*`` matches dots too), a predicate of (name, module), or a list of these.

    Returns:
        Name to module, in the order of registration. Of nested matches the outermost is kept, and a module that is
        registered under two names appears once.

    Raises:
        TypeError: `blocks` is none of these.
        ValueError: nothing matches; for a list, one of its entries matches nothing.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(2, 2)
        >>> model = nn.Sequential(nn.Linear(2, 2), Block(), Block())
        >>> list(find_blocks(model)), list(find_blocks(model, "*.linear"))
        (['1', '2'], ['1.linear', '2.linear'])
    """
    validate_selector(blocks)
    selectors = list(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else [blocks]
    chosen: set[nn.Module] = set()
    for selector in selectors:
        matches = _repeats(module) if selector == "auto" else _matches(module, selector)
        if not matches:
            raise ValueError(_nothing_matches(module, selector))
        chosen.update(matches)
    return _outermost(module, chosen)


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Find the repeated blocks of a model, as `find_blocks` does for ``"auto"``, or none.

    Args:
        module: the model.

    Returns:
        Name to module, in the order of registration; empty where nothing repeats.

    Example:
        >>> repeated_blocks(nn.Linear(2, 2))
        {}
    """
    return _outermost(module, set(_repeats(module)))


def inner_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walk a module's submodules in the order of registration, each after those inside of it, the module itself last.

    Args:
        module: the model.

    Returns:
        Name and module of each, once; the order in which constructors finish.

    Example:
        >>> [name for name, _ in inner_first(nn.Sequential(nn.Sequential(nn.Tanh()), nn.Tanh()))]
        ['0.0', '0', '1', '']
    """
    seen: set[nn.Module] = set()

    def walk(one: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        seen.add(one)
        for child_name, child in one.named_children():
            if child not in seen:
                yield from walk(child, f"{name}.{child_name}" if name else child_name)
        yield name, one

    return walk(module, "")


def validate_selector(blocks: object) -> None:
    """Raise TypeError or ValueError unless `blocks` is something that `find_blocks` takes.

    Args:
        blocks: the argument to look at.

    Example:
        >>> validate_selector(["auto", nn.Linear, "encoder.*"])
    """
    entries = blocks if isinstance(blocks, (list, tuple)) else [blocks]
    if not entries:
        raise ValueError("expected `blocks` to name at least one kind of module, got an empty list")
    for entry in entries:
        is_module_class = isinstance(entry, type) and issubclass(entry, nn.Module)
        if isinstance(entry, str) or is_module_class or (callable(entry) and not isinstance(entry, (type, nn.Module))):
            continue
        raise TypeError(
            'expected `blocks` to be "auto", a module class, a class name, a glob over module names, '
            f"a predicate of (name, module), or a list of these; got {entry!r}"
        )


def _matches(module: nn.Module, selector: BlockSelector) -> list[nn.Module]:
    def matches(name: str, candidate: nn.Module) -> bool:
        if isinstance(selector, str):
            return fnmatchcase(name, selector) or any(base.__name__ == selector for base in type(candidate).__mro__)
        if isinstance(selector, type):
            return isinstance(candidate, selector)
        return bool(selector(name, candidate))

    return [candidate for name, candidate in module.named_modules() if name and matches(name, candidate)]


def _outermost(module: nn.Module, chosen: set[nn.Module]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    inside = ""  # named_modules walks parents first, so one prefix is enough
    for name, candidate in module.named_modules():
        if candidate in chosen and not (inside and name.startswith(inside)):
            found[name] = candidate
            inside = name + "."
    return found


def _repeats(module: nn.Module) -> list[nn.Module]:
    in_containers = list(_walk(module, _groups_in_containers))
    return in_containers or list(_walk(module, _groups_of_attributes))


def _walk(module: nn.Module, groups_of: Callable[[nn.Module], list[nn.Module]]) -> Iterator[nn.Module]:
    """Repeated children, and below all other children the same again."""
    named = _blocks_named_by_model(module)
    if named:
        yield from named
        return
    repeated = set(groups_of(module))
    for child in module.children():
        if child in repeated:
            yield child
        else:
            yield from _walk(child, groups_of)


def _blocks_named_by_model(module: nn.Module) -> list[nn.Module]:
    names = set(getattr(module, "_no_split_modules", None) or ())
    if not names:
        return []
    found = []
    for parent in module.modules():
        siblings = Counter(type(child) for child in parent.children())
        found += [child for child in parent.children() if type(child).__name__ in names and siblings[type(child)] > 1]
    return found


def _groups_in_containers(parent: nn.Module) -> list[nn.Module]:
    """Children of a container that repeat; unnamed sub-containers must be built alike to count as one kind."""
    if not isinstance(parent, _CONTAINERS):
        return []
    return _repeating(child for child in parent.children() if not isinstance(child, (nn.ModuleList, nn.ModuleDict)))


def _groups_of_attributes(parent: nn.Module) -> list[nn.Module]:
    return _repeating(child for child in parent.children() if not isinstance(child, _CONTAINERS))


def _repeating(children: Iterator[nn.Module]) -> list[nn.Module]:
    groups: dict[object, list[nn.Module]] = defaultdict(list)
    for child in children:
        composed = next(child.children(), None) is not None or isinstance(child, nn.RNNBase)
        if composed and next(child.parameters(), None) is not None:
            groups[_kind(child)].append(child)
    return [child for group in groups.values() if len(group) > 1 for child in group]


def _kind(module: nn.Module) -> object:
    if isinstance(module, nn.Sequential):
        return tuple(type(child) for child in module.modules())
    return type(module)


def _nothing_matches(module: nn.Module, selector: object) -> str:
    types = Counter(type(child).__name__ for child in module.modules() if child is not module)
    there_are = ", ".join(f"{name} ({count})" for name, count in types.items()) or "no submodules"
    looked_for = "repeated blocks" if selector == "auto" else repr(getattr(selector, "__name__", selector))
    return f"found no {looked_for} in {type(module).__name__}; the module types there are: {there_are}"
