"""`tileloss report`: what the page says of each kind of line, files that are not as they should be, and the exit codes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import report_lines as lines
from tileloss.check.command import run
from tileloss.check.report.blocks import Mark, Table
from tileloss.check.report.fields import Record
from tileloss.check.report.page import Report, html, make_report
from tileloss.check.report.style import DARK, LIGHT

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
    records = [Record(file, number, line) for number, line in enumerate(found, start=1)]
    return make_report(records, "A title")


def text_of(*found: lines.Line) -> str:
    return Text(html(made(*found))).text


def report(*arguments: str | Path) -> int:
    return run(lines.PROGRAM, ["report", *map(str, arguments)])


# ---------------------------------------------------------------------------------------------------------------- sections


def test_a_passing_check_passes() -> None:
    found = made(lines.check_line())
    assert found.verdict == (Mark.PASS, "Passed: checks: 1 of 1 check pass")
    text = Text(html(found)).text
    assert "| dlogits/ulp_target | 0.5 |" in text  # the gate nearest to its limit, and its share
    assert "1 more gate without allowance: all 0." in text
    assert "| loss_ref | 2.5 |" in text


def test_a_failing_check_says_what_failed() -> None:
    found = made(lines.check_line(), lines.failed_check())
    mark, verdict = found.verdict
    assert mark is Mark.FAIL
    assert verdict == "Failed: checks: 1 of 2 checks pass; 1 of 2 planted bugs caught"
    text = Text(html(found)).text
    assert "Failed: logp, lse, argmax, mutant gradient_halved." in text
    assert "| ✗ | fail | logp | 3.25 | 1 |" in text
    assert "| ✗ | fail | lse | not finite | 1 |" in text
    assert "| ✗ | not caught | gradient_halved" in text
    assert "| - | without effect here | partial_tile_skipped" in text


def test_of_many_checks_the_worst_are_shown() -> None:
    found = [lines.check_line(f"case{number}") for number in range(50)]
    report = made(*found, lines.failed_check())
    assert len(report.pictures) == 13  # one of all, those of the first twelve
    first, *others = report.pictures
    assert first.says.startswith("51. ce_options: 3.25; 1. case0: 0.5; ")
    assert first.says.count(";") == 39 and first.caption.endswith("The 40 that come nearest.")
    assert [picture.name for picture in others][-1] == "gates-51"


def test_measurements_alone_have_no_verdict() -> None:
    mark, verdict = made(*lines.compare_lines()).verdict
    assert mark is Mark.NONE and verdict.startswith("Measurements only")


def test_an_audit_is_a_table_of_implementations() -> None:
    found = made(*lines.audit_lines())
    assert found.verdict[0] is Mark.FAIL
    text = Text(html(found)).text
    assert (
        "| case | torch (torch 2.15.0) | tileloss (tileloss 0.1.0) | liger | trl (trl 1.16.0) |"
        in text
    )
    row = "ce/softcap | ! | refused | ✓ | pass | - | not installed | ✗ | crashed |"
    assert row in text
    assert (
        "| ce/confident | ✗ | failed | dlogits/ulp_target | 12.5 | 1 | the message of failed"
        in text
    )


def test_refusals_and_missing_packages_fail_no_audit() -> None:
    good = [
        line
        for line in lines.audit_lines()
        if line["status"] in ("pass", "refused", "not_installed")
    ]
    assert made(*good).verdict[0] is Mark.PASS


def test_invariance_says_what_keeps_its_bits() -> None:
    text = text_of(*lines.invariance_lines())
    assert "2 of 6 keep every bit, 1 not measured" in text
    assert "| row order | as tileloss |" in text
    assert "| mine | logits | bfloat16 | ✗ | dlogits 0.001 |" in text
    assert "| torch | logits | bfloat16 | ! | logp 0.07 | ! | logp 3 | ! | dlogits 2e-05 |" in text
    assert "| tileloss | logits | bfloat16 | ✓ | same |" in text
    assert "| liger | logits | bfloat16 | - | not installed |" in text
    row = "| torch | logits | bfloat16 | batch split | logp | ! | differ | 0.93 | 1 | 1.07 | 41 % |"
    assert row in text


def test_a_comparison_on_a_gpu_has_roofs_and_failures() -> None:
    of_gpu = [
        {name: x for name, x in line.items() if name not in ("isa", "threads")}
        | {"host_s": 4.2e-5, "timed_by": "graph replays"}
        for line in lines.compare_lines()
    ]
    roof = of_gpu[0] | {
        "group": "roofs",
        "title": "roofs of logits",
        "name": "copy",
        "errors": None,
        "rate": "2950 GB/s",
    }
    start = ("tool", "version", "group", "title", "machine", "versions")
    failed = {name: of_gpu[2][name] for name in start} | {
        "name": "QuACK",
        "failed": "Error: no <GPU>",
    }
    found = made(roof, *of_gpu, failed)
    (section,) = found.sections
    assert section.summary.endswith("; 1 not measured")
    assert [picture.name for picture in found.pictures] == ["compare", "compare-cross_entropy"]
    assert "copy" not in found.pictures[0].says
    of_roofs, *_, last = [block for block in section.blocks if isinstance(block, Table)]
    assert (
        of_roofs.heads[-3:] == ("rate", "host", "timed") and "error of loss" not in of_roofs.heads
    )
    assert [cell.text for cell in of_roofs.rows[0]][-3:] == [
        "2950 GB/s",
        "0.042 ms",
        "graph replays",
    ]
    assert [cell.text for cell in last.rows[0]] == [
        "cross-entropy from logits",
        "QuACK",
        "Error: no <GPU>",
    ]


def test_a_comparison_has_the_fastest_of_each_first() -> None:
    found = made(*lines.compare_lines())
    (section,) = found.sections
    assert section.summary == (
        "a training step: 3.8 x as fast as transformers; cross-entropy from logits: 16 x as fast as torch eager"
    )
    assert [picture.name for picture in found.pictures] == ["compare", "compare-cross_entropy"]
    assert "float32 logits" not in found.pictures[0].says
    assert "torch eager, float32 logits: 900 ms, 3 GB" in found.pictures[1].says
    text = Text(html(found)).text
    assert "A processor, avx2, 2 threads, torch 2.15.0." in text
    assert "| transformers | 6.4 s | 3.76 | 1 | 3.9 GB | 1e-06 | 0.002 |" in text


def test_a_sweep_over_one_parameter_is_curves() -> None:
    found = made(*lines.sweep_lines())
    (picture,) = found.pictures
    assert (
        "cross_entropy [64, 32000] bfloat16 forward: auto 0.25 ms, 1 0.5 ms, 2 0.26 ms, 16 not finite ms"
        in picture.says
    )
    assert found.verdict[0] is Mark.FAIL  # as one case has no time
    text = Text(html(found)).text
    assert (
        "| cross_entropy [64, 32000] bfloat16 forward | threads auto | 0.25 ms | 2 x | 4 |" in text
    )
    assert "out_of_memory | 16 threads were refused" in text


def test_a_sweep_over_two_parameters_is_a_heat_map_with_the_best_over_the_others() -> None:
    found = []
    for isa, slower in (("avx2", 2.0), ("avx512", 1.0)):
        for rows in (1, 8, 32):
            for columns in (512, 1024, 2048):
                case = {"loss": "cross_entropy", "tokens": 8, "vocab": 9000, "pass": "forward"}
                case |= {"isa": isa, "row_block": rows, "vocab_block": columns}
                ms = slower * (rows + columns / 512)
                found.append({"tool": "sweep", "case": case, "status": "ok", "median_ms": ms})
    (picture,) = made(*found).pictures
    assert picture.says.startswith("1, 512: 2; 1, 1024: 3; ")
    assert (
        picture.caption
        == "Darker is slower; a frame marks the best. Each cell is the best over isa."
    )


def test_sizes_are_no_choice() -> None:
    found = []
    for tokens in (8, 64):
        for vocab in (1000, 32000):
            case = {"loss": "cross_entropy", "tokens": tokens, "vocab": vocab, "pass": "forward"}
            found.append(
                {"tool": "sweep", "case": case, "status": "ok", "median_ms": tokens * vocab / 1e5}
            )
    report = made(*found)
    assert report.pictures[0].caption == "Darker is slower."
    assert "| cross_entropy forward | 80 ms" not in Text(html(report)).text


def test_each_file_of_a_sweep_stands_for_itself() -> None:
    first = [Record("a.jsonl", n, line) for n, line in enumerate(lines.sweep_lines(), 1)]
    second = [Record("b.jsonl", n, line) for n, line in enumerate(lines.sweep_lines(), 1)]
    found = make_report(first + second, "two")
    assert [picture.name for picture in found.pictures] == [
        "sweep-1-threads-1",
        "sweep-2-threads-1",
    ]


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
    assert "#0102" not in pages[0]  # every colour has become a variable


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
    assert f"{path}:1 | no section for astrology | {{'tool': 'astrology'}}" in text
    assert f"{path}:3 | check: gates: expected a list of objects, got 'none'" in text
    assert f"{path}:4 | check: pass: expected true or false, got 'yes'" in text


ODD = [
    None,
    True,
    0,
    1,
    -1.5,
    1e308,
    10**400,
    float("inf"),
    "",
    "a",
    [],
    [1],
    [{}],
    {},
    {"a": None},
    "\ud800\x00",
]


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
    assert sum(section.lines for section in found.sections) == len(changed)
    if value in (0, 1e308, "\ud800\x00"):
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
        ([empty], 2, "RESULTS.jsonl: expected at least one line, got none"),
        ([there, "-o", tmp_path / "no" / "folder.html"], 3, "/no/folder.html: No such file"),
        ([there, "-o", tmp_path / "r.html", "--images", there], 2, "there.jsonl"),
    ):
        assert report(*arguments) == code
        error = capsys.readouterr().err
        assert error.startswith("tileloss: ") and message in error and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        report()


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
        (results, f"-o: expected a file that is not read, got {results}"),
        (link, f"-o: expected a file that is not read, got {link}"),
        (pipe, f"-o: expected a regular file, got {pipe}, a pipe"),
        (tmp_path, f"-o: expected a regular file, got {tmp_path}, a folder"),
        ("/dev/full", "-o: expected a regular file, got /dev/full, a device"),
        ("-", "-o: expected a file to write, got '-'"),
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
    both = ("compare", "compare-cross_entropy")
    assert names == {f"{name}{end}" for name in both for end in ("-light.svg", "-dark.svg", ".png")}
    inks = {"light": "#1b1f24", "dark": "#e6e9ec"}
    for theme, ink in inks.items():
        text = (tmp_path / "images" / f"compare-{theme}.svg").read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert ink in text and "var(" not in text and "3.9 GB" in text
    assert (tmp_path / "images" / "compare.png").read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------------------------------- documents


COMMANDS = re.findall(
    r"^(?:python -m|build/release/)\S* ?.*$", (ROOT / "docs/users/report.md").read_text(), re.M
)


def test_the_documents_commands_run(tmp_path: Path) -> None:
    """One after the other, as they stand in docs/users/report.md, in a folder that looks like the repository."""
    for entry in ROOT.iterdir():
        if entry.name != "build":
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "release").symlink_to(lines.PROGRAM.parent)
    assert len(COMMANDS) >= 3
    for line in COMMANDS:
        command = re.sub(r"^python ", f"{sys.executable} ", line.partition("  #")[0])
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert list(tmp_path.glob("*.html"))
    shutil.rmtree(tmp_path / "build")


def test_the_documents_pictures_are_there_for_both_themes_and_small() -> None:
    shown = 0
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for source, picture in re.findall(r'(srcset|src)="([^"]+)"', document.read_text()):
            path = document.parent / picture
            assert path.stat().st_size < 200_000, path
            ink = DARK.ink if source == "srcset" else LIGHT.ink
            assert ink in path.read_text(), f"{path}: another theme's colours"
            shown += 1
    assert shown >= 4
