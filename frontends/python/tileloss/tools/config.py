"""The one reader of configs: a YAML file and its overrides as a tree, in which every value knows where it stands.

libtileloss_judge.so gets the tree and asks for its keys by name, type and range, and so does this package for its own.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from tileloss.tools.printable import shown

if TYPE_CHECKING:
    from tileloss.testing._judge import Tensors

# What this package reads itself: the judge suggests these for words that are near to them.
KEYS = (
    "output",
    "model_path",
    "teacher_model_path",
    "text",
    "mesh_shape",
    "tracker",
    "wandb_project",
    "wandb_mode",
    "wandb_name",
    "kernel.block_size",
    "kernel.time_block",
)

# Limits that no honest config meets.
_MOST_BYTES = 1 << 20
_MOST_NODES = 10_000
_MOST_DEPTH = 16

_NULL = ("", "~", "null", "Null", "NULL")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_KINDS = {"empty": "nothing", "scalar": "a value", "list": "a list", "map": "a section"}

# As src/support/config.h has it: key, kind (of _KINDS), origin ("c.yaml:12", "--set a=1"), directory (where relative paths
# start); of a scalar text and quoted (it is no number), of the others children; of a map others (keys that this package reads).
Node = dict[str, Any]


class Config:
    """A config with its overrides: "a.b=value", the value in YAML. A relative path of the file starts at its folder, one of an
    override, and of a file without a folder such as ``<(...)``, at the working directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no YAML map, or an override is wrong; names the line.
    """

    def __init__(self, file: Path, overrides: list[str]) -> None:
        self.file, self.overrides = file, overrides
        self.skipped: list[str] = []  # the keys that have been taken
        folder = file.absolute().parent if file.is_file() else Path.cwd()
        name = shown(str(file))
        root = _Reader(name, folder, has_lines=True).tree(_read(file))
        if root is None:
            raise ValueError(f"{name}: expected one YAML document, got none")
        if root["kind"] != "map":
            raise ValueError(
                f"{root['origin']}: expected keys and values, got {_KINDS[root['kind']]}"
            )
        self._root = root
        for text in overrides:
            _override(root, text)

    def __contains__(self, key: str) -> bool:
        return _find(self._root, key) is not None

    def text(self, key: str, default: str | None = None) -> str | None:
        node = self._scalar(key, "text")
        return default if node is None else str(node["text"])

    def integer(self, key: str, default: int | None = None, minimum: int = 0) -> int | None:
        node = self._scalar(key, "an integer")
        if node is None:
            return default
        text = node["text"]
        if node["quoted"] or not re.fullmatch("-?[0-9]{1,18}", text) or int(text) < minimum:
            self.fail(key, f"expected an integer from {minimum} on, got '{shown(text)}'")
        return int(text)

    def number(self, key: str, default: float, minimum: float, maximum: float) -> float:
        node = self._scalar(key, "a number")
        if node is None:
            return default
        is_number = not node["quoted"] and _NUMBER.fullmatch(node["text"])
        if not is_number or not minimum <= float(node["text"]) <= maximum:
            wish = f"expected a number from {minimum:g} to {maximum:g}"
            self.fail(key, f"{wish}, got '{shown(node['text'])}'")
        return float(node["text"])

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        node = self._scalar(key, "a word")
        if node is None:
            return default
        if node["text"] not in choices:
            self.fail(key, f"expected one of {', '.join(choices)}, got '{shown(node['text'])}'")
        return str(node["text"])

    def path_from(self, key: str, text: str) -> Path:
        """``text`` as the path that it is where the key stands."""
        node = _find(self._root, key)
        assert node is not None
        return Path(node["directory"]) / text

    def skip(self, *keys: str) -> None:
        """The judge is not to see these."""
        self.skipped += [key for key in keys if key in self and key not in self.skipped]

    def everything(self) -> dict[str, Any]:
        """The config as text, by dotted keys: for a tracker."""
        return dict(_flat(self._root, ""))

    def tree(self, *more: str) -> Node:
        """What the judge reads: the config with ``more`` overrides, without the keys that have been skipped."""
        root = copy.deepcopy(self._root)
        for text in more:
            _override(root, text)
        for key in self.skipped:
            section, last = _section(root, key)
            if section is not None:
                section["children"] = [c for c in section["children"] if c["key"] != last]
        for key in KEYS:
            section, last = _section(root, key)
            if section is not None:
                section.setdefault("others", []).append(last)
        return root

    def files(self) -> dict[str, Tensors]:
        """The tensors of the files that the section source names, by path as the judge has it.

        Raises OSError and ValueError as ``read_tensors``.
        """
        from tileloss.tools.case_file import read_tensors

        if self.text("source.kind") != "safetensors":
            return {}
        paths = []
        for key in ("source.path", "source.teacher_path"):
            if (text := self.text(key)) is not None:
                paths.append(os.path.join(self.path_from(key, ""), text))
        return {path: read_tensors(Path(path)) for path in paths}

    def place(self, key: str) -> str:
        """Where a key stands, and its name: a message about it begins so."""
        node = _find(self._root, key)
        return f"{shown(str(self.file)) if node is None else node['origin']}: {key}"

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ValueError(f"{self.place(key)}: {problem}")

    def _scalar(self, key: str, expected: str) -> Node | None:
        node = _find(self._root, key)
        if node is None:
            return None
        if node["kind"] == "empty" or node.get("text") == "":
            self.fail(key, "has no value")
        if node["kind"] != "scalar":
            self.fail(key, f"expected {expected}, got {_KINDS[node['kind']]}")
        return node


def overrides_tree(overrides: list[str]) -> Node:
    """The tree of a command line without a file. Raises ValueError."""
    root: Node = {"key": "", "kind": "map", "children": []}
    for text in overrides:
        _override(root, text)
    return root


def translate_old_keys(config: Config) -> list[str]:
    """The keys of the JAX project that this one began as, in today's words: overrides."""
    overrides = []
    for old, new in (
        ("kernel.block_size", "kernel.vocab_block"),
        ("kernel.time_block", "kernel.row_block"),
    ):
        if old in config:
            if new in config:
                config.fail(old, f"is the old name of {new}: expected one of the two")
            overrides.append(f"{new}={config.integer(old, minimum=1)}")
    if "mesh_shape" in config:
        print("tileloss: note: mesh_shape is ignored: a check runs on one machine", file=sys.stderr)
    config.skip("mesh_shape", "kernel.block_size", "kernel.time_block")
    return overrides


class _Reader:
    """The events of YAML as a tree. Not by yaml.compose, which follows a hostile text to its end and beyond Python's stack."""

    def __init__(self, name: str, folder: Path, *, has_lines: bool) -> None:
        self._name, self._folder, self._has_lines = name, str(folder), has_lines
        self._anchors: dict[str, Node] = {}
        self._count = 0

    def tree(self, text: str | bytes, path: str = "") -> Node | None:
        """Of the one document; None if there is none. ``path``: the key that it is for. Raises ValueError."""
        root = None
        try:
            self._events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
            for event in self._events:
                if isinstance(event, yaml.DocumentStartEvent):
                    if root is not None:
                        raise ValueError(f"{self._name}: expected one YAML document, got 2 or more")
                    root = self._node(next(self._events), path, 0)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line if error.problem_mark else 0
            raise ValueError(f"{self._place(line)}: not YAML: {error.problem}") from None
        except yaml.reader.ReaderError as error:
            newline = "\n" if isinstance(text, str) else b"\n"
            line = text.count(newline, 0, error.position)  # type: ignore[arg-type]
            raise ValueError(f"{self._place(line)}: not YAML: {error.reason}") from None
        return root

    def _node(self, event: Any, path: str, depth: int) -> Node:
        where = self._place(event.start_mark.line)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise ValueError(
                    f"{where}: {path}: not YAML: no whole value has the name {event.anchor}"
                )
            return self._copied(self._anchors[event.anchor], path, depth)
        self._count_one(where, path, depth)
        node: Node = {"key": "", "origin": where, "directory": self._folder}
        if isinstance(event, yaml.ScalarEvent):
            if _is_empty(event):
                node |= {"kind": "empty"}
            else:
                is_quoted = event.style is not None or event.tag == "!"
                node |= {"kind": "scalar", "text": event.value, "quoted": is_quoted}
        elif isinstance(event, yaml.SequenceStartEvent):
            node |= {"kind": "list", "children": []}
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                node["children"].append(self._node(item, path, depth + 1))
        else:
            node |= {"kind": "map", "children": self._children(path, depth)}
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _children(self, path: str, depth: int) -> list[Node]:
        found: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            where = self._place(event.start_mark.line)
            if not isinstance(event, yaml.ScalarEvent) or _is_empty(event):
                raise ValueError(f"{where}: {shown(path) or 'config'}: a key must be a word")
            key = str(event.value)
            full = f"{path}.{key}" if path else key
            if key in found:
                first = found[key]["origin"]
                raise ValueError(f"{where}: {shown(full)}: duplicate key (first at {first})")
            found[key] = self._node(next(self._events), full, depth + 1)
            found[key] |= {"key": key, "origin": where}
        return list(found.values())

    def _copied(self, node: Node, path: str, depth: int) -> Node:
        self._count_one(node["origin"], path, depth)
        children = [self._copied(child, path, depth + 1) for child in node.get("children", ())]
        return node | ({"children": children} if "children" in node else {})

    def _count_one(self, where: str, path: str, depth: int) -> None:
        self._count += 1
        if depth > _MOST_DEPTH or self._count > _MOST_NODES:
            raise ValueError(f"{where}: {shown(path)}: nested too deeply")

    def _place(self, line: int) -> str:
        return f"{self._name}:{line + 1}" if self._has_lines else self._name


def _is_empty(event: Any) -> bool:
    return event.style is None and event.value in _NULL


def _read(file: Path) -> bytes:
    if not file.exists():
        raise FileNotFoundError(errno.ENOENT, "no such config file", str(file))
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, not a config file", str(file))
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{shown(str(file))}: larger than 1 MB")
    return data


def _child(section: Node, key: str) -> Node | None:
    if section["kind"] != "map":
        return None
    return next((child for child in section["children"] if child["key"] == key), None)


def _find(root: Node, key: str) -> Node | None:
    node: Node | None = root
    for name in key.split("."):
        node = None if node is None else _child(node, name)
    return node


def _section(root: Node, key: str) -> tuple[Node | None, str]:
    """The map that a dotted key stands in, and the key in it."""
    path, _, last = key.rpartition(".")
    node = _find(root, path) if path else root
    return (node if node is not None and node["kind"] == "map" else None), last


def _flat(node: Node, path: str) -> Iterator[tuple[str, Any]]:
    for child in node["children"]:
        name = path + child["key"]
        if child["kind"] == "map":
            yield from _flat(child, f"{name}.")
        else:
            yield name, _plain(child)


def _plain(node: Node) -> Any:
    if node["kind"] == "map":
        return {child["key"]: _plain(child) for child in node["children"]}
    if node["kind"] == "list":
        return [_plain(child) for child in node["children"]]
    return node.get("text", "")


def _override(root: Node, text: str) -> None:
    """Replaces or adds one value, and the sections that lead to it. Raises ValueError."""
    origin = f"--set {shown(text)}"
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{origin}: expected key=value")
    reader = _Reader(origin, Path.cwd(), has_lines=False)
    base: Node = {"key": "", "origin": origin, "directory": str(Path.cwd())}
    new = reader.tree(value, key) or base | {"kind": "empty"}
    names = key.split(".")
    for number, name in enumerate(names):
        if not name:
            raise ValueError(f"{origin}: empty part in the key")
        if root["kind"] != "map":
            place = root["origin"]
            raise ValueError(f"{origin}: {shown(root['key'])} is not a section (at {place})")
        found = _child(root, name)
        if found is None:
            found = base | {"key": name, "kind": "map", "children": []}
            root["children"].append(found)
        if number + 1 == len(names):
            found.clear()
            found.update(new, key=name)
        root = found
