"""The pictures, of matplotlib's stock plots, and their way to SVG and PNG.

Blue against grey and vermillion, which also colour-blind readers tell apart (Okabe and Ito's palette); lines differ in their
markers too. Labels stand above what they name, so that a picture is legible on a phone, where it shrinks.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Light and dark. Pictures are drawn in the light ones, which are then replaced; what is no paper and no ink serves both.
COLOURS = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1b1f24", "#e6e9ec"),
    "muted": ("#59636e", "#a2acb7"),
    "grid": ("#d9dee3", "#3a424b"),
    "ours": ("#0072b2", "#56b4e9"),
    "others": ("#a3abb5", "#6c7682"),
    "fail": ("#c44e00", "#ff8b3d"),
}
_INK, _MUTED, _GRID = (COLOURS[name][0] for name in ("ink", "muted", "grid"))
_WIDTH, _ROW, _LINE, _SIGN = 560, 36, 19, 7.2  # pixels: of a picture, a row, a line, a sign
_CYCLE = cycler(color=("#0072b2", "#d55e00", "#009e73", "#b0578f", "#9a7a00", "#7c848d")) + cycler(
    marker=list("osD^vP"), linestyle=["-", "--", "-.", ":", "-", "--"]
)
_SETTINGS: Any = {
    "axes.edgecolor": _MUTED, "axes.facecolor": "none", "axes.labelcolor": _MUTED, "axes.prop_cycle": _CYCLE,
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlelocation": "left", "axes.titlesize": 10,
    "axes.titleweight": "bold", "font.family": "DejaVu Sans", "font.size": 9, "grid.color": _GRID,
    "hatch.linewidth": 1.2, "legend.frameon": False, "lines.markersize": 4, "text.color": _INK, "xtick.color": _MUTED,
    "ytick.color": _MUTED, "svg.fonttype": "none", "text.parse_math": False,  # text stays text, a $ is a $
}  # fmt: skip


class Row(NamedTuple):
    """Of bars or a line: values, which may be NaN, with texts that stand for them, and marks, where a short line crosses the
    bar. `look`: one of COLOURS; "fail" is hatched too."""

    label: str
    values: Sequence[float]
    texts: Sequence[str]
    look: str = "ours"
    marks: Sequence[float] = (math.nan, math.nan)


class Picture(NamedTuple):
    """`name`: of its file, unique in a report. `groups`: rows by their title. With an axis these are lines over the places
    `across`; else bars in the panels of these names, with a line at the limit, if there is one, and no longer than 1.25 of it."""

    name: str
    caption: str
    groups: dict[str, list[Row]]
    across: list[str]
    limit: float = math.inf
    axis: str = ""

    @property
    def says(self) -> str:
        """The same in words, for those who do not see it."""
        found = [(title, row) for title, rows in self.groups.items() for row in rows]
        texts = [(", ".join(filter(None, (title, row.label))), row.texts) for title, row in found]
        return "; ".join(f"{start}: {', '.join(says)}" for start, says in texts)


def _bars(picture: Picture) -> Figure:
    counts = [len(rows) for rows in picture.groups.values()]
    height = _ROW * sum(counts) + 4 * _LINE * len(counts)
    figure = Figure(figsize=(_WIDTH / 96, height / 96), layout="constrained")
    panels = picture.across
    grid = figure.subplots(len(counts), len(panels), squeeze=False, height_ratios=counts)
    for (title, rows), line in zip(picture.groups.items(), grid, strict=True):
        for place, axes in enumerate(line):
            _panel(axes, rows, place, _WIDTH / len(panels), picture.limit)
            axes.set_xlabel(panels[place], loc="left")
        for y, row in enumerate(rows):  # labels may reach into the next panel
            text = _fitted("✗ " * (row.look == "fail") + row.label)
            line[0].text(0, y - 0.24, text, va="bottom", transform=line[0].get_yaxis_transform())
        line[0].set_title(textwrap.fill(title, 62, max_lines=3))
    for written in (text for axes in figure.axes for text in axes.texts):
        written.set_in_layout(False)
    return figure


def _panel(axes: Axes, rows: list[Row], place: int, width: float, limit: float) -> None:
    found = [v for row in rows for v in (row.values[place], row.marks[place]) if math.isfinite(v)]
    high = min(max(found, default=0.0) or 1.0, 1e300) if limit == math.inf else 1.25 * limit
    for y, row in enumerate(rows):
        value, mark, colour = row.values[place], row.marks[place], COLOURS[row.look][0]
        end = min(max(value, 0.0), high) if math.isfinite(value) else high
        fill, hatch = ("none", "////") if row.look == "fail" else (colour, None)
        axes.barh(y, end, 0.36, facecolor=fill, edgecolor=colour, hatch=hatch)
        axes.plot([mark], [y], "|", color=_INK, markersize=12, markeredgewidth=1.5)
        end = high if limit < math.inf else max(end, mark) if math.isfinite(mark) else end
        axes.annotate(row.texts[place], (end, y), (5, 0), textcoords="offset points", va="center")
    # The texts have their room at the end of the scale.
    share = 1 - min((max(len(row.texts[place]) for row in rows) * _SIGN + 14) / width, 0.6)
    axes.set(xlim=(0, high / share), ylim=(len(rows) - 0.5, -0.8), xticks=[], yticks=[])
    if limit < math.inf:
        axes.axvline(limit, color=_INK, linestyle="--")


def _lines(picture: Picture) -> Figure:
    """Up to six of them; the others are in the table."""
    ((title, rows),) = picture.groups.items()
    height = 280 + _LINE * len(rows[:6])
    figure = Figure(figsize=(_WIDTH / 96, height / 96), layout="constrained")
    axes, places = figure.subplots(), [_fitted(place, 150) for place in picture.across]
    for row in rows[:6]:
        axes.plot(row.values, label=" " + _fitted(row.label, _WIDTH - 60))  # none begins with "_"
    figure.legend(loc="outside lower left", handlelength=3.5)
    is_upright = sum(len(place) + 2 for place in places) * _SIGN > 0.85 * _WIDTH
    axes.set_xticks(range(len(places)), places, rotation=90 if is_upright else 0)
    axes.set(xlabel=picture.axis, ylim=(0, None), title=textwrap.fill(title, 62, max_lines=3))
    axes.grid(axis="y")
    return figure


def _fitted(text: str, width: float = _WIDTH) -> str:
    return text if len(text) * _SIGN <= width else text[: int(width / _SIGN) - 1] + "…"


def saved(picture: Picture, kind: str) -> bytes:
    """As "svg" or "png", two pixels for one. A sign that the font lacks is the reader's font's to show."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else None
    more: Any = {"transparent": True} if kind == "svg" else {"facecolor": COLOURS["paper"][0]}
    settings, buffer = _SETTINGS | {"svg.hashsalt": picture.name}, io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = _lines(picture) if picture.axis else _bars(picture)
        figure.savefig(buffer, format=kind, dpi=192, metadata=nothing, **more)
    return buffer.getvalue()


def svg(picture: Picture, colours: dict[str, str]) -> str:
    """An <svg> element. The picture's name starts its ids, as several stand in one page."""
    text = saved(picture, "svg").decode()
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{picture.name}-", text)
    # Those are no wider than DejaVu Sans, by which texts were measured.
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, Arial, sans-serif")
    for name, (light, _) in COLOURS.items():
        text = text.replace(light, colours[name])
    return text[text.index("<svg") :].rstrip()
