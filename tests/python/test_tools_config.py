"""The reader of configs: what it refuses and how, and that the judge gets what the file says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tileloss.testing._judge import JudgeError, ask
from tileloss.tools.config import Config, overrides_tree, translate_old_keys

MINIMAL = "loss: cross_entropy\nbatch_size: 1\nseq_len: 4\nvocab_size: 64\ndtype: bf16\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(text: str, *overrides: str) -> Config:
    Path("c.yaml").write_text(text)
    return Config(Path("c.yaml"), list(overrides))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml: expected one YAML document, got none"),
        ("# nothing\n", "c.yaml: expected one YAML document, got none"),
        ("a: 1\n---\nb: 2\n", "c.yaml: expected one YAML document, got 2 or more"),
        ("- a\n- b\n", "c.yaml:1: expected keys and values, got a list"),
        ("---\n", ": expected keys and values, got nothing"),
        ("a: 1\nb: [1, 2\n", "c.yaml:3: not YAML: expected ',' or ']'"),
        (", a\n", "c.yaml:1: not YAML: "),
        ('a: "abc', "c.yaml:1: not YAML: found unexpected end of stream"),
        ("a: 'abc\n \n", "c.yaml:3: not YAML: found unexpected end of stream"),
        ("a: 1\nb: \x01\n", "c.yaml:2: not YAML: special characters are not allowed"),
        ("a: 1\nb: *x\n", "c.yaml:2: b: not YAML: no whole value has the name x"),
        ("a: &x\n  b: *x\n", "c.yaml:2: a.b: not YAML: no whole value has the name x"),
        ("count: 1\nother: 2\ncount: 3\n", "c.yaml:3: count: duplicate key (first at c.yaml:1)"),
        ("a:\n  b: 1\n  b: 1\n", "c.yaml:3: a.b: duplicate key (first at c.yaml:2)"),
        ("a: 1\n[b]: 1\n", "c.yaml:2: config: a key must be a word"),
        ("a:\n  ~: 1\n", "c.yaml:2: a: a key must be a word"),
        ("a: " + "[" * 17 + "]" * 17, "c.yaml:1: a: nested too deeply"),
        ("a: " + "[" * 500_000, "c.yaml:1: a: nested too deeply"),
        ("a: [" + "1," * 10_000 + "]", "c.yaml:1: a: nested too deeply"),
        # Each line stands for ten of the one before.
        (
            "a0: &a0 [1]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)),
            "nested too deeply",
        ),
        ("# " + "x" * (1 << 20), "c.yaml: larger than 1 MB"),
    ],
)
def test_what_is_no_config_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        config(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bytes_that_are_no_text_are_refused() -> None:
    Path("c.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ValueError, match="c.yaml:2: not YAML: "):
        Config(Path("c.yaml"), [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("count", "--set count: expected key=value"),
        ("=1", "--set =1: expected key=value"),
        ("a..b=1", "--set a..b=1: empty part in the key"),
        ("count.a=2", "--set count.a=2: count is not a section (at c.yaml:1)"),
        ("a=[1", "--set a=[1: not YAML: "),
        ("a={b: 1, b: 2}", "a.b: duplicate key"),
        ("x" * 100_000, "x...[99760 characters]...x"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        config("count: 1\n", override)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_overrides_replace_and_add() -> None:
    read = config(
        "count: 1\nkernel:\n  isa: auto\n  threads: 1\n",
        "count=7",
        "kernel.threads=2",
        "fresh.deep.key=text",
        "made={x: 3}",
        "made.y=4",
    )
    assert (read.integer("count"), read.integer("kernel.threads")) == (7, 2)
    assert read.text("kernel.isa") == "auto"
    assert read.text("fresh.deep.key") == "text"
    assert (read.integer("made.x"), read.integer("made.y")) == (3, 4)
    assert list(read.everything()) == [
        "count",
        "kernel.isa",
        "kernel.threads",
        "fresh.deep.key",
        "made.x",
        "made.y",
    ]


def test_a_command_line_without_a_file_is_a_tree() -> None:
    (a,) = overrides_tree(["a.b=1", "a.c=[2]"])["children"]
    assert [(child["key"], child["kind"], child["origin"]) for child in a["children"]] == [
        ("b", "scalar", "--set a.b=1"),
        ("c", "list", "--set a.c=[2]"),
    ]


def test_an_override_within_an_alias_leaves_the_other() -> None:
    read = config("a: &x {k: 1}\nb: *x\n", "b.k=2")
    assert (read.integer("a.k"), read.integer("b.k")) == (1, 2)


READ: dict[str, Any] = {
    "text": lambda read: read.text("key"),
    "integer": lambda read: read.integer("key", minimum=2),
    "number": lambda read: read.number("key", 0, 0, 1),
    "choice": lambda read: read.choice("key", ("red", "blue"), "red"),
}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("text", '"3"', "3"),
        ("text", "~", "key: has no value"),
        ("text", "", "key: has no value"),
        ("text", '""', "key: has no value"),
        ("text", "[a]", "key: expected text, got a list"),
        ("text", "{a: 1}", "key: expected text, got a section"),
        ("integer", "3", 3),
        ("integer", "1", "key: expected an integer from 2 on, got '1'"),
        *(
            ("integer", text, "key: expected an integer from 2 on, got '")
            for text in ("many", "1.5", '"3"', "1e1", "0x10", "1_0", "1 2", "9" * 30)
        ),
        ("number", "0.5", 0.5),
        ("number", "+1e-3", 1e-3),
        ("number", ".5", 0.5),
        *(
            ("number", text, "key: expected a number from 0 to 1, got '")
            for text in ("2", "-0.1", "much", '"0.5"', ".nan", ".inf", "nan", "1,5", "1_0")
        ),
        ("choice", "blue", "blue"),
        ("choice", "green", "key: expected one of red, blue, got 'green'"),
    ],
)
def test_a_value_is_read_or_refused_with_its_line(kind: str, value: str, expected: Any) -> None:
    read = config(f"# first\nkey: {value}\n")
    if isinstance(expected, str) and expected.startswith("key:"):
        with pytest.raises(ValueError) as caught:
            READ[kind](read)
        assert str(caught.value).startswith(f"c.yaml:2: {expected}")
    else:
        assert READ[kind](read) == expected


def test_paths_start_at_the_file_and_of_overrides_at_the_working_directory(folder: Path) -> None:
    (folder / "real/configs").mkdir(parents=True)
    (folder / "link").symlink_to("real/configs")
    (folder / "link/c.yaml").write_text("a: ../x\nb: /abs/y\nc: z\n")
    read = Config(folder / "link/c.yaml", ["c=here"])
    # Behind a link, ".." is the target's parent: the path may not be shortened as text.
    assert str(read.path_from("a", "../x")) == f"{folder}/link/../x"
    assert read.path_from("b", "/abs/y") == Path("/abs/y")
    assert read.path_from("c", "here") == folder / "here"


def test_what_is_no_file_is_an_environment_error(folder: Path) -> None:
    for path, message in ((folder / "none", "no such config file"), (folder, "a folder, not a")):
        with pytest.raises(OSError, match=message):
            Config(path, [])


def test_a_pipe_is_read_once_and_has_no_folder(folder: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, (MINIMAL + "path: data/x\n").encode())
    os.close(writing)
    read = Config(Path(f"/dev/fd/{reading}"), [])
    os.close(reading)
    read.skip("path")
    assert ask({"do": "draw", "config": read.tree(), "name": "pipe"}).passed
    assert read.path_from("path", "data/x") == folder / "data/x"
    with pytest.raises(ValueError, match="/dev/zero: larger than 1 MB"):
        Config(Path("/dev/zero"), [])


def drawn(text: str, *overrides: str) -> Any:
    read = config(MINIMAL + text, *overrides)
    read.skip("output", "tracker")
    return ask({"do": "draw", "config": read.tree(), "name": "c.yaml"}).event("case")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("lable_smoothing: 1\n", [], "c.yaml:6: lable_smoothing: unknown key; did you mean label_"),
        ("kernel:\n  isaa: x\n", [], "c.yaml:7: kernel.isaa: unknown key; did you mean isa?"),
        # Of what Python reads itself.
        ("traker: none\n", [], "c.yaml:6: traker: unknown key; did you mean tracker?"),
        ("kernel: {time_blok: 8}\n", [], "kernel.time_blok: unknown key; did you mean time_block?"),
        ("a.b: 1\n", [], "c.yaml:6: a.b: unknown key"),
        ('seed: "3"\n', [], "c.yaml:6: seed: expected an integer, got '3'"),
        ("seed: |\n  3\n", [], "c.yaml:6: seed: expected an integer, got '3"),
        ("seed:\n", [], "c.yaml:6: seed: has no value"),
        ("seed: null\n", [], "c.yaml:6: seed: has no value"),
        ("seed: [1]\n", [], "c.yaml:6: seed: expected an integer, got a list"),
        ("kernel: fast\n", [], "c.yaml:6: kernel: expected a section, got a value"),
        ("z_loss: .inf\n", [], "c.yaml:6: z_loss: expected a finite number, got '.inf'"),
        ("", ["seed="], "--set seed=: seed: has no value"),
        ("", ["seed=x"], "--set seed=x: seed: expected an integer, got 'x'"),
        ("", ["sede=1"], "--set sede=1: sede: unknown key; did you mean seed?"),
        ("", ["kernel.isa=mmx"], "--set kernel.isa=mmx: kernel.isa: "),
        (
            "upstream: &x ones\nkernel: {threads: *x}\n",
            [],
            "c.yaml:7: kernel.threads: expected an integer",
        ),
        ("", ['"\x1b"=1'], "--set "),
    ],
)
def test_the_judge_names_the_place_too(text: str, overrides: list[str], message: str) -> None:
    with pytest.raises((JudgeError, ValueError)) as caught:
        drawn(text, *overrides)
    assert getattr(caught.value, "code", 2) == 2
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_judge_gets_what_the_config_says() -> None:
    case = drawn(
        "label_smoothing: 0.25\nz_loss: +1e-4\nignore_index: -1\noutput: r.jsonl\ntracker: none\n"
        "valid_vocab: &n 60\nseed: *n\nreduction: 'sum'\n",
        "label_smoothing=0.125",
    )
    options = case["case"]["options"]
    assert options["label_smoothing"] == 0.125
    assert options["z_loss"] == 1e-4
    assert options["ignore_index"] == -1
    assert options["valid_vocab"] == 60
    assert options["reduction"] == "sum"


def test_what_has_been_read_is_left_out_and_more_is_put_in() -> None:
    read = config("count: 1\nkernel:\n  isa: auto\n  time_block: 8\n", "text=y")
    read.skip("kernel.time_block", "text", "absent", "absent.too")
    assert read.skipped == ["kernel.time_block", "text"]
    count, kernel, more = read.tree("more.x=[1]")["children"]
    assert [count["key"], kernel["key"], more["key"]] == ["count", "kernel", "more"]
    assert [child["key"] for child in kernel["children"]] == ["isa"]
    assert "more" not in read and read.text("text") == "y"


def test_old_keys_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    read = config("mesh_shape: [1]\nkernel: {block_size: 128, time_block: 8}\n")
    assert translate_old_keys(read) == ["kernel.vocab_block=128", "kernel.row_block=8"]
    assert "mesh_shape is ignored" in capsys.readouterr().err
    (kernel,) = read.tree()["children"]
    assert kernel["children"] == []
    both = config("kernel: {block_size: 128, vocab_block: 64}\n")
    with pytest.raises(ValueError, match="c.yaml:1: kernel.block_size: is the old name of"):
        translate_old_keys(both)
