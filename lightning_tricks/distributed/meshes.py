"""The mesh of data-parallel ranks: one axis that shards, and for hybrid sharding one that replicates.

Hybrid sharding (HSDP) splits each parameter over the ranks of a group and keeps a copy of each shard in every other
group: gathers stay within a group (a node), and only gradients, already sharded, are summed between groups.

**Reference**: Zhao et al. (2023), arXiv:2304.11277, section 3.2.2.
**Cost**: `replicate_size` copies of the model in all; one more all-reduce of 1/shard_size of the gradients a step.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["SHARD", "data_parallel_mesh", "shard_size_of"]

REPLICATE, SHARD = "replicate", "data_parallel"


def data_parallel_mesh(device_type: str, world_size: int, replicate_size: int = 1) -> DeviceMesh:
    """Arrange all ranks so that neighbours shard and groups of neighbours replicate. A collective: on every rank.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` and so on.
        world_size: the number of ranks.
        replicate_size: how many copies of the model there are to be; 1 shards over all ranks.

    Returns:
        A mesh with the axis ``data_parallel``, and in front of it ``replicate`` where there are several copies.

    Raises:
        ValueError: `replicate_size` does not divide `world_size`.
    """
    shard_size, rest = divmod(world_size, replicate_size)
    if rest:
        raise ValueError(
            f"expected `replicate_size` x the ranks of a copy to be the world size, got {world_size} ranks / "
            f"{replicate_size} copies = {world_size / replicate_size:.2f} ranks a copy"
        )
    if replicate_size == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicate_size, shard_size), mesh_dim_names=(REPLICATE, SHARD))


def shard_size_of(mesh: DeviceMesh, reshard_after_forward: bool | int = True) -> int:
    """Over how many ranks a mesh shards.

    Args:
        mesh: what `data_parallel_mesh` returned.
        reshard_after_forward: if a number, the size of the groups that must divide it.

    Raises:
        ValueError: it does not.
    """
    shard_size = mesh[SHARD].size()
    if not isinstance(reshard_after_forward, bool) and shard_size % reshard_after_forward:
        raise ValueError(
            f"expected `reshard_after_forward` to divide the ranks of a shard group, got {reshard_after_forward} for "
            f"{shard_size} = world size {mesh.size()} / replicate size {mesh.size() // shard_size}"
        )
    return shard_size
