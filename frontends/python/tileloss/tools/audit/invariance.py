"""`tileloss audit --invariance`: what keeps its bits when only the division of the work changes, and how far the rest moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import tileloss
from tileloss.testing.case import Case
from tileloss.tools.audit.child import Child, environment
from tileloss.tools.case_file import read_tensors, write_case
from tileloss.tools.implementations import KNOBS
from tileloss.tools.implementations.contract import Contract
from tileloss.tools.progress import Progress

ROWS, VOCAB, HIDDEN = 64, 8192, 128  # enough for more than one thread
PARTS = (1, 15, 48)  # of the rows
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
LEVELS = 2 * len(DTYPES)  # steps of an implementation
QUANTILES = (0.01, 0.5, 0.99, 1.0)
FAR = 1e-3  # of a ratio from 1
# Of a contract, by what is varied; between two that claim the same bits it is the implementation, which has no word.
WORDS = {
    "batch_split": "split",
    "row_order": "order",
    "chunk_size": "tile",
    "threads": "threads",
    "shards": "shards",
}
_SEED = 5
Line = dict[str, Any]
Arrays = dict[str, np.ndarray]
Run = Callable[..., Arrays]  # of a case and of knobs


class Unable(Exception):
    """The implementation gave no outputs: a status and a message."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer.get("message"))
        self.status = answer["status"]


class Claims:
    """The results of implementations, for those after them that claim the same bits: kernels of the same name in their contracts,
    and the same list for the quantity."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], tuple[str, np.ndarray]] = {}

    def lines(self, child: Child, case: Case, dtype: str, found: Arrays) -> Iterator[Line]:
        """A line for each quantity of which somebody has claimed the same."""
        contract = child.contract or {}
        for quantity, ours in found.items():
            if "kernels" not in contract or quantity not in contract:
                continue
            words = frozenset(contract[quantity])
            key = (contract["kernels"], words, quantity, case.function, dtype)
            first, theirs = self._first.setdefault(key, (child.name, ours))
            if first != child.name:
                line = compare(quantity, [(theirs, ours)])
                yield {"varied": "implementation", "against": first, **line}


def measure(name: str, seconds: float, progress: Progress, claims: Claims) -> Iterator[Line]:
    """A line for each level, dtype, kind of change and quantity; with a status and a message where nothing can be compared."""
    count = str(len(os.sched_getaffinity(0)))
    with (
        tempfile.TemporaryDirectory(prefix="tileloss-") as folder,
        Child(name, seconds, _threads(count)) as child,
        Child(name, seconds, _threads("1"), cpus=1) as alone,
    ):
        ask, ask_alone = (_asking(each, Path(folder)) for each in (child, alone))
        for level in ("logits", "linear"):
            for dtype in DTYPES:
                progress.step(f"{name} {level} {dtype}")
                for line in _case_lines(child, level, dtype, ask, ask_alone, claims):
                    kept = claim(child.contract, line)
                    yield describe(
                        name, child.package, level=level, dtype=dtype, claim=kept, **line
                    )


def measure_model(seconds: float, progress: Progress) -> Iterator[Line]:
    """Head against body of a causal LM (invariance_model.py); a line that says so where a package is missing."""
    progress.step("transformers")

    def failed(status: str, message: str) -> Line:
        return describe("transformers", "", status=status, message=message)

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        yield failed("not_installed", f"{missing[0]} is not installed")
        return
    command = [sys.executable, "-m", "tileloss.tools.audit.invariance_model"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment(), check=False
        )
    except subprocess.TimeoutExpired:
        yield failed("timeout", f"no answer in {seconds:g} s")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        yield failed("crashed", f"exit code {done.returncode}: {last}")
        return
    yield from map(json.loads, done.stdout.splitlines())


def describe(name: str, package: str, **found: Any) -> Line:
    """A line with all its keys."""
    usual = {
        "tool": "invariance", "version": tileloss.__version__, "implementation": name, "package": package, "status": "measured",
        "level": None, "varied": None, "against": None, "quantity": None, "dtype": None, "same_bits": None,
        "ratio_quantiles": None, "outside_1e-3": None, "relative_difference": None, "claim": None, "message": None,
    }  # fmt: skip
    return usual | found


def claim(contract: Contract | None, line: Line) -> str | None:
    """Whether the contract says that the line's bits stay the same: "kept" or "broken"; None where it says nothing of it."""
    words = (contract or {}).get(line.get("quantity", ""))
    if words is None or line.get("same_bits") is None or WORDS.get(line["varied"]) in words:
        return None
    return "kept" if line["same_bits"] else "broken"


def compare(quantity: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Line:
    """How far the second of each pair is from the first: quantiles of the ratio exp(a - b) of log-probabilities and the share of
    them outside 1 +- 1e-3; of a gradient the largest norm of a difference relative to the first's norm."""
    line: Line = {
        "quantity": quantity,
        "same_bits": all(a.tobytes() == b.tobytes() for a, b in pairs),
    }
    wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    if quantity != "logp":
        norms = [float(np.linalg.norm(a - b)) / (float(np.linalg.norm(a)) or 1.0) for a, b in wide]
        return line | {"relative_difference": max(norms)}
    ratios = np.exp(np.concatenate([a - b for a, b in wide]))
    quantiles = {f"{q:g}": float(np.quantile(ratios, q)) for q in QUANTILES}
    return line | {
        "ratio_quantiles": quantiles,
        "outside_1e-3": float(np.mean(abs(ratios - 1) > FAR)),
    }


def _threads(count: str) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TILELOSS_NUM_THREADS")
    return {"JAX_NUM_CPU_DEVICES": "8", **dict.fromkeys(names, count)}


def _asking(child: Child, folder: Path) -> Run:
    def ask(case: Case, **knobs: int) -> Arrays:
        inputs, outputs = folder / "inputs", folder / "outputs"
        write_case(inputs, case)
        answer = child.ask(inputs=str(inputs), outputs=str(outputs), knobs=knobs)
        if answer["status"] == "usage":
            raise ValueError(answer["message"])
        if answer["status"] != "done":
            raise Unable(answer)
        found = {name: np.array(array) for name, array in read_tensors(outputs).items()}
        if "logp" not in found:
            found["logp"] = -found["loss"].reshape(-1)
        return {name: found[name] for name in ("logp", *case.gradients)}

    return ask


def _case_lines(
    child: Child, level: str, dtype: str, ask: Run, ask_alone: Run, claims: Claims
) -> Iterator[Line]:
    try:
        case, whole = _first_that_is_offered(level, dtype, ask)
    except Unable as error:
        yield {"status": error.status, "message": str(error)}
        return
    yield from claims.lines(child, case, dtype, whole)
    changes: dict[str, Callable[[], list[Arrays]]] = {
        "batch_split": lambda: [_in_parts(case, ask)],
        "row_order": lambda: [_reordered(case, ask)],
    }
    for knob, values in KNOBS.get(child.name, {}).items():
        if knob == "chunk_size" and level == "logits":
            continue
        changes[knob] = lambda knob=knob, values=values: [
            ask(case, **{knob: value}) for value in values
        ]  # type: ignore[misc]
    changes["threads"] = lambda: [ask_alone(case)]
    for varied, run in changes.items():
        if varied == "threads" and len(os.sched_getaffinity(0)) == 1:
            yield {"varied": varied, "status": "not_run", "message": "NOT RUN: there is one CPU"}
            continue
        try:
            found = run()
        except Unable as error:
            yield {"varied": varied, "status": error.status, "message": str(error)}
            continue
        # A knob's values are compared among themselves: the first call may have taken another way altogether.
        first, others = (found[0], found[1:]) if len(found) > 1 else (whole, found)
        for quantity in whole:
            yield {
                "varied": varied,
                **compare(quantity, [(first[quantity], x[quantity]) for x in others]),
            }


def _first_that_is_offered(level: str, dtype: str, ask: Run) -> tuple[Case, Arrays]:
    """Log-probabilities, or the losses of rows: who has neither raises."""
    prefix = "linear_" if level == "linear" else ""
    logprobs = _draw(f"{prefix}logprobs", DTYPES[dtype])
    try:
        return logprobs, ask(logprobs)
    except Unable as error:
        if error.status != "refused":
            raise
    tensors = dict(logprobs.tensors)
    tensors["loss_grad"] = -tensors.pop("logp_grad")
    function, options = f"{prefix}cross_entropy", {"reduction": "none"}
    losses = replace(logprobs, function=function, tensors=tensors, options=options, outputs=[])
    return losses, ask(losses)


def _draw(function: str, dtype: Any) -> Case:
    random = np.random.default_rng(_SEED)

    def normal(std: float, *shape: int) -> np.ndarray:
        return (std * random.standard_normal(shape, np.float32)).astype(dtype)

    tensors: Arrays = {
        "labels": random.integers(0, VOCAB, ROWS),
        "logp_grad": random.standard_normal(ROWS).astype(np.float32),
    }
    gradients: tuple[str, ...] = ("dlogits",)
    if function.startswith("linear_"):
        tensors |= {
            "hidden": normal(1, ROWS, HIDDEN),
            "head": normal(3 * HIDDEN**-0.5, VOCAB, HIDDEN),
        }
        gradients = ("dhidden", "dhead")
    else:
        tensors["logits"] = normal(3, ROWS, VOCAB)
    return Case(tensors, function, {}, 1, ROWS, ["logp"], False, False, gradients)


def _rows_of(case: Case, rows: np.ndarray) -> Case:
    tensors = {n: x if n == "head" else x[rows] for n, x in case.tensors.items()}
    return replace(case, tensors=tensors, seq_len=len(rows))


def _in_parts(case: Case, ask: Run) -> Arrays:
    """The rows in several calls; the head's gradients added up in float32."""
    ends = np.cumsum(PARTS)
    parts = [
        ask(_rows_of(case, np.arange(end - size, end)))
        for end, size in zip(ends, PARTS, strict=True)
    ]
    found = {}
    for name, first in parts[0].items():
        arrays = [part[name] for part in parts]
        if name == "dhead":
            found[name] = np.sum(arrays, 0, np.float32).astype(first.dtype)
        else:
            found[name] = np.concatenate(arrays)
    return found


def _reordered(case: Case, ask: Run) -> Arrays:
    order = np.random.default_rng(_SEED + 1).permutation(ROWS)
    found = ask(_rows_of(case, order))
    back = np.argsort(order)
    return {name: array if name == "dhead" else array[back] for name, array in found.items()}
