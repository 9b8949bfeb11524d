"""A config with `model_path`: the case's tensors from a forward of that model, in place of those of a file."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tileloss.testing.outputs import to_numpy
from tileloss.tools import models
from tileloss.tools.architectures import PREFIX
from tileloss.tools.config import Config
from tileloss.tools.progress import Progress

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_POLICY_KEYS = ("epsilon_low", "epsilon_high", "old_logp_noise_scale")
_SEQ_LEN, _IGNORE_PROB, _NOISE = 256, 0.1, 0.2  # where the config says nothing


class ModelCase(NamedTuple):
    """What the judge is to be told besides the config, and the report."""

    tensors: dict[str, np.ndarray]  # of the file that has the model's name
    overrides: list[str]
    facts: dict[str, Any]


class _Settings(NamedTuple):
    """What the config says of the case."""

    model_path: str
    teacher_path: str | None
    level: str
    is_policy: bool
    dtype: torch.dtype | None
    text: str | None
    batch_size: int
    seq_len: int | None
    ignored: float  # the share of rows that the labels, or the mask, leave out
    ignore_index: int
    seed: int


def prepare(config: Config) -> list[str]:
    """The overrides that hold whatever the model is. Marks the keys that the judge is to skip.

    Raises:
        ValueError: a key is wrong; names it and its line.
    """
    if "source" in config:
        config.fail("source", "the tensors come from model_path: expected one of the two")
    config.skip(
        "model_path",
        "teacher_model_path",
        "text",
        "dtype",
        "ignore_prob",
        "mask_prob",
        "vocab_size",
    )
    path = json.dumps(config.text("model_path"))  # quoted, as YAML is too
    overrides = ["source.kind=safetensors", f"source.path={path}"]
    if "loss" not in config:
        is_policy = any(key in config for key in _POLICY_KEYS)
        overrides += ["loss=policy_loss", "preset=grpo"] if is_policy else ["loss=cross_entropy"]
    if _is_policy(config):
        overrides.append("source.mask=mask")
        if "old_logp_noise_scale" not in config:
            overrides.append(f"old_logp_noise_scale={_NOISE}")
    if _settings(config).teacher_path is not None:
        if "loss" not in config or config.text("loss") != "distillation":
            config.fail("teacher_model_path", "expected loss: distillation beside it")
        overrides.append("source.teacher=teacher_logits")
    return overrides


def make(config: Config, progress: Progress) -> ModelCase:
    """Loads the model and runs it.

    Raises:
        ValueError: there is no such model at hand, or it is none that the losses fit.
    """
    settings = _settings(config)
    progress.step(f"loading {settings.model_path}")
    model_folder = config.path_from("model_path", settings.model_path)
    model = models.load(settings.model_path, model_folder, settings.dtype, settings.seed)
    random = torch.Generator().manual_seed(settings.seed)
    ids, words = _ids(model, settings, config, random)
    progress.step(f"forward of {tuple(ids.shape)} tokens")
    captured = models.capture(model, ids, settings.level)
    tensors = captured.tensors | _label_tensors(ids, settings, random)
    if settings.teacher_path is not None and "logits" in tensors:
        progress.step(f"loading {settings.teacher_path}")
        tensors["teacher_logits"] = _teacher_logits(config, settings, ids, tensors["logits"])
    overrides = [f"{k}={v!r}" for k, v in captured.options.items()]
    overrides += ["source.bias=bias"] if "bias" in tensors else []
    overrides += [f"batch_size={ids.shape[0]}", f"seq_len={ids.shape[1]}"]
    facts = {
        "model": settings.model_path,
        "model/class": type(model.module).__name__,
        "model/parameters": sum(p.numel() for p in model.module.parameters()),
        "model/weights": "random" if settings.model_path.startswith(PREFIX) else "stored",
        "model/ids": words,
        "time/load_s": model.load_s,
        "time/forward_s": captured.forward_s,
    }
    arrays = {name: to_numpy(name, tensor) for name, tensor in tensors.items()}
    return ModelCase(arrays, overrides, facts)


def _is_policy(config: Config) -> bool:
    if "loss" in config:
        return config.text("loss") == "policy_loss"
    return any(key in config for key in _POLICY_KEYS)


def _settings(config: Config) -> _Settings:
    is_policy = _is_policy(config)
    dtype = config.choice("dtype", tuple(_DTYPES), "")
    return _Settings(
        model_path=config.text("model_path") or "",
        teacher_path=config.text("teacher_model_path"),
        level=config.choice("level", ("logits", "linear"), "logits"),
        is_policy=is_policy,
        dtype=_DTYPES.get(dtype),
        text=config.text("text"),
        batch_size=config.integer("batch_size", 1, minimum=1) or 1,
        seq_len=config.integer("seq_len", None, minimum=2),
        ignored=config.number("mask_prob" if is_policy else "ignore_prob", _IGNORE_PROB, 0, 1),
        ignore_index=config.integer("ignore_index", -100, minimum=-(2**31)) or 0,
        seed=config.integer("seed", 0) or 0,
    )


def _ids(
    model: models.Model, settings: _Settings, config: Config, random: torch.Generator
) -> tuple[Tensor, str]:
    """Ids [B, T] of the text, or drawn; and what they are, in words."""
    if settings.text is None:
        vocab = model.module.get_output_embeddings().weight.shape[0]
        shape = (settings.batch_size, settings.seq_len or _SEQ_LEN)
        return torch.randint(0, vocab, shape, generator=random), "random"
    file = config.path_from("text", settings.text)
    if len(settings.text.split()) == 1 and not file.is_file():
        config.fail("text", f"expected a text or a file, got '{settings.text}': no such file")
    found = models.encode(model, file.read_text() if file.is_file() else settings.text)
    seq_len = settings.seq_len or len(found) // settings.batch_size
    size = settings.batch_size * seq_len
    if seq_len < 2 or len(found) < size:
        config.fail(
            "text",
            f"expected at least batch_size x seq_len = {max(size, 2 * settings.batch_size)} tokens, got {len(found)}",
        )
    ids = torch.tensor(found[:size]).reshape(settings.batch_size, seq_len)
    return ids, str(settings.text) if file.is_file() else "text"


def _teacher_logits(config: Config, settings: _Settings, ids: Tensor, student: Tensor) -> Tensor:
    """[B, T, V] of the other model on the same tokens, in the student's dtype."""
    assert settings.teacher_path is not None
    folder = config.path_from("teacher_model_path", settings.teacher_path)
    # Another seed: random weights are not to be the student's.
    model = models.load(settings.teacher_path, folder, settings.dtype, settings.seed + 1)
    columns = model.module.get_output_embeddings().weight.shape[0]
    if columns != student.shape[-1]:
        config.fail(
            "teacher_model_path",
            f"expected a vocabulary of {student.shape[-1]}, as model_path has, got {columns}",
        )
    logits = models.capture(model, ids, "logits").tensors["logits"]
    return logits.to(student.dtype).contiguous()


def _label_tensors(ids: Tensor, settings: _Settings, random: torch.Generator) -> dict[str, Tensor]:
    """Each position's label is the next token. The last of a sequence has none, and a share of the others is left out."""
    labels = ids.roll(-1, dims=1)
    out = torch.rand(ids.shape, generator=random) < settings.ignored
    out[:, -1] = True
    if settings.is_policy:
        return {"labels": labels, "mask": (~out).to(torch.uint8)}
    return {"labels": labels.masked_fill(out, settings.ignore_index)}
