"""From result lines to one HTML page, and its pictures to files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from tileloss import __version__
from tileloss.tools.files import output_place, write_whole
from tileloss.tools.report import plots
from tileloss.tools.report.kinds import KINDS, Shown
from tileloss.tools.report.lines import Line, count, grouped, printable, table
from tileloss.tools.report.plots import COLOURS, Picture

Record = tuple[Path, int, Line]  # a line, and where it stands


class Section(NamedTuple):
    """Lines of a kind with what was read of them, and what they come to."""

    name: str
    items: list[Line]
    shown: Shown

    @property
    def pictures(self) -> list[Picture]:
        return sum((item.get("pictures", []) for item in self.items), self.shown.pictures)


class Report(NamedTuple):
    title: str
    sections: list[Section]
    files: dict[str, int]

    @property
    def verdict(self) -> tuple[str, str]:
        """Of the sections that judge something."""
        for mark, word in (("fail", "Failed"), ("pass", "Passed")):
            found = [each for each in self.sections if each.shown.mark == mark]
            if found:
                return mark, f"{word}: " + "; ".join(f"{e.name}: {e.shown.summary}" for e in found)
        return "none", "Measurements only: nothing here was checked"


def make_report(records: Sequence[Record], title: str) -> Report:
    """Lines that no section understands get one of their own. Of files the names are shown, not where they were."""
    items: dict[str, list[Line]] = {name: [] for name in KINDS}
    unknown = []
    for path, number, given in records:
        line = printable(given)
        line |= {"path": str(path), "file": printable(path.name), "number": number}
        is_time = "roof_ms" in line and "pass" in line  # older ones of bench have no tool
        tool = str(line.get("tool", "bench" if is_time else "a line without a tool"))
        name = "checks" if tool in ("gradcheck", "judge") else tool
        try:
            if name not in KINDS:
                raise ValueError(f"no section for {name}")
            items[name].append(line | KINDS[name][0](line))
        except ValueError as error:
            text = str(printable(given))
            why = {"where": f"{line['file']}:{number}", "why": str(error)}
            unknown.append(why | {"text": text[:160] + "…" * (len(text) > 160)})
    sections = [Section(n, found, KINDS[n][1](found)) for n, found in items.items() if found]
    if unknown:
        shown = Shown(f"{count(len(unknown), 'line')} not understood", "warn", [])
        sections.append(Section("unknown", unknown, shown))
    return Report(printable(title), sections, Counter(printable(path.name) for path, *_ in records))


def html(report: Report) -> str:
    """A page that needs nothing else: styles and pictures are in it, and no script."""
    loader = PackageLoader("tileloss.tools.report")
    page = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    variables = {name: f"var(--{name})" for name in COLOURS}
    page.globals |= {"colours": COLOURS, "grouped": grouped, "table": table, "version": __version__}
    page.globals["drawing"] = lambda picture: Markup(plots.svg(picture, variables))
    return page.get_template("page.html.j2").render(report=report)


def write_images(report: Report, folder: Path, inputs: Sequence[Path] = ()) -> list[Path]:
    """NAME-light.svg, NAME-dark.svg and NAME.png of every picture. Raises OSError, and ValueError as output_place."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--images: expected a folder, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for picture in (picture for section in report.sections for picture in section.pictures):
        files = {".png": plots.saved(picture, "png")}
        for place, theme in enumerate(("light", "dark")):
            colours = {name: both[place] for name, both in COLOURS.items()}
            files[f"-{theme}.svg"] = plots.svg(picture, colours).encode() + b"\n"
        for end, data in files.items():
            written.append(folder / f"{picture.name}{end}")
            write_whole(output_place("--images", written[-1], inputs), data)
    return written
