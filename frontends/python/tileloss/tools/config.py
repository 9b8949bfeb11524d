"""The keys of a config that the compiled program does not know. It reads the same file, and skips them."""

from __future__ import annotations

import errno
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from tileloss.testing._judge import Tensors
from tileloss.tools.case_file import read_tensors

# A config with one of these is for this package (what the compiled program says of them: src/support/config.cpp).
KEYS = (
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
_NAMES = "|".join(key.rpartition(".")[2] for key in KEYS)
_NAMED = re.compile(rf"""(^|[{{,])\s*["']?({_NAMES})["']?\s*:""", re.MULTILINE)


def needs_package(arguments: list[str]) -> bool:
    """Whether the config or a --set of a command line has such a key. A quick look, before anything is imported."""
    values = dict(pairwise(arguments))
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("--set=")]
    given += [value for flag, value in pairwise(arguments) if flag == "--set"]
    if any(text.partition("=")[0] in KEYS for text in given):
        return True
    inline = [a.partition("=")[2] for a in arguments if a.startswith("--config=")]
    path = Path(inline[-1] if inline else values.get("--config", ""))
    try:
        return path.is_file() and _NAMED.search(path.read_text(errors="replace")) is not None
    except OSError:
        return False  # the compiled program will say so


class _Entry(NamedTuple):
    value: Any  # text, or a list of it, or a map
    origin: str  # "c.yaml:12", "--set a=1"
    directory: Path  # relative paths start here


class Config:
    """A config with its overrides, as far as it concerns this package: every scalar is text until it is asked for.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no YAML map; names the file.
    """

    def __init__(self, file: Path, overrides: list[str]) -> None:
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no such config file", str(file))
        if not file.is_file():
            raise ValueError(
                f"--config: expected a regular file, as it is read more than once, got {file}"
            )
        self.file, self.overrides = file, overrides
        self.skipped: list[str] = []  # the keys that have been taken
        try:
            root = yaml.compose(file.read_text(), yaml.SafeLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not YAML: {error}") from None
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(f"{file}: expected keys and values")
        self._root = root
        self._entries: dict[str, _Entry] = {}
        self._add(root, "", file.absolute().parent)
        for text in overrides:
            key, _, value = text.partition("=")
            origin = f"--set {text}"
            try:
                parsed = yaml.load(value, yaml.BaseLoader)
            except yaml.YAMLError as error:
                raise ValueError(f"{origin}: not YAML: {error}") from None
            self._entries[key] = _Entry(parsed, origin, Path.cwd())

    def _add(self, node: Any, prefix: str, directory: Path) -> None:
        for key, value in node.value:
            name = prefix + str(key.value)
            origin = f"{self.file}:{key.start_mark.line + 1}"
            if isinstance(value, yaml.MappingNode):
                self._add(value, f"{name}.", directory)
            loader = yaml.BaseLoader("")
            self._entries[name] = _Entry(
                loader.construct_object(value, deep=True), origin, directory
            )

    def __contains__(self, key: str) -> bool:
        """A key, or a section of which a key is given."""
        return any(name == key or name.startswith(f"{key}.") for name in self._entries)

    def text(self, key: str, default: str | None = None) -> str | None:
        entry = self._entries.get(key)
        if entry is None:
            return default
        if not isinstance(entry.value, str) or not entry.value:
            self.fail(key, f"expected text, got {entry.value!r}")
        return entry.value

    def integer(self, key: str, default: int | None = None, minimum: int = 0) -> int | None:
        text = self.text(key)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d+", text) or int(text) < minimum:
            self.fail(key, f"expected an integer from {minimum} on, got '{text}'")
        return int(text)

    def number(self, key: str, default: float, minimum: float, maximum: float) -> float:
        text = self.text(key)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not minimum <= value <= maximum:
            self.fail(key, f"expected a number from {minimum:g} to {maximum:g}, got '{text}'")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        text = self.text(key)
        if text is None:
            return default
        if text not in choices:
            self.fail(key, f"expected one of {', '.join(choices)}, got '{text}'")
        return text

    def path_from(self, key: str, text: str) -> Path:
        """A relative path of the file starts at its folder, one of --set at the working directory."""
        return self._entries[key].directory / text

    def skip(self, *keys: str) -> None:
        """The compiled program is not to see these."""
        self.skipped += [key for key in keys if key in self and key not in self.skipped]

    def everything(self) -> dict[str, Any]:
        """The config as text, by dotted keys: for a tracker."""
        return {
            key: entry.value
            for key, entry in self._entries.items()
            if not isinstance(entry.value, dict)
        }

    def tree(self, *more: str) -> dict[str, Any]:
        """The config with its overrides and ``more`` of them as libtileloss_judge.so reads it, without the keys that have been
        skipped: of each value its kind, text, place and folder."""
        root = _node("", self._root, str(self.file), self.file.absolute().parent)
        _override(root, [*self.overrides, *more])
        for key in self.skipped:
            _leave_out(root, key.split("."))
        return root

    def files(self) -> dict[str, Tensors]:
        """The tensors of the files that the section source names, by path as the judge has it."""
        paths = [
            os.path.join(self._entries[key].directory, self.text(key) or "")
            for key in ("source.path", "source.teacher_path")
            if key in self
        ]
        return {path: read_tensors(Path(path)) for path in paths}

    def arguments(self, *more: str) -> list[str]:
        """Of the compiled program: the file, the overrides and ``more`` of them, and what it is to skip."""
        sets = [f"--set={text}" for text in (*self.overrides, *more)]
        return [f"--config={self.file}", *sets, *(f"--skip-key={key}" for key in self.skipped)]

    def fail(self, key: str, problem: str) -> NoReturn:
        origin = self._entries[key].origin if key in self._entries else str(self.file)
        raise ValueError(f"{origin}: {key}: {problem}")


def overrides_tree(overrides: list[str]) -> dict[str, Any]:
    """The tree of a command line without a file."""
    root = {"key": "", "kind": "map", "children": []}
    _override(root, overrides)
    return root


def _override(root: dict[str, Any], overrides: list[str]) -> None:
    for text in overrides:
        key, _, value = text.partition("=")
        parsed = yaml.compose(value, yaml.SafeLoader)
        origin = f"--set {text}"
        node = _node("", parsed, origin, Path.cwd(), has_lines=False)
        _put(root, key.split("."), node, origin)


def _node(
    key: str, node: Any, file: str, directory: Path, *, has_lines: bool = True
) -> dict[str, Any]:
    place = f"{file}:{node.start_mark.line + 1}" if has_lines and node is not None else file
    found: dict[str, Any] = {"key": key, "origin": place, "directory": str(directory)}
    if isinstance(node, yaml.MappingNode):
        children = []
        for name, value in node.value:
            child = _node(str(name.value), value, file, directory, has_lines=has_lines)
            if has_lines:
                child["origin"] = f"{file}:{name.start_mark.line + 1}"
            children.append(child)
        return found | {"kind": "map", "children": children}
    if isinstance(node, yaml.SequenceNode):
        children = [_node("", item, file, directory, has_lines=has_lines) for item in node.value]
        return found | {"kind": "list", "children": children}
    if node is None or (node.style is None and node.value in ("", "~", "null", "Null", "NULL")):
        return found | {"kind": "empty"}
    return found | {"kind": "scalar", "text": node.value, "quoted": node.style in ("'", '"')}


def _put(root: dict[str, Any], keys: list[str], node: dict[str, Any], origin: str) -> None:
    *sections, last = keys
    for name in sections:
        found = next((child for child in root["children"] if child["key"] == name), None)
        if found is None:
            found = {
                "key": name,
                "origin": origin,
                "directory": node["directory"],
                "kind": "map",
                "children": [],
            }
            root["children"].append(found)
        root = found
    others = [child for child in root["children"] if child["key"] != last]
    root["children"] = [*others, node | {"key": last}]


def _leave_out(root: dict[str, Any], keys: list[str]) -> None:
    for name in keys[:-1]:
        root = next((child for child in root["children"] if child["key"] == name), {"children": []})
    root["children"] = [child for child in root.get("children", []) if child["key"] != keys[-1]]


def translate_old_keys(config: Config) -> list[str]:
    """The keys of the JAX project that this one began as, in today's words: overrides for the compiled program."""
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
