"""`tileloss gradcheck` with model_path: what is captured of a causal LM, the config's keys, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tileloss.testing._judge import Crashed
from tileloss.tools import architectures, checks, models
from tileloss.tools.command import run
from tileloss.tools.config import Config

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests/data/qwen2-tiny-cut"
TINY = "gradcheck_ce_tiny_model.yaml"
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # for logits of some size
}
# One of each kind of LM head: plain, with softcap, bias, divisor, factor.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "qwen2"},
    "softcap": {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 3.0},
    "bias": {"model_type": "phi"},
    "divisor": {"model_type": "granite", "logits_scaling": 4.0},
    "factor": {"model_type": "cohere", "logit_scale": 0.25},
}


def gradcheck(config: Path | str, *sets: str, flags: tuple[str, ...] = ()) -> int:
    path = config if isinstance(config, Path) else ROOT / "configs" / config
    values = [f"--set={value}" for value in sets]
    return run(["gradcheck", f"--config={path}", "--quiet", *values, *flags])


def result(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text().splitlines()[-1])


@pytest.mark.parametrize("level", ["logits", "linear"])
@pytest.mark.parametrize("loss", ["cross_entropy", "policy_loss"])
def test_a_checkpoint_on_a_text_passes_and_its_mutants_are_caught(
    level: str,
    loss: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    output = tmp_path / "r.jsonl"
    assert gradcheck(TINY, f"level={level}", f"loss={loss}", f"output={output}") == 0
    files = [path for path in temporary.rglob("*") if path.is_file()]
    assert files == []  # no tensor goes to one
    line = result(output)
    out = capfd.readouterr().out
    assert "; ../tests/data/qwen2-tiny-cut; seed 0\n" in out
    assert re.search(r"\nmodel/class +Qwen2ForCausalLM\n", out)
    facts = ["model", "model/class", "model/parameters", "model/weights", "model/ids"]
    end = [*facts, "time/load_s", "time/forward_s", "gates", "mutants", "pass"]
    assert list(line)[-len(end) :] == end
    assert line["model/class"] == "Qwen2ForCausalLM"
    assert line["model/weights"] == "stored"
    assert line["time/load_s"] > 0
    assert line["time/forward_s"] > 0
    assert line["shape/batch_size"] == 2
    assert line["shape/vocab_size"] == 512
    # The last of each sequence has no label; of the 254 others some 10 % are left out.
    assert 200 < line["shape/rows_used"] < 245
    assert sum(bool(mutant["caught_by"]) for mutant in line["mutants"]) >= 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["logits", "linear"])
def test_every_kind_of_head_passes(
    kind: str, level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(architectures.ARCHITECTURES, kind, {**SIZES, **KINDS[kind]})
    config = tmp_path / "c.yaml"
    config.write_text(f"model_path: random:{kind}\nlevel: {level}\nseq_len: 24\nbatch_size: 2\n")
    output = tmp_path / "r.jsonl"
    assert gradcheck(config, "dtype=fp32", f"output={output}", flags=("--mutants",)) == 0
    assert (result(output)["model/weights"], result(output)["model/ids"]) == ("random",) * 2
    options = result(output)["options"]
    of_the_model = {"softcap": {"softcap": 3.0}, "divisor": {"logit_scale": 0.25}}
    of_the_model["factor"] = of_the_model["divisor"]
    expected = of_the_model.get(kind, {}) if level == "linear" else {}
    assert {k: v for k, v in options.items() if k in ("softcap", "logit_scale")} == expected


def test_distillation_from_another_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(architectures.ARCHITECTURES, "student", {**SIZES, **KINDS["plain"]})
    wider = {**SIZES, **KINDS["softcap"], "hidden_size": 48}
    monkeypatch.setitem(architectures.ARCHITECTURES, "teacher", wider)
    config = tmp_path / "c.yaml"
    config.write_text(
        "model_path: random:student\nloss: distillation\nseq_len: 24\nlabel_weight: 0.2\ndivergence_weight: 0.8\n"
    )
    output = tmp_path / "r.jsonl"
    sets = ("dtype=fp32", "temperature=2", f"output={output}")
    teacher = "teacher_model_path=random:teacher"
    assert gradcheck(config, *sets, teacher, flags=("--mutants",)) == 0
    assert (
        gradcheck(
            config,
            *sets,
            "teacher_model_path=random:student",
            "label_weight=0",
            "divergence_weight=1",
        )
        == 0
    )
    assert gradcheck(config, *sets) == 0  # near the model's own logits
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[0]["loss_ref"] != lines[2]["loss_ref"]
    assert lines[1]["loss_ref"] > 0.01  # of the same architecture, not the same model
    capfd.readouterr()
    monkeypatch.setitem(architectures.ARCHITECTURES, "teacher", {**wider, "vocab_size": 212})
    assert gradcheck(config, *sets, teacher) == 2
    assert "teacher_model_path: expected a vocabulary of 211, as model" in capfd.readouterr().err
    assert gradcheck(config, "loss=cross_entropy", teacher) == 2
    assert "teacher_model_path: expected loss: distillation" in capfd.readouterr().err


def test_the_loss_is_the_model_s_own(tmp_path: Path) -> None:
    """What transformers says of the same tokens, in float32."""
    output = tmp_path / "r.jsonl"
    assert gradcheck(TINY, "dtype=fp32", "ignore_prob=0", f"output={output}") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    text = (CHECKPOINT / "sample.txt").read_text()
    ids = models.encode(models.Model("it", model, CHECKPOINT / "tokenizer.json", 0), text)
    batch = torch.tensor(ids[:256]).reshape(2, 128)
    with torch.no_grad():
        expected = float(model(input_ids=batch, labels=batch).loss)
    assert result(output)["loss_kernel"] == pytest.approx(expected, rel=1e-5)


def test_the_old_keys_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "r.jsonl"
    sets = (f"model_path={CHECKPOINT}", "seq_len=40", f"output={output}", "kernel.block_size=128")
    assert gradcheck("gradcheck_grpo_qwen2.5_1.5b_model.yaml", *sets) == 0
    line = result(output)
    assert (line["loss"], line["preset"]) == ("policy_loss", "grpo")
    assert line["kernel/vocab_block"] == 128
    limits = {gate["name"].rpartition("/")[2]: gate["limit"] for gate in line["gates"]}
    of_the_config = [limits[name] for name in ("atol", "dlogits_max_abs", "dlogits_max_rel")]
    assert of_the_config == [1e-5, 1e-4, 1e-2]
    assert "mesh_shape is ignored" in capfd.readouterr().err


def test_another_implementation_is_judged_on_a_model(tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    sets = ("level=logits", "dtype=fp32", "mutants=false", "seq_len=16", f"output={output}")
    assert gradcheck(TINY, *sets, "outputs=[logp]", flags=("--impl=tileloss-torch",)) == 0
    assert result(output)["producer"].startswith("tileloss-torch, ")
    assert result(output)["model/class"] == "Qwen2ForCausalLM"


def test_a_crash_on_a_model_is_told_with_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise Crashed("signal 4, Illegal instruction", 4)

    monkeypatch.setattr(checks, "run_request", crash)
    output = tmp_path / "r.jsonl"
    assert gradcheck(TINY, f"output={output}") == 1
    assert capfd.readouterr().out == "\nFAIL: crashed (signal 4, Illegal instruction)\n"
    line = result(output)
    assert list(line)[:4] == ["tool", "version", "config", "model"]
    assert (line["model/weights"], line["pass"]) == ("stored", False)


def test_sizes_are_those_of_the_published_models() -> None:
    published = {
        "Qwen/Qwen2.5-0.5B": 494_032_768,
        "Qwen/Qwen2.5-1.5B": 1_543_714_304,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "Qwen/Qwen3-0.6B": 596_049_920,
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
        "google/gemma-2-2b": 2_614_341_888,
        "microsoft/phi-2": 2_779_683_840,
    }
    for name, parameters in published.items():
        sizes = dict(architectures.ARCHITECTURES[name])
        config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == parameters, name


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model_path=Nobody/nothing"], "hf download Nobody/nothing"),
        (["model_path=Qwen/Qwen2.5-1.5B"], "random:Qwen/Qwen2.5-1.5B"),
        (["model_path=random:Nobody/nothing"], "expected one of Qwen/Qwen2.5-0.5B"),
        (["text=none.txt"], "--set text=none.txt: text: expected a text or a file"),
        (["text=two words"], "text: expected at least batch_size x seq_len = 256 tokens"),
        (["seq_len=1"], "seq_len: expected an integer from 2 on, got '1'"),
        (["dtype=int8"], "dtype: expected one of fp32, bf16, fp16, got 'int8'"),
        (["source.kind=synthetic"], "source: the tensors come from model_path"),
        (
            ["kernel.isa=none", "model_path=Nobody/nothing"],
            "kernel.isa",
        ),  # before a model is sought
        (["kernel.block_size=x"], "kernel.block_size: expected an integer from 1 on, got 'x'"),
        (["seq_len=[1"], "--set seq_len=[1: not YAML"),
        (["labels_smoothing=1"], "labels_smoothing: unknown key"),
    ],
)
def test_what_is_wrong_is_named(
    sets: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gradcheck(TINY, *sets) == 2
    assert message in capfd.readouterr().err


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


def _put_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _leave_out(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "is no folder with a config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json' is not a valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "truncated": (_truncate, "SafetensorError"),
    "other sizes": (_widen, "got [256, 256] for model.layers.0.mlp."),
    "NaN": (_put_nan, "its forward gives NaN or inf: the weights model.norm.weight hold NaN or inf"),
    "a layer missing": (_leave_out, "as config.json has it, got none for model.norm.weight"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_model_is_one_line(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(CHECKPOINT, tmp_path / "model")
    breaks, message = BROKEN[how]
    breaks(folder)
    assert gradcheck(TINY, f"model_path={folder}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line and "model_path" in line, line


def test_positions_that_a_model_lacks_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"model_path: {CHECKPOINT}\nseq_len: 1025\n")
    assert gradcheck(config) == 2
    assert "seq_len: expected at most 1024, the positions of " in capfd.readouterr().err


def test_logits_that_no_option_explains_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.ARCHITECTURES, "plain", {**SIZES, **KINDS["plain"]})
    model = models.load("random:plain", Path("none"), torch.float32, 0)
    ids = torch.arange(12).reshape(1, 12)
    assert models.capture(model, ids, "linear").options == {}
    model.module.config.logits_scaling = 2.0  # its forward does not look at it
    with pytest.raises(ValueError, match="use level: logits"):
        models.capture(model, ids, "linear")


def test_the_documents_have_models_and_trackers() -> None:
    for config in ("gradcheck_ce_qwen2.5_1.5b_model", "gradcheck_grpo_qwen2.5_1.5b_model"):
        model = Config(ROOT / f"configs/{config}.yaml", []).text("model_path")
        assert model in architectures.ARCHITECTURES
