"""The report's page in headless Chromium: nothing from elsewhere, nothing too wide, no text over another, on phones and desktops,
light and dark. Debian's chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import report_lines as lines
from tileloss.tools.command import run
from tileloss.tools.report.plots import COLOURS

CHROMIUM = shutil.which("chromium")
WIDTHS = {"phone": 390, "desktop": 1280}
THEMES = {"light": 0, "dark": 1}

# What is wider than the page and in no box that scrolls; words that are broken; texts of a picture that lie over each other or
# leave it.
FINDINGS = """
() => {
  const name = (e) => `${e.tagName} ${e.className.baseVal ?? e.className} ${(e.textContent || "").trim().slice(0, 40)}`;
  const wide = [...document.body.querySelectorAll("*")]
    .filter((e) => !e.closest(".scroll") || e.matches(".scroll"))
    .filter((e) => e.getClientRects().length)
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)
    .map((e) => "wide: " + name(e));
  if (document.documentElement.scrollWidth > innerWidth) wide.push("wide: the page");
  // A cell is one line, or breaks between words alone: else its text would be wider than it is.
  for (const e of document.querySelectorAll("td, th"))
    if (e.scrollWidth > e.clientWidth + 1 || getComputedStyle(e).overflowWrap == "anywhere") wide.push("breaks: " + name(e));
  const bad = [];
  let pictures = 0, texts = 0;
  for (const svg of document.querySelectorAll("svg")) {
    const sheet = svg.getBoundingClientRect();
    if (!sheet.width) continue;
    pictures += 1;
    // A line's box is higher than its signs: a quarter of it is air.
    const boxes = [...svg.querySelectorAll("text")].map((e) => {
      const r = e.getBoundingClientRect();
      const air = Math.min(r.width, r.height) / 8;
      return { e, left: r.left, right: r.right, top: r.top + air, bottom: r.bottom - air };
    }).filter((b) => b.right > b.left);
    texts += boxes.length;
    boxes.forEach((a, i) => {
      if (a.left < sheet.left - 1 || a.right > sheet.right + 1 || a.top < sheet.top - 1 || a.bottom > sheet.bottom + 1)
        bad.push("outside: " + name(a.e));
      for (const b of boxes.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
          bad.push(`overlap: ${name(a.e)} | ${name(b.e)}`);
    });
  }
  return { findings: [...wide, ...bad], pictures, texts };
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("NOT RUN: there is no chromium (Debian's package of that name)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM)
        yield found
        found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of every kind of line."""
    folder = tmp_path_factory.mktemp("report")
    output = folder / "report.html"
    files = map(str, lines.everything(folder))
    assert run(["report", *files, "-o", str(output)]) == 0
    return output


COLORS = """
() => Object.fromEntries([["page", document.body, "backgroundColor"], ["text", document.body, "color"],
  ["picture", document.querySelector("svg text"), "fill"]].map(([n, e, p]) => [n, e ? getComputedStyle(e)[p] : ""]))
"""


def look_at(browser: Any, path: Path, width: str, theme: str) -> SimpleNamespace:
    """With all folds open."""
    size = {"width": WIDTHS[width], "height": 900}
    context = browser.new_context(viewport=size, color_scheme=theme)
    tab = context.new_page()
    messages: list[str] = []
    requests: list[str] = []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(path.as_uri())
    tab.evaluate("() => document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    seen = SimpleNamespace(messages=messages, requests=requests, colors=tab.evaluate(COLORS))
    seen.__dict__.update(tab.evaluate(FINDINGS))
    context.close()
    return seen


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_reads_well(browser: Any, page: Path, width: str, theme: str) -> None:
    seen = look_at(browser, page, width, theme)
    assert seen.messages == []
    assert seen.requests == [page.as_uri()]
    assert seen.findings == []
    assert seen.pictures > 10 and seen.texts > 200
    paper, ink, muted = (COLOURS[name][THEMES[theme]] for name in ("paper", "ink", "muted"))
    found = {name: _hex(color) for name, color in seen.colors.items()}
    assert (found["page"], found["text"]) == (paper, ink) and found["picture"] in (ink, muted)


def _hex(color: str) -> str:
    """Of "rgb(1, 2, 3)"."""
    return "#" + "".join(f"{int(part):02x}" for part in color[4:-1].split(","))


TEXTS = '<text x="5" y="20">one</text><text x="9" y="22">two</text>'
PLANTED = {
    "breaks: TD": '<div class="scroll"><table><td style="overflow-wrap: anywhere">x</table></div>',
    "wide: DIV planted": '<div class="planted" style="width: 1300px">x</div>',
    "outside: text  far": '<svg width="200" height="30"><text x="190" y="20">far out</text></svg>',
    "hello": '<script>console.log("hello")</script>',
    "nothing is not defined": "<script>nothing.there</script>",
    "missing.png": '<img src="missing.png">',
    "overlap: text  one | text  two": f'<svg width="200" height="30">{TEXTS}</svg>',
}


@pytest.mark.parametrize("finding", PLANTED)
def test_what_is_planted_is_found(browser: Any, finding: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.html"
    path.write_text(f"<!DOCTYPE html><body>{PLANTED[finding]}</body>")
    seen = look_at(browser, path, "phone", "light")
    found = [*seen.findings, *seen.messages, *(Path(each).name for each in seen.requests)]
    assert any(each.startswith(finding) for each in found), seen
