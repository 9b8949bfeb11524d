"""From result lines to one HTML page, and its pictures to files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tileloss import __version__
from tileloss.check.files import output_place, write_whole
from tileloss.check.report import (
    audits,
    blocks,
    checks,
    comparisons,
    fields,
    invariances,
    style,
    sweeps,
    times,
)
from tileloss.check.report.blocks import Block, Fold, Mark, Picture, Section, plain
from tileloss.check.report.fields import Line, Record, printable

_SHOWN_TEXT = 160  # characters of a line that is not understood


# A section's name, in the order of the page: what makes an item of a line or raises ValueError, and what shows the items. bench's
# lines have no tool.
KINDS: dict[str, tuple[Callable[[Record], Any], Callable[[Sequence[Any]], Section]]] = {
    "check": (lambda record: checks.read(record.line), checks.section),
    "audit": (lambda record: fields.read(audits.Audited, record.line), audits.section),
    "invariance": (lambda record: invariances.read(record.line), invariances.section),
    "compare": (lambda record: comparisons.read(record.line), comparisons.section),
    "bench": (lambda record: times.read(record.line), times.section),
    "sweep": (sweeps.read, sweeps.section),
}
_TOOLS = {"gradcheck": "check", "judge": "check"}


@dataclass(frozen=True)
class Report:
    title: str
    sections: list[Section]
    files: dict[str, int]

    @property
    def verdict(self) -> tuple[Mark, str]:
        """Of the sections that judge something."""
        judged = [each for each in self.sections if each.outcome in (Mark.PASS, Mark.FAIL)]
        failed = [each for each in judged if each.outcome is Mark.FAIL]
        if failed:
            return Mark.FAIL, "Failed: " + "; ".join(f"{e.name}: {e.summary}" for e in failed)
        if judged:
            return Mark.PASS, "Passed: " + "; ".join(f"{e.name}: {e.summary}" for e in judged)
        return Mark.NONE, "Measurements only: nothing here was checked"

    @property
    def pictures(self) -> list[Picture]:
        return [each for section in self.sections for each in _pictures(section.blocks)]


def make_report(records: list[Record], title: str) -> Report:
    """Lines that no section understands get one of their own."""
    items: dict[str, list[Any]] = {name: [] for name in KINDS}
    unknown: list[tuple[Record, str]] = []
    for given in records:
        record = Record(printable(given.file), given.number, printable(given.line))
        name = kind_of(record.line)
        if name not in KINDS:
            unknown.append((record, f"no section for {name}"))
            continue
        try:
            items[name].append(KINDS[name][0](record))
        except ValueError as error:
            unknown.append((record, f"{name}: {error}"))
    sections = [KINDS[name][1](found) for name, found in items.items() if found]
    if unknown:
        sections.append(_unknown_section(unknown))
    files = Counter(printable(record.file) for record in records)
    return Report(printable(title), sections, files)


def kind_of(line: Line) -> str:
    """The section's name, or in words what the line is."""
    tool = line.get("tool")
    if isinstance(tool, str):
        return _TOOLS.get(tool, tool)
    return "bench" if "roof_ms" in line and "pass" in line else "a line without a tool"


def _unknown_section(unknown: list[tuple[Record, str]]) -> Section:
    columns: blocks.Columns[tuple[Record, str]] = {
        "line": lambda each: plain(f"{each[0].file}:{each[0].number}"),
        "why": lambda each: plain(each[1]),
        "text": lambda each: plain(_shortened(str(each[0].line))),
    }
    found: list[Block] = [blocks.table(unknown, columns)]
    summary = f"{blocks.count(len(unknown), 'line')} not understood"
    return Section("unknown", "Lines not understood", len(unknown), Mark.WARN, summary, found)


def _shortened(text: str) -> str:
    return text[:_SHOWN_TEXT] + "…" * (len(text) > _SHOWN_TEXT)


def _pictures(found: Sequence[Block]) -> list[Picture]:
    pictures: list[Picture] = []
    for block in found:
        if isinstance(block, Picture):
            pictures.append(block)
        elif isinstance(block, Fold):
            pictures += _pictures(block.blocks)
    return pictures


def html(report: Report) -> str:
    """A page that needs nothing else: styles and pictures are in it, and no script."""
    environment = Environment(
        loader=PackageLoader("tileloss.check.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "drawings": _drawings,
        "kind_of_block": lambda block: type(block).__name__,
        "light": style.css_variables(style.LIGHT),
        "dark": style.css_variables(style.DARK),
        "version": __version__,
    }
    return environment.get_template("page.html.j2").render(report=report)


def _drawings(picture: Picture) -> list[tuple[str, Markup]]:
    """One for desktops and one for phones."""
    found = []
    for name, width in (("wide", style.WIDE), ("narrow", style.NARROW)):
        with style.settings():
            drawn = style.svg(picture.plot(width, style.VARIABLES).figure, f"{picture.name}-{name}")
        found.append((name, Markup(drawn)))
    return found


def write_images(report: Report, folder: Path, inputs: Sequence[Path] = ()) -> list[Path]:
    """NAME-light.svg, NAME-dark.svg and NAME.png of every picture. Raises OSError, and ValueError as output_place."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--images: expected a folder, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def write(name: str, data: str | bytes) -> None:
        write_whole(output_place("--images", folder / name, inputs), data)
        written.append(folder / name)

    for picture in report.pictures:
        for theme, palette in (("light", style.LIGHT), ("dark", style.DARK)):
            with style.settings():
                drawn = style.svg(picture.plot(style.WIDE, palette).figure, picture.name)
            write(f"{picture.name}-{theme}.svg", drawn + "\n")
        with style.settings():
            write(f"{picture.name}.png", style.png(picture.plot(style.WIDE, style.LIGHT).figure))
    return written
