"""`tileloss gradcheck` and `tileloss bench` with --frontend jax: gradcheck's gates on what tileloss.jax computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tileloss
import tileloss.jax as tileloss_jax
from tileloss.jax import cross_entropy, logprobs
from tileloss.jax._sweeps.library import is_built
from tileloss.testing.case import Case
from tileloss.tools.command import run

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SMALL = ("seq_len=6", "vocab_size=127")
EDGES = ("gradcheck_ce_edges", "batch_size=2", *SMALL)


def sets(values: tuple[str, ...]) -> list[str]:
    return [f"--set={value}" for value in values]


def gradcheck(config: str, *values: str, flags: tuple[str, ...] = ()) -> int:
    path = CONFIGS / f"{config}.yaml"
    return run(["gradcheck", "--frontend=jax", f"--config={path}", *sets(values), *flags])


@pytest.mark.parametrize(
    "case",
    [
        ("gradcheck_ce_edges", *SMALL),
        ("gradcheck_ce_edges", *SMALL, "reduction=none", "upstream=per_row", "dtype=fp16"),
        ("gradcheck_ce_options", *SMALL, "valid_vocab=120", "class_weights=random"),
        ("gradcheck_ce_safetensors",),
        ("gradcheck_logprobs", *SMALL, "dtype=fp32"),
        ("gradcheck_policy_edges", *SMALL),
        ("gradcheck_bnpo", *SMALL, "aggregation=none", "upstream=per_row", "sequences=batch"),
        ("gradcheck_gspo", *SMALL),
        ("gradcheck_grpo_safetensors",),
        ("gradcheck_linear_safetensors", "head_layout=hv"),
        ("gradcheck_linear_ce_qwen2.5_1.5b", *SMALL, "hidden_size=24", "bias=random"),
        ("gradcheck_linear_grpo_qwen2.5_1.5b", *SMALL, "hidden_size=24", "gradients=[dhidden]"),
        ("gradcheck_linear_distillation", *SMALL, "head_layout=hv"),
        ("gradcheck_soft_cross_entropy", "vocab_size=127"),
        pytest.param(("gradcheck_distillation", "vocab_size=127"), marks=pytest.mark.full),
        pytest.param(("gradcheck_sparse_distillation", "vocab_size=127"), marks=pytest.mark.full),
    ],
    ids=lambda case: " ".join(case),
)
def test_it_passes_and_its_mutants_are_caught(
    case: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    code = gradcheck(*case, flags=("--mutants", "--implementation=xla"))
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert out.endswith("\nPASS\n")
    made_by = f"tileloss.jax xla, jax {jax.__version__}, {jax.default_backend()}"
    assert f"\noutputs made by {made_by}\n" in out
    caught_by = "/frobenius" if "linear" in case[0] else "dlogits/ulp_off_target"
    assert out.count(caught_by) >= 3
    assert "NOT CAUGHT" not in out


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_implementations_are_chosen_by_name(
    implementation: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if implementation == "cpu" and not is_built():
        pytest.skip("this build has no XLA handler")
    assert gradcheck(*EDGES, flags=(f"--implementation={implementation}",)) == 0
    assert f"\noutputs made by tileloss.jax {implementation}, " in capfd.readouterr().out


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(logits: Any, *arguments: Any, **options: Any) -> Any:
        return function((logits + jax.lax.stop_gradient(logits)) / 2, *arguments, **options)

    return wrong


def without_a_column(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits, *arguments, **options: function(
        logits.at[:, -1].set(-jnp.inf), *arguments, **options
    )


@pytest.mark.parametrize("wrong", [halved, without_a_column])
def test_what_is_wrong_is_rejected(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tileloss_jax, "cross_entropy", wrong(cross_entropy))
    assert gradcheck(*EDGES) == 1
    assert "dlogits/ulp_off_target" in capfd.readouterr().out.splitlines()[-1]


def test_a_wrong_row_output_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tileloss_jax, "logprobs", without_a_column(logprobs))
    assert gradcheck(*EDGES) == 1
    assert capfd.readouterr().out.splitlines()[-1].startswith("FAIL: logp, ")


def test_in_place_donates_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def kept(case: Case) -> dict[str, jax.Array]:
        given.append(operands(case))
        return given[-1]

    operands = Case.jax_operands
    monkeypatch.setattr(Case, "jax_operands", kept)
    for in_place in ("true", "false"):
        assert gradcheck(*EDGES, f"kernel.in_place={in_place}") == 0
    # Of each check the forward's and the step's.
    assert [each["logits"].is_deleted() for each in given] == [False, True, False, False]


def test_the_results_line_is_the_judges(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert gradcheck(*EDGES, f"output={path}", "mutants=true") == 0
    line = json.loads(path.read_text())
    assert (line["tool"], line["pass"], "outputs" in line) == ("judge", True, False)
    assert line["config"].endswith("gradcheck_ce_edges.yaml")
    assert line["producer"].startswith("tileloss.jax ")
    assert any(mutant["planted"] for mutant in line["mutants"])


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("case", "flags", "message"),
    [
        (EDGES, ("--implementation=magic",), "tileloss: implementation: expected names among "),
        ((*EDGES, "vocab_size=0"), (), "tileloss: --set vocab_size=0: vocab_size: "),
        ((*EDGES, "no_key=1"), (), "no_key"),
    ],
)
def test_bad_usage_names_what_is_wrong(
    case: tuple[str, ...],
    flags: tuple[str, ...],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert gradcheck(*case, flags=flags) == 2
    assert message in capfd.readouterr().err


def test_a_function_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tileloss_jax, "__all__", ["logprobs"])
    assert gradcheck(*EDGES) == 2
    expected = "loss: expected one that tileloss.jax has (logprobs), got cross_entropy"
    assert expected in capfd.readouterr().err


@pytest.mark.parametrize("flags", [("--strict",), ("--row=5",), ("--device=cpu",)])
def test_what_it_does_not_take_is_refused(
    flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert gradcheck(*EDGES, flags=flags) == 2
    own = "--strict, --device, --row and --column are of the library's own kernels"
    assert f"{own}, got --impl tileloss-jax" in capfd.readouterr().err


def test_there_is_no_other_frontend(capfd: pytest.CaptureFixture[str]) -> None:
    assert gradcheck(*EDGES, flags=("--frontend=torch",)) == 2
    assert "--frontend: expected one of jax, got 'torch'" in capfd.readouterr().err


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tileloss", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_without_jax_the_kernels_are_checked_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise ImportError('no jax here', name='jax')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = ["gradcheck", "--config", str(CONFIGS / "gradcheck_ce_edges.yaml")]
    native = program(*arguments, *sets(SMALL), PYTHONPATH=path)
    assert native.returncode == 0 and native.stdout.startswith("gradcheck "), native.stderr
    missing = program(*arguments, *sets(SMALL), "--frontend", "jax", PYTHONPATH=path)
    assert missing.returncode == 3
    assert missing.stderr == "tileloss: gradcheck: no jax here: pip install 'tileloss[jax]'\n"
    there = program(*arguments, *sets(SMALL), "--frontend", "jax")
    assert there.returncode == 0 and there.stdout.startswith("judge "), there.stderr


def test_a_missing_judge_is_said(tmp_path: Path) -> None:
    alone = tmp_path / "libtileloss.so"
    alone.symlink_to(tileloss.library_path())
    done = program("info", TILELOSS_LIBRARY=str(alone))
    assert done.returncode == 3
    assert "expected libtileloss_judge.so beside" in done.stderr


# ------------------------------------------------------------------------------------------------------------------- bench


def bench(*arguments: str) -> int:
    sizes = ("--tokens=300", "--vocab=500", "--iters=2", "--warmup=1")
    return run(["bench", "--frontend=jax", *sizes, *arguments])


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("--loss=cross_entropy", "--set=label_smoothing=0.1"),
        ("--loss=logprobs", "--dtype=fp32"),
        ("--loss=policy_loss", "--preset=dr_grpo", "--set=beta=0.1"),
        ("--loss=distillation",),
    ],
    ids=" ".join,
)
def test_bench_has_a_line_a_pass(
    arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments, "--json", "--implementation=xla") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    passes = ["forward", "value_and_grad", "value_and_grad, donated"]
    assert [line["pass"] for line in lines] == passes
    for line in lines:
        assert line["impl"] == "jax xla" and line["iters"] == 2
        assert 0 < line["min_ms"] <= line["median_ms"] <= 1000 * line["first_call_s"]
        moved = line["gb_per_s"] * line["median_ms"] * 1e6
        item = 4 if line["dtype"] == "float32" else 2
        teacher = line["loss"] == "distillation"
        times = (1 if line["pass"] == "forward" else 2) + teacher
        assert moved == pytest.approx(300 * 500 * item * times)
        assert line["ratio_to_roof"] == pytest.approx(line["median_ms"] / line["roof_ms"])
    memory = lines[2]["in_place_ms"] + teacher * lines[2]["read_ms"]
    assert lines[2]["roof_ms"] == max(memory, (1 + teacher) * lines[2]["exp_ms"])


def test_bench_prints_a_table_and_keeps_its_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "r.jsonl"
    assert bench("--dtype=fp16", f"--output={output}") == 0
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["tool"], line["dtype"]) for line in kept] == 3 * [("bench", "float16")]
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith(f"cross_entropy [300, 500] float16, jax {jax.__version__} on ")
    assert "median ms" in out[2] and "measured MB" in out[2]
    assert [line.split("  ")[0] for line in out[4:]] == [
        "forward",
        "value_and_grad",
        "value_and_grad, donated",
    ]


def test_bench_refuses_what_the_program_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench("--loss=policy_loss", "--preset=nothing") == 2
    assert "nothing" in capfd.readouterr().err
