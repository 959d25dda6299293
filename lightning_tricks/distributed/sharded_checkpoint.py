"""A checkpoint as a folder to which each rank writes its shards, and which any number of ranks reads.

The layout is that of Lightning's own distributed checkpoints: the tensors of the model under ``state_dict``, those of
optimizer i under ``optimizer_i``, by the names of their parameters, in the format of ``torch.distributed.checkpoint``;
all the rest in ``meta.pt``. Names, not numbers, say which state belongs to which parameter: the groups of an optimizer
may come in any order.

**Cost**: each rank writes and reads what it holds. Asynchronous: one copy of it in CPU memory until it is written.
**Sharding**: what is held whole by every rank is written by rank 0.
"""

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from lightning_tricks.distributed.publishing import (
    META,
    is_checkpoint_folder,
    publish,
    recover,
    save_file,
    scratch_beside,
)

__all__ = [
    "CheckpointFolders",
    "consolidate",
    "is_sharded_checkpoint",
    "load_sharded_state_",
    "named_optimizer_state",
    "read_full_checkpoint",
    "read_meta",
    "read_sharded_optimizer_state",
    "saved_names",
]


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a complete checkpoint folder lies here.

    Args:
        path: of a file, a folder or nothing.
    """
    return is_checkpoint_folder(recover(path))


def named_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state dict with the names of the parameters in the place of their numbers.

    Args:
        optimizer: of parameters of the module.
        module: the model.

    Raises:
        ValueError: its state nests tensors.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = dict(enumerate(names[id(parameter)] for parameter in parameters))
    state = optimizer.state_dict()
    for number, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, (dict, list, tuple)) and any(isinstance(one, Tensor) for one in _leaves(value)):
                raise ValueError(
                    f"expected an optimizer whose state holds tensors by name, got {type(optimizer).__name__}, whose "
                    f"{key!r} of {name_of[number]} nests them: a folder cannot hold that. "
                    "Use save_distributed_checkpoint=False"
                )
    return {
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


class CheckpointFolders:
    """Writes checkpoint folders, one after another, in the background if asked to.

    Args:
        asynchronous: whether `save` returns once everything is copied to the CPU.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._group: Any = None  # of its own: the thread that writes must not take part in the training's collectives
        self._saving: Future[Any] | None = None
        self._outdated: list[Callable[[], None]] = []

    def save(
        self,
        path: Path,
        state_dict: Mapping[str, Any],
        optimizer_states: list[dict[str, Any]] | None,
        rest: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint folder and publish it. A collective: on every rank.

        Args:
            path: where the folder is to be, on a disk that all ranks share; rank 0's counts.
            state_dict: of the model, sharded.
            optimizer_states: of each optimizer, by `named_optimizer_state`; None for a checkpoint of weights only.
            rest: what else the checkpoint holds; rank 0's counts.
        """
        self.wait()
        if path.is_dir() and not is_checkpoint_folder(path):  # every rank looks: none may wait for the others then
            raise IsADirectoryError(f"expected the path of a checkpoint to be free, or an older one, got {path}")
        first = dist.get_rank() == 0
        places = [path, path]
        if first:
            places = [path, scratch_beside(path)]
            places[1].mkdir()
            skeletons = [_without_tensors(state) for state in optimizer_states or ()]
            states = {} if optimizer_states is None else {"optimizer_states": skeletons}
            save_file({**rest, **states}, places[1] / META)
        dist.broadcast_object_list(places, src=0)  # and no rank writes before the folder is there
        path, scratch = places
        content: dict[str, Any] = {"state_dict": dict(state_dict)}
        content.update({f"optimizer_{index}": state for index, state in enumerate(optimizer_states or ())})
        # What every rank holds may differ (running statistics): rank 0's is the one of an ordinary checkpoint.
        planner, writer = DefaultSavePlanner(dedup_save_to_lowest_rank=True), FileSystemWriter(scratch)
        if self.asynchronous:
            self._group = self._group or dist.new_group(backend="gloo")
            written = async_save(content, storage_writer=writer, planner=planner, process_group=self._group)
            self._saving = Future()
            written.add_done_callback(partial(_publish_when_written, scratch, path, first, self._saving))  # type: ignore[union-attr]
        else:
            save(content, storage_writer=writer, planner=planner)
            if first:
                publish(scratch, path)
            dist.barrier()

    def remove_later(self, remove: Callable[[], None]) -> None:
        """Remove an older checkpoint once the one that takes its place is complete.

        Args:
            remove: does it.
        """
        if self._saving is None:
            remove()
        else:
            self._outdated.append(remove)

    def wait(self) -> None:
        """Wait until the last checkpoint is in its place. A collective, if one is being written.

        Raises:
            Exception: what went wrong with it.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            dist.barrier()
            while self._outdated:
                self._outdated.pop(0)()

    def abandon(self) -> None:
        """Do not wait for the other ranks, which may be gone."""
        self._saving = self._group = None


def _publish_when_written(scratch: Path, path: Path, first: bool, published: Future[Any], done: Future[Any]) -> None:
    try:
        done.result()
        if first:  # the coordinator is done when all ranks are
            publish(scratch, path)
        published.set_result(None)
    except Exception as error:
        published.set_exception(error)


def read_meta(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read what a checkpoint folder holds beside the tensors.

    Args:
        path: of the folder.
        weights_only: as in `torch.load`.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
    """
    if not is_sharded_checkpoint(path):
        raise FileNotFoundError(f"expected a complete checkpoint folder, with meta.pt and .metadata, got {path}")
    rest: dict[str, Any] = torch.load(recover(path) / META, map_location="cpu", weights_only=weights_only)
    return rest


def saved_names(path: Path) -> list[str]:
    """Names of the model's parameters and buffers in a checkpoint folder.

    Args:
        path: of the folder.
    """
    return [keys[1] for keys in _paths(_metadata(path)).values() if keys[0] == "state_dict"]


def load_sharded_state_(module: nn.Module, path: Path, *, strict: bool = True) -> None:
    """Load the model from a checkpoint folder; each rank reads its part. A collective: on every rank.

    Args:
        module: sharded.
        path: of the folder.
        strict: whether the names must be the module's.

    Raises:
        RuntimeError: as `torch.nn.Module.load_state_dict` does.
    """
    own, saved = module.state_dict(), saved_names(path)
    wanted = {name: own[name] for name in saved if name in own}
    load({"state_dict": wanted}, storage_reader=FileSystemReader(recover(path)))
    strangers = {name: torch.empty(0) for name in saved if name not in own}
    module.load_state_dict({**wanted, **strangers}, strict=strict)


def read_sharded_optimizer_state(
    optimizer: Optimizer, module: nn.Module, path: Path, index: int, skeleton: Mapping[str, Any]
) -> dict[str, Any]:
    """Read the state of one optimizer from a checkpoint folder, as `Optimizer.load_state_dict` takes it.

    A collective: on every rank.

    Args:
        optimizer: of parameters of the module, its groups in any order.
        module: sharded.
        path: of the folder.
        index: which optimizer of the checkpoint.
        skeleton: what `read_meta` has of it under ``"optimizer_states"``.

    Raises:
        ValueError: the groups hold other parameters than the saved ones.
    """
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = _tensors_of(_metadata(path), index, parameters)
    load({f"optimizer_{index}": {"state": state}}, storage_reader=FileSystemReader(recover(path)))
    groups = _match_groups([[names[id(p)] for p in group["params"]] for group in optimizer.param_groups], skeleton)
    return _numbered({"state": _merged(state, skeleton["state"]), "param_groups": groups})


def consolidate(path: Path, file: Path, *, weights_only: bool = True) -> None:
    """Turn a checkpoint folder into one ordinary file, optimizer state included. In one process.

    Args:
        path: of the folder.
        file: where to write; what is there is replaced.
        weights_only: whether to refuse what is neither tensor nor plain value, as `torch.load` does.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
    """
    save_file(read_full_checkpoint(path, weights_only=weights_only), file)


def read_full_checkpoint(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint folder as one ordinary checkpoint, optimizer state included. In one process.

    Args:
        path: of the folder.
        weights_only: whether to refuse what is neither tensor nor plain value, as `torch.load` does.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        return _read_full(path, weights_only)


def _read_full(path: Path, weights_only: bool) -> dict[str, Any]:
    rest, metadata = read_meta(path, weights_only=weights_only), _metadata(path)
    reader = FileSystemReader(recover(path))
    model = {
        keys[1]: _empty(metadata.state_dict_metadata[key])
        for key, keys in _paths(metadata).items()
        if keys[0] == "state_dict"
    }
    load({"state_dict": model}, storage_reader=reader, no_dist=True)
    states = []
    has_states = "optimizer_states" in rest
    for index, skeleton in enumerate(rest.pop("optimizer_states", ())):
        state = _tensors_of(metadata, index, {})
        load({f"optimizer_{index}": {"state": state}}, storage_reader=reader, no_dist=True)
        states.append(_numbered({"state": _merged(state, skeleton["state"]), "param_groups": skeleton["param_groups"]}))
    return {**rest, "state_dict": model, **({"optimizer_states": states} if has_states else {})}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, (list, tuple)) else [value]


def _metadata(path: Path) -> Metadata:
    return FileSystemReader(recover(path)).read_metadata()


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """For each key of the file the keys of the nested dicts that it came from."""
    return metadata.planner_data  # type: ignore[no-any-return]


def _empty(saved: Any, like: Tensor | None = None) -> Any:
    if not isinstance(saved, TensorStorageMetadata):
        return None  # overwritten by what was saved
    dtype = saved.properties.dtype
    if like is not None and like.shape == saved.size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype)


def _tensors_of(metadata: Metadata, index: int, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Memory for the tensors of an optimizer's state, by parameter and name, split as the parameter is."""
    state: dict[str, dict[str, Any]] = {}
    for key, keys in _paths(metadata).items():
        saved = metadata.state_dict_metadata[key]
        if keys[:2] == (f"optimizer_{index}", "state") and isinstance(saved, TensorStorageMetadata):
            _, _, parameter, name = keys
            state.setdefault(parameter, {})[name] = _empty(saved, parameters.get(parameter))
    return state


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for name, values in state["state"].items()
    }
    return {"state": kept, "param_groups": state["param_groups"]}


def _merged(tensors: dict[str, dict[str, Any]], rest: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**rest.get(name, {}), **tensors.get(name, {})} for name in dict.fromkeys([*rest, *tensors])}


def _match_groups(own: list[list[str]], skeleton: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The saved groups in the order of the optimizer's own, their parameters in its order too."""
    saved = {frozenset(group["params"]): group for group in skeleton["param_groups"]}
    for number, group in enumerate(own):
        if frozenset(group) not in saved:
            sizes = [len(one["params"]) for one in skeleton["param_groups"]]
            raise ValueError(
                f"expected the optimizer's groups to hold the parameters of the saved ones, got a group {number} of "
                f"{len(group)} parameters ({group[0]}, ...) that is none of the saved groups, of {sizes} parameters. "
                "Group the parameters as in the run that was saved"
            )
    return [{**saved[frozenset(group)], "params": group} for group in own]


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """Numbers in the place of names, as an optimizer gives them."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: values for name, values in state["state"].items() if name in numbers},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }
