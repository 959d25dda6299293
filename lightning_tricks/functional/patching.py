"""Replace an attribute of one object, and put it back.

A temporary edit of an object is a value set in its own ``__dict__``: its class and every other object of that class
stay as they are. The handle knows whether the object had such a value before, so that undoing an edit leaves no
trace, also when somebody else had patched the object first.
"""

from typing import Any, Protocol

__all__ = ["Patch", "Removable", "patch_"]


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
