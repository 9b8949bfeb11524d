"""The bar chart that most pictures are: rows with a label, and for each row a bar in every panel.

On a wide page the label stands left of the bars, on a phone above them. Sizes are in pixels, from the top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from tileloss.check.report.blocks import Plot
from tileloss.check.report.sheet import Sheet, title_lines, titles_height
from tileloss.check.report.style import SMALL, TEXT, Palette, fitted, text_width

_GAP = 14.0  # between panels
_HEAD_HEIGHT, _TICK_HEIGHT, _GROUP_GAP = 20.0, 20.0, 16.0
_BAR = 12.0
_REACH = _BAR / 2 + 2  # of a mark, from the middle of its bar
_LEAST_DECADE, _MOST_DECADE = 1e-4, 1e6  # of a logarithmic panel


class Look(Enum):
    OURS = "ours"
    OTHERS = "others"
    FAIL = "fail"


@dataclass(frozen=True)
class Bar:
    """`text` stands for the value, which may be NaN. `mark`: where a short line crosses the bar."""

    value: float
    text: str
    mark: float | None = None


@dataclass(frozen=True)
class Row:
    label: str
    bars: tuple[Bar, ...]
    look: Look = Look.OURS
    is_strong: bool = False


@dataclass(frozen=True)
class Panel:
    """`limit`: a line through all rows. Only a panel with one has an axis with numbers."""

    title: str
    is_log: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Group:
    """Rows that share their panels' scales."""

    title: str
    panels: tuple[Panel, ...]
    rows: tuple[Row, ...]

    @property
    def has_axis(self) -> bool:
        return any(panel.limit is not None for panel in self.panels)


def bar_chart(groups: list[Group]) -> Plot:
    return partial(_Bars, groups)


class _Bars(Sheet):
    def __init__(self, groups: list[Group], width: float, palette: Palette) -> None:
        super().__init__(width, palette)
        self.row_height = 35.0 if self.is_narrow else 21.0
        labels = [text_width(_signed(row), TEXT, True) for group in groups for row in group.rows]
        self.label_width = 0.0 if self.is_narrow else min(max(labels) + 12, 0.42 * width)
        self.open(sum(map(self._height, groups)) + _GROUP_GAP * (len(groups) - 1))
        top = 0.0
        for group in groups:
            self._group(group, top)
            top += self._height(group) + _GROUP_GAP

    def _height(self, group: Group) -> float:
        ticks = _TICK_HEIGHT if group.has_axis else 0
        rows = len(group.rows) * self.row_height
        return titles_height(title_lines(group.title, self.width)) + _HEAD_HEIGHT + rows + ticks

    def _group(self, group: Group, top: float) -> None:
        top = self.titles(title_lines(group.title, self.width), top)
        # The first number of an axis is centered below its end.
        margin = 16.0 if self.is_narrow and group.has_axis else self.label_width
        panel_width = (self.width - margin + _GAP) / len(group.panels) - _GAP
        for number, panel in enumerate(group.panels):
            left = margin + number * (panel_width + _GAP)
            title = fitted(panel.title, panel_width, SMALL)
            self.text(left, top + 8, title, color=self.palette.muted)
            self._panel(group, number, (left, top + _HEAD_HEIGHT, panel_width))
        for number, row in enumerate(group.rows):
            y = top + _HEAD_HEIGHT + number * self.row_height
            room = self.width if self.is_narrow else self.label_width - 12
            label = fitted(_signed(row), room, TEXT, row.is_strong)
            weight = "bold" if row.is_strong else "normal"
            down = 9.0 if self.is_narrow else self.row_height / 2
            self.text(0, y + down, label, fontsize=TEXT, fontweight=weight)

    def _panel(self, group: Group, place: int, where: tuple[float, float, float]) -> None:
        left, top, width = where
        panel, bars = group.panels[place], [row.bars[place] for row in group.rows]
        texts = max(text_width(bar.text, SMALL) for bar in bars) + 8
        height = len(bars) * self.row_height
        axes = self.axes(left, top, max(width - texts, 30.0), height)
        low, high = _range(panel, bars)
        axes.set_xscale("log" if panel.is_log else "linear")
        axes.set_xlim(low, high)
        axes.set_ylim(height, 0)
        self._axis(axes, panel)
        middle = 25.0 if self.is_narrow else self.row_height / 2
        places = [number * self.row_height + middle for number in range(len(bars))]
        for y, bar, row in zip(places, bars, group.rows, strict=True):
            self._bar(axes, bar, row.look, y, (low, high))
            shown = min(max(bar.value, low), high) if math.isfinite(bar.value) else high
            end = high if panel.limit is not None or bar.mark is not None else shown
            axes.annotate(
                bar.text,
                (end, y),
                xytext=(6, 0),
                textcoords="offset points",
                fontsize=SMALL,
                color=self.palette.ink,
                va="center_baseline",
                annotation_clip=False,
            )
        if panel.limit is not None:
            self._limit(axes, panel.limit, places)

    def _limit(self, axes: Axes, limit: float, places: list[float]) -> None:
        """A line through the chart; on a phone through each bar, as labels stand between them."""
        style: dict[str, Any] = {"color": self.palette.ink, "linewidth": 1.2, "clip_on": False}
        if not self.is_narrow:
            axes.axvline(limit, linestyle=(0, (4, 2)), **style)
            return
        for y in places:
            axes.vlines(limit, y - _REACH, y + _REACH, **style)

    def _bar(self, axes: Axes, bar: Bar, look: Look, y: float, limits: tuple[float, float]) -> None:
        low, high = limits
        color = getattr(self.palette, look.value)
        is_hatched = look is Look.FAIL
        end = min(max(bar.value, low), high) if math.isfinite(bar.value) else high
        axes.barh(
            y,
            end - low,
            left=low,
            height=_BAR,
            color="none" if is_hatched else color,
            edgecolor=color,
            linewidth=1.0,
            hatch="////" if is_hatched else None,
        )
        if bar.mark is not None and math.isfinite(bar.mark):
            axes.vlines(bar.mark, y - _REACH, y + _REACH, color=self.palette.ink, linewidth=2)

    def _axis(self, axes: Axes, panel: Panel) -> None:
        has_numbers = panel.limit is not None
        self.scale(axes, "x" if has_numbers and not self.is_narrow else "")
        axes.set_yticks([])
        axes.spines["left"].set_visible(not self.is_narrow)
        axes.spines["left"].set_color(self.palette.muted)
        if not has_numbers:
            axes.set_xticks([])
            return
        axes.xaxis.set_major_locator(LogLocator(numticks=5) if panel.is_log else MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()


def _signed(row: Row) -> str:
    return f"✗ {row.label}" if row.look is Look.FAIL else row.label


def _range(panel: Panel, bars: list[Bar]) -> tuple[float, float]:
    """Of the values, marks and the limit; a logarithmic one in whole decades."""
    found = [bar.value for bar in bars] + [bar.mark for bar in bars if bar.mark is not None]
    found = [value for value in found if math.isfinite(value)]
    if panel.limit is not None:
        found.append(panel.limit)
    if not panel.is_log:
        return 0.0, max(found, default=0.0) * (1.1 if panel.limit is not None else 1) or 1.0
    positive = [min(max(value, _LEAST_DECADE), _MOST_DECADE) for value in found if value > 0]
    low = 10.0 ** math.floor(math.log10(min(positive, default=1.0)) - 1e-9)
    high = 10.0 ** math.ceil(math.log10(max(positive, default=1.0)))
    return min(low, 0.01 * high), high
