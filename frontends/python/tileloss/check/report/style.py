"""Colours, fonts and the way from a matplotlib figure to SVG and PNG.

Blue against grey and vermillion, which also colour-blind readers tell apart (Okabe and Ito's palette); lines differ in their
markers too. Inside a page colours are CSS variables, so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

WIDE, NARROW = 760.0, 340.0  # pixels: a desktop's column, a phone's
TEXT, SMALL, TITLE = 12.0, 11.0, 13.0  # font sizes, pixels
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a $ in a file's name is a $
    "hatch.linewidth": 1.5,
    "axes.unicode_minus": False,
}
# Those are no wider than DejaVu Sans, by which texts are measured.
_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"


@dataclass(frozen=True)
class Palette:
    """Colours by what they say. `others`: what is compared with ours; `a` to `f`: lines of a curve."""

    ink: str
    muted: str
    grid: str
    paper: str
    ours: str
    others: str
    fail: str
    a: str
    b: str
    c: str
    d: str
    e: str
    f: str

    @property
    def lines(self) -> tuple[str, ...]:
        return self.a, self.b, self.c, self.d, self.e, self.f


_COLOURS = {  # light, dark
    "ink": ("#1b1f24", "#e6e9ec"),
    "muted": ("#59636e", "#a2acb7"),
    "grid": ("#d9dee3", "#3a424b"),
    "paper": ("#ffffff", "#14181d"),
    "ours": ("#0072b2", "#56b4e9"),
    "others": ("#a3abb5", "#6c7682"),
    "fail": ("#c44e00", "#ff8b3d"),
    "a": ("#0072b2", "#56b4e9"),
    "b": ("#d55e00", "#ff8b3d"),
    "c": ("#009e73", "#2fc79a"),
    "d": ("#b0578f", "#e39ac6"),
    "e": ("#8a6d00", "#e6c229"),
    "f": ("#3b3f46", "#d4d8dd"),
}
LIGHT, DARK = (
    Palette(**{name: colours[theme] for name, colours in _COLOURS.items()}) for theme in (0, 1)
)
# Colours that nothing else has stand for the variables while a figure is drawn.
_SENTINELS = {name: f"#0102{number:02x}" for number, name in enumerate(_COLOURS)}
VARIABLES = Palette(**_SENTINELS)


def css_variables(palette: Palette) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in asdict(palette).items())


@contextmanager
def settings() -> Iterator[None]:
    """Figures are drawn and saved within it. A sign that the font lacks is the reader's font's to show: no reason to warn."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def svg(figure: Figure, name: str) -> str:
    """An <svg> element. `name` starts its ids, as several stand in one page; colours of VARIABLES become CSS variables."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    found = buffer.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.S)
    found = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", found)
    found = found.replace("'DejaVu Sans'", _FONTS)
    for variable, colour in _SENTINELS.items():
        found = found.replace(colour, f"var(--{variable})")
    return re.sub(
        r'(<svg [^>]*?)width="([\d.]+)pt" height="([\d.]+)pt"', _size, found, count=1
    ).rstrip()


def _size(match: re.Match[str]) -> str:
    return f'{match[1]}width="{match[2]}" height="{match[3]}"'


def png(figure: Figure) -> bytes:
    """On white, two pixels for one."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144, facecolor=LIGHT.paper)
    return buffer.getvalue()


@cache
def text_width(text: str, size: float = TEXT, is_bold: bool = False) -> float:
    """Pixels."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if is_bold else "normal")
    width, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def fitted(text: str, width: float, size: float = TEXT, is_bold: bool = False) -> str:
    """The text, shortened to what fits."""
    if text_width(text, size, is_bold) <= width:
        return text
    while text and text_width(text + "…", size, is_bold) > width:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, width: float, size: float = TEXT, is_bold: bool = False) -> list[str]:
    """The text in lines that fit, broken at spaces; none of an empty one."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, is_bold) <= width:
            lines[-1] = longer
        else:
            lines.append(fitted(word, width, size, is_bold))
    return lines
