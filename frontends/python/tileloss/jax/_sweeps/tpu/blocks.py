"""How large a kernel's blocks are: a table by chip, what `tileloss.jax.tune` found here, and the VMEM that blocks take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from tileloss.jax._sweeps.tpu import store
from tileloss.jax._sweeps.tpu.calls import settings
from tileloss.jax._sweeps.tpu.tiles import GROUP, LANES

MIB = 2**20


class Blocks(NamedTuple):
    rows: int  # a multiple of GROUP
    columns: int  # a multiple of LANES


class Call(NamedTuple):
    """What the room of a kernel depends on."""

    kernel: str
    rows: int  # N
    columns: int  # V
    operand_bytes: int  # of an element of the logits or hidden states
    hidden: int = 0  # H; 0: from logits
    head_bytes: int = 0  # of an element of the head
    compute_bytes: int = 0  # of an element as the products see it
    row_arrays: int = 1  # arrays a row of 4 bytes, read or written
    dhidden_bytes: int = 0  # of an element of dhidden; 0: operand_bytes
    dhead_bytes: int = 0  # of an element of dhead; 0: head_bytes


class Chip(NamedTuple):
    name: str
    vmem_limit: int  # bytes that a kernel may take: three quarters of what a core has
    blocks: dict[str, Blocks]


# From logits: a row of a tile fits into registers, and a block's copy from HBM is 1 MiB. With the head: a block of it is copied
# once for each block of rows, so rows (dhead: columns) should not be much fewer than the chip's flops in the time of a byte from
# HBM: 240 on v5e, 170 on v5p, 560 on v6e, 310 on tpu7x. No chip has run any of it: `tune` is for that.
_LOGITS = {"logits_forward": Blocks(256, 2048), "logits_backward": Blocks(256, 2048)}


def _table(least: int, most: int) -> dict[str, Blocks]:
    """Blocks of the head, of ``most`` rows (dhead: columns)."""
    of_rows = Blocks(most, least)
    head = {"head_forward": of_rows, "head_dhidden": of_rows, "head_dhead": Blocks(least, most)}
    return _LOGITS | head


_V5E = Chip("v5e", 96 * MIB, _table(512, 512))
_V5P = Chip("v5p", 48 * MIB, _table(512, 512))
_V6E = Chip("v6e", 96 * MIB, _table(512, 1024))
_TPU7X = Chip("tpu7x", 48 * MIB, _table(512, 512))
_BY_DEVICE_KIND = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _TPU7X,
}
_OTHER = Chip("this TPU", 12 * MIB, _table(256, 256))  # what every TPU has room for


def device_kind() -> str:
    return settings().device_kind or jax.devices()[0].device_kind


def is_tpu() -> bool:
    return device_kind().startswith("TPU")


def chip() -> Chip:
    """Of the device that there is; where that is no TPU, one whose blocks fit into all that are in the table."""
    return _BY_DEVICE_KIND.get(device_kind(), _OTHER) if is_tpu() else _V5P


def fits(blocks: Blocks, call: Call) -> bool:
    return vmem_bytes(blocks, call) <= chip().vmem_limit


def can_fit(call: Call) -> bool:
    return fits(Blocks(GROUP, LANES), call)


def blocks_for(call: Call) -> Blocks:
    """Raises ValueError when blocks that `tune` stored do not fit, or none do."""
    tuned = store.find(device_kind(), key(call)) if is_tpu() else None
    if tuned:
        blocks = clipped(Blocks(*tuned), call)
        check_fits(blocks, call)
        return blocks
    blocks = clipped(chip().blocks[call.kernel], call)
    while not fits(blocks, call) and blocks != (GROUP, LANES):
        # The wider side first: products are at their best when both are alike.
        if blocks.columns > LANES and blocks.columns >= blocks.rows:
            blocks = blocks._replace(columns=max(LANES, _multiple(blocks.columns // 2, LANES)))
        else:
            blocks = blocks._replace(rows=max(GROUP, _multiple(blocks.rows // 2, GROUP)))
    check_fits(blocks, call)
    return blocks


def key(call: Call) -> str:
    """Calls with one key share their blocks."""
    dtype = f"{8 * call.operand_bytes} bits"
    return f"{call.kernel}, {dtype}" + (f", hidden size {call.hidden}" if call.hidden else "")


def check_fits(blocks: Blocks, call: Call) -> None:
    if not fits(blocks, call):
        needed, here = vmem_bytes(blocks, call), chip()
        raise ValueError(
            f"{key(call)}: expected blocks that fit into the {here.vmem_limit // MIB} MiB of VMEM that a kernel "
            f"may take on {here.name}, got {blocks.rows} x {blocks.columns}, which take {math.ceil(needed / MIB)}"
        )


def vmem_bytes(blocks: Blocks, call: Call) -> int:
    """Bytes of VMEM: two of each block that is copied, scratch, and the products before they are added up."""
    return _ROOM[call.kernel](blocks, call)


def _tile(rows: int, columns: int, element_bytes: int) -> int:
    """Of an array in VMEM, whose tiles are of 8 x 128 words."""
    return _multiple(rows, 32 // element_bytes) * _multiple(columns, LANES) * element_bytes


def _multiple(x: int, of: int) -> int:
    return -(-x // of) * of


def clipped(blocks: Blocks, call: Call) -> Blocks:
    return Blocks(
        min(blocks.rows, _multiple(max(call.rows, 1), GROUP)),
        min(blocks.columns, _multiple(max(call.columns, 1), LANES)),
    )


def _rows_room(b: Blocks, c: Call) -> int:
    return 2 * c.row_arrays * _tile(b.rows, LANES, 4) + 4 * _tile(1, b.columns, 4)


def _logits_forward(b: Blocks, c: Call) -> int:
    return 2 * _tile(*b, c.operand_bytes) + _rows_room(b, c)


def _logits_backward(b: Blocks, c: Call) -> int:
    return 4 * _tile(*b, c.operand_bytes) + _rows_room(b, c)


def _head_operands(b: Blocks, c: Call) -> int:
    copied = _tile(b.rows, c.hidden, c.compute_bytes) + _tile(b.columns, c.hidden, c.head_bytes)
    of_compute_dtype = _tile(b.columns, c.hidden, c.compute_bytes)
    tiles = 2 * _tile(*b, 4) + _tile(*b, c.compute_bytes)
    # A product of float32 is one of several bfloat16 parts of each operand.
    parts = 6 * of_compute_dtype if c.compute_bytes == 4 else 0
    return 2 * copied + of_compute_dtype + parts + tiles + _rows_room(b, c)


def _head_dhidden(b: Blocks, c: Call) -> int:
    sums = _tile(b.rows, c.hidden, 4)
    written = _tile(b.rows, c.hidden, c.dhidden_bytes or c.operand_bytes)
    return _head_operands(b, c) + 2 * sums + 2 * written


def _head_dhead(b: Blocks, c: Call) -> int:
    sums = _tile(b.columns, c.hidden, 4)
    written = _tile(b.columns, c.hidden, c.dhead_bytes or c.head_bytes)
    return _head_operands(b, c) + 2 * sums + 2 * written


_ROOM: dict[str, Callable[[Blocks, Call], int]] = {
    "logits_forward": _logits_forward,
    "logits_backward": _logits_backward,
    "head_forward": _head_operands,
    "head_dhidden": _head_dhidden,
    "head_dhead": _head_dhead,
}
KERNELS = tuple(_ROOM)
