"""Replace an attribute of one object, and put it back.

A temporary edit of an object is a value set in its own ``__dict__``: its class and every other object of that class
stay as they are. The handle knows whether the object had such a value before, so that undoing an edit leaves no
trace, also when somebody else had patched the object first.
"""

from typing import Any, Protocol

__all__ = ["ClassSwap", "Patch", "Removable", "patch_", "swap_class_"]


class Removable(Protocol):
    """Anything that can be undone by `remove`."""

    def remove(self) -> None:
        """Undo."""


class Patch:
    """The handle of one replaced instance attribute.

    Args:
        target: the object that was edited.
        name: the attribute.
    """

    def __init__(self, target: object, name: str) -> None:
        self.target = target
        self.name = name
        self._had = name in vars(target)
        self._before = vars(target).get(name)
        self._removed = False

    def remove(self) -> None:
        """Put the attribute back as it was. A second call does nothing."""
        if self._removed:
            return
        self._removed = True
        if self._had:
            setattr(self.target, self.name, self._before)
        elif self.name in vars(self.target):
            delattr(self.target, self.name)


def patch_(target: object, name: str, value: Any) -> Patch:
    """Set the instance attribute `name` of `target` and return the handle that undoes it.

    Args:
        target: any object with a ``__dict__``.
        name: the attribute to shadow.
        value: what to set. For a method use `functools.partial` of a module-level function: a closure breaks
            pickling, and survives a deep copy bound to the old object.

    Returns:
        A handle with `remove()`.

    Example:
        >>> class Greeter:
        ...     def greet(self):
        ...         return "hello"
        >>> greeter = Greeter()
        >>> patch = patch_(greeter, "greet", lambda: "patched")
        >>> greeter.greet()
        'patched'
        >>> patch.remove()
        >>> greeter.greet(), vars(greeter)
        ('hello', {})
    """
    patch = Patch(target, name)
    setattr(target, name, value)
    return patch


class ClassSwap:
    """The handle of an object whose class was replaced by a subclass of the same name.

    Args:
        target: the object that was edited.
        kind: its own class.
    """

    def __init__(self, target: object, kind: type) -> None:
        self.target = target
        self.kind = kind

    def remove(self) -> None:
        """Give the object its class back. A second call does nothing."""
        self.target.__class__ = self.kind


def swap_class_(target: object, attributes: dict[str, Any]) -> ClassSwap:
    """Override attributes of one object that must stand in its class, such as properties.

    Args:
        target: any object with a ``__dict__``. It pickles and copies as one of its own class.
        attributes: of the class.

    Returns:
        A handle with `remove()`.

    Example:
        >>> class Greeter:
        ...     name = property(lambda self: "nobody")
        >>> greeter = Greeter()
        >>> swap = swap_class_(greeter, {"name": property(lambda self: "somebody")})
        >>> greeter.name, isinstance(greeter, Greeter)
        ('somebody', True)
        >>> swap.remove()
        >>> greeter.name
        'nobody'
    """
    kind = type(target)
    as_own = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": lambda self, protocol: (_bare, (kind,), vars(self)),
    }
    target.__class__ = type(kind.__name__, (kind,), {**as_own, **attributes})
    return ClassSwap(target, kind)


def _bare(kind: type) -> object:
    return object.__new__(kind)
