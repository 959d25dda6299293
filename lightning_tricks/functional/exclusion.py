"""Leave parts of a model out of a technique: by class, by glob, or the head, which many techniques spare.

The head is the layer that turns features into predictions. Its gradients and its range differ from those of the layers
below it, so adaptive clipping and fp8 leave it alone by default.
"""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["Exclusion", "excluded_parameters", "find_head", "validate_exclusion"]

Exclusion = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""``"head"``, a glob over names of modules and parameters, a module class or its name, or a sequence of these."""

_HEADS = frozenset({"head", "fc", "classifier"})


def find_head(module: nn.Module) -> str | None:
    """Find the layer that a model predicts with: the one `nn.Linear` named head, fc or classifier, else the last one.

    Args:
        module: the model.

    Returns:
        Its name in `module`, None where there is no `nn.Linear`.

    Example:
        >>> find_head(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
        '2'
        >>> find_head(nn.ModuleDict({"fc": nn.Linear(4, 2), "auxiliary": nn.Linear(4, 2)}))
        'fc'
    """
    linear: list[str] = [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
    named = [name for name in linear if _HEADS.intersection(name.split("."))]
    if len(named) == 1:
        return named[0]
    return linear[-1] if linear else None


def excluded_parameters(module: nn.Module, exclude: Exclusion) -> set[str]:
    """Name the parameters that an exclusion leaves out.

    Args:
        module: the model.
        exclude: see `Exclusion`; () for nothing. A glob is held against the names of modules, whose parameters it then
            means, and of parameters; ``*`` matches dots too.

    Returns:
        Names as in ``module.named_parameters(remove_duplicate=False)``: all names of a parameter that is shared.

    Raises:
        ValueError: a glob or a class matches nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> sorted(excluded_parameters(model, "head")), sorted(excluded_parameters(model, "*.bias"))
        (['1.bias', '1.weight'], ['0.bias', '1.bias'])
    """
    validate_exclusion(exclude)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    left_out: set[str] = set()
    for entry in _entries(exclude):
        if entry == "head":
            head = find_head(module)
            modules = set() if head is None else {head}
        else:
            modules = {name for name, one in module.named_modules() if name and _matches(entry, name, one)}
        found = {
            name
            for name in names
            if any(name.startswith(one + ".") for one in modules)
            or (isinstance(entry, str) and fnmatchcase(name, entry))
        }
        if not found and not modules and entry != "head":
            raise ValueError(_nothing_matches(module, entry))
        left_out |= found
    named = dict(module.named_parameters(remove_duplicate=False))
    shared = {id(named[name]) for name in left_out}
    return {name for name in names if id(named[name]) in shared}


def validate_exclusion(exclude: object) -> None:
    """Raise TypeError unless `exclude` is something that `excluded_parameters` takes.

    Args:
        exclude: the argument to look at.

    Example:
        >>> validate_exclusion(["head", nn.LayerNorm, "*.bias"])
        >>> validate_exclusion(3)
        Traceback (most recent call last):
        TypeError: expected `exclude` to be "head", a glob, a module class, or a list of these; got 3
    """
    for entry in _entries(exclude):
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(
                f'expected `exclude` to be "head", a glob, a module class, or a list of these; got {entry!r}'
            )


def _entries(exclude: object) -> list[object]:
    return list(exclude) if isinstance(exclude, (list, tuple)) else [exclude]


def _matches(entry: object, name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        return fnmatchcase(name, entry) or any(base.__name__ == entry for base in type(module).__mro__)
    return isinstance(entry, type) and isinstance(module, entry)


def _nothing_matches(module: nn.Module, entry: object) -> str:
    types = Counter(type(child).__name__ for child in module.modules() if child is not module)
    there_are = ", ".join(f"{name} ({count})" for name, count in types.items()) or "no submodules"
    return (
        f"expected `exclude` to name modules or parameters of {type(module).__name__}, but nothing matches "
        f"{getattr(entry, '__name__', entry)!r}; the module types there are: {there_are}"
    )
