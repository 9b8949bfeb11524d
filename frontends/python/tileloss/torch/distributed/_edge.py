"""DTensors as the shards that they are cut into."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tileloss.torch._dtensor import is_dtensor
from tileloss.torch.distributed._meeting import Group


def local_shard(name: str, tensor: Any, dim: int, group: Group) -> tuple[Any, Group]:
    """(this rank's shard, the group): of a DTensor that one mesh dimension cuts along ``dim``, whose group is taken where none is
    given; anything else as it is."""
    if not is_dtensor(tensor):
        return tensor, group
    from torch.distributed.tensor import Shard

    mesh = tensor.device_mesh
    dim %= max(tensor.dim(), 1)
    cutting = [d for d in range(mesh.ndim) if mesh.size(d) > 1]
    if not cutting:  # of one process, however it is laid out
        cutting = [0]
    elif len(cutting) > 1 or tensor.placements[cutting[0]] != Shard(dim):
        raise ValueError(
            f"{name}: expected a plain tensor, or a DTensor with Shard({dim}), its vocabulary, on a mesh of one dimension, got "
            f"one with placements {tensor.placements}: give this rank's shard, to_local(), and group="
        )
    own = mesh.get_group(cutting[0])
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(
        own
    ):
        raise ValueError(f"group: expected none, or that of {name}'s mesh, got another")
    return tensor.to_local(), own if group is None else group
