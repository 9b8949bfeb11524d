"""Models with TRL's fused LM head (add_fused_lm_head), with the patch against without."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from trl.trainer.utils import add_fused_lm_head

from peft_models import with_lora
from tileloss.integrations import trl as integration
from wrapped_tensors import quantized

VOCAB, BATCH, LENGTH = 97, 3, 11
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# A plain head, a tied one, one with a bias, and each of the ways in which models transform their
# logits.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "bias": ("Phi", {}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8}),
    "logit_scale": ("Cohere", {"logit_scale": 0.25}),
    "logits_scaling": ("Granite", {"logits_scaling": 4.0}),
    "experts": (
        "Mixtral",
        {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
}


def make_model(
    family: str, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    torch.manual_seed(1)
    made = getattr(transformers, f"{family}Config")(**(SMALL | config))
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(std=0.4)  # logits of about 2: far from uniform
        if head.bias is not None:
            head.bias.normal_()
    return model.to(dtype)


def make_batch() -> dict[str, torch.Tensor]:
    """Token ids and labels, masked in each sequence's first tokens (a prompt) and some others."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    labels[0, -3:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.fixture
def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of linear_logprobs."""
    rows: list[int] = []
    original = integration.linear_logprobs

    def counting(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(hidden.shape[0])
        return original(hidden, *args, **kwargs)

    monkeypatch.setattr(integration, "linear_logprobs", counting)
    return rows


def step(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], autocast: bool = False
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model's output, and its gradients of loss + 0.1 * the sum of a weighted entropy."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**batch, fused_lm_head=True)
    weights = torch.arange(output.entropy.numel()).reshape(output.entropy.shape) / 30
    (output.loss + 0.1 * (output.entropy * weights).sum()).backward()
    return output, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def refuse(*_: Any) -> None:
    raise AssertionError("lm_head was called")


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_head_gives_trls_outputs_and_gradients(name, seen_rows):
    model = make_model(*MODELS[name])
    model.get_output_embeddings().register_forward_pre_hook(refuse)
    add_fused_lm_head(model, temperature=0.9, outputs=PER_TOKEN)
    batch = make_batch()
    own, own_gradients = step(model, batch)
    assert seen_rows == []
    with integration.patch():
        ours, our_gradients = step(model, batch)

    kept = batch["labels"][:, 1:] != -100
    assert seen_rows == [int(kept.sum())]
    assert torch.equal(ours.label_mask, kept)
    for field in PER_TOKEN:
        assert ours[field].dtype == own[field].dtype
        torch.testing.assert_close(ours[field], own[field], rtol=1e-5, atol=1e-5)
        assert not ours[field][~kept].any(), f"{field} of a masked token is not 0"
    torch.testing.assert_close(ours.loss, own.loss, rtol=1e-6, atol=0.0)
    assert own_gradients.keys() == our_gradients.keys() > set()
    everything = sum(float(g.square().sum()) for g in own_gradients.values()) ** 0.5
    for parameter, gradient in own_gradients.items():
        assert float((our_gradients[parameter] - gradient).norm()) <= 1e-5 * everything, parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast_lm_head_to_fp32_stays_in_float32_under_autocast(dtype):
    model = make_model("Qwen2", {}, dtype)
    model.lm_head.float()
    add_fused_lm_head(model, cast_lm_head_to_fp32=True, outputs=PER_TOKEN)
    own, own_gradients = step(model, make_batch(), autocast=True)
    with integration.patch():
        ours, our_gradients = step(model, make_batch(), autocast=True)
    torch.testing.assert_close(ours.log_probs, own.log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        our_gradients["lm_head.weight"], own_gradients["lm_head.weight"], rtol=1e-4, atol=1e-5
    )


def test_shift_labels_are_scored_where_they_stand(seen_rows):
    model = make_model("Qwen2", {})
    add_fused_lm_head(model, outputs=PER_TOKEN)
    batch = make_batch()
    batch["shift_labels"] = batch.pop("labels")
    own, _ = step(model, batch)
    with integration.patch():
        ours, _ = step(model, batch)
    assert seen_rows == [int((batch["shift_labels"] != -100).sum())]
    assert ours.log_probs.shape == (BATCH, LENGTH)
    torch.testing.assert_close(ours.log_probs, own.log_probs, rtol=1e-5, atol=1e-5)


def test_a_batch_without_labels_gives_a_loss_of_0_that_can_be_differentiated(seen_rows):
    model = make_model("Qwen2", {})
    add_fused_lm_head(model, outputs=PER_TOKEN)
    batch = make_batch()
    batch["labels"][:] = -100
    with integration.patch():
        output, gradients = step(model, batch)
    assert seen_rows == [0]
    assert output.loss.item() == 0.0
    assert gradients and not any(gradient.any() for gradient in gradients.values())


def test_models_that_got_their_head_under_the_patch_lose_it_with_unpatch(seen_rows):
    model = make_model("Qwen2", {})
    with integration.patch():
        add_fused_lm_head(model)
        with torch.no_grad():
            ours = model(**make_batch(), fused_lm_head=True).log_probs
    with torch.no_grad():
        own = model(**make_batch(), fused_lm_head=True).log_probs
    assert len(seen_rows) == 1
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


def test_a_label_beyond_the_vocabulary_is_named():
    model = make_model("Qwen2", {})
    add_fused_lm_head(model)
    batch = make_batch()
    batch["labels"][1, -1] = VOCAB
    with (
        integration.patch(),
        pytest.raises(IndexError, match=f"target.*expected 0 <= label < {VOCAB} .* got {VOCAB}"),
    ):
        model(**batch, fused_lm_head=True)


def check_same(model: Any) -> None:
    own, own_gradients = step(model, make_batch())
    with integration.patch():
        ours, our_gradients = step(model, make_batch())
    torch.testing.assert_close(ours.loss, own.loss, rtol=1e-6, atol=0.0)
    assert own_gradients.keys() == our_gradients.keys() > set()
    largest = max(float(g.abs().max()) for g in own_gradients.values())
    for name, gradient in own_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=0, atol=1e-5 * largest)


def test_trained_tokens_of_the_head_are_beyond_trl_itself():
    """peft's trainable_token_indices: TRL asks the wrapper of the head for a bias, which it does not have."""
    model = make_model(*MODELS["tied"])
    add_fused_lm_head(model)
    adapted = with_lora(model, trainable_token_indices=[4, 7])
    for context in (contextlib.nullcontext, integration.patch):
        with context(), pytest.raises(AttributeError, match="TrainableTokensWrapper.*bias"):
            adapted(**make_batch(), fused_lm_head=True)


def test_a_quantized_weight():
    model = make_model("Qwen2", {})
    add_fused_lm_head(model, outputs=PER_TOKEN)
    model.lm_head.weight = quantized((VOCAB, 32))
    with integration.patch():
        ours, our_gradients = step(model, make_batch())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.dequantize(), False)
    own, own_gradients = step(model, make_batch())
    torch.testing.assert_close(ours.loss, own.loss, rtol=1e-6, atol=0.0)
    for name, gradient in own_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_dispatched_head_that_stays_on_its_device():
    model = make_model("Qwen2", {})
    add_fused_lm_head(model, outputs=PER_TOKEN)
    check_same(dispatch_model(model, {"": "cpu"}, force_hooks=True))


def test_an_offloaded_head_is_refused_by_that_name():
    model = make_model("Qwen2", {})
    add_fused_lm_head(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with (
        integration.patch(),
        pytest.raises(NotImplementedError, match="LM head is offloaded by acc"),
    ):
        model(**make_batch(), fused_lm_head=True)


def test_a_head_that_zero3_has_partitioned_is_refused_by_that_name():
    model = make_model("Qwen2", {})
    add_fused_lm_head(model)
    model.lm_head.weight.ds_id = 7
    with integration.patch(), pytest.raises(NotImplementedError, match="ZeRO-3 partitions"):
        model(**make_batch(), fused_lm_head=True)


def test_a_flat_shard_of_fsdp1_is_refused_by_that_name():
    """tests/python/head_ranks.py has the real one."""
    model = make_model("Qwen2", {})
    add_fused_lm_head(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flatten()[:40])
    with integration.patch(), pytest.raises(ValueError, match="a unit of FSDP1 by itself"):
        model(**make_batch(), fused_lm_head=True)
