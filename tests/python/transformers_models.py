"""Tiny random causal LMs, one of each kind that a forward comes in, and how two of them compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tileloss.integrations.transformers import patch

VOCAB = 96
BATCH, LENGTH = 2, 11
# docs/users/huggingface.md counts and lists this version's classes; others have other forwards.
OF_THE_DOCUMENT = pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."),
    reason="NOT RUN: the document is about transformers 5.23",
)

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = _LLAMA | {"output_router_logits": True, "router_aux_loss_coef": 0.1}
_SHARED_EXPERT = {
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8}
_GEMMA4 = _LLAMA | {"head_dim": 8, "final_logit_softcapping": 2.0}
_GEMMA4 |= {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_MAMBA |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1}
_GPT2 |= {"eos_token_id": 2, "pad_token_id": 0}

# name -> (class, options of its config); what is special is said beside each.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA | {"tie_word_embeddings": True}),  # tied
    "gemma2": (
        "Gemma2ForCausalLM",
        _LLAMA | {"head_dim": 8, "final_logit_softcapping": 2.0},
    ),  # soft-cap
    "gemma4": (
        "Gemma4ForCausalLM",
        _GEMMA4,
    ),  # soft-cap; its base model may have cut the positions already
    "cohere": ("CohereForCausalLM", _LLAMA | {"logit_scale": 0.3}),  # multiplies logits
    "granite": ("GraniteForCausalLM", _LLAMA | {"logits_scaling": 3.0}),  # divides logits
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        _LLAMA | _LATENT | {"dim_model_base": 16},
    ),  # divides hidden states
    "phi": ("PhiForCausalLM", _LLAMA | {"resid_pdrop": 0.0}),  # a head with bias
    "mixtral": ("MixtralForCausalLM", _EXPERTS | {"num_local_experts": 4}),  # router loss
    "qwen2_moe": ("Qwen2MoeForCausalLM", _EXPERTS | _SHARED_EXPERT),
    "gpt2": ("GPT2LMHeadModel", _GPT2),  # base model "transformer", called by position, tied
    "gptj": ("GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),  # return_dict by hand, bias
    "mamba": ("MambaForCausalLM", _MAMBA),  # casts hidden states to the head's dtype
}


def build(kind: str, **options: Any) -> PreTrainedModel:
    """A model in training, float32, with weights large enough for logits that differ."""
    name, defaults = KINDS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**(defaults | options)))
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if label.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.dim() > 1:
                parameter.mul_(5)
    model.generation_config.pad_token_id = 0
    return model.train()


def pair(kind: str, prepare: Callable[[PreTrainedModel], Any] = lambda model: None, **options: Any):
    """(unpatched, patched) with the same weights; ``prepare`` is done to both before the patch."""
    unpatched = build(kind, **options)
    prepare(unpatched)
    return unpatched, patch(copy.deepcopy(unpatched))


def batch() -> dict[str, torch.Tensor]:
    """Two sequences: one with a masked prompt, one padded at its end; labels hold -100 at both."""
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 8:], mask[1, 8:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def backward(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs


def check_gradients(
    unpatched: PreTrainedModel, patched: PreTrainedModel, tolerance: float, least: float = 0.0
) -> None:
    """Every parameter's gradients agree to ``tolerance`` of that gradient's largest element, or of ``least`` times the largest of
    all: a key's bias has a gradient that is 0 but for rounding."""
    expected = dict(unpatched.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    assert largest > 0
    for name, parameter in patched.named_parameters():
        want, got = expected[name].grad, parameter.grad
        assert (want is None) == (got is None), name
        if want is not None and got is not None:
            scale = max(float(want.abs().max()), least * largest, 1e-6)
            assert float((got - want).abs().max()) <= tolerance * scale, name


def check_step(
    unpatched: Any, patched: Any, inputs: Any = None, tolerance: float = 1e-5, **more: float
) -> tuple[Any, Any]:
    """A step of both, without logits of the patched one: the loss to ``rtol`` or ``tolerance``, and all gradients."""
    inputs = inputs or batch()
    want, got = backward(unpatched, inputs), backward(patched, inputs)
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss, rtol=more.pop("rtol", tolerance), atol=0)
    check_gradients(unpatched, patched, tolerance, **more)
    return want, got


def gradient_errors(model: PreTrainedModel, exact: PreTrainedModel) -> dict[str, float]:
    """||g - g_exact|| / ||g_exact|| of every parameter that has a gradient."""
    errors = {}
    for (name, parameter), reference in zip(
        model.named_parameters(), exact.parameters(), strict=True
    ):
        if reference.grad is not None and reference.grad.norm() > 0:
            difference = parameter.grad.float() - reference.grad
            errors[name] = float(difference.norm() / reference.grad.norm())
    return errors


class HeadCalls:
    """Counts calls of a model's LM head, by hook and by its forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        head = model.get_output_embeddings()
        own = head.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return own(*args, **kwargs)

        head.forward = forward
        head.register_forward_hook(lambda *_: setattr(self, "count", self.count + 1))
