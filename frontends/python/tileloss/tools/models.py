"""What a causal language model of transformers hands to its loss: hidden states, LM head, and how the logits follow from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tileloss.tools.architectures import ARCHITECTURES, PREFIX

transformers.utils.logging.disable_progress_bar()  # of the weights; ours says what goes on
transformers.utils.logging.set_verbosity_error()  # what is wrong with a model is an error of ours, in one line

_LISTED = 4  # weights, of many
_PROBED = 8  # tokens whose logits are computed to see what the model makes of them


@dataclass(frozen=True)
class Model:
    """A causal LM in evaluation mode, and where it came from."""

    path: str  # as the config has it
    module: Any
    tokenizer_file: Path | None
    load_s: float


@dataclass(frozen=True)
class Captured:
    """Of one forward over ids [B, T]."""

    # Of level "logits": logits [B, T, V], after the model's own scale and softcap. Of level "linear": hidden [B, T, H], as the
    # head gets them, lm_head [V, H], and bias [V] where there is one.
    tensors: dict[str, Tensor]
    options: dict[str, float]  # of the loss, of level linear: logit_scale, softcap
    forward_s: float


def load(model_path: str, folder: Path, dtype: torch.dtype | None, seed: int) -> Model:
    """``model_path``: ``folder`` if that is one, a hub id in the local cache, or "random:" and a name of ARCHITECTURES.

    Nothing is downloaded. dtype None: as stored; bfloat16 of random weights.

    Raises:
        ValueError: there is no such model at hand; says what would fetch it.
    """
    begin = time.perf_counter()
    if model_path.startswith(PREFIX):
        module, tokenizer = _random(model_path.removeprefix(PREFIX), dtype, seed), None
    else:
        module, tokenizer = _stored(model_path, folder, dtype)
    return Model(model_path, module.eval(), tokenizer, time.perf_counter() - begin)


def capture(model: Model, ids: Tensor, level: str) -> Captured:
    """One forward, without gradients.

    Raises:
        ValueError: the model has no LM head of its own, or makes something of its logits that the losses have no option for; it
            has fewer positions than ids, its forward fails, or gives NaN.
    """
    module = model.module
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and ids.shape[1] > positions:
        raise ValueError(
            f"seq_len: expected at most {positions}, the positions of {model.path}, got {ids.shape[1]}"
        )
    head = module.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2:
        raise ValueError(f"{type(module).__name__} has no output embeddings with a weight [V, H]")
    seen: list[Tensor] = []

    def keep(_: Any, arguments: tuple[Tensor, ...]) -> Any:
        seen.append(arguments[0].detach())
        # With the hidden states at hand no more logits are wanted than tell how they are made.
        return (arguments[0][:1, :_PROBED],) if level == "linear" else None

    hook = head.register_forward_pre_hook(keep)
    begin = time.perf_counter()
    try:
        with torch.no_grad(), _blaming(model.path):
            logits = module(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    forward_s = time.perf_counter() - begin
    if len(seen) != 1 or seen[0].shape[:2] != ids.shape:
        raise ValueError(
            f"{type(module).__name__}: expected one call of its LM head with hidden states [B, T, H]"
        )
    _refuse_not_finite(model, logits, seen[0], *([weight] if level == "linear" else []))
    if level == "logits":
        return Captured({"logits": logits.contiguous()}, {}, forward_s)
    bias = getattr(head, "bias", None)
    options = _transform(module, seen[0][:1, :_PROBED], weight, bias, logits)
    hidden = seen[0].to(weight.dtype).contiguous()
    tensors = {"hidden": hidden, "lm_head": weight.detach().contiguous()}
    if bias is not None:
        tensors["bias"] = bias.detach().float().contiguous()
    return Captured(tensors, options, forward_s)


def encode(model: Model, text: str) -> list[int]:
    """The token ids of a text, without special tokens.

    Raises:
        ValueError: the model has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    # Not AutoTokenizer: it goes by the model's type, whatever the folder holds.
    if model.tokenizer_file is None:
        raise ValueError("text: the model has no tokenizer.json; without `text` ids are drawn")
    with _blaming(f"{model.path}: tokenizer.json"):
        tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _random(name: str, dtype: torch.dtype | None, seed: int) -> Any:
    if name not in ARCHITECTURES:
        raise ValueError(
            f"model_path: {PREFIX} expected one of {', '.join(ARCHITECTURES)}, got {name}"
        )
    sizes = dict(ARCHITECTURES[name])
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)


def _stored(model_path: str, folder: Path, dtype: torch.dtype | None) -> tuple[Any, Path | None]:
    from transformers.utils import cached_file

    name = str(folder) if folder.is_dir() else model_path
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        config = None
    if config is None:
        known = (
            ", or no weights at all: " + PREFIX + model_path if model_path in ARCHITECTURES else ""
        )
        raise ValueError(
            f"model_path: {model_path} is no folder with a config.json, and not in the local cache of the hub; "
            f"expected one of these: `hf download {model_path}` fetches it{known}"
        )
    tokenizer = Path(config).with_name("tokenizer.json")
    with _blaming(model_path):
        module, found = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # or it draws them all the same, and says so in a table
            output_loading_info=True,
        )
    # What is not in the file, or not of the config's size, has been drawn at random.
    wrong = [f"none for {name}" for name in sorted(found["missing_keys"])]
    wrong += [
        f"{list(stored)} for {name} {list(size)}" for name, stored, size in found["mismatched_keys"]
    ]
    if wrong:
        raise ValueError(
            f"model_path: {model_path}: expected the weights of {type(module).__name__} as config.json has it, "
            f"got {_listed(wrong)}"
        )
    return module, tokenizer if tokenizer.is_file() else None


@contextmanager
def _blaming(model_path: str) -> Iterator[None]:
    """What transformers, safetensors and torch raise over a broken model is the model's fault."""
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"model_path: {model_path}: {type(error).__name__}: {error}") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _refuse_not_finite(model: Model, *captured: Tensor) -> None:
    """-inf is a logit; NaN and +inf are none."""
    if all(bool((each < float("inf")).all()) for each in captured):
        return
    weights = model.module.named_parameters()
    names = [name for name, weight in weights if not bool(torch.isfinite(weight).all())]
    cause = f"the weights {_listed(names)} hold NaN or inf" if names else "its weights are finite"
    raise ValueError(f"model_path: {model.path}: its forward gives NaN or inf: {cause}")


def _transform(
    module: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor
) -> dict[str, float]:
    """The options that make the model's logits [1, n, V] of the head's products: tried, not believed."""
    config = module.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1)
    scale /= float(getattr(config, "logits_scaling", None) or 1)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0)
    weight = weight.detach().float()
    z = torch.nn.functional.linear(
        hidden.float(), weight, None if bias is None else bias.detach().float()
    )
    z *= scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    error = float((z - logits.float()).abs().max())
    largest = float(z.abs().max())
    if not error <= 4 * torch.finfo(logits.dtype).eps * largest + 1e-5 * largest:
        raise ValueError(
            f"{type(module).__name__}: its logits are not softcap({softcap:g}) of {scale:g} * (hidden x head + bias): "
            f"they differ by {error:.3g}; use level: logits"
        )
    options = {"logit_scale": scale, "softcap": softcap}
    usual = {"logit_scale": 1.0, "softcap": 0.0}
    return {name: value for name, value in options.items() if value != usual[name]}
