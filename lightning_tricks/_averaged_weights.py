"""What the averages of weights share: following applied steps, being swapped in and out, and checkpoints."""

import functools
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._averaged_part import AveragedPart
from lightning_tricks._lightning import callbacks_that_copy_the_module, is_fitting
from lightning_tricks._scored_weights import show_in_state_dict
from lightning_tricks._validation import check_bool
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, step_ledger
from lightning_tricks.composition.following import Follower
from lightning_tricks.composition.trick import key_of
from lightning_tricks.distributed.full_state import copy_from_whole_, gather_state_dict, load_full_state_, whole
from lightning_tricks.distributed.sharding import reshard_
from lightning_tricks.functional.patching import Removable

__all__ = ["AveragedWeights", "with_aliases"]


class AveragedWeights(Trick):
    """A running average of the trainable parameters, over the applied steps of the optimizer that each belongs to.

    Args:
        average_buffers: whether buffers of floating point are averaged too; else they are the module's own.
        device: where to keep the average; None for the parameters' own device.
    """

    touches = Touches.WEIGHTS
    job = "average the weights"
    topic: str
    """What its logged keys begin with."""
    validates = False
    """Whether validation in fit sees the average, and so the checkpoints."""

    def __init__(self, *, average_buffers: bool, device: str | torch.device | None) -> None:
        if device is not None and not isinstance(device, (str, torch.device)):
            raise TypeError(f"expected `device` to be a device, its name or None, got {device!r}")
        self.average_buffers = check_bool("average_buffers", average_buffers)
        try:
            self.device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"expected `device` to be a device or its name, got {device!r}: {error}") from None
        self._undo: list[Removable] = []
        self.reset()

    @abstractmethod
    def share(self, num_updates: int) -> float:
        """Return how far an update moves the average towards the weights.

        Args:
            num_updates: updates before it.
        """

    @abstractmethod
    def begins_at(self, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        """Return the number of applied steps whose weights the average begins with."""

    def takes(self, steps_since_begin: int) -> bool:
        """Return whether the average is updated so many applied steps after its begin."""
        return True

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        return callbacks_that_copy_the_module(trainer)

    @override
    def reset(self) -> None:
        self._parts: dict[int, AveragedPart] = {}
        self._module: pl.LightningModule | None = None
        self._saved: dict[str, Any] = {}
        self._running = False
        self._final = False  # whether the module holds the average for good
        self._scanned: Any = None
        self._frozen: list[Tensor] = []  # parameters of the optimizers that are not averaged
        self._raw_buffers: dict[str, Tensor] = {}  # that the final ones took the place of

    # The run

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(
                    f"expected `device` to be one of this machine's, got {self.device}: {error}"
                ) from error
        self._remove_patch()
        self._undo.append(show_in_state_dict(trainer, pl_module, functools.partial(_scored, self, pl_module)))

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._saved or self._module is not module or not self._put_raw_weights_back(trainer, module):
            self._parts.clear()
        self._module, self._running, self._final, self._scanned = module, True, False, None
        begin = self.begins_at(trainer, module)
        for index, ledger in enumerate(step_ledger(trainer)):
            part = self._parts.setdefault(index, AveragedPart(self.share, self.takes, self.device))
            part.module, part.begin, part.follower = module, begin, Follower(ledger, part.follow)
        self._scan(trainer, module)
        self._load(module)
        for part in self._parts.values():
            part.applied = part.follower.ledger.applied
            if part.average is None and part.applied >= begin:
                part.start()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._scan(trainer, pl_module)

    def _scan(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Take in what has become trainable: until then it stood still, so that its average is its value."""
        groups = sum(len(group["params"]) for optimizer in trainer.optimizers for group in optimizer.param_groups)
        if self._scanned == (trainer.current_epoch, groups) and not any(one.requires_grad for one in self._frozen):
            return
        self._scanned = trainer.current_epoch, groups
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        known = {name for part in self._parts.values() for name in part.names}
        for index, optimizer in enumerate(trainer.optimizers):
            new = _trainable(optimizer, names, known)
            self._parts[index].add(new)
            known |= set(new)
        self._frozen = [
            parameter
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if not parameter.requires_grad and names.get(id(parameter)) not in known
        ]
        if self.average_buffers:
            new = {name: one for name, one in _float_buffers(module) if name not in known}
            self._parts[0].add(new)
            self._parts[0].buffers += new

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        self._parts[step.index].follower.step()

    @override
    def catch_up(self, trainer: pl.Trainer) -> None:
        for part in self._parts.values():
            part.follower.catch_up()

    # Validation, and the end

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.validates and self._running and is_fitting(trainer):
            self.catch_up(trainer)
            self._show(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.catch_up(trainer)
        self._show(pl_module)
        self._final = any(part.held is not None for part in self._parts.values())
        self._note_versions()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._running = False
        self._remove_patch()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # What checkpoints show stays patched: one may be written because of the exception.
        self._put_back(pl_module)
        self._note_versions()
        self._running = False

    def _show(self, module: pl.LightningModule) -> None:
        reshard_(module)
        for part in self._parts.values():
            part.show()

    def _put_back(self, module: pl.LightningModule) -> None:
        if self._final or all(part.held is None for part in self._parts.values()):
            return
        reshard_(module)  # an evaluation may have left it gathered, with copies of the average
        for part in self._parts.values():
            part.put_back()
        buffers = dict(module.named_buffers())
        for name, raw in self._raw_buffers.items():
            buffers[name].copy_(raw)
        self._raw_buffers = {}

    def _put_raw_weights_back(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Go on where an earlier fit of the same Trainer ended, unless somebody changed the weights since."""
        untouched = trainer.strategy.reduce_boolean_decision(all(part.is_untouched for part in self._parts.values()))
        self._final = False
        if untouched:
            self._put_back(module)
        return untouched

    def _note_versions(self) -> None:
        for part in self._parts.values():
            part.versions = [one._version for one in part.live]

    def _remove_patch(self) -> None:
        while self._undo:
            self._undo.pop().remove()

    # What others ask

    @override
    def tensors(self) -> Mapping[str, Tensor]:
        return {
            f"{index} {name}": tensor
            for index, part in self._parts.items()
            if part.average is not None
            for name, tensor in zip(part.names, part.average.local, strict=True)
        }

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> dict[str, float | Tensor]:
        values: dict[str, float | Tensor] = {}
        for index, part in self._parts.items():
            if part.average is not None and part.names:
                values[key_of(f"{self.topic}/distance", index)] = part.average.distance(part.live)
        return values

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        tensors = [tensor for part in self._parts.values() for tensor in part.live]
        elements = sum(tensor.numel() for tensor in tensors)
        begin = next(iter(self._parts.values())).begin
        return Summary(f"{len(tensors)} tensors, {elements:,} elements, from step {begin} on")

    def averages(self) -> dict[str, Tensor]:
        """Return the average by name, in fp32, sharded as the parameters are; empty before it begins."""
        parts = [part.average.tensors for part in self._parts.values() if part.average is not None]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def copy_to(self, module: nn.Module) -> None:
        """Copy the average into a module, and the buffers of the one that is trained. Under sharding on every rank.

        Args:
            module: of the parameters' names and shapes: the trained module, or another of its kind.

        Raises:
            TypeError: `module` is none.
            RuntimeError: the average has not begun.
            ValueError: the module lacks parameters that are averaged.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected `module` to be a torch.nn.Module, got {module!r}")
        averages = self.averages()
        if not averages:
            raise RuntimeError("expected an average that has begun: no step from its first one on was applied yet")
        own, trained = module.state_dict(), self._module
        if trained is None and next(module.buffers(), None) is not None:
            rank_zero_warn(
                f"{type(self).__name__} was unpickled, without the module that it averages: what is not averaged, such "
                f"as buffers, stays as {type(module).__name__} has it"
            )
        missing = sorted(set(averages) - set(own))
        if missing:
            raise ValueError(
                f"expected a module with the averaged parameters of {_name(trained)}, but {type(module).__name__} "
                f"lacks {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
            )
        # What is not averaged is that of the trained module: frozen parameters, and buffers.
        rest = {} if trained is None else {**trained.state_dict(), **with_aliases(trained, averages)}
        state = {name: whole(one.detach()) for name, one in {**rest, **averages}.items() if isinstance(one, Tensor)}
        load_full_state_(module, {name: one for name, one in state.items() if name in own}, strict=False)

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self._parts:
            return self._saved or {"parts": {}}
        for part in self._parts.values():
            part.follower.catch_up()
        return {"parts": {index: part.state() for index, part in self._parts.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._running:
            self._saved = dict(state_dict)
            return
        for index, part in self._parts.items():  # a rollback; the tensors were brought back in place
            part.go_back(state_dict["parts"][index])

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self.averages():
            return  # or, before training starts, what is yet to be loaded, which `state_dict` returned whole
        raw: dict[str, Tensor] = {}
        average: dict[str, Tensor] = {}
        for part in self._parts.values():
            if part.average is None:
                continue
            if self.validates or self._final:  # then the checkpoint's `state_dict` holds the average, but for its bits
                raw |= {**part.average.named(part.raw), **self._raw_buffers}
                average |= {name: one for name, one in part.average.tensors.items() if part.is_narrow(name)}
            else:
                average |= part.average.tensors
        entry = checkpoint["callbacks"][self.state_key]
        entry |= {"raw": gather_state_dict(raw), "average": gather_state_dict(average)}

    def _load(self, module: pl.LightningModule) -> None:
        """Begin with the averages of a checkpoint, and put the weights that training goes on with into the module."""
        saved, self._saved = self._saved, {}
        raw, average = saved.get("raw", {}), saved.get("average", {})
        tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        names = {**raw, **average}
        strangers = sorted(name for name in names if name not in tensors or tensors[name].shape != names[name].shape)
        if strangers:
            raise ValueError(
                f"expected a checkpoint whose averaged weights are parameters of {type(module).__name__}, of their "
                f"shapes, got {len(strangers)} that are not: {', '.join(strangers[:5])}"
                f"{', ...' if len(strangers) > 5 else ''}. Resume with the model that the checkpoint was written with, "
                "or load its weights alone"
            )
        for index, state in saved.get("parts", {}).items():
            if index not in self._parts or not state["started"]:
                continue
            part = self._parts[index]
            known = {name for other in self._parts.values() for name in other.names}
            part.add({name: tensors[name] for name in state["names"] if name not in known})  # frozen since
            part.start()
            part.updates, part.begun_at = state["updates"], state["begun_at"]
            assert part.average is not None
            for name, own in part.average.tensors.items():
                if name in average:
                    copy_from_whole_(own, average[name])
        for name, one in raw.items():
            copy_from_whole_(tensors[name].detach(), one)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": None}


def _scored(average: AveragedWeights, module: pl.LightningModule) -> dict[str, Tensor]:
    """What a checkpoint shows in the place of the weights, by all names."""
    if not average.validates or average._final:
        return {}
    for part in average._parts.values():
        part.follower.catch_up()  # Lightning asks for the weights before it asks the callbacks for their state
    shown = {name: tensor for part in average._parts.values() for name, tensor in part.shown().items()}
    return with_aliases(module, shown)


def with_aliases(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under all names that a module's state dict has for them: one a place where a weight is shared.

    Args:
        module: the module.
        tensors: of its parameters and buffers, by their first names.
    """
    first = {id(one): name for name, one in module.named_parameters()}
    names = {name: first[id(one)] for name, one in module.named_parameters(remove_duplicate=False)}
    return {**tensors, **{name: tensors[one] for name, one in names.items() if one in tensors}}


def _trainable(optimizer: Optimizer, names: Mapping[int, str], known: Collection[str]) -> dict[str, Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = ((names.get(id(parameter)), parameter) for parameter in parameters if parameter.requires_grad)
    return {name: parameter for name, parameter in named if name is not None and name not in known}


def _float_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point())


def _name(module: nn.Module | None) -> str:
    return "the trained module" if module is None else type(module).__name__
