"""`tileloss gradcheck` and `tileloss judge` from outside: what is printed, written and exited with."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileloss
from tileloss._core.functions import FUNCTIONS
from tileloss.testing import _judge
from tileloss.testing._judge import JudgeError, ask
from tileloss.tools.case_file import read_case, read_tensors, write_tensors
from tileloss.tools.command import run
from tileloss.tools.config import KEYS, Config
from tileloss.tools.results import ResultWriter

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SMALL = """\
loss: cross_entropy
batch_size: 2
seq_len: 9
vocab_size: 3001
dtype: bf16
seed: 3
ignore_prob: 0.2
source: {kind: synthetic, distribution: normal, std: 2}
outputs: [logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit]
"""
LINEAR = """\
{level: linear, loss: cross_entropy, batch_size: 2, seq_len: 20, vocab_size: 500, hidden_size: 48, dtype: bf16, bias: random,
 ignore_prob: 0.2, source: {std: 2}, gradients: [dhidden, dhead, dbias]}
"""
FILE = "loss: cross_entropy\nsource: {kind: safetensors, path: x.safetensors}\n"
PYTORCHS = ROOT / "tests/data/qwen2-tiny-hidden-outputs.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(SMALL)
    return tmp_path


def command(*arguments: str | Path) -> int:
    try:
        return run([str(word) for word in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def gradcheck(*arguments: str, config: str | Path = "c.yaml") -> int:
    return command("gradcheck", f"--config={config}", "--quiet", *arguments)


def judge(*arguments: str, config: str | Path = "c.yaml") -> int:
    return command("judge", f"--config={config}", "--quiet", *arguments)


def lines(path: str = "r.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().out.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------- verdict and line


def test_the_verdict_is_the_last_line_and_the_exit_code(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gradcheck() == 0
    out, err = capfd.readouterr()
    assert out.endswith("\n\nPASS\n")
    assert err == ""
    first = "gradcheck c.yaml: cross_entropy [2, 9, 3001] bfloat16; synthetic, normal; seed 3"
    assert out.splitlines()[0] == first
    assert gradcheck("--set=tolerances.dlogits_max_abs=1e-12", "--mutants") == 1
    out = capfd.readouterr().out
    failed = "value_and_grad/dlogits_max_abs, backward_from_row_state/dlogits_max_abs"
    assert out.endswith(f"\n\nFAIL: {failed}\n")
    assert re.search(r"\nvalue_and_grad/dlogits_max_abs +\S+ +1e-12 +FAIL\n", out)
    assert "\nmutants: not judged, as gates fail without any\n" in out


def test_what_is_checked_is_told_in_words(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "gradcheck_linear_grpo_qwen2.5_1.5b.yaml"
    sets = [f"--set={text}" for text in ("seq_len=6", "vocab_size=127", "hidden_size=24")]
    assert gradcheck(*sets, config=config) == 0
    first, options = capfd.readouterr().out.splitlines()[:2]
    assert first.startswith(f"gradcheck {config}: linear_policy_loss grpo [")
    assert ", 6, 127, hidden 24] bfloat16; synthetic, normal; seed " in first
    assert options.startswith('options {"') and json.loads(options.removeprefix("options "))
    in_place = "--set=kernel.in_place=true"
    assert gradcheck(in_place) == 0
    assert "] bfloat16, in place; synthetic" in capfd.readouterr().out


def test_the_line_of_results_has_every_metric_and_gate(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = ("--set=vocab_size=191", "--set=output=r.jsonl")
    assert gradcheck("--mutants", "--strict", *sets) == 0
    (line,) = lines()
    start = ["tool", "version", "config", "loss", "options", "preset", "dtype", "seed", "loss_ref"]
    assert list(line)[: len(start)] == start
    assert list(line)[-4:] == ["gates", "mutants", "strict", "pass"]
    assert (line["tool"], line["version"]) == ("gradcheck", tileloss.__version__)
    assert (line["config"], line["preset"], line["seed"]) == ("c.yaml", None, 3)
    names = """loss_kernel abs_diff_loss fwd/per_loss_max_abs fwd/logp_max_abs fwd/argmax_mismatches dlogits_max_abs
        dlogits_max_rel dlogits_mean_abs dlogits_ulp_target dlogits_ulp_off_target dlogits_worst_off_target_at
        dlogits_normwise time/ref_s shape/rows time/kernel_s kernel/isa kernel/in_place"""
    assert [name for name in names.split() if name not in line] == []
    assert (line["shape/vocab_size"], line["shape/rows"]) == (191, 18)
    assert len(line["gates"]) >= 20 and all(gate["pass"] for gate in line["gates"])
    assert len(line["mutants"]) >= 5 and line["pass"] is True
    out = capfd.readouterr().out
    for name in names.split():  # the table's too
        assert re.search(rf"\n{name} +\S", out), name
    assert re.search(
        rf"\n{line['gates'][0]['name']} +{line['gates'][0]['value']:.4g} +1 +pass\n", out
    )
    assert "\nmutants, planted in the first 64 used rows\n" in out
    assert re.search(r"\ngradient_halved +value_and_grad/dlogits/ulp_target, ", out)
    assert "NOT CAUGHT" not in out


def test_a_mutant_that_changes_nothing_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    sets = ("--set=vocab_size=127", "--set=mutants=true")
    assert gradcheck(*sets, config=CONFIGS / "gradcheck_distillation.yaml") == 0
    out = capfd.readouterr().out
    assert re.search(r"\nsquare_forgotten_in_value +\(no effect on this config\)\n", out)


def test_the_same_seed_gives_the_same_numbers(folder: Path) -> None:
    assert gradcheck("--set=output=r.jsonl") == 0
    sets = ("--set=kernel.threads=1", "--set=kernel.row_block=1", "--set=output=r.jsonl")
    assert gradcheck(*sets) == 0
    first, second = lines()
    for key in ("loss_ref", "loss_kernel", "dlogits_max_abs", "dlogits_normwise"):
        assert first[key] == second[key], key


def test_a_results_file_of_somebody_else_is_left_alone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("p.txt").write_text("precious")
    assert gradcheck("--set=output=p.txt") == 2
    assert "p.txt:1: not a JSON object" in capfd.readouterr().err
    assert Path("p.txt").read_text() == "precious"
    with ResultWriter(Path("r.jsonl")):
        assert gradcheck("--set=output=r.jsonl") == 3
    out, err = capfd.readouterr()
    assert "r.jsonl: another process writes to it" in err
    assert out == ""  # before any work


# ------------------------------------------------------------------------------------------------------------------ errors

BLOCK = "kernel.vocab_block: expected a multiple of 64 up to "


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set=lable=1", "--set=output=r.jsonl"], 2, "--set lable=1: lable: unknown key"),
        (["--config=none.yaml"], 3, "none.yaml: no such config file"),
        (["--set=kernel.vocab_block=100"], 2, f"--set kernel.vocab_block=100: {BLOCK}"),
        (["--set=valid_vocab=3002"], 2, "valid_vocab: expected <= the logits' columns = 3001, got"),
        (["--set=output=none/r.jsonl"], 3, "none/r.jsonl: "),
        (["--set=output=c.yaml"], 2, "output: expected a file that is not read, got "),
        (["--set=output='-'"], 2, "output: expected a file to write, got '-'"),
        (["--device=gpu"], 2, "kernel.device: expected cpu, cuda or cuda:N, got gpu"),
        (["--device=cuda:99"], 3, "device: expected "),
        (["--device=cuda", "--strict"], 2, "strict: expected device cpu"),
        (["--set=seq_len=1000000000"], 3, "logits: needs "),
        (["--row=18"], 2, "--row: expected 0 to 17, of 18 rows, got 18"),
        (["--row=0", "--column=3001"], 2, "--column: expected 0 to 3000, of 3001 columns, got"),
        (["--row=-1"], 2, "-1"),
        (["--row=x"], 2, "--row"),
        (["--column=0"], 2, "--column: expected --row beside it"),
        (["--row=0", "--mutants"], 2, "--row: expected neither --mutants nor --strict beside it"),
        (["--row=0", "--strict"], 2, "--row: expected neither --mutants nor --strict beside it"),
        (["--impl=torch", "--device=cpu"], 2, "--device, --row and --column are of the library's"),
        (["--confg=c.yaml"], 2, "unknown flag --confg; did you mean --config?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line_before_any_file_is_made(
    arguments: list[str],
    code: int,
    message: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = time.monotonic()
    assert gradcheck(*arguments) == code
    assert time.monotonic() - start < 5  # nothing is drawn that does not fit
    err = capfd.readouterr().err
    assert message in err
    assert [path.name for path in folder.iterdir()] == ["c.yaml"]


def test_the_place_is_the_files_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for more, message in (
        ("lable: 1\n", "c.yaml:10: lable: unknown key"),
        ("kernel:\n  threads: 1\n  vocab_block: 63\n", f"c.yaml:12: {BLOCK}"),
        ("output: c.yaml\n", "c.yaml:10: output: expected a file that is not read, got "),
    ):
        Path("c.yaml").write_text(SMALL + more)
        assert gradcheck() == 2
        assert capfd.readouterr().err.startswith(f"tileloss: {message}")


def test_files_of_the_config_are_read_and_never_written(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(FILE)
    rows = np.full((3, 40), 0.5, np.float32)
    write_tensors(Path("x.safetensors"), {"logits": rows, "labels": np.array([1, 2, 40])})
    assert gradcheck() == 2
    error = "x.safetensors: labels: row 2: expected a label from 0 to 39, or -100 (ignore_index)"
    assert error in capfd.readouterr().err
    write_tensors(Path("x.safetensors"), {"logits": rows, "labels": np.array([1, 2, -100])})
    assert gradcheck("--set=output=x.safetensors") == 2
    assert "output: expected a file that is not read, got " in capfd.readouterr().err
    assert gradcheck() == 0
    assert f"; {folder}/x.safetensors; seed 0\n" in capfd.readouterr().out


def test_the_help_names_every_key_that_is_no_option_of_the_loss(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gradcheck("--help") == 0
    text = capfd.readouterr().out
    words = set(re.findall(r"\w+", text))
    sizes = "batch_size: 1\nseq_len: 2\nvocab_size: 64\ndtype: bf16\nhidden_size: 8\n"
    expected = {key.rpartition(".")[2] for key in KEYS} | {"output"}
    for level in ("logits", "linear"):
        for loss in ("cross_entropy", "policy_loss", "distillation", "sparse_distillation"):
            for source in ("{kind: synthetic}", "{kind: safetensors, path: x}"):
                Path("c.yaml").write_text(
                    f"level: {level}\nloss: {loss}\nsource: {source}\n{sizes}"
                )
                prefix = "linear_" if level == "linear" else ""
                options = set(FUNCTIONS[prefix + loss].options)
                for section in ("", "source.", "kernel.", "tolerances."):
                    try:
                        tree = Config(Path("c.yaml"), [f"{section}unknown_key=1"]).tree()
                        ask({"do": "read", "config": tree, "name": "c.yaml"})
                    except JudgeError as error:
                        known = re.search("known here: (.*)", str(error))
                    if known is not None:
                        expected |= set(known[1].split(", ")) - (options if not section else set())
    assert len(expected) > 60
    assert expected - words == set()


# ---------------------------------------------------------------------------------------------------------- one row, strict


def test_a_row_is_shown_at_every_stage(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    used = ignored = -1
    for row in range(18):
        assert gradcheck(f"--row={row}", "--column=7", "--set=output=r.jsonl") == 0
        out = capfd.readouterr().out
        assert out.endswith("\n\nPASS\n")
        is_ignored = "label -100: ignored, its label is ignore_index; all its outputs are 0" in out
        used, ignored = (used, row) if is_ignored else (row, ignored)
        if used >= 0 and ignored >= 0:
            break
    assert used >= 0 and ignored >= 0
    assert gradcheck(f"--row={used}", "--column=7", "--set=output=s.jsonl") == 0
    out = capfd.readouterr().out
    assert re.search(rf"\nrow {used} of 18, label \d+\n\nstage +column +kernel +oracle +diff", out)
    assert re.search(r"\nstate/sum +- +\d\S+ +\d\S+ +\S+ +\S+ +pass\n", out)
    assert re.search(r"\nterm/nll +- +- +\d\S+ +- +- +-\n", out)
    assert re.search(r"\nvalue_and_grad/dlogits/column +7 +\S+ +\S+ +\S+ +\S+ +pass\n", out)
    (line,) = lines("s.jsonl")
    assert list(line)[-2:] == ["trace", "pass"]
    assert (line["trace"]["row"], line["trace"]["ignored"]) == (used, None)
    assert line["trace"]["stages"][0]["stage"] == "state/max"
    assert line["kernel/device"] == "cpu" and "gates" not in line
    assert gradcheck(f"--row={used}", "--set=tolerances.ulp=0") == 1
    failed = "FAIL: value_and_grad/dlogits/label, value_and_grad/dlogits/worst, "
    assert last_line(capfd).startswith(failed)


def test_rows_of_special_values_are_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(FILE)
    logits = np.full((4, 40), 0.5, np.float32)
    logits[0, 3], logits[1, 3], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf, -np.inf
    write_tensors(Path("x.safetensors"), {"logits": logits, "labels": np.arange(1, 5)})
    for row in range(4):
        for sets in ("reduction=none", "loss=logprobs"):
            assert gradcheck(f"--row={row}", f"--set={sets}") == 0
            assert last_line(capfd) == "PASS"
    # Figures that JSON cannot have.
    assert gradcheck("--set=reduction=sum") == 0
    assert re.search(r"\nloss_ref +not finite\n", capfd.readouterr().out)


def test_strict_says_what_it_looked_at(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sets = ("--set=vocab_size=17", "--set=output=r.jsonl")
    assert gradcheck("--strict", *sets) == 0
    found = "\nstrict: 4 calls in 7 layouts of guard-page buffers, 18 of 18 rows: nothing found\n"
    assert found in capfd.readouterr().out
    assert gradcheck(*sets) == 0
    assert "strict" not in capfd.readouterr().out
    first, second = lines()
    assert (first["strict"]["calls"], first["strict"]["findings"]) == (4, [])
    assert "strict" not in second


# ------------------------------------------------------------------------------------------------------- crashes and stops


def crash_after(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that is asked apart gets SIGSEGV once it has told of ``name``."""

    def dying(request: Any, files: Any = None, outputs: Any = None, told: Any = None) -> Any:
        def tell(event: Any) -> None:
            if told is not None:
                told(event)
            if event["event"] == name:
                faulthandler.disable()  # pytest's
                os.kill(os.getpid(), signal.SIGSEGV)

        return ask(request, files, outputs, tell)

    monkeypatch.setattr(_judge, "ask", dying)


def test_a_crash_of_a_kernel_is_a_failed_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    crash_after("case", monkeypatch)
    assert gradcheck("--set=output=r.jsonl", "--set=seed=0") == 1
    out = capfd.readouterr().out
    assert out.startswith("gradcheck c.yaml: cross_entropy [2, 9, 3001]")
    assert out.endswith("\nFAIL: crashed (signal 11, Segmentation fault)\n")
    crash_after("strict", monkeypatch)
    assert gradcheck("--set=output=r.jsonl", "--set=vocab_size=17", "--strict") == 1
    assert "buffers, 18 of 18 rows: nothing found\n\nFAIL: crashed" in capfd.readouterr().out
    first, second = lines()
    names = ["tool", "version", "config", "loss", "options", "preset", "dtype", "seed"]
    assert list(first) == [*names, "crashed", "pass"]
    assert list(second) == [*names, "strict", "crashed", "pass"]
    described = {name: first[name] for name in names[3:]}
    case = {"loss": "cross_entropy", "options": {}, "preset": None, "dtype": "bfloat16", "seed": 0}
    assert described == case
    assert (first["crashed"], first["pass"]) == ("signal 11, Segmentation fault", False)


def test_a_crash_of_what_judges_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    crash_after("case", monkeypatch)
    config = CONFIGS / "gradcheck_linear_safetensors.yaml"
    assert judge(f"--outputs={PYTORCHS}", config=config) == 3
    out, err = capfd.readouterr()
    assert "FAIL" not in out
    assert err == "tileloss: what judges crashed (signal 11, Segmentation fault)\n"


# ------------------------------------------------------------------------------------------------------------------- judge


def test_outputs_in_a_file_are_judged(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "gradcheck_linear_safetensors.yaml"
    flags = ("--mutants", "--producer=another library 2.1", "--set=output=r.jsonl")
    assert judge(f"--outputs={PYTORCHS}", *flags, config=config) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"judge {config}: linear_cross_entropy [1, 12, 128, hidden 256] bfloat16")
    assert f"\noutputs {PYTORCHS}, made by another library 2.1\n" in out
    for gate in ("loss", "logp", "lse", "dhidden/cap", "dhead/cap", "dbias/cap"):
        assert re.search(rf"\n{gate} +\S+ +1 +pass\n", out), gate
    assert "\nmutants\nmutant" in out and "NOT CAUGHT" not in out
    assert out.endswith("\n\nPASS\n")
    (line,) = lines()
    assert list(line)[7:11] == ["seed", "outputs", "producer", "loss_ref"]
    assert (line["tool"], line["outputs"]) == ("judge", str(PYTORCHS))
    assert (line["producer"], line["pass"]) == ("another library 2.1", True)
    assert sum(bool(mutant["caught_by"]) for mutant in line["mutants"]) >= 5
    # Nothing of what the config says of the library's own kernels has a part.
    sets = ("--set=head_layout=hv", "--set=kernel.vocab_block=64", "--set=strict=true")
    assert judge(f"--outputs={PYTORCHS}", *sets, config=config) == 0
    assert "mutants" not in capfd.readouterr().out


def test_wrong_outputs_fail(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "gradcheck_linear_safetensors.yaml"
    outputs = dict(read_tensors(PYTORCHS))
    write_tensors(Path("o.safetensors"), outputs | {"dbias": -outputs["dbias"]})
    assert judge("--outputs=o.safetensors", "--mutants", config=config) == 1
    out = capfd.readouterr().out
    assert out.endswith("\n\nFAIL: dbias/frobenius, dbias/cap\n")
    assert "\nmutants: not judged" in out


@pytest.mark.parametrize("text", [SMALL, LINEAR + "\n"], ids=["logits", "linear"])
def test_inputs_are_the_ones_that_are_drawn(
    text: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(text)
    assert judge("--write-inputs=in.safetensors", "--set=mutants=true") == 0
    out = capfd.readouterr().out
    assert re.search(r"\nlabels +int64 +\[\d+\]\n", out)
    assert out.endswith("\ninputs written to in.safetensors\n")
    case = read_case(Path("in.safetensors"))
    config = Config(Path("c.yaml"), ["mutants=true"])
    drawn = ask({"do": "draw", "config": config.tree(), "name": "c.yaml"})
    assert case.tensors.keys() == drawn.tensors.keys()
    for name, tensor in drawn.tensors.items():
        assert case.tensors[name].tobytes() == tensor.tobytes(), name
    described = drawn.event("case")["case"]
    assert {name: getattr(case, name) for name in described} == described
    assert case.mutants


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--outputs"),
        (["--outputs=a", "--write-inputs=b"], 2, "not allowed with argument"),
        (["--outputs=none"], 3, "none: "),
        (["--write-inputs=none/in.safetensors"], 3, "none/in.safetensors: "),
        (["--write-inputs=c.yaml"], 2, "--write-inputs: expected a file that is not read, got"),
        (["--write-inputs=x", "--mutants"], 2, "expected --outputs beside them"),
        (["--write-inputs=x", "--producer=me"], 2, "expected --outputs beside them"),
        (["--outputs=o.safetensors", "--set=output=o.safetensors"], 2, "output: expected a file that"),
        (["--outputs=o.safetensors"], 2, "o.safetensors: logp: expected [18] or [2, 9], got [17]"),
        (["--outputs=p.safetensors", "--mutants"], 2, "mutants: expected a gradient in p.safe"),
        (["--write-inputs=x", "--set=lable=1"], 2, "--set lable=1: lable: unknown key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_the_judge_does_not_take_is_said(
    arguments: list[str],
    code: int,
    message: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, rows in (("o", 17), ("p", 18)):
        write_tensors(Path(f"{name}.safetensors"), {"logp": np.zeros(rows, np.float32)})
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert judge(*arguments) == code
    assert message in capfd.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_judges_help_names_every_output(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert judge("--help") == 0
    words = re.findall(r"\w+", capfd.readouterr().out)
    config = Config(CONFIGS / "gradcheck_distillation.yaml", ["vocab_size=127"])
    request = {"do": "judge", "config": config.tree(), "name": "c.yaml"}
    with pytest.raises(JudgeError, match="at least one output of distillation: ") as error:
        ask(request)
    names = re.search(r"distillation: (.*), got none", str(error.value))
    assert names is not None and set(names[1].split(", ")) - set(words) == set()


def test_what_adds_up_is_not_judged(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(LINEAR)
    assert judge("--write-inputs=x", "--set=accumulate=true") == 2
    error = "accumulate: expected false where outputs are judged, got true"
    assert error in capfd.readouterr().err
