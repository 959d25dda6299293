"""Regional compilation as a callback."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_tricks._lightning import is_compiled
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.functional.blocks import BlockSelector, validate_selector
from lightning_tricks.functional.compilation import CompilationHandle, compile_blocks, validate_backend

__all__ = ["ModelCompilation"]


class ModelCompilation(Trick):
    """Compile each repeated block of the model with `torch.compile`, blocks that are alike once.

    The first step then waits for one block to be compiled instead of the whole model, and what is around the blocks
    stays eager. It goes together with the other tricks in the one order that is right: blocks are checkpointed, then
    compiled, then sharded by the strategy, whatever the order in the list of callbacks. What is recomputed is the
    compiled block; a budget measures the blocks as they are, and they are compiled after its choice. Evaluation runs
    compiled too. With gradients a fresh Hugging Face cache is not filled. After fit the module is as before.

    Args:
        blocks: which modules to compile, as for `ActivationCheckpointing`.
        backend: of `torch.compile`: a name of `torch.compiler.list_backends()`, or a function.
        mode: of ``"inductor"``: None, ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"``.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or there is none of that name; at the start of fit,
            nothing matches (with the module types there are), or a block to compile is around others that are
            checkpointed in segments or within a budget.
        MisconfigurationException: at the start of fit, the module is compiled as a whole.

    Cost:
        The compilation, in the first step and in the first evaluation; again for another shape, then with sizes as
        variables (in checkpointed blocks from the fifth on). A number in the block that changes (`DropoutScheduler`)
        is compiled anew each time; after eight times the compiler lets the block run as it is. With ``"selective"``
        checkpointing so does a block whose forward changes something outside of it. Numbers equal those of the eager
        block as far as the backend keeps them.

    Reference:
        Ansel et al. (2024), "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and
        Graph Compilation", ASPLOS 2024.

    Example:
        >>> from lightning_tricks import ModelCompilation
        >>> compiled = ModelCompilation(mode="max-autotune-no-cudagraphs")
    """

    touches = Touches.MODULE
    rank = 2  # after what changes the blocks
    job = "compile the model"
    buys = "fused kernels, after compiling one block instead of the model"
    costs = "seconds to minutes in the first step"

    def __init__(
        self,
        blocks: str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[BlockSelector] = "auto",
        *,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
    ) -> None:
        validate_selector(blocks)
        validate_backend(backend, mode)
        self.blocks = blocks
        self.backend = backend
        self.mode = mode
        self._handle = CompilationHandle()

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        return ["torch.compile(module)"] if is_compiled(module) else []

    @override
    def edit(self, module: pl.LightningModule) -> CompilationHandle:
        self._handle = compile_blocks(module, self.blocks, backend=self.backend, mode=self.mode)
        if not self._handle.compiled:
            rank_zero_warn(
                f"ModelCompilation changed nothing: all {len(self._handle.already)} matching blocks are compiled "
                "already. Drop the callback, or the module's own compilation."
            )
        return self._handle

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        names = self._handle.compiled
        shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
        how = self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "its own backend")
        left = f"; left {len(self._handle.already)} alone that were compiled already" if self._handle.already else ""
        return Summary(f"{len(names)} blocks by {how}: {shown}{left}")
