"""Shows result lines of any mix on one self-contained page: gradcheck, judge, audit, invariance, compare, bench, sweep.

fields.py       result lines, and reading their fields
blocks.py       what sections are made of
checks.py, audits.py, invariances.py, comparisons.py, times.py, sweeps.py    a section each
sheet.py, bars.py, grids.py, style.py    the pictures
page.py         which line goes where; the page and the files
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tileloss.check.files import output_place, write_whole
from tileloss.check.report.fields import read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS.jsonl", help="result lines"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page; default: %(default)s",
    )
    parser.add_argument(
        "--images", type=Path, metavar="FOLDER", help="write every picture there, SVG and PNG"
    )
    parser.add_argument("--title", default="TileLoss report", metavar="TEXT")


def run(_program: Path, options: argparse.Namespace) -> int:
    """Exit code 0 whatever the results say: the report says it."""
    place = output_place("-o", options.output, options.results)
    records = read_records(options.results)
    if not records:
        raise ValueError("RESULTS.jsonl: expected at least one line, got none")

    from tileloss.check.report.page import html, make_report, write_images

    report = make_report(records, options.title)
    write_whole(place, html(report))
    images = write_images(report, options.images, options.results) if options.images else []
    _, verdict = report.verdict
    print(verdict)
    for section in report.sections:
        print(f"  {section.name}: {section.summary}")
        for detail in section.details:
            print(f"    {detail}")
    size = options.output.stat().st_size / 1e3
    more = f", {len(images)} pictures to {options.images}" if images else ""
    print(f"{options.output}: {size:.0f} kB{more}", file=sys.stderr)
    return 0
