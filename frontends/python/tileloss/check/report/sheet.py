"""A figure whose places are pixels from its top left corner."""

from __future__ import annotations

from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tileloss.check.report.style import SMALL, TITLE, Palette, wrapped

_TITLE_LINE = 20.0


class Sheet:
    """A chart's base. On a phone labels stand above what they name, not left of it."""

    def __init__(self, width: float, palette: Palette, title: str = "") -> None:
        self.width, self.palette, self.is_narrow = width, palette, width < 500
        self.lines = title_lines(title, width)

    def open(self, height: float) -> None:
        """Below the title there is room for so much."""
        self.height = titles_height(self.lines) + height
        self.figure = Figure(figsize=(self.width / 72, self.height / 72))
        self.titles(self.lines)

    def x(self, pixels: float) -> float:
        """In the figure's own coordinates, as those of y."""
        return pixels / self.width

    def y(self, pixels: float) -> float:
        return 1 - pixels / self.height

    def text(self, x: float, y: float, text: str, **more: Any) -> None:
        style: dict[str, Any] = {"fontsize": SMALL, "color": self.palette.ink}
        style["va"] = "center_baseline"
        self.figure.text(self.x(x), self.y(y), text, **(style | more))

    def titles(self, lines: list[str], top: float = 0.0) -> float:
        """Writes them below each other. Returns where they end."""
        for line in lines:
            self.text(0, top + _TITLE_LINE / 2, line, fontsize=TITLE, fontweight="bold")
            top += _TITLE_LINE
        return top

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        place = (self.x(left), self.y(top + height), self.x(width), height / self.height)
        return self.figure.add_axes(place, facecolor="none")

    def scale(self, axes: Axes, grid: Literal["x", "y", ""], name: str = "") -> None:
        """What all scales look like; "" has no grid."""
        axes.minorticks_off()
        axes.set_xlabel(name, fontsize=SMALL, color=self.palette.muted)
        axes.tick_params(length=0, labelsize=SMALL, labelcolor=self.palette.muted, pad=5)
        if grid:
            axes.grid(axis=grid, color=self.palette.grid, linewidth=1)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)


def title_lines(text: str, width: float) -> list[str]:
    return wrapped(text, width, TITLE, is_bold=True)


def titles_height(lines: list[str]) -> float:
    return _TITLE_LINE * len(lines)
