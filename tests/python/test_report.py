"""`tileloss report`: what the page says of each kind of line, files that are not as they should be, and the exit codes."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import report_lines as lines
from tileloss.tools.command import run
from tileloss.tools.report.page import Report, html, make_report
from tileloss.tools.report.plots import COLOURS

ROOT = Path(__file__).parents[2]


class Text(HTMLParser):
    """What a reader sees: the text of the page outside of pictures and styles, a line an element; and the tags there are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)
        if tag in ("svg", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside and data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " | ".join(self.texts)


def made(*found: lines.Line, file: str = "results.jsonl") -> Report:
    return make_report([(Path(file), n, line) for n, line in enumerate(found, 1)], "A title")


def text_of(*found: lines.Line) -> str:
    return Text(html(made(*found))).text


def pictures_of(*found: lines.Line) -> list[Any]:
    return [picture for section in made(*found).sections for picture in section.pictures]


def report(*arguments: str | Path) -> int:
    return run(["report", *map(str, arguments)])


# ---------------------------------------------------------------------------------------------------------------- sections


GPU = {"host_s": 4.2e-5, "timed_by": "graph replays", "isa": None, "threads": None}
COPY = {"group": "roofs", "title": "roofs of logits", "name": "copy", "rate": "2950 GB/s"}
FAILED = {"failed": "no <GPU>"}
TRACED = {"trace": {"row": 5, "label": 57, "stages": [{"stage": "state/max", "kernel": 4.875, "pass": True}]}}  # fmt: skip
MISSED = {"mutants": [{"name": "gradient_halved", "planted": True, "caught_by": []}], "pass": False}
PRODUCED = {"producer": "torch, torch 2.15.0", "outputs": "/tmp/tileloss-0i0ab4rv/outputs"}
STRICT = {"strict": {"findings": ["logits: read behind its end"]}, "pass": False}


def sizes() -> list[lines.Line]:
    start = lines.sweep_lines()[0]["case"]
    cases = [start | {"tokens": n, "vocab": v} for n in (8, 64) for v in (1000, 32000)]
    return [{"tool": "sweep", "case": case, "status": "ok", "median_ms": 80} for case in cases]


# Lines, and what the page says of them, as "a cell | the next", or after an ! does not say.
SAID: dict[str, tuple[list[lines.Line], list[str]]] = {
    "a passing check": ([lines.check_line()], [
        "✓ | Passed: checks: 1 of 1 check pass", "| dlogits/ulp_target | 0.5 | gradcheck |", "| loss_ref | 2.5 |", "!Failed",
        "!| options |",
    ]),
    "a failing check": ([lines.check_line(), lines.failed_check()], [
        "✗ | Failed: checks: 1 of 2 checks pass; 1 of 1 planted bug caught", "Failed: logp, lse, argmax.",
        "| ✗ | fail | logp | 3.25 | 1 | 3.25 |", "| ✗ | fail | lse | 1 | not finite |",
        "| ✓ | caught | gradient_zero | logp, dlogits/ulp_target |",
        "| - | not judged: the check fails already | gradient_halved |", "| - | without effect here | partial_tile_skipped |",
        "!not caught",
    ]),
    "a blind check": ([lines.check_line() | MISSED], [
        "0 of 1 planted bug caught", "Failed: bug gradient_halved.", "| ✗ | not caught |", "!not judged",
    ]),
    "what strict found": ([lines.check_line() | STRICT], ["Failed: strict.", "logits: read behind its end"]),
    "who made outputs": ([lines.check_line() | PRODUCED], ["| torch 2.15.0 |", "!torch, torch", "!/tmp/"]),
    "a row's stages": ([lines.check_line(gates=[]) | TRACED], ["Row 5, label 57", "| ✓ | pass | state/max | 4.875 |"]),
    "an audit": (lines.audit_lines(), [
        "✗ | Failed: audit: 1 failed, 1 refused, 2 pass, 1 not installed, 1 crashed, 1 timeout",
        "| case | torch 2.15.0 | tileloss 0.1.0 | liger | trl 1.16.0 |",
        "ce/softcap | ! | refused | ✓ | pass | - | not installed | ✗ | crashed |",
        "| ce/confident | ✗ | failed | dlogits/ulp_target | 12.5 | 1 | the message of failed | somebody/something#1",
        "!torch (torch",
    ]),
    "an audit without failures": (
        [each for each in lines.audit_lines() if each["status"] in ("pass", "refused", "not_installed")], [
        "✓ | Passed: audit: ", "!All that failed",
    ]),
    "invariance": (lines.invariance_lines(), [
        "2 of 6 keep every bit, 1 not measured", "| row order | as tileloss |",
        "| mine (torch 2.15.0) | logits | bfloat16 | ✗ | dlogits 0.001 |",
        "| torch 2.15.0 | logits | bfloat16 | ! | logp 0.07 | ! | logp 3 | ! | dlogits 2e-05 |",
        "| logits | bfloat16 | ✓ | same |", "| - | not installed |",
        "| batch split | logp | ! | logp 0.07 | 0.93 | 1 | 1.07 | 0.41 |",
    ]),
    "a comparison": (lines.compare_lines(), [
        "- | Measurements only: nothing here was checked",
        "a training step: 3.8 x as fast as transformers; cross-entropy from logits: 16 x as fast as torch eager",
        "A processor, avx2, 2 threads, torch 2.15.0.",
        "| contestant | time | x the fastest | rounds | memory above inputs and outputs | error of loss | of gradient |",
        "| transformers | 6.4 s | 3.765 | 1 | 3.9 GB | 1e-06 | 0.002 |", "!host",
    ]),
    "a comparison on a GPU": (
        [each | more for each, more in zip(lines.compare_lines(), (GPU, COPY, FAILED), strict=False)], [
        "contestants; 1 not measured", "| host | timed |", "| 0.042 ms | graph replays", "| 2950 GB/s |",
        "TileLoss, in place | no <GPU>",
    ]),
    "times": ([lines.bench_line(), lines.bench_line() | {"roofs_steady": False, "pass": "value_and_grad", "tflops": None}], [
        "2 times; the nearest to its roof, 2.00 x: cross_entropy [8, 1000] hidden 16 bfloat16 softcap=30, forward",
        "| forward | 0.5 ms | 0.4 ms | 0.25 ms | 2 | 0.1 TFLOP/s | 4.1 kB | 2.05 kB | 2 | yes |",
        "| value and grad | 0.5 ms | 0.4 ms | 0.25 ms | 2 | 20 GB/s | 4.1 kB | 2.05 kB | 2 | no |", "| losses | 512 B |",
    ]),
    "a sweep over one parameter": (lines.sweep_lines(), [
        "✗ | Failed: sweep: 8 cases: 6 ok, 2 out_of_memory", "| cross_entropy, tokens 64, vocab 32000, bfloat16, forward",
        "| threads auto | 0.25 ms | 2 | 4 |", "| ✗ | out_of_memory | 16 threads were refused",
    ]),
    "sizes, of which none is the best": (sizes(), ["| cross_entropy, bfloat16, forward", "!best case", "!80 ms | 4"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_the_page_says(name: str) -> None:
    found, said = SAID[name]
    text = text_of(*found) + " |"
    for each in said:
        assert (each.removeprefix("!") in text) != each.startswith("!"), (each, text)


def test_pictures_say_what_they_show() -> None:
    fifty = [lines.check_line(f"case{number}") for number in range(50)]
    pictures = pictures_of(*fifty, lines.failed_check())
    assert [each.name for each in pictures] == [*(f"gates-{n}" for n in range(1, 12)), "gates-51"]
    assert pictures[0].says == "logp: 0.25; dlogits/ulp_target: 0.5"
    assert pictures[-1].says.startswith("logp: 3.25; lse: not finite; argmax: 2, 0 allowed; ")
    (compare,) = pictures_of(*lines.compare_lines(), lines.compare_lines()[0] | COPY)
    assert "TileLoss, in place: 51 ms, 60 kB" in compare.says
    assert "float32 logits" not in compare.says and "copy" not in compare.says
    (bench,) = pictures_of(lines.bench_line())
    assert bench.says.endswith("forward: 0.5 ms, 2.00 x roof, 4.1 kB")
    curve, _ = pictures_of(*lines.sweep_lines())
    assert curve.says.endswith("median: auto 0.25, 1 0.5, 2 0.26, 16 not finite")
    (grid,) = pictures_of(*lines.grid_lines("avx2", "avx512"))
    assert "isa avx2: 512 16.3, 1024 28.7, " in grid.says and "isa avx512: 512 18.3" in grid.says
    (curve,) = pictures_of(*sizes())
    assert curve.says.endswith("median ms, vocab 32000: 8 80, 64 80")


def test_each_file_of_a_sweep_stands_for_itself() -> None:
    files = [(Path(folder, "r.jsonl"), 1, line) for folder in "ab" for line in lines.sweep_lines()]
    (section,) = make_report(files, "two").sections
    assert [len(sweep["cases"]) for sweep in section.shown.more] == [8, 8]


@pytest.fixture(scope="module")
def program_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return lines.program_files(tmp_path_factory.mktemp("program"))


def test_the_programs_own_lines_are_understood(
    program_files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(*program_files, "-o", tmp_path / "report.html", "--title", "Mine") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Passed: checks: 3 of 3 checks pass; ")
    names = [line.split(":")[0].strip() for line in out[1:] if line[:3] != "   "]
    assert names == ["checks", "bench", "sweep"]
    assert re.fullmatch(
        r"    cross_entropy \[8, 1000\] bfloat16, forward: .* ms, .* x roof", out[3]
    ), out
    text = Text((tmp_path / "report.html").read_text()).text
    assert "state/max" in text and "Row 5, label" in text  # the stages of a row
    assert "cross_entropy [8, 1000] " in text and "scratch of threads" in text
    assert text.startswith("Mine | Mine | ✓ | Passed: ")


# ------------------------------------------------------------------------------------------------------------------- files


SCRIPT = "<script>alert(1)</script>"


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    hostile = [
        lines.check_line(SCRIPT) | {"loss": SCRIPT, "producer": f'">{SCRIPT}', "note": SCRIPT},
        *({**line, "case": SCRIPT, "message": SCRIPT} for line in lines.audit_lines()[:1]),
        {**lines.audit_lines()[0], "case": "turned", "message": "\x1b[31m \u202e \u2066"},
        *({**line, "name": SCRIPT, "title": f"{SCRIPT} $x^2$"} for line in lines.compare_lines()),
        *({**line, "memory": SCRIPT, "errors": {}} for line in lines.compare_lines()),
        *(
            {**line, "implementation": SCRIPT, "varied": SCRIPT}
            for line in lines.invariance_lines()
        ),
        *(
            {**line, "case": {SCRIPT: SCRIPT, "a | b: c d": n}}
            for n, line in enumerate(lines.sweep_lines())
        ),
        {**lines.bench_line(), "buffers": {SCRIPT: 1}, "pass": SCRIPT, "options": {SCRIPT: SCRIPT}},
        {"tool": SCRIPT},
    ]
    path = lines.write(tmp_path / f"{SCRIPT.replace('/', '')}.jsonl", hostile)
    assert report(path, "-o", tmp_path / "report.html", "--title", SCRIPT) == 0
    page = (tmp_path / "report.html").read_text()
    assert "script" not in Text(page).tags
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert "$x^2$" in page  # no formula
    assert r"\x1b[31m \u202e \u2066" in page
    assert not set("\x1b\u202e\u2066") & set(page)


def test_the_page_is_self_contained_and_the_same_every_time(
    program_files: list[Path], tmp_path: Path
) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        assert report(*program_files, "-o", tmp_path / name) == 0
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    found = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)|(@import)', pages[0])
    assert found and all(a.startswith(("#", "data:,")) or b.startswith("#") for a, b, _ in found)
    ids = re.findall(r'\bid="([^"]+)"', pages[0])
    assert len(ids) == len(set(ids)) > 10
    for target in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', pages[0]):
        assert "".join(target) in ids
    light = [light for light, _ in COLOURS.values()]
    assert not [each for each in light if each in pages[0].partition("</head>")[2]]  # all variables


def test_lines_that_nothing_understands_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines.write(
        tmp_path / "odd.jsonl",
        [
            {"tool": "astrology"},
            {"hello": "world"},
            lines.check_line(gates="none"),
            lines.check_line() | {"pass": "yes"},
            {"tool": "sweep", "case": {}, "status": "ok"},
            {"impl": "kernel", "pass": "forward", "roof_ms": 1.0, "loss": "x", "tokens": None},
            {"tool": 5},
        ],
    )
    assert report(path, "-o", tmp_path / "report.html") == 0
    assert "unknown: 7 lines not understood" in capsys.readouterr().out
    text = Text((tmp_path / "report.html").read_text()).text
    assert "| odd.jsonl:1 | no section for astrology | {'tool': 'astrology'}" in text
    assert "| odd.jsonl:3 | gates: expected a list, got 'none'" in text
    assert "| odd.jsonl:4 | pass: expected true or false, got 'yes'" in text


ODD = [None, True, 0, 1, -1.5, 1e308, 10**400, math.inf, "", "a", [], [1], [{}], {}, {"a": None}, "\ud800\x00"]  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:9])
def test_no_field_can_break_the_report(value: Any) -> None:
    """Any value in the place of any other: in a section or among the unknown, never an error."""
    changed: list[lines.Line] = []
    for line in (
        lines.failed_check() | {"trace": {"row": 1, "stages": []}, "strict": {"findings": []}},
        lines.audit_lines()[0],
        lines.invariance_lines()[0],
        lines.compare_lines()[0],
        lines.bench_line(),
        lines.sweep_lines()[0],
        lines.sweep_lines()[0],
    ):
        changed += [{**line, name: value} for name in line]
        inner = [(name, part) for name, part in line.items() if part and isinstance(part, dict)]
        changed += [{**line, n: {**part, key: value}} for n, part in inner for key in part]
    found = made(*changed)
    assert sum(len(section.items) for section in found.sections) == len(changed)
    assert "</html>" in html(found)


def test_a_torn_last_line_is_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines.write(tmp_path / "torn.jsonl", [lines.check_line()])
    path.write_text(path.read_text() + '{"tool":"gradcheck","ver')
    assert report(path, "-o", tmp_path / "report.html") == 0
    out, err = capsys.readouterr()
    assert "checks: 1 of 1 check pass" in out
    assert f"warning: {path}: left out a torn last line" in err


def test_a_bad_line_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"tool":"sweep"}\nnot JSON\n{"tool":"sweep"}\n')
    assert report(path, "-o", tmp_path / "report.html") == 2
    assert f"{path}:2: not a JSON object" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_bad_usage_and_environment_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = lines.write(tmp_path / "there.jsonl", [lines.check_line()])
    empty = lines.write(tmp_path / "empty.jsonl", [])
    for arguments, code, message in (
        ([tmp_path / "missing.jsonl"], 3, "missing.jsonl"),
        ([empty], 2, f"{empty}: expected at least one line, got none"),
        ([there, "-o", tmp_path / "no" / "folder.html"], 3, "/no/folder.html: No such file"),
        ([there, "-o", tmp_path / "r.html", "--images", there], 2, "there.jsonl"),
        ([], 2, "RESULTS.jsonl is required"),
    ):
        assert report(*arguments) == code
        error = capsys.readouterr().err
        assert error.startswith("tileloss: ") and message in error and error.count("\n") == 1


def test_what_would_be_destroyed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inputs, whatever they are called, and what is no regular file; links are followed."""
    results, link, pipe = (tmp_path / name for name in ("r.jsonl", "link", "pipe"))
    lines.write(results, [lines.check_line()])
    before = results.read_bytes()
    link.symlink_to("r.jsonl")
    os.mkfifo(pipe)
    for output, message in (
        (link, f"-o: expected a file that is not read, got {link}"),
        (pipe, f"-o: expected a regular file, got {pipe}, a pipe"),
    ):
        assert report(str(results), "-o", str(output)) == 2
        assert capsys.readouterr().err == f"tileloss: {message}\n"
    assert results.read_bytes() == before and pipe.is_fifo() and link.is_symlink()
    page, link_to_page = tmp_path / "page.html", tmp_path / "current.html"
    link_to_page.symlink_to("page.html")
    assert report(str(results), "-o", str(link_to_page)) == 0
    assert link_to_page.is_symlink() and "TileLoss report" in page.read_text()
    images = tmp_path / "images"
    images.mkdir()
    (images / "gates-1.png").symlink_to("/dev/full")
    assert report(str(results), "-o", str(page), "--images", str(images)) == 2
    assert "--images: expected a regular file, got " in capsys.readouterr().err
    assert report(str(results), "-o", str(page), "--images", str(results)) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "current.html", "images", "link", "page.html", "pipe", "r.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_said(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package} here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    results = lines.write(tmp_path / "results.jsonl", [lines.check_line()])
    command = [sys.executable, "-m", "tileloss", "report", str(results)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 3
    expected = f"tileloss: report: no {package} here: pip install 'tileloss[check]'\n"
    assert done.stderr == expected


def test_pictures_are_written_for_light_and_dark(tmp_path: Path) -> None:
    results = lines.write(tmp_path / "results.jsonl", lines.compare_lines())
    assert report(results, "-o", tmp_path / "r.html", "--images", tmp_path / "images") == 0
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert names == {f"compare{end}" for end in ("-light.svg", "-dark.svg", ".png")}
    for theme, ink in zip(("light", "dark"), COLOURS["ink"], strict=True):
        text = (tmp_path / "images" / f"compare-{theme}.svg").read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert ink in text and "var(" not in text and "3.9 GB" in text
    assert (tmp_path / "images" / "compare.png").read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------------------------------- documents


def test_the_documents_pictures_are_there_for_both_themes_and_small() -> None:
    shown = 0
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for source, picture in re.findall(r'(srcset|src)="([^"]+)"', document.read_text()):
            path = document.parent / picture
            assert path.stat().st_size < 200_000, path
            ink = COLOURS["ink"][source == "srcset"]
            assert ink in path.read_text(), f"{path}: another theme's colours"
            shown += 1
    assert shown >= 4
