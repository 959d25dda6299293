"""How gradients fare on their way back through a network, block by block.

In a deep network the gradient of an early block is a product of many factors. Where most are below one it vanishes,
where most are above one it explodes; a layer whose units all stand in the flat part of their activation is dead. The
norms of the blocks side by side show which, and where it begins. The ratio of a block's update to its weights shows
whether it learns: about 1e-3 is healthy for most networks.

Formula:
    norm = |g|, ratio = |w_after - w_before| / |w_before| for each block

Reference:
    Pascanu, Mikolov, Bengio (2013), arXiv:1211.5063, section 2; Glorot, Bengio (2010), "Understanding the difficulty of
    training deep feedforward neural networks", section 4.

Cost:
    On the steps that are looked at: one copy of the weights, three reads of the gradients and three of the weights.

Sharding:
    Each rank counts its own shards; one sum over ranks for each mesh, of a few numbers a block.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_tricks.functional.blocks import BlockSelector, find_blocks, repeated_blocks
from lightning_tricks.functional.shards import by_placement, local_part, reduce_over_shards

__all__ = ["ADVICE", "BlockHealth", "Symptom", "block_of_parameters", "diagnose", "gradient_sums", "update_sums_"]

Symptom = Literal["non-finite", "dead", "exploding", "vanishing"]

ADVICE: dict[Symptom, str] = {
    "vanishing": "use activations that do not saturate (ReLU, GELU), residual connections and normalisation "
    "(LayerNorm, BatchNorm), and an initialisation that keeps the variance (He for ReLU, Glorot for tanh)",
    "exploding": "clip gradients (GradientNormClipping), lower the learning rate or lengthen its warmup, normalise "
    "(LayerNorm, RMSNorm), and look at the scale of the initialisation",
    "dead": "lower the learning rate, use an activation with a slope everywhere (LeakyReLU, GELU), normalise before "
    "it, and look for large negative biases and for outputs that the loss does not use",
    "non-finite": "leave such steps out (NonFiniteGuard), look for a division by zero, log or sqrt in this block, and "
    "under fp16 at LossScaleMonitor",
}


@dataclass(frozen=True)
class BlockHealth:
    """What was measured of one block in one step.

    Args:
        name: the block's path in the module.
        gradient_norm: norm of its gradient.
        update_ratio: norm of the step's change of its weights over the weights' norm; nan where the weights are zero.
        zero_share: share of its gradient's elements that are exactly zero.
        nonfinite_share: share of them that are inf or nan.
    """

    name: str
    gradient_norm: float
    update_ratio: float
    zero_share: float
    nonfinite_share: float


def block_of_parameters(module: nn.Module, blocks: BlockSelector | Sequence[BlockSelector] = "auto") -> dict[str, str]:
    """Assign each parameter to a block.

    Args:
        module: the model.
        blocks: as for `find_blocks`. With ``"auto"`` the repeated blocks; parameters outside of any block count as of
            the module that holds them.

    Returns:
        Name of the parameter to name of the block, in the order of registration.

    Raises:
        ValueError: `blocks` matches nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> block_of_parameters(model)
        {'0.weight': '0', '0.bias': '0', '1.weight': '1', '1.bias': '1'}
    """
    found = repeated_blocks(module) if blocks == "auto" else find_blocks(module, blocks)
    assigned = {}
    for name, _ in module.named_parameters():
        inside = next((block for block in found if name.startswith(block + ".")), None)
        owner = name.rpartition(".")[0]
        assigned[name] = inside or owner or type(module).__name__
    return assigned


def gradient_sums(gradients: Sequence[Tensor], blocks: Sequence[int], num_blocks: int) -> Tensor:
    """Sum up the gradients of each block, over all ranks, without synchronising.

    Args:
        gradients: tensors of any shape; plain, DTensor, or both.
        blocks: the number of each one's block.
        num_blocks: how many blocks there are.

    Returns:
        Of shape (num_blocks, 4), float64: squares, zeros, elements that are not finite, elements.

    Example:
        >>> gradient_sums([torch.tensor([3.0, 4.0]), torch.tensor([0.0])], [0, 1], 2).tolist()
        [[25.0, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 1.0]]
    """

    def columns(tensors: list[list[Tensor]]) -> list[Tensor]:
        (parts,) = tensors
        sizes = torch.tensor([part.numel() for part in parts])
        nonzero = torch.stack([torch.count_nonzero(part) for part in parts]).double()
        finite = torch.stack([torch.isfinite(part).sum() for part in parts]).double()
        sizes = sizes.to(nonzero.device, torch.float64, non_blocking=True)
        return [_squares(parts), sizes - nonzero, sizes - finite, sizes]

    return _sum_by_block([gradients], blocks, (num_blocks, 4), columns)


def update_sums_(before: Sequence[Tensor], after: Sequence[Tensor], blocks: Sequence[int], num_blocks: int) -> Tensor:
    """Sum up what a step changed in each block, over all ranks, without synchronising.

    Args:
        before: copies of the weights before the step; overwritten with the change.
        after: the weights; of the same placements.
        blocks: the number of each one's block.
        num_blocks: how many blocks there are.

    Returns:
        Of shape (num_blocks, 2), float64: squares of the weights before, squares of their change.

    Example:
        >>> update_sums_([torch.tensor([2.0])], [torch.tensor([1.5])], [0], 1).tolist()
        [[4.0, 0.25]]
    """

    def columns(tensors: list[list[Tensor]]) -> list[Tensor]:
        old, new = tensors
        weights = _squares(old)
        with torch.no_grad():
            torch._foreach_sub_(old, new)
        return [weights, _squares(old)]

    return _sum_by_block([before, after], blocks, (num_blocks, 2), columns)


def diagnose(
    healths: Sequence[BlockHealth],
    vanishing_below: float,
    exploding_above: float,
    sparse: Collection[str] = (),
) -> tuple[Symptom, BlockHealth] | None:
    """Find the worst symptom, and the block that shows it first on the way back from the loss.

    Args:
        healths: the blocks in the order of the forward pass.
        vanishing_below: a gradient norm that is a smaller share than this of the largest block's.
        exploding_above: a gradient norm above this.
        sparse: names of blocks whose gradient is mostly zero when all is well, as an embedding's.

    Returns:
        The symptom and the block; None if all is well.

    Example:
        >>> blocks = [BlockHealth(name, norm, 1e-3, 0.0, 0.0) for name, norm in (("0", 1e-9), ("1", 1e-6), ("2", 1.0))]
        >>> symptom, block = diagnose(blocks, vanishing_below=1e-4, exploding_above=1e3)
        >>> symptom, block.name
        ('vanishing', '1')
    """
    largest = max((one.gradient_norm for one in healths), default=0.0)
    signs: dict[Symptom, list[BlockHealth]] = {
        "non-finite": [one for one in healths if one.nonfinite_share > 0],
        "dead": [one for one in healths if one.zero_share == 1.0 and one.name not in sparse],
        "exploding": [one for one in healths if one.gradient_norm > exploding_above],
        "vanishing": [one for one in healths if one.gradient_norm < vanishing_below * largest and one.zero_share < 1.0],
    }
    for symptom, blocks in signs.items():
        if blocks:
            return symptom, blocks[-1]
    return None


def _squares(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of each tensor."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).double().square()


def _sum_by_block(
    tensors: Sequence[Sequence[Tensor]],
    blocks: Sequence[int],
    shape: tuple[int, int],
    columns: Callable[[list[list[Tensor]]], list[Tensor]],
) -> Tensor:
    """Add up `columns` of this rank's parts by block, and the ranks' sums where they hold different parts."""
    total: Tensor | None = None
    for placement, indices in by_placement(tensors[0]).items():
        parts = {index: [local_part(one[index]) for one in tensors] for index in indices}
        device = parts[indices[0]][0].device
        local = torch.zeros(shape, dtype=torch.float64, device=device)
        filled = [index for index in indices if parts[index][0].numel()]
        for dtype in dict.fromkeys(parts[index][0].dtype for index in filled):  # a foreach function takes one
            members = [index for index in filled if parts[index][0].dtype == dtype]
            values = torch.stack(columns([list(one) for one in zip(*(parts[i] for i in members), strict=True)]), dim=1)
            number = torch.tensor([blocks[index] for index in members]).to(device, non_blocking=True)
            local.index_add_(0, number, values)
        reduced = reduce_over_shards(local, placement)
        total = reduced if total is None else total + reduced.to(total.device)
    return torch.zeros(shape, dtype=torch.float64) if total is None else total
