"""DTensors as the shards that they are cut into, and the group that these lie on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from tileloss.torch._dtensor import is_dtensor
from tileloss.torch.distributed._meeting import Group


class Shard(NamedTuple):
    """What a rank has of a matrix: a plain tensor, or a DTensor cut along ``dim``."""

    name: str
    tensor: Any
    dim: int


def group_of(given: Group, shards: list[Shard]) -> Group:
    """The group to meet in: the one that was given, else that of the first DTensor's mesh. Of a mesh that is cut along two
    dimensions nobody knows which: there a rank raises by itself."""
    for shard in shards:
        if given is None and is_dtensor(shard.tensor):
            own: Group = shard.tensor.device_mesh.get_group(_cut_dimension(shard))
            return own
    return given


def local_shard(shard: Shard, group: Group) -> Any:
    """This rank's part of a DTensor on the ranks of ``group``; anything else as it is."""
    tensor = shard.tensor
    if not is_dtensor(tensor):
        return tensor
    mesh, cut = tensor.device_mesh, _cut_dimension(shard)
    if mesh.size(cut) > 1 and not tensor.placements[cut].is_shard(shard.dim % max(tensor.dim(), 1)):
        raise _refusal(shard)
    ranks = dist.get_process_group_ranks(mesh.get_group(cut))
    if dist.get_process_group_ranks(group) != ranks:
        raise ValueError(f"group: expected none, or that of {shard.name}'s mesh, got another")
    return tensor.to_local()


def _cut_dimension(shard: Shard) -> int:
    """The mesh's dimension along which there is more than one process; 0 where there is none."""
    mesh = shard.tensor.device_mesh
    cutting = [d for d in range(mesh.ndim) if mesh.size(d) > 1]
    if len(cutting) > 1:
        raise _refusal(shard)
    return cutting[0] if cutting else 0


def _refusal(shard: Shard) -> ValueError:
    dim = shard.dim % max(shard.tensor.dim(), 1)
    return ValueError(
        f"{shard.name}: expected a plain tensor, or a DTensor with Shard({dim}), its vocabulary, on a mesh of one dimension, "
        f"got one with placements {shard.tensor.placements}: give this rank's shard, to_local(), and group="
    )
