"""The LM head on an H100 by arithmetic: the table of docs/developers/cuda.md, made from the numbers of the plans.

head_model.py [--write]: fails where the page has another table, or puts it there. TILELOSS_LIBRARY: the emulated CUDA's.
"""

import ctypes
import json
import pathlib
import sys
from math import ceil

ROOT = pathlib.Path(__file__).parents[3]
PAGE = ROOT / "docs/developers/cuda.md"
sys.path.insert(0, str(ROOT / "frontends/python"))

from tileloss._core import calls, structs  # noqa: E402
from tileloss._core.functions import FUNCTIONS  # noqa: E402
from tileloss._core.library import lib, raise_on_error  # noqa: E402

BEGIN, END = "<!-- tests/backends/cuda/head_model.py -->\n", "<!-- so far -->\n"
ROWS, WIDTH, VOCAB = 8192, 4096, 151936  # Qwen3-8B's head
# An H100, by docs/measurements/nvidia-h100.md: operations of products, bytes of memory a second, and of a block's logits by the
# kernels of its rows; a product's tile on each multiprocessor.
PRODUCTS, MEMORY, LOGITS, PROCESSORS, TILE = 725e12, 3.0e12, 1.2e12, 132, 128 * 256
# Seconds: between two launches; of a row's barriers; of a row's state and gradient, which a thread makes in double.
GAP, BARRIERS, STATE, GRADIENT = 1e-6, 2e-6, 4e-6, 8e-6
OTHERS = 4 + 5  # launches: of the call; of the head once, as CudaHead.LaunchesOfACall counts them
CUDA, VALUE_AND_GRAD, STASH, JSON = 1, 2, 1, 1


def plan_of(schedule: int) -> dict[str, float]:
    """What it says of itself."""
    function, args = FUNCTIONS["linear_cross_entropy"], calls.new_args()
    args.place = (CUDA, 0)
    for slot, lines in (("hidden", ROWS), ("head", VOCAB), ("dhidden", ROWS), ("dhead", VOCAB)):
        calls.set_matrix(args, slot, 0, structs.BFLOAT16, (lines, WIDTH), (WIDTH, 1))
    calls.set_vector(args, "labels", 0, structs.INT64, ROWS, 1)
    calls.set_vector(args, "loss", 0, structs.FLOAT32, 1, 1)
    hints = structs.PlanOptions(struct_size=ctypes.sizeof(structs.PlanOptions))
    hints.cuda.schedule = schedule
    plan = structs.Plan(ctypes.sizeof(structs.Plan))
    to, options = ctypes.byref, function.new_options("")
    given = (to(args), to(options), to(hints), None, to(plan))
    raise_on_error(lib.tileloss_make_plan(function.encoded, VALUE_AND_GRAD, *given))
    text = ctypes.create_string_buffer(4096)
    lib.tileloss_plan_describe(to(plan), JSON, text, len(text), None)
    return json.loads(text.value)


def model(schedule: int) -> dict[str, float]:
    plan = plan_of(schedule)
    rows, columns, chunk = plan["row_block"], plan["vocab_block"], plan["chunk_columns"]
    kept = plan["kept_columns"] / VOCAB
    parts, blocks, chunks = ROWS // rows, VOCAB / columns, VOCAB / chunk
    chunks_kept = ceil(plan["kept_columns"] / chunk)

    tiles = rows * columns / TILE / PROCESSORS  # of a product for each of them
    logits = 2 * ROWS * VOCAB * WIDTH / PRODUCTS * ceil(tiles) / tiles
    sweep = parts * blocks * (rows * columns * 4 / LOGITS + BARRIERS)
    waiting, dlogits = kept * ROWS * VOCAB * 2 * plan["kept_bytes"], ROWS * VOCAB * 2
    once = ceil(blocks) * STATE + GRADIENT
    launches = OTHERS + ceil(blocks) * parts * 2 + ceil(chunks) * 2
    launches += (ceil(chunks) - chunks_kept) * parts * 2 + chunks_kept
    times = {
        "products: logits": logits,
        "products: logits again": (1 - kept) * logits,
        "products: dhidden, dhead": 4 * ROWS * VOCAB * WIDTH / PRODUCTS,
        "rows": (2 - kept) * sweep + (waiting + dlogits) / MEMORY + once,
        "dhidden's sums, read and written for each chunk": chunks * ROWS * WIDTH * 8 / MEMORY,
        "dhead, written": VOCAB * WIDTH * 2 / MEMORY,
        "between launches": launches * GAP,
    }
    return {
        "workspace, GB": plan["workspace_bytes"] / 1e9,
        "logits kept, %": 100 * kept,
        "launches": launches,
        **{f"{name}, ms": 1e3 * seconds for name, seconds in times.items()},
        "all, ms": 1e3 * sum(times.values()),
    }


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
    made = before + BEGIN + table() + END + after
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(made)
    elif made != text:
        print(f"{PAGE.name} has another table than head_model.py makes:\n\n{table()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
