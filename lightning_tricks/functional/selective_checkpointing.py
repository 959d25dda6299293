"""Selective activation checkpointing: keep the results of expensive operations, recompute the cheap ones.

Attention and matrix multiplications are most of a block's FLOPs and little of its activation bytes; normalisations,
activation functions and dropout are the other way round. Keeping the former, a recomputation costs next to nothing.

Reference:
    Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198,
    section 5, which recomputes attention; here it is kept, since a fused kernel saves no scores.

Differs:
    Torch's selective checkpointing (`create_selective_checkpoint_contexts`) does the work; the choice is this file's.

Cost:
    The bytes of what is kept. A Python call for each operation of a checkpointed block.

Sharding:
    Each rank keeps its own.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_tricks.functional.activation_memory import note_kept
from lightning_tricks.functional.replay import tensors_of
from lightning_tricks.functional.saved_tensors import StorageKey, storages_of

__all__ = ["ATTENTION_OPERATIONS", "MATMUL_OPERATIONS", "SelectivePolicy", "selective_contexts"]

_aten = torch.ops.aten

ATTENTION_OPERATIONS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _aten._flash_attention_forward.default,
        _aten._efficient_attention_forward.default,
        torch.ops.higher_order.flex_attention,
    }
)
"""Fused attention: always kept."""

MATMUL_OPERATIONS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_mm.default,
        _aten.convolution.default,
    }
)
"""Matrix multiplications, convolutions among them: a share of those that a block runs is kept."""


class SelectivePolicy:
    """Decides for each operation of one forward pass of a block whether its result is kept.

    A result that the block then writes into (``nn.ReLU(inplace=True)`` behind a convolution) cannot be kept. Which ones
    those are is seen in a first pass, that keeps nothing.

    Args:
        matmul_share: the share of `MATMUL_OPERATIONS` to keep, from 0 to 1, spread evenly: of 0.5 the first of
            each two, which of a transformer's feed-forward network is the one that a recomputation would need.
        overwritten: the operations whose result is written into, counted from 0 among those that may be kept; what the
            pass sees of them is added.
        keeps_nothing: for a first pass.

    Example:
        >>> policy = SelectivePolicy(0.5, set())
        >>> [policy.keeps(torch.ops.aten.mm.default) for _ in range(4)], policy.keeps(torch.ops.aten.gelu.default)
        ([True, False, True, False], False)
    """

    def __init__(self, matmul_share: float, overwritten: set[int], *, keeps_nothing: bool = False) -> None:
        self.matmul_share = matmul_share
        self.overwritten = overwritten
        self.keeps_nothing = keeps_nothing
        self._operations = 0
        self._matmuls = 0
        self._results: dict[StorageKey, int] = {}

    def keeps(self, operation: Any) -> bool:
        """Decide for the next operation.

        Args:
            operation: an overload, such as ``torch.ops.aten.mm.default``.
        """
        is_matmul = operation in MATMUL_OPERATIONS
        if not is_matmul and operation not in ATTENTION_OPERATIONS:
            return False
        self._operations += 1
        if self.keeps_nothing or self._operations - 1 in self.overwritten:
            return False
        if not is_matmul:
            return True
        self._matmuls += 1
        so_far, before = (math.ceil(n * self.matmul_share - 1e-9) for n in (self._matmuls, self._matmuls - 1))
        return so_far > before

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decide for torch."""
        if torch.compiler.is_compiling():  # where nothing is written into: the compiler has seen to it
            return CheckpointPolicy.MUST_SAVE if self.keeps(operation) else CheckpointPolicy.PREFER_RECOMPUTE
        for tensor in _written_into(operation, args, kwargs):
            self.overwritten.update(self._results[key] for key in storages_of(tensor) if key in self._results)
        before = self._operations
        is_kept = self.keeps(operation)
        if self._operations > before:
            outputs = tensors_of(context.op_output)
            self._results.update({key: before for one in outputs for key in storages_of(one)})
            if is_kept:
                note_kept(outputs)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _written_into(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    schema = getattr(operation, "_schema", None)  # a higher-order operation has none
    if schema is None or not schema.is_mutable:
        return []
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    names = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return tensors_of([values.get(name) for name in names])


def selective_contexts(
    matmul_share: float, overwritten: set[int], keeps_nothing: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what to run a forward pass and its recomputation in, for ``checkpoint(context_fn=...)``.

    Args:
        matmul_share: as for `SelectivePolicy`, as are the others.
        overwritten: operations whose result is written into.
        keeps_nothing: for a first pass.

    Example:
        >>> import functools
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> contexts = functools.partial(selective_contexts, 1.0, set(), False)
        >>> checkpoint(lambda x: (x @ x).tanh(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    """
    policy = SelectivePolicy(matmul_share, overwritten, keeps_nothing=keeps_nothing)
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
