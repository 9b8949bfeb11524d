"""`tileloss audit` and `gradcheck --impl`: what is wrong fails, what ends its process is a cell, and the audit goes on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloss
from processes import children_of, is_gone, spawn, wait_for
from tileloss.testing import Case, Refused, Report
from tileloss.testing._drawn import Drawn
from tileloss.testing._judge import Crashed
from tileloss.testing.outputs import Missing, prepare
from tileloss.tools import implementations
from tileloss.tools.audit.cases import CASES
from tileloss.tools.audit.cells import EVERY
from tileloss.tools.audit.child import Child
from tileloss.tools.audit.command import GOOD
from tileloss.tools.audit.table import what_failed
from tileloss.tools.command import run
from tileloss.tools.implementations.contract import declared, tileloss_contract

ROOT = Path(__file__).parents[2]
LOSSES = Path(__file__).with_name("audit_losses.py")
FEW = "ce/fp32,ce/bf16,ce/none"
KEYS = [
    "tool", "version", "implementation", "package", "case", "device", "contract", "gate", "value", "limit", "message",
    "looks_like", "status", "seconds",
]  # fmt: skip


def audit(
    path: Path, names: str, cases: str, *flags: str
) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit code, and the lines by implementation and case."""
    output = path / "results.jsonl"
    code = run(["audit", f"--impl={names}", f"--case={cases}", f"--output={output}", *flags])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return code, {(line["implementation"], line["case"]): line for line in lines}


def audit_function(
    path: Path, function: str, cases: str = FEW, *flags: str
) -> tuple[int, list[Any]]:
    code, lines = audit(path, f"{LOSSES}:{function}", cases, *flags)
    return code, list(lines.values())


def test_every_case_is_one_that_the_kernels_pass(tmp_path: Path) -> None:
    usual = ",".join(
        {f"{case.name.partition('/')[0]}/*" for case in CASES}
    )  # bugs': test_audit_bugs.py
    code, lines = audit(tmp_path, "tileloss", usual)
    assert code == 0 and len(lines) == len(CASES) == len({case.name for case in CASES})
    assert {line["status"] for line in lines.values()} == {"pass"}


def test_a_right_loss_passes_and_a_line_says_what_it_was(tmp_path: Path) -> None:
    code, lines = audit_function(tmp_path, "right")
    assert code == 0 and [line["status"] for line in lines] == ["pass"] * 3
    assert [sorted(line) for line in lines] == [sorted(KEYS)] * 3
    assert next(iter(lines[0])) == "tool" and lines[0]["tool"] == "audit"
    assert lines[0]["version"] == tileloss.__version__ and lines[0]["seconds"] > 0


@pytest.mark.parametrize(
    ("function", "gate"),
    [
        ("halved", "dlogits/ulp_target"),
        ("off", "loss"),
        ("without_gradient", "dlogits/missing"),
        ("transposed", "outputs"),
    ],
)
def test_what_is_wrong_fails(function: str, gate: str, tmp_path: Path) -> None:
    code, lines = audit_function(tmp_path, function)
    assert code == 1
    assert [line["status"] for line in lines] == ["failed"] * 3
    assert all(line["gate"] in (gate, f"per_{gate}") for line in lines), lines
    if lines[0]["limit"] is not None:
        assert lines[0]["value"] > lines[0]["limit"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raising", f"ValueError: no such luck, at {LOSSES}:"),
        ("a_list", "TypeError: expected a dict of arrays by name, got list"),
        ("exiting", "exit code 7"),
    ],
)
def test_what_raises_or_ends_has_crashed(function: str, message: str, tmp_path: Path) -> None:
    code, lines = audit_function(tmp_path, function)
    assert code == 1 and [line["status"] for line in lines] == ["crashed"] * 3
    assert all(line["message"].startswith(message) for line in lines), lines


def test_the_audit_goes_on_after_a_crash_and_after_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = audit_function(tmp_path, "aborting")
    assert code == 1 and [line["status"] for line in lines] == ["pass", "crashed", "pass"]
    assert lines[1]["message"] == "signal SIGABRT: last words"
    (tmp_path / "results.jsonl").unlink()
    ask = Child.ask

    def impatient(self: Child, **request: Any) -> dict[str, Any]:
        """The case that hangs has a second; a slow machine may take its time over the others, and over the imports."""
        self.seconds = 1 if "bf16" in request["inputs"] else 300
        return ask(self, **request)

    monkeypatch.setattr(Child, "ask", impatient)
    code, lines = audit_function(tmp_path, "hanging", FEW)
    assert code == 1 and [line["status"] for line in lines] == ["pass", "timeout", "pass"]
    assert lines[1]["message"] == "no answer in 1 s"


def test_refused_and_not_installed_are_no_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = audit_function(tmp_path, "refusing")
    assert code == 0
    assert {(line["status"], line["message"]) for line in lines} == {("refused", "not today")}
    (tmp_path / "optax.py").write_text("raise AssertionError('imported')")
    assert implementations.KNOWN["optax"].packages[0] == "optax"
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda n: None if n == 'optax' else find(n)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "results.jsonl").unlink()
    code, by_name = audit(tmp_path, "optax", "ce/fp32")
    assert code == 0
    (line,) = by_name.values()
    assert (line["status"], line["message"]) == (
        "not_installed",
        "optax is not installed: pip install optax",
    )


def test_the_table_has_a_cell_a_case_and_what_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    audit(tmp_path, f"tileloss,{LOSSES}:halved,{LOSSES}:refusing", "ce/fp32,ce/sum")
    out = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:4]}
    assert rows == {"ce/fp32": ["pass", "FAIL", "-"], "ce/sum": ["pass", "-", "-"]}
    assert "FAIL  dlogits/ulp_target " in out and "tileloss: 2 pass (tileloss " in out


def test_what_is_raised_reaches_the_terminal_escaped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f(case):\n    raise ValueError('\x1b[31mred \u202e txt')\n")
    _, said = gradcheck(f"{file}:f", capfd)
    audit(tmp_path, f"{file}:f", "ce/fp32")
    out = capfd.readouterr().out
    for text in (said, out):
        assert r"ValueError: \x1b[31mred \u202e txt" in text
        assert not {"\x1b", "\u202e"} & set(text)


def test_what_failed_is_short() -> None:
    line = {"gate": "loss", "value": 3.14159265, "limit": 1.0, "message": "logp, lse"}
    assert what_failed(line) == "loss 3.142 > 1, and 2 more"
    assert what_failed(line | {"value": None, "message": None}) == "loss NaN > 1"
    assert what_failed({"gate": None, "message": "signal SIGABRT"}) == "signal SIGABRT"


def test_a_contract_says_what_bits_depend_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = f"tileloss,{LOSSES}:claiming,{LOSSES}:right"
    _, lines = audit(tmp_path, names, "ce/fp32")
    contracts = [line["contract"] for line in lines.values()]
    assert contracts == [tileloss_contract(), {"logp": ["exp"], "dlogits": []}, None]
    out = capfd.readouterr().out
    assert f"\n{LOSSES}:claiming  logp: exp; dlogits: nothing\n" in out
    (own,) = (line for line in out.splitlines() if line.startswith("tileloss  "))
    assert f"kernels: tileloss {tileloss.__version__}, " in own
    assert own.endswith("; dhead: instruction set, exp, split, order")
    assert out.endswith(":right     unknown\n")
    assert (
        "\nWhat the bits of results depend on besides the case, as implementations declare" in out
    )
    audit(tmp_path, f"{LOSSES}:right", "ce/fp32")
    assert "bits" not in capfd.readouterr().out  # nobody has declared anything
    for wrong in ({"loss": ["exp"]}, {"logp": ["weather"]}, ["exp"], {"kernels": ["mine"]}):
        with pytest.raises(ValueError, match="^--impl f: contract: expected a dict from logp, "):
            declared("f", wrong)


def test_json_lines_replace_the_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, lines = audit_function(tmp_path, "halved", "ce/fp32", "--json")
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == lines


def test_the_list_names_cases_and_implementations(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "--list"]) == 0
    out = capfd.readouterr().out
    names = {line.split()[0] for line in out.splitlines() if line}
    assert {case.name for case in CASES} | set(implementations.NAMES) <= names


@pytest.mark.skipif(platform.machine() != "x86_64", reason="NOT RUN: fibers of x86-64")
def test_the_kernels_of_a_device(tmp_path: Path) -> None:
    """That of tests/cuda_on_host."""
    kept = next(case.name for case in EVERY if case.calls == "kept")
    output = tmp_path / "results.jsonl"
    flags = ["--impl=tileloss", f"--case=ce/bf16,{kept}", "--device=cuda", f"--output={output}"]
    folder = str(tileloss.library_path().with_name("cuda_on_host"))
    environment = {**os.environ, "LD_LIBRARY_PATH": folder}  # which the loader reads at a start
    command = [sys.executable, "-m", "tileloss", "audit", "--quiet", *flags]
    subprocess.run(command, env=environment, check=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["status"], line["device"]) for line in lines] == 2 * [("pass", "cuda")]


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (Crashed("signal 11, Segmentation fault", 11), "crashed", "signal SIGSEGV"),
        (Crashed("exit code 7", None), "crashed", "exit code 7"),
        (TimeoutError(), "timeout", "no answer in 5 s"),
    ],
)
def test_kernels_that_end_their_process_are_a_cell(
    raised: Exception, status: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(drawn: Drawn, strict: bool, device: str, seconds: float) -> Report:
        if drawn.name == "ce/bf16":
            raise raised
        return checked(drawn, strict, device, seconds)

    checked = Drawn.checked
    monkeypatch.setattr(Drawn, "checked", end)
    code, lines = audit(tmp_path, "tileloss", FEW, "--time-limit=5")
    assert code == 1 and [x["status"] for x in lines.values()] == ["pass", status, "pass"]
    assert lines["tileloss", "ce/bf16"]["message"] == message


@pytest.mark.parametrize("name", ["ce/z-loss", "ce/none", "policy/grpo-kl", "linear/logprobs"])
def test_every_tensor_lies_on_the_device(name: str) -> None:
    """PyTorch's device without memory stands for one: there a tensor of the CPU beside the others is refused."""
    import torch

    inputs = next(case for case in CASES if case.name == name).draw().case
    compute = implementations.load("torch").compute
    outputs = compute(replace(inputs.with_numbers(), device="meta"))
    assert {x.device for x in outputs.values()} == {torch.device("meta")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "--impl=magic"], "--impl: expected one of tileloss, torch, "),
        (["audit", "--impl=tourch"], "got tourch; did you mean torch?"),
        (["audit", "--case=ce/magic"], "--case: no case matches ce/magic"),
        (["audit", "--case=ce/spke"], "--list shows them; did you mean ce/spike?"),
        (["audit", "--impl="], "--impl: expected at least one name, got ''"),
        (["audit", "--impl=,"], "--impl: expected at least one name, got ','"),
        (["audit", "--case="], "--case: expected at least one name, got ''"),
        (["audit", "--output=/tmp"], "--output: expected a regular file, got /tmp, a folder"),
        (["audit", "--device=tpu"], "--device: expected cpu, cuda or cuda:N, got tpu"),
        (["audit", "--device=cuda", "--invariance"], "--device: expected cpu with --invariance"),
        (["audit", "--time-limit=nan"], "--time-limit: expected more than 0, got nan"),
        (["audit", "--output=-"], "--output: expected a file to write, got '-'"),
        (
            ["audit", "--impl=no_module:f", "--case=ce/fp32"],
            "--impl no_module:f: there is no module no_module",
        ),
        (["audit", "--impl=json:f", "--case=ce/fp32"], "--impl json:f: json has no function f"),
        (["audit", "--impl=json.none:f", "--case=ce/fp32"], "there is no module json.none"),
        (
            ["audit", "--impl=none.py:f", "--case=ce/fp32"],
            "--impl: expected a Python file, got none.py",
        ),
        (["gradcheck", "--config=x", "--impl=magic"], "--impl: expected one of tileloss, torch, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_names_what_is_wrong(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(arguments)
    except SystemExit as exit:  # argparse's way
        code = exit.code
    assert code == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("syntax error(", "SyntaxError: "),
        ("import nonexistent_pkg", "ModuleNotFoundError: No module named 'nonexistent_pkg', at "),
        ("raise SystemExit(7)", "SystemExit: 7, at "),
    ],
)
@pytest.mark.parametrize("subcommand", ["audit", "gradcheck"])
def test_an_implementation_that_cannot_be_imported_is_one_line(
    subcommand: str, text: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    config = ROOT / "configs/gradcheck_ce_edges.yaml"
    more = ["--case=ce/fp32"] if subcommand == "audit" else [f"--config={config}"]
    assert run([subcommand, f"--impl={file}:f", "--quiet", *more]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"tileloss: --impl {file}:f: its import fails: {message}")


def test_a_child_ends_with_its_audit(tmp_path: Path) -> None:
    """Killed while a case hangs, an audit leaves no process behind."""

    def workers() -> list[int]:
        found = children_of(process.pid)
        names = [Path(f"/proc/{each}/cmdline").read_bytes() for each in found]
        return found if any(b"tools.audit.worker" in name for name in names) else []

    with spawn("audit", f"--impl={LOSSES}:hanging", "--case=ce/bf16") as process:
        children = wait_for(workers, process)
        time.sleep(1)
        process.kill()
    wait_for(lambda: all(map(is_gone, children)))


def test_children_get_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-canary")
    code, lines = audit_function(tmp_path, "telling", "ce/fp32")
    assert code == 0 and lines[0]["message"] == "no key, but a path"


# --------------------------------------------------------------------------------------------------------------- gradcheck


def gradcheck(
    name: str, capfd: pytest.CaptureFixture[str], *sets: str, config: str = "ce_safetensors"
) -> tuple[int, str]:
    flags = [f"--set={each}" for each in ("mutants=false", *sets)]
    path = ROOT / "configs" / f"gradcheck_{config}.yaml"
    code = run(["gradcheck", f"--impl={name}", f"--config={path}", *flags])
    out, err = capfd.readouterr()
    return code, out + err


def test_gradcheck_takes_a_function(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, out = gradcheck(f"{LOSSES}:right", capfd)
    assert code == 0 and f"made by {LOSSES}:right, " in out
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # its tensors are on the CPU
    code, out = gradcheck(f"{LOSSES}:right", capfd, "mutants=true")
    assert code == 0 and "dropped" in out and "NOT CAUGHT" not in out


@pytest.mark.parametrize(
    ("name", "config", "size", "mutant"),
    [
        # The loss of one function, row outputs of another.
        ("tileloss-torch", "linear_low_rank", 319, "dhead_r_low_rank_left_out"),
        ("tileloss-jax", "linear_low_rank", 319, "dhead_r_low_rank_left_out"),
        ("tileloss-torch", "distillation", 255, "label_term_dropped"),
        ("tileloss-torch", "linear_distillation", 319, "dhead_base_2"),
        ("tileloss-torch", "soft_cross_entropy", 255, "sum_taken_as_one"),
        ("tileloss-torch", "sparse_distillation", 255, "neighbours_logprobs"),
    ],
)
def test_gradcheck_catches_the_mutants_of(
    name: str, config: str, size: int, mutant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = [f"vocab_size={size}", "mutants=true"]
    sets += ["seq_len=9"] * (config == "linear_distillation")
    code, out = gradcheck(name, capfd, *sets, config=config)
    assert code == 0 and mutant in out and "NOT CAUGHT" not in out


def test_gradcheck_of_what_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    code, out = gradcheck("torch", capfd, "vocab_size=255", config="distillation")
    assert code == 2 and "refused: distillation: it has logprobs, " in out


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("halved", 1, "FAIL: dlogits/ulp_target"),
        ("without_gradient", 1, "FAIL: dlogits: the case asks for it, got none"),
        ("a_list", 1, "FAIL: expected a dict of arrays by name, got list"),
        ("raising", 1, f"FAIL: ValueError: no such luck, at {LOSSES}:"),
        ("refusing", 2, "refused: not today"),
    ],
)
def test_gradcheck_says_what_is_wrong(
    function: str, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found, out = gradcheck(f"{LOSSES}:{function}", capfd)
    assert found == code and message in out


def test_tileloss_itself_is_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    code, out = gradcheck("tileloss", capfd)
    assert code == 0 and "kernel/isa" in out


# -------------------------------------------------------------------------------------------------------------------- case


def make_case(**changes: Any) -> Case:
    nan = np.nan
    logits = np.array([[1, 2, nan], [nan, nan, nan], [3, 4, nan], [nan, nan, nan]])
    tensors = {
        "logits": logits.astype(ml_dtypes.bfloat16),
        "labels": np.array([1, -100, 0, 99]),
        "mask": np.array([1, 1, 1, 0], np.uint8),
        "old_logp": np.array([-1, nan, -2, nan], np.float32),
        "sequence_offsets": np.array([0, 2, 4]),
    }
    given = {
        "tensors": tensors,
        "function": "policy_loss",
        "options": {"valid_vocab": 2},
        "batch_size": 2,
    }
    more = {"seq_len": 2, "outputs": [], "mutants": False, "in_place": False}
    return Case(**{**given, **more, **changes})


def test_numbers_replace_what_tileloss_never_reads() -> None:
    case = make_case()
    numbers = case.with_numbers()
    assert numbers.in_use.tolist() == case.in_use.tolist() == [True, False, True, False]
    expected = [[1, 2, 0], [0, 0, 0], [3, 4, 0], [0, 0, 0]]
    assert numbers.tensors["logits"].astype(np.float32).tolist() == expected
    assert numbers.tensors["labels"].tolist() == [1, -100, 0, -100]
    assert numbers.tensors["old_logp"].tolist() == [-1, 0, -2, 0]
    assert "sequence_offsets" not in numbers.tensors
    assert np.isnan(case.tensors["logits"].astype(np.float32)[0, 2])
    ragged = make_case(tensors=case.tensors | {"sequence_offsets": np.array([0, 1, 4])})
    assert "sequence_offsets" in ragged.with_numbers().tensors


def test_the_head_and_an_absent_bias() -> None:
    tensors = {
        "hidden": np.ones((1, 2), np.float32),
        "head": np.array([[1, 2], [np.nan, np.nan]], np.float32),
        "labels": np.array([0]),
    }
    gradients = ("dhead", "dbias")
    case = make_case(
        tensors=tensors, options={"valid_vocab": 1}, gradients=gradients
    ).with_numbers()
    assert case.tensors["head"].tolist() == [[1, 2], [0, 0]]
    assert case.tensors["bias"].tolist() == [0, 0]
    assert [case.torch(name).requires_grad for name in ("hidden", "head", "bias")] == [
        False,
        True,
        True,
    ]


def test_refusals_name_what_is_not_offered() -> None:
    case = make_case()
    with pytest.raises(Refused, match="^policy_loss: it has cross_entropy$"):
        case.refuse_unless(["cross_entropy"])
    with pytest.raises(Refused, match="^valid_vocab, old_logp, sequence_offsets: not offered$"):
        case.refuse_unless(["policy_loss"], tensors=["mask"])
    case.refuse_unless(["policy_loss"], ["valid_vocab"], ["mask", "old_logp", "sequence_offsets"])
    graded = make_case(
        tensors={"logits": case.tensors["logits"], "lse_grad": np.ones(1)}, options={}
    )
    with pytest.raises(Refused, match="^lse_grad: not offered$"):
        graded.refuse_unless(["policy_loss"])
    graded.refuse_unless(["policy_loss"], differentiable=["lse"])


def test_the_second_backward_is_the_one_that_counts() -> None:
    import torch

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.turns = 0
            return x.sum()

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            ctx.turns += 1
            return upstream * ctx.turns * torch.ones(2, 2)

    tensors = {"logits": np.ones((2, 2), np.float32), "loss_grad": np.array([3], np.float32)}
    for backwards in (1, 2):
        case = make_case(tensors=tensors, options={}, backwards=backwards)
        found = case.torch_outputs(loss=Doubling.apply(case.torch("logits")))
        assert found["dlogits"].tolist() == [[3 * backwards] * 2] * 2


def test_outputs_become_what_the_judge_reads() -> None:
    import jax.numpy as jnp
    import torch

    case = make_case(function="cross_entropy")
    found = prepare(
        case,
        {
            "loss": torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
            "dlogits": torch.ones(4, 3, dtype=torch.bfloat16).T,
            "logp": jnp.ones(4, jnp.float16),
            "argmax": [1, 2, 3, 4],
            "correct": np.array([1, 0, 0, 1]),
            "entropy": None,
        },
    )
    dtypes = {name: array.dtype.name for name, array in found.items()}
    assert dtypes == {
        "loss": "float32", "dlogits": "bfloat16", "logp": "float32", "argmax": "int64", "correct": "bool",
    }  # fmt: skip
    assert found["dlogits"].shape == (3, 4) and found["loss"] == 1.5
    with pytest.raises(Missing, match="loss"):
        prepare(case, {"dlogits": found["dlogits"]})
    with pytest.raises(TypeError, match="^loss: expected an array of numbers, got str$"):
        prepare(case, {"loss": "high", "dlogits": found["dlogits"]})
    assert set(GOOD) == {"pass", "refused", "not_installed"}
