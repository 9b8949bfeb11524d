"""A figure whose places are pixels from its top left corner."""

from __future__ import annotations

from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tileloss.check.report.style import SMALL, TITLE, Palette

_TITLE_LINE = 20.0


class Sheet:
    def __init__(self, width: float, height: float, palette: Palette) -> None:
        self.width, self.height, self.palette = width, height, palette
        self.figure = Figure(figsize=(width / 72, height / 72))

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


def titles_height(lines: list[str]) -> float:
    return _TITLE_LINE * len(lines)
