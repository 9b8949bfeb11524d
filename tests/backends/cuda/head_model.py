"""The LM head on an H100 by arithmetic: the table of docs/developers/cuda.md, made from the numbers of the plans.

head_model.py [--write]: fails where the page has another table, or puts it there. TILELOSS_LIBRARY: the emulated CUDA's.
"""

import ctypes
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[3]
PAGE = ROOT / "docs/developers/cuda.md"
sys.path.insert(0, str(ROOT / "frontends/python"))

from tileloss._core import calls, structs  # noqa: E402
from tileloss._core.functions import FUNCTIONS  # noqa: E402
from tileloss._core.library import lib, raise_on_error  # noqa: E402

BEGIN, END = "<!-- tests/backends/cuda/head_model.py -->\n", "<!-- so far -->\n"
ROWS, WIDTH, VOCAB = 8192, 4096, 151936  # Qwen3-8B's head
PRODUCTS, MEMORY, CACHE = (
    700e12,
    3.35e12,
    5.5e12,
)  # an H100's operations, and bytes of memory and L2, a second
PROCESSORS, TILE = 132, 128 * 256  # of a product, a multiprocessor's at a time
GAP = 1e-6  # between two launches
BLOCKS = 6  # rows that a multiprocessor has under way
STATE, GRADIENT = (
    4e-6,
    8e-6,
)  # what a row's first thread does alone in double, of a forward and a backward
OTHERS = 7  # launches of a call besides the head's: beginning, sums, row stage
CUDA, VALUE_AND_GRAD, STASH, JSON = 1, 2, 1, 1


def plan_of(schedule: int) -> dict[str, float]:
    """Its facts and its bytes."""
    function, args = FUNCTIONS["linear_cross_entropy"], calls.new_args()
    args.place = (CUDA, 0)
    for slot, lines in (("hidden", ROWS), ("head", VOCAB), ("dhidden", ROWS), ("dhead", VOCAB)):
        calls.set_matrix(args, slot, 0, structs.BFLOAT16, (lines, WIDTH), (WIDTH, 1))
    calls.set_vector(args, "labels", 0, structs.INT64, ROWS, 1)
    calls.set_vector(args, "loss", 0, structs.FLOAT32, 1, 1)
    wishes = structs.PlanOptions(struct_size=ctypes.sizeof(structs.PlanOptions))
    wishes.cuda.schedule = schedule
    plan = structs.Plan(ctypes.sizeof(structs.Plan))
    made = (function.encoded, VALUE_AND_GRAD, args, function.new_options(""), wishes, None, plan)
    raise_on_error(
        lib.tileloss_make_plan(
            *(a if isinstance(a, (bytes, int)) or a is None else ctypes.byref(a) for a in made)
        )
    )
    text = ctypes.create_string_buffer(4096)
    lib.tileloss_plan_describe(ctypes.byref(plan), JSON, text, len(text), None)
    return json.loads(text.value)


def product(rows: int, columns: int, depth: int) -> float:
    """Seconds; the last wave of tiles is not full."""
    waves = rows * columns / TILE / PROCESSORS
    return 2 * rows * columns * depth / PRODUCTS * math.ceil(waves) / waves


def model(schedule: int) -> dict[str, float]:
    plan = plan_of(schedule)
    block, columns = plan["row_block"], plan["vocab_block"]
    row_blocks, blocks, chunks = ROWS / block, VOCAB / columns, VOCAB / plan["chunk_columns"]
    kept = plan["kept_columns"] / VOCAB
    z = block * columns * 4  # bytes
    alone = math.ceil(block / (PROCESSORS * BLOCKS))  # rows one after the other

    again = 1 - kept
    logits = row_blocks * blocks * product(block, columns, WIDTH)
    gradients = 2 * 2 * ROWS * WIDTH * VOCAB / PRODUCTS
    forward = z / CACHE + alone * STATE + STATE  # and the merge
    backward = 2 * z / CACHE + alone * GRADIENT + 1.5 * z / CACHE  # and what rounds
    kept_bytes = kept * ROWS * VOCAB * 12
    rows = row_blocks * blocks * (forward + backward) + kept_bytes / MEMORY
    dhidden = chunks * 2 * ROWS * WIDTH * 4 / MEMORY
    dhead = VOCAB * WIDTH * (4 + 4 + 2) / MEMORY
    launches = OTHERS + 3 + math.ceil(blocks) * (1 + 3 * row_blocks) - row_blocks
    launches += math.ceil(chunks) * (4 + 2 * row_blocks) + math.ceil(blocks * again) * row_blocks
    parts = {
        "products: logits": logits,
        "products: logits again": again * logits,
        "products: dhidden, dhead": gradients,
        "row kernels": rows,
        "dhidden's sums, read and written for each chunk": dhidden,
        "dhead's sums, and from there to bfloat16": dhead,
        "gaps between launches": launches * GAP,
    }
    figures = {
        "workspace, GB": plan["workspace_bytes"] / 1e9,
        "logits kept, %": 100 * kept,
        "launches": launches,
    }
    return (
        figures
        | {f"{name}, ms": 1e3 * s for name, s in parts.items()}
        | {"all, ms": 1e3 * sum(parts.values())}
    )


def table() -> str:
    default, whole = model(0), model(STASH)
    lines = ["| | default budget | kept whole |", "|---|---|---|"]
    for name, value in default.items():
        digits = {"workspace, GB": 2, "logits kept, %": 0, "launches": 0}.get(name, 1)
        lines.append(f"| {name} | {value:.{digits}f} | {whole[name]:.{digits}f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    now = before + BEGIN + table() + END + after
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(now)
    elif now != text:
        print(f"{PAGE.name} has another table than head_model.py makes:\n\n{table()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
