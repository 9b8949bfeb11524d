"""Pictures over varied parameters: curves over one, heat maps over two; and ranges, of quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tileloss.check.report.blocks import Plot
from tileloss.check.report.sheet import Sheet
from tileloss.check.report.style import SMALL, TEXT, Palette, fitted, text_width, wrapped

_MARKERS, _DASHES = "osD^vP", ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
_FURTHEST = 1e3  # of a range from its center
_CELL, _LINE = 30.0, 16.0  # a heat map's rows, a key's lines, pixels


@dataclass(frozen=True)
class Curve:
    """A value for each place of the axis, NaN where there is none."""

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Heat:
    """`values` [row][column], NaN where there is none; `texts` the same in words. Low is good; `best`: row and column."""

    title: str
    columns: tuple[str, tuple[str, ...]]
    rows: tuple[str, tuple[str, ...]]
    values: tuple[tuple[float, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    best: tuple[int, int] | None = None


Axis = tuple[str, tuple[str, ...]]  # its name and its places


def curve_chart(title: str, axis: Axis, curves: list[Curve]) -> Plot:
    """Places are evenly spaced. Up to six curves, told apart by markers too; the key stands below."""
    return partial(_Curves, title, axis, curves)


class _Curves(Sheet):
    left, right, plot, bottom = 52.0, 16.0, 200.0, 46.0  # pixels

    def __init__(
        self, title: str, axis: Axis, curves: list[Curve], width: float, palette: Palette
    ) -> None:
        super().__init__(width, palette, title)
        keys = [wrapped(curve.label, width - self.left - 40, SMALL) for curve in curves]
        below = sum(_LINE * len(key) + 4 for key in keys)
        self.open(10 + self.plot + self.bottom + below)
        room = width - self.left - self.right
        y = self.height - below
        self.area = self.axes(self.left, y - self.bottom - self.plot, room, self.plot)
        for number, (curve, key) in enumerate(zip(curves, keys, strict=True)):
            self._curve(number, curve, y + 8)
            for line in key:
                self.text(self.left + 38, y + 8, line)
                y += _LINE
            y += 4
        self._places(*axis, room)

    def _curve(self, number: int, curve: Curve, y: float) -> None:
        style: dict[str, Any] = {
            "marker": _MARKERS[number],
            "linestyle": _DASHES[number],
            "color": self.palette.lines[number],
            "linewidth": 1.8,
            "markersize": 5.0,
        }
        self.area.plot(range(len(curve.values)), curve.values, **style)
        ends, height = [self.x(end) for end in (self.left, self.left + 28)], self.y(y)
        sheet = self.figure.transFigure
        self.area.plot(ends, [height, height], transform=sheet, clip_on=False, **style)

    def _places(self, name: str, places: tuple[str, ...], room: float) -> None:
        axes = self.area
        axes.set_xlim(-0.3, len(places) - 0.7)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        widest = max(text_width(each, SMALL) + 8 for each in places)
        step = max(1, math.ceil(widest * len(places) / room))
        axes.set_xticks(range(0, len(places), step), places[::step])
        self.scale(axes, "y", name)
        axes.spines["bottom"].set_visible(True)
        axes.spines["bottom"].set_color(self.palette.muted)


def heat_map(heat: Heat) -> Plot:
    """Each cell has its value in words; the darker, the slower. The best has a frame."""

    return partial(_Heat, heat)


class _Heat(Sheet):
    def __init__(self, heat: Heat, width: float, palette: Palette) -> None:
        super().__init__(width, palette, heat.title)
        self.heat = heat
        self.down, self.across = f"{heat.rows[0]} ↓", f"{heat.columns[0]} →"
        labels = [text_width(each, SMALL) for each in (*heat.rows[1], self.down)]
        self.left = min(max(labels) + 10, 0.4 * width)
        self.cell = min((width - self.left) / len(heat.columns[1]), 110.0)
        columns = [text_width(each, SMALL) for each in heat.columns[1]]
        self.is_upright = max(columns) + 6 > self.cell
        below = _CELL * len(heat.rows[1]) + 4
        head = 20 + (max(columns) + 10 if self.is_upright else 20)
        self.open(8 + head + below)
        self.top = self.height - below
        self._draw(self.top - head)

    def _draw(self, head: float) -> None:
        heat, muted, write = self.heat, self.palette.muted, self.text
        across = fitted(self.across, self.width - self.left, SMALL)
        write(self.left, head + 8, across, color=muted)
        write(0, self.top - 10, fitted(self.down, self.left - 4, SMALL), color=muted)
        for number, column in enumerate(heat.columns[1]):
            x = self.left + (number + 0.5) * self.cell
            if self.is_upright:
                write(x, self.top - 5, column, rotation=90, ha="center", va="bottom")
            else:
                write(x, self.top - 10, column, ha="center")
        for number, row in enumerate(heat.rows[1]):
            y = self.top + (number + 0.5) * _CELL
            write(0, y, fitted(row, self.left - 8, SMALL))
            for place in range(len(heat.columns[1])):
                self._cell(number, place)

    def _cell(self, row: int, column: int) -> None:
        value, text = self.heat.values[row][column], self.heat.texts[row][column]
        color = self._color(value)
        is_best = (row, column) == self.heat.best
        x, y = self.left + column * self.cell, self.top + row * _CELL
        frame = Rectangle(
            (self.x(x + 1), self.y(y + _CELL - 1)),
            width=(self.cell - 2) / self.width,
            height=(_CELL - 2) / self.height,
            facecolor=color or "none",
            edgecolor=self.palette.ink if is_best else self.palette.grid,
            linewidth=2.5 if is_best else 0.5,
            transform=self.figure.transFigure,
        )
        self.figure.add_artist(frame)
        # A cell too small for its words leaves them to the table.
        if text_width(text, SMALL, is_best) <= self.cell - 4:
            ink = self.palette.ink if color is None else _ink_on(color)
            weight = "bold" if is_best else "normal"
            middle = x + self.cell / 2, y + _CELL / 2
            self.text(*middle, text, ha="center", color=ink, fontweight=weight)

    def _color(self, value: float) -> tuple[float, ...] | None:
        """By its distance to the best on a logarithmic scale, of which twice the best is the least range."""
        if not math.isfinite(value) or value <= 0:
            return None
        found = [
            each for row in self.heat.values for each in row if math.isfinite(each) and each > 0
        ]
        share = math.log(value / min(found)) / math.log(max(max(found) / min(found), 2.0))
        return tuple(matplotlib.colormaps["cividis_r"](0.05 + 0.9 * share))


def _ink_on(color: tuple[float, ...]) -> str:
    red, green, blue = color[:3]
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


@dataclass(frozen=True)
class Range:
    """low, middle and high of a row, on a scale that all share."""

    label: str
    low: float
    middle: float
    high: float


def range_chart(title: str, axis: str, ranges: list[Range], center: float) -> Plot:
    """A line from low to high, a dot at the middle. The scale is linear near `center` and logarithmic beyond 0.0001 from it."""

    return partial(_Ranges, title, axis, ranges, center)


class _Ranges(Sheet):
    def __init__(
        self,
        title: str,
        axis: str,
        ranges: list[Range],
        center: float,
        width: float,
        palette: Palette,
    ) -> None:
        super().__init__(width, palette, title)
        self.center, self.row_height = center, 32.0 if self.is_narrow else 21.0
        labels = max(text_width(each.label) for each in ranges)
        left = 28.0 if self.is_narrow else min(labels + 34, 0.5 * width)
        height, bottom = self.row_height * len(ranges), 46.0
        self.open(10 + height + bottom)
        top = self.height - bottom - height
        self.area = self.axes(left, top, width - left - 28, height)
        self.area.set_ylim(height, 0)
        self.area.set_xscale("symlog", linthresh=1e-4, linscale=0.5)
        room = width if self.is_narrow else left - 32
        for number, each in enumerate(ranges):
            self._range(each, number * self.row_height)
            up = top + number * self.row_height + (9 if self.is_narrow else self.row_height / 2)
            self.text(0, up, fitted(each.label, room), fontsize=TEXT)
        ends = [end for each in ranges for end in (each.low, each.high)]
        self._ticks(axis, max(abs(end - center) for end in ends))

    def _range(self, each: Range, top: float) -> None:
        y = top + (23 if self.is_narrow else self.row_height / 2)
        values = (value - self.center for value in (each.low, each.middle, each.high))
        low, middle, high = (min(max(value, -_FURTHEST), _FURTHEST) for value in values)
        self.area.hlines(y, low, high, color=self.palette.ours, linewidth=4)
        self.area.plot([middle], [y], "o", color=self.palette.ink, markersize=5)
        if self.is_narrow:  # as the labels stand between
            self.area.vlines(0, y - 7, y + 7, color=self.palette.ink, linewidth=1.2)

    def _ticks(self, name: str, furthest: float) -> None:
        axes = self.area
        decade = min(max(math.ceil(math.log10(max(furthest, 1e-4))), -3), 3)
        axes.set_xlim(-(10.0**decade), 10.0**decade)
        shown = [10.0**each for each in range(decade, -4, -2 if self.is_narrow else -1)]
        ticks = sorted({*(-each for each in shown), 0.0, *shown})
        axes.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        axes.set_yticks([])
        self.scale(axes, "" if self.is_narrow else "x", name)
        if not self.is_narrow:
            axes.axvline(0, color=self.palette.ink, linewidth=1.2)
