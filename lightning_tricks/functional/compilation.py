"""Compile the repeated blocks of a model, not the model: one compilation serves all blocks that are alike.

A compiler that is given the whole model compiles each of its N equal layers, and all again when anything around them
changes. Here each class of block is compiled once, with its parameters as arguments.

Differs:
    `nn.Module.compile` of each block does the same, but does not go together with blocks that are checkpointed in
    segments or within a budget, which have to see the compiled block run. Names, types, state-dict keys and hooks of
    the blocks stay, since only the instance's `forward` is replaced. With gradients a fresh Hugging Face cache is not
    filled.

Cost:
    The compilation, seconds to minutes with ``"inductor"``, when a block first runs, and again for what the compiler
    has to tell apart: training and evaluation, gradients or none, another dtype, other shapes (the second time with
    sizes as variables; where the block is recomputed, from the fifth on), a number in the block that somebody changes.

Sharding:
    Applied after checkpointing and before sharding: the collectives of a block stay outside of what is compiled.
"""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_tricks.functional.blocks import BlockSelector, find_blocks
from lightning_tricks.functional.checkpointing import CheckpointedBlock, checkpointed_block, checkpointed_forward
from lightning_tricks.functional.patching import Patch, patch_
from lightning_tricks.functional.replay import cached_positions, tensors_of

__all__ = ["CompilationHandle", "compile_blocks", "validate_backend"]

_SIZES_AS_CONSTANTS = 4


def validate_backend(backend: object, mode: object) -> None:
    """Raise unless `torch.compile` takes a backend and a mode.

    Args:
        backend: a name or a function.
        mode: a name or None.

    Raises:
        TypeError: one is of the wrong kind.
        ValueError: there is none of that name, or the mode is of another backend.

    Example:
        >>> validate_backend("inductor", "max-autotune")
    """
    if not isinstance(backend, str) and not callable(backend):
        raise TypeError(f"expected `backend` to be a name or a function, got {backend!r}")
    if mode is not None and not isinstance(mode, str):
        raise TypeError(f"expected `mode` to be a name or None, got {mode!r}")
    known = torch.compiler.list_backends(exclude_tags=()) if isinstance(backend, str) else [backend]
    if backend not in known:
        raise ValueError(f"expected `backend` to be one of {', '.join(map(repr, known))}, got {backend!r}")
    if mode is None:
        return
    if backend != "inductor":
        raise ValueError(f'expected mode={mode!r} to go with backend="inductor", got backend={backend!r}')
    modes = list(torch._inductor.list_mode_options())  # torch 2.13: public in all but its module's name
    if mode not in modes:
        raise ValueError(f"expected `mode` to be one of {', '.join(map(repr, modes))}, got {mode!r}")


@dataclass
class CompilationHandle:
    """What was compiled, and the way back.

    Attributes:
        compiled: names of the blocks that are now compiled.
        already: names of matching blocks that somebody else compiles, left alone.
    """

    compiled: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    _module: nn.Module | None = field(default=None, repr=False)
    _before: set[int] = field(default_factory=set, repr=False)
    _patches: list[Patch] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Give every block its own `forward` back, copies of blocks in the module too. A second call does nothing."""
        for patch in self._patches:
            patch.remove()
        for holder, wrapper in _compiled(self._module) if self._patches and self._module else ():
            if id(holder) in self._before:
                continue
            if isinstance(holder, nn.Module) and wrapper.forward is None:
                del holder.forward
            else:
                holder.forward = wrapper.forward
        self._patches.clear()


def compile_blocks(
    module: nn.Module,
    blocks: BlockSelector | Sequence[BlockSelector] = "auto",
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
) -> CompilationHandle:
    """Compile blocks of a model, in place: each class of block once, when it first runs.

    Args:
        module: the model to edit, its blocks checkpointed already if they are to be.
        blocks: which modules, as for `find_blocks`.
        backend: of `torch.compile`: a name, or a function of a graph and example inputs.
        mode: of ``"inductor"``.

    Returns:
        A handle that names the compiled blocks; its `remove()` undoes the edit.

    Raises:
        TypeError, ValueError: as `find_blocks` and `validate_backend`; a block holds modules that are checkpointed in
            segments or within a budget, which a compiled parent would not see.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        >>> handle = compile_blocks(model, backend="eager")
        >>> handle.compiled
        ['0', '1', '2']
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> handle.remove()
    """
    validate_backend(backend, mode)
    handle = CompilationHandle(_module=module, _before={id(holder) for holder, _ in _compiled(module)})
    compiler = BlockCompiler(backend, mode)
    recomputed = {
        inner for part in module.modules() if checkpointed_block(part) for inner in part.modules() if inner is not part
    }
    for name, block in find_blocks(module, blocks).items():
        checkpointed = checkpointed_block(block)
        if _is_compiled(name, block) or (checkpointed is not None and id(checkpointed) in handle._before):
            handle.already.append(name)
            continue
        _refuse_inner_checkpointing(name, block)
        # A recomputation runs the block, compiled, and sees what it saves. A selection has to see the operations
        # themselves: there the compiler is shown the recomputation, and sees to it.
        beneath = checkpointed if checkpointed is not None and checkpointed.matmul_share is None else None
        holder = beneath or block
        wrapper = CompiledBlock(
            vars(holder).get("forward"),
            compiler,
            checkpointed=None if beneath else checkpointed,
            beneath=beneath,
            is_recomputed=beneath is not None or block in recomputed,
        )
        handle._patches.append(patch_(holder, "forward", functools.partial(_compiled_forward, block, wrapper)))
        handle.compiled.append(name)
    return handle


class BlockCompiler:
    """Compiles each class of block once, for all blocks of it.

    Args:
        backend: of `torch.compile`.
        mode: likewise.
    """

    def __init__(self, backend: str | Callable[..., Any], mode: str | None) -> None:
        self._backend = backend
        self._mode = mode
        self._forget()

    def _forget(self) -> None:
        self._compiled: dict[tuple[type, tuple[int, ...] | None, bool | None], Callable[..., Any]] = {}
        self._sizes: dict[type, list[tuple[int, ...]]] = {}  # those that are compiled for themselves

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: not what is compiled."""
        return {"_backend": self._backend, "_mode": self._mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def of(self, kind: type) -> Callable[..., Any]:
        """Return what runs blocks of a class, as `_run` does, for any shapes.

        Args:
            kind: the class.
        """
        return self._function(kind, None, None)

    def recomputed(self, kind: type, values: Any) -> Callable[..., Any]:
        """Return what runs blocks of a class in the forward pass, and again in the backward pass.

        The second time it has to save what it saved the first time. Where two compilations would do, the compiler takes
        the one that ran last; so which one it is follows here from the shapes. The first few have one each, with their
        sizes as constants; all others one with sizes as variables, by which of them are equal, since the compiler
        has one variable for equal sizes.

        Args:
            kind: the class.
            values: the arguments of the block.
        """
        sizes = tuple(size for one in tensors_of(values) for size in (one.dim(), *one.shape))
        known = self._sizes.setdefault(kind, [])
        if sizes not in known and len(known) < _SIZES_AS_CONSTANTS:
            known.append(sizes)
        if sizes in known:
            return self._function(kind, sizes, False)
        return self._function(kind, tuple(sizes.index(size) for size in sizes), True)

    def _function(self, kind: type, sizes: tuple[int, ...] | None, dynamic: bool | None) -> Callable[..., Any]:
        key = (kind, sizes, dynamic)
        if key not in self._compiled:
            # The compiler keeps compilations by code object, and gives up after a few: each function has its own.
            own = types.FunctionType(_run.__code__.replace(), globals(), f"_run_{kind.__name__}")
            self._compiled[key] = torch.compile(own, dynamic=dynamic, backend=self._backend, mode=self._mode)
        return self._compiled[key]


@dataclass
class CompiledBlock:
    """How a block is compiled.

    Args:
        forward: the holder's own `forward` from before, None where the class has it.
        compiler: what compiles it.
        checkpointed: how the block is checkpointed within what is compiled, None if it is not.
        beneath: how it is checkpointed around that, None if it is not.
        is_recomputed: whether something around it runs it again in the backward pass.
    """

    forward: Any
    compiler: BlockCompiler
    checkpointed: CheckpointedBlock | None
    beneath: CheckpointedBlock | None
    is_recomputed: bool


def _compiled_forward(block: nn.Module, wrapper: CompiledBlock, /, *args: Any, **kwargs: Any) -> Any:
    is_measured = wrapper.beneath is not None and wrapper.beneath.is_measured
    if torch.compiler.is_compiling() or is_measured:  # by a parent; or what is measured is the block itself
        forward = wrapper.forward or functools.partial(type(block).forward, block)
        return forward(*args, **kwargs)
    if torch.is_grad_enabled():  # a cache serves generation; each layer that fills its part of it is compiled by itself
        args = tuple(_without_fresh_cache(block, value) for value in args)
        kwargs = {key: _without_fresh_cache(block, value) for key, value in kwargs.items()}
    if wrapper.is_recomputed and torch.is_grad_enabled():
        run = wrapper.compiler.recomputed(type(block), (args, kwargs))
    else:
        run = wrapper.compiler.of(type(block))
    return run(block, wrapper.checkpointed, None if wrapper.checkpointed else wrapper.forward, args, kwargs)


def _run(
    block: nn.Module, checkpointed: CheckpointedBlock | None, own_forward: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    if checkpointed is not None:
        return checkpointed_forward(block, checkpointed, *args, **kwargs)
    if own_forward is not None:
        return own_forward(*args, **kwargs)
    return type(block).forward(block, *args, **kwargs)


def _without_fresh_cache(block: nn.Module, value: Any) -> Any:
    return None if cached_positions(block, value) == 0 else value


def _compiled(module: nn.Module) -> Iterator[tuple[Any, CompiledBlock]]:
    """What holds a compiled `forward` in a module, and how."""
    for part in list(module.modules()):
        for holder in (part, checkpointed_block(part)):
            forward = None if holder is None else vars(holder).get("forward")
            if isinstance(forward, functools.partial) and forward.func is _compiled_forward:
                yield holder, forward.args[1]


def _is_compiled(name: str, block: nn.Module) -> bool:
    forward = vars(block).get("forward")
    by_us = isinstance(forward, functools.partial) and forward.func is _compiled_forward
    # torch 2.13: no public way to ask for `nn.Module.compile`, and `torch.compile(block)` wraps it under this name
    by_wrapper = "_orig_mod" in block._modules or "_orig_mod" in name.split(".")
    return by_us or by_wrapper or block._compiled_call_impl is not None


def _sees_saved_tensors(checkpointed: CheckpointedBlock) -> bool:
    return checkpointed.chain is not None or checkpointed.budget is not None


def _refuse_inner_checkpointing(name: str, block: nn.Module) -> None:
    for inner_name, inner in block.named_modules(prefix=name):
        checkpointed = None if inner is block else checkpointed_block(inner)
        if checkpointed is not None and _sees_saved_tensors(checkpointed):
            raise ValueError(
                f"expected `blocks` without checkpointed modules inside, got {name!r}, where {inner_name!r} is "
                "recomputed in segments or within a budget, which a compiled parent would not see. Compile and "
                "checkpoint the same blocks"
            )
