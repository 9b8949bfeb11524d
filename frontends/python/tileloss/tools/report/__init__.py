"""Shows result lines of any mix on one self-contained page: gradcheck, judge, audit, invariance, compare, bench, sweep."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tileloss.tools.files import output_place, write_whole
from tileloss.tools.printable import escaped
from tileloss.tools.results import read_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS.jsonl", help="result lines")
    page, title = Path("report.html"), "TileLoss report"
    add("-o", "--output", type=Path, default=page, metavar="FILE", help="the page; default: %(default)s")  # fmt: skip
    add("--images", type=Path, metavar="FOLDER", help="write every picture there, SVG and PNG")
    add("--title", default=title, metavar="TEXT", help="of the page; default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Exit code 0 whatever the results say: the report says it."""
    place = output_place("-o", options.output, options.results)
    records = [(p, n, line) for p in options.results for n, line in enumerate(read_results(p), 1)]
    if not records:
        files = ", ".join(dict.fromkeys(map(str, options.results)))
        raise ValueError(f"{files}: expected at least one line, got none")

    from tileloss.tools.report.page import html, make_report, write_images

    report = make_report(records, options.title)
    write_whole(place, html(report))
    images = write_images(report, options.images, options.results) if options.images else []
    print(report.verdict[1])
    for section in report.sections:
        print(f"  {section.name}: {section.shown.summary}")
        for detail in (item["detail"] for item in section.items if "detail" in item):
            print(f"    {detail}")
    size = options.output.stat().st_size / 1e3
    more = f", {len(images)} pictures to {options.images}" if images else ""
    print(escaped(f"{options.output}: {size:.0f} kB{more}"), file=sys.stderr)
    return 0
