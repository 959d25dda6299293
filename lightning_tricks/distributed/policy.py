"""Decide which modules are sharded together: the units of fully sharded data parallel.

A unit is gathered whole before its forward and its backward, and freed after each. Few large units hold much memory at
once; many small ones cost a collective each. The rule that fits most models: each repeated block is a unit, a module
outside of the blocks that is at least as large as the largest block is one as well, and what is left over belongs to
the root, which is gathered for the whole of forward and backward.

Modules that share a parameter (an embedding and a tied head) must belong to one unit. Under ``"auto"`` they stay with
the root, which is gathered while either runs.

**Reference**: Zhao et al. (2023), "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv:2304.11277, section 3.2.1; Rajbhandari et al. (2020), "ZeRO", arXiv:1910.02054.
**Cost**: planning reads names and shapes only: no process group, no device, no weights (meta tensors will do).
**Sharding**: every parameter is split along its first dimension; rank r of W holds chunk r of ``torch.chunk``.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_tricks.functional.blocks import (
    BlockSelector,
    find_blocks,
    inner_first,
    repeated_blocks,
    validate_selector,
)

__all__ = ["Piece", "ShardingPlan", "ShardingPolicy", "ShardingUnit"]


@dataclass(frozen=True)
class Piece:
    """What a plan says of a parameter: not the parameter itself, which sharding is to free.

    Args:
        name: in the model.
        shape: of the whole.
        dtype: of its elements.
        is_trained: whether it requires gradients.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool

    @property
    def num_elements(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardingUnit:
    """Modules that are gathered and freed as one.

    Args:
        name: the module's name in the model; ``""`` for the root.
        module: the module.
        parameters: those of it that no unit inside of it holds, each once.
        reshards: whether its parameters are freed between forward and backward.
        full_precision: whether a policy of mixed precision must leave it alone.
    """

    name: str
    module: nn.Module
    parameters: tuple[Piece, ...]
    reshards: bool = True
    full_precision: bool = False

    @property
    def num_parameters(self) -> int:
        """Elements of the unit's parameters, over all ranks."""
        return sum(piece.num_elements for piece in self.parameters)

    def bytes_of_rank(self, shard_size: int, rank: int = 0) -> int:
        """Bytes of the unit's parameters that a rank holds between steps.

        Args:
            shard_size: over how many ranks each parameter is split; 1 or more.
            rank: which of these; rank 0 holds no less than any other.
        """
        rows = [_rows_of_rank(piece.shape[0], shard_size, rank) for piece in self.parameters]
        sizes = [math.prod(piece.shape[1:]) * piece.dtype.itemsize for piece in self.parameters]
        return sum(count * size for count, size in zip(rows, sizes, strict=True))


@dataclass(frozen=True)
class ShardingPlan:
    """What a policy makes of a model. ``str(plan)`` is a table of the units.

    Args:
        units: the units, inner ones before those that contain them, the root last.
        ignored: names of parameters that every rank keeps whole and that are not trained.
        replicated: names of parameters without a dimension to split, which every rank keeps whole.
        shard_size: over how many ranks each parameter is split.
    """

    units: tuple[ShardingUnit, ...]
    ignored: tuple[str, ...]
    replicated: tuple[str, ...]
    shard_size: int

    def __str__(self) -> str:
        rows = [("unit", "parameters", "bytes a rank"), *map(self._row, _runs_of_alike(self.units))]
        total = sum(unit.num_parameters for unit in self.units)
        bytes_ = sum(unit.bytes_of_rank(self.shard_size) for unit in self.units)
        rows.append(("total", f"{total:,}", f"{bytes_:,} ({self.shard_size} ranks)"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for label, names in (("left out", self.ignored), ("replicated", self.replicated)):
            if names:
                lines.append(f"{label}: {', '.join(names)}")
        return "\n".join(lines)

    def _row(self, run: list[ShardingUnit]) -> tuple[str, str, str]:
        first, count = run[0], len(run)
        times = f"{count} x " if count > 1 else ""
        last = f"-{run[-1].name.rpartition('.')[2]}" if count > 1 else ""
        return (
            (first.name or "root") + last,
            f"{times}{first.num_parameters:,}",
            f"{times}{first.bytes_of_rank(self.shard_size):,}",
        )


@dataclass(frozen=True)
class ShardingPolicy:
    """The rule by which a model is divided into units.

    Args:
        units: which modules are units. ``"auto"`` takes the repeated blocks, then modules outside of them that are at
            least as large as the largest block. Else a class, the name of a class, a glob over the modules' names, a
            predicate of (name, module), or a list of these. What is in no unit belongs to the root.
        min_parameters: a module with fewer parameters than this is not made a unit; 0 or more.
        ignore: modules to leave out, in the same language, or ``"frozen"`` for every parameter that is not trained:
            each rank keeps them whole, so that they are never gathered. They must be frozen.
        reshard_last: whether the last unit is freed after its forward too, although its backward comes next.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 1))
        >>> print(ShardingPolicy().plan(model, shard_size=2))
        unit   parameters  bytes a rank
        0-2    3 x 20      3 x 40
        root   5           20
        total  65          140 (2 ranks)
    """

    units: BlockSelector | Sequence[BlockSelector] = "auto"
    _: KW_ONLY
    min_parameters: int = 0
    ignore: BlockSelector | Sequence[BlockSelector] | None = None
    reshard_last: bool = False

    def __post_init__(self) -> None:
        validate_selector(self.units)
        if self.ignore is not None:
            validate_selector(self.ignore)
        if isinstance(self.min_parameters, bool) or not isinstance(self.min_parameters, int):
            raise TypeError(f"expected `min_parameters` to be an int, got {self.min_parameters!r}")
        if self.min_parameters < 0:
            raise ValueError(f"expected `min_parameters` to be at least 0, got {self.min_parameters}")

    def plan(
        self,
        module: nn.Module,
        shard_size: int | None = None,
        *,
        root: bool = True,
        full_precision: tuple[type[nn.Module], ...] = (),
    ) -> ShardingPlan:
        """Divide a model into units. Reads names, shapes and `requires_grad` only.

        Args:
            module: the model.
            shard_size: over how many ranks each parameter is to be split; None for all processes there are.
            root: whether the model is the root of its units. Without one, each of its children that has parameters
                left over is a unit of its own, for models whose step runs several forwards and backwards.
            full_precision: classes whose modules become units of their own, to be kept in full precision.

        Returns:
            The plan. The same on every rank for the same model.

        Raises:
            ValueError: a selector matches nothing; units share a parameter; a unit's trained parameters differ in
                dtype; an ignored parameter is trained; without a root, a parameter belongs to no child.
        """
        if shard_size is None:
            shard_size = dist.get_world_size() if dist.is_initialized() else 1
        if shard_size < 1:
            raise ValueError(f"expected `shard_size` to be at least 1, got {shard_size}")
        ignored = self._ignored(module)
        chosen = self._chosen(module)
        if not root:
            chosen.update(_children_with_forward(module, set(chosen.values())))
        precise = {name: one for name, one in module.named_modules() if name and isinstance(one, full_precision)}
        # The last unit's backward comes right after its forward. Without a root, nobody knows which that is.
        last = None if self.reshard_last or not root else next(reversed(chosen), None)
        chosen.update(precise)
        _refuse_shared(module, chosen)
        owned = _divide(module, chosen, ignored)
        names = {one: name for name, one in chosen.items()}
        units = [
            ShardingUnit(names[one], one, tuple(owned[names[one]]), names[one] != last, names[one] in precise)
            for _, one in inner_first(module)
            if one in names and owned[names[one]]
        ]
        if not root and owned[""]:
            raise ValueError(
                "expected every parameter to belong to a submodule with a forward of its own, since a step in manual "
                f"optimization runs several backwards; got {owned[''][0].name}, which belongs to no such module of "
                f"{type(module).__name__}. Move it into a submodule that uses it in its forward"
            )
        if root:
            units.append(ShardingUnit("", module, tuple(owned[""]), reshards=False))
        for unit in units:
            _refuse_mixed_dtypes(unit)
        scalars = [name for name, one in module.named_parameters() if one.ndim == 0 and id(one) not in ignored]
        left_out = [name for name, one in module.named_parameters() if id(one) in ignored]
        return ShardingPlan(tuple(units), tuple(left_out), tuple(scalars), shard_size)

    def _ignored(self, module: nn.Module) -> set[int]:
        if self.ignore is None:
            return set()
        if self.ignore == "frozen":
            return {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
        ignored = set()
        for name, one in find_blocks(module, self.ignore).items():
            for parameter_name, parameter in one.named_parameters():
                if parameter.requires_grad:
                    raise ValueError(
                        f"expected `ignore` to name frozen modules, got {name}, whose parameter "
                        f"{name}.{parameter_name} is trained: its gradient would differ between ranks. Freeze it "
                        "(requires_grad_(False)), or let it be sharded"
                    )
                ignored.add(id(parameter))
        return ignored

    def _chosen(self, module: nn.Module) -> dict[str, nn.Module]:
        """The units by name, in the order of registration, without the root."""
        automatic = self.units == "auto"
        # A block that is called by another method than its forward would not be gathered for it.
        repeated = {name: one for name, one in repeated_blocks(module).items() if _has_forward(one)}
        blocks = repeated if automatic else find_blocks(module, self.units)
        chosen = {name: one for name, one in blocks.items() if _size(one) >= self.min_parameters}
        if not automatic:
            return chosen
        chosen = _without_shared(module, chosen)
        if chosen:
            threshold = max(map(_size, chosen.values()))
            chosen.update(_large_leftovers(module, set(chosen.values()), threshold))
            chosen = _without_shared(module, chosen)
        return {name: one for name, one in module.named_modules() if name in chosen}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _rows_of_rank(rows: int, shard_size: int, rank: int) -> int:
    chunk = math.ceil(rows / shard_size)
    return max(0, min(chunk, rows - rank * chunk))


def _owners(module: nn.Module, chosen: dict[str, nn.Module]) -> dict[int, tuple[str, dict[str, str]]]:
    """For each parameter, its name, and by unit the module in it that holds it. ``""`` is the root."""
    units = {one: name for name, one in chosen.items()}
    found: dict[int, tuple[str, dict[str, str]]] = {}

    def walk(one: nn.Module, name: str, unit: str) -> None:
        unit = units.get(one, unit)
        for parameter_name, parameter in one._parameters.items():
            if parameter is not None:
                full_name = f"{name}.{parameter_name}" if name else parameter_name
                found.setdefault(id(parameter), (full_name, {}))[1].setdefault(unit, name or type(one).__name__)
        for child_name, child in one.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, unit)

    walk(module, "", "")
    return found


def _without_shared(module: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop the units that share a parameter with another or with the root, until none does."""
    while True:
        shared = {unit for _, owners in _owners(module, chosen).values() if len(owners) > 1 for unit in owners}
        kept = {name: one for name, one in chosen.items() if name not in shared}
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def _refuse_mixed_dtypes(unit: ShardingUnit) -> None:
    of_dtype: dict[torch.dtype, str] = {}
    for piece in unit.parameters:
        if piece.is_trained:
            of_dtype.setdefault(piece.dtype, piece.name)
    if len(of_dtype) > 1:
        found = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in of_dtype.items())
        raise ValueError(
            f"expected the trained parameters of a unit to have one dtype, got {found} in unit {unit.name or 'root'}. "
            "Convert them to one dtype, or name the modules of another dtype as units of their own"
        )


def _refuse_shared(module: nn.Module, chosen: dict[str, nn.Module]) -> None:
    for parameter_name, owners in _owners(module, chosen).values():
        if len(owners) > 1:
            (unit, holder), (other_unit, other_holder) = list(owners.items())[:2]
            raise ValueError(
                f"expected modules that share a parameter to be in one unit, got {parameter_name}, which {holder} "
                f"(unit {unit or 'root'}) and {other_holder} (unit {other_unit or 'root'}) share. "
                'Leave both out of the units, so that the root holds them, or use "auto"'
            )


def _large_leftovers(module: nn.Module, units: set[nn.Module], threshold: int) -> Iterator[tuple[str, nn.Module]]:
    """Modules outside of the units, containing none, with at least `threshold` parameters; the outermost of nested."""
    inside = "\0"  # begins no name
    for name, one in module.named_modules():
        if not name or name.startswith(inside):
            continue
        if one in units:
            inside = name + "."
        elif _has_forward(one) and _size(one) >= threshold and not any(part in units for part in one.modules()):
            inside = name + "."
            yield name, one


def _children_with_forward(module: nn.Module, units: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Children that have parameters; of containers that have no forward of their own, theirs."""
    for name, child in module.named_children():
        if not _has_forward(child):
            for inner_name, inner in _children_with_forward(child, units):
                yield f"{name}.{inner_name}", inner
        elif child not in units and next(child.parameters(), None) is not None:
            yield name, child


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _divide(module: nn.Module, chosen: dict[str, nn.Module], ignored: set[int]) -> dict[str, list[Piece]]:
    """The parameters that each unit shards: those of its own, without ignored ones and those of no dimension."""
    owners = _owners(module, chosen)
    owned: dict[str, list[Piece]] = defaultdict(list)
    for parameter in module.parameters():
        name, by_unit = owners[id(parameter)]
        if id(parameter) not in ignored and parameter.ndim > 0:
            piece = Piece(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            owned[next(iter(by_unit))].append(piece)
    return owned


def _runs_of_alike(units: tuple[ShardingUnit, ...]) -> list[list[ShardingUnit]]:
    """Neighbours such as blocks.0, blocks.1, blocks.2 with the same shapes, as one run."""
    runs: list[list[ShardingUnit]] = []
    for unit in units:
        if runs and _follows(runs[-1][-1], unit):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _follows(earlier: ShardingUnit, later: ShardingUnit) -> bool:
    parent, _, number = earlier.name.rpartition(".")
    other_parent, _, other_number = later.name.rpartition(".")
    shapes = [[piece.shape for piece in unit.parameters] for unit in (earlier, later)]
    return (
        parent == other_parent
        and number.isdigit()
        and other_number.isdigit()
        and int(other_number) == int(number) + 1
        and shapes[0] == shapes[1]
    )
