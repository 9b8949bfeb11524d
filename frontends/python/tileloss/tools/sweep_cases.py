"""The cases of a sweep's config: every combination of the values that it lists, each a bench's config."""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tileloss.testing._judge import JudgeError, ask
from tileloss.tools.config import Config
from tileloss.tools.printable import did_you_mean, escaped

# Each has a value or a list of them; the last runs fastest. The bench has them under these names, but the shape.
AXES = (
    *("loss", "shape", "dtype", "pass", "isa", "threads", "schedule", "row_block", "vocab_block"),
    *("cuda_kernel", "hidden", "head_layout", "workspace"),
)
COMMON = ("device", "in_place", "iters", "warmup", "seed")  # of the bench as well
OWN = ("time_limit_s", "memory_limit_mb", "output")
_REQUIRED = ("loss", "shape", "dtype")
_HEAD = ("hidden", "head_layout", "workspace")  # of the functions linear_* alone
_MAX_COUNT = 2**31 - 1  # keeps the bytes of a matrix far from overflow
_MAX_CASES = 100_000  # weeks of measuring: a config with more has a mistake in it
Line = dict[str, Any]
Node = dict[str, Any]  # of a config, as the judge reads it


class Case(NamedTuple):
    config: Node
    identity: Line  # its parameters, as results have them


class Sweep(NamedTuple):
    cases: dict[str, Case]  # by their keys; what compares with each other stands together
    output: Path
    seconds: float  # of a case, then it is killed
    megabytes: int  # of address space that a case may take; 0: no limit


def key_of(identity: Line) -> str:
    """Two cases are the same if this is."""
    return json.dumps(identity, sort_keys=True)


def read_sweep(config: Config) -> Sweep:
    """Raises JudgeError and ValueError with the place of what is wrong, whatever case it is in."""
    nodes = {node["key"]: node for node in config.tree()["children"]}
    known = (*AXES, *COMMON, *OWN)
    for key, node in nodes.items():
        if key not in known:
            near = did_you_mean(key, known)
            _fail(node, f"{escaped(key)}: unknown key{near}; known here: {', '.join(known)}")
    for key in _REQUIRED:
        if key not in nodes:
            config.fail(key, "required, but missing")
    output = Path(f"{config.file.stem}.jsonl")
    if name := config.text("output"):
        output = config.path_from("output", name)
    seconds = config.number("time_limit_s", 300, 1e-3, 1e6)
    megabytes = int(config.number("memory_limit_mb", 0, 0, _MAX_COUNT))
    cases = _combine(config, nodes)
    if megabytes and any("device" in case.identity for case in cases.values()):
        problem = "expected none on a GPU, whose driver takes more than there is memory"
        config.fail("memory_limit_mb", problem)
    return Sweep(cases, output, seconds, megabytes)


def _combine(config: Config, nodes: dict[str, Node]) -> dict[str, Case]:
    axes = {key: _values(nodes[key]) for key in AXES if key in nodes}
    if math.prod(map(len, axes.values())) > _MAX_CASES:
        config.fail("shape", f"all lists together make more than {_MAX_CASES} cases")
    common = [nodes[key] for key in COMMON if key in nodes]
    if "pass" not in nodes:
        common.append(nodes["dtype"] | {"key": "pass", "kind": "scalar", "text": "value_and_grad"})
    cases: dict[str, Case] = {}
    origins: dict[str, tuple[list[Node], ...]] = {}
    for values in product(*axes.values()):
        parts = [node for value in values for node in value]
        identity = _identity(config, nodes, parts + common)
        key = key_of(identity)
        for axis, value, other in zip(axes, values, origins.setdefault(key, values), strict=True):
            # Of a function without a loss value_and_grad and backward are the same case.
            if value is not other and axis != "pass":
                text = "x".join(node["text"] for node in value if node["kind"] == "scalar")
                _fail(value[0], f"{axis}: {escaped(text)} stands there twice")
        tree = {"key": "", "kind": "map", "children": parts + common}
        cases.setdefault(key, Case(tree, identity))
    return cases


def _values(axis: Node) -> list[list[Node]]:
    """For each value the keys of a bench's config that it decides."""
    items = axis["children"] if axis["kind"] == "list" else [axis]
    if not items:
        _fail(axis, f"{axis['key']}: an empty list")
    decide = {"shape": _decided_by_shape, "loss": _decided_by_loss}.get(axis["key"])
    return [decide(item) if decide else [item | {"key": axis["key"]}] for item in items]


def _decided_by_shape(value: Node) -> list[Node]:
    """512x151936"""
    text = value.get("text", "")
    found = re.fullmatch(r"(\d{1,10})x(\d{1,10})", text, re.ASCII)
    sizes = found.groups() if found else ()
    if not sizes or not all(1 <= int(size) <= _MAX_COUNT for size in sizes):
        wanted = f"expected TOKENSxVOCAB, each 1 to {_MAX_COUNT}"
        _fail(value, f"shape: {wanted}, got '{escaped(text)}'")
    named = zip(("tokens", "vocab"), sizes, strict=True)
    return [value | {"key": name, "text": size} for name, size in named]


def _decided_by_loss(value: Node) -> list[Node]:
    """cross_entropy, or {name: cross_entropy, label_smoothing: 0.1}"""
    if value["kind"] != "map":
        return [value | {"key": "loss"}]
    names = [node for node in value["children"] if node["key"] == "name"]
    options = [node for node in value["children"] if node["key"] != "name"]
    if not names:
        _fail(value, "loss.name: required, but missing")
    return [names[0] | {"key": "loss"}, value | {"key": "options", "children": options}]


def _identity(config: Config, nodes: dict[str, Node], parts: list[Node]) -> Line:
    """The case in the bench's words, which refuses what is wrong with it."""
    loss = parts[0].get("text", "")
    is_linear = loss.startswith("linear_")
    read = [node for node in parts if is_linear or node["key"] not in _HEAD]
    tree = {"key": "", "kind": "map", "children": read}
    try:
        asked = ask({"do": "bench", "config": tree, "only_read": True})
    except JudgeError as error:
        raise JudgeError(_placed(str(error), config, nodes), error.code) from None
    for key in _HEAD:
        if key in nodes and not is_linear:
            config.fail(key, f"{loss} takes logits; this is for the functions linear_*")
    identity: Line = asked.event("case")["case"]
    given = [option["key"] for node in parts for option in node.get("children", ())]
    if "max_length" not in given:  # what the bench takes then follows from the shape
        identity["options"].pop("max_length", None)
    return identity


def _placed(message: str, config: Config, nodes: dict[str, Node]) -> str:
    """What names a key alone, or a flag of the bench, with the key's place in the config."""
    found = re.fullmatch(r"(?:--)?([a-z_-]+): (.*)", message, re.DOTALL)
    key = found[1].replace("-", "_") if found else ""
    if not found or key not in (*AXES, *COMMON):
        return message
    return f"{nodes[key]['origin'] if key in nodes else config.file}: {key}: {found[2]}"


def _fail(node: Node, problem: str) -> NoReturn:
    raise ValueError(f"{node['origin']}: {problem}")
