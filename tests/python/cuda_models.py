"""Models of transformers and losses of TRL on CUDA tensors, patched, against the same on the CPU as they are:
test_torch_cuda.py. All of a model is on the device, and of a step nothing is read on the host but what its body reads itself."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import cuda_device
from cuda_device import OTHER, CudaTensor, get, to_device
from tileloss import torch as tl
from tileloss.integrations import trl as trl_integration
from tileloss.integrations.transformers import make_compute_loss_func, patch
from transformers_models import VOCAB, batch, build

TOLERANCE = cuda_device.TOLERANCE_OF_MODELS


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_device.installed():
        yield
        tl.check_errors()
    gc.collect()  # models, whose memory is protected piece by piece at every operator


def there(x: Any) -> Any:
    return tree_map(lambda x: to_device(x) if isinstance(x, Tensor) else x, x)


def on_device(kind: str, build: Any = build) -> Any:
    model = build(kind)
    cuda_device.move(model)
    body = model.model.forward

    @functools.wraps(body)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with cuda_device.reads():  # whether there is padding, or several sequences in one
            return body(*args, **kwargs)

    model.model.forward = forward
    return model


def hold(found: Tensor, model: Any, expected: Tensor, own: Any) -> None:
    """The loss, and the gradients of both models."""
    assert isinstance(found, CudaTensor)
    found.backward(), expected.backward()
    torch.testing.assert_close(get(found.detach()), expected.detach(), rtol=TOLERANCE, atol=0)
    parameters = zip(model.named_parameters(), own.parameters(), strict=True)
    trained = [both for both in parameters if both[1].requires_grad]
    largest = max(float(p.grad.abs().max()) for _, p in trained)
    for (name, mine), other in trained:
        off = (get(mine.grad) - other.grad).abs().max()
        assert off <= TOLERANCE * max(other.grad.abs().max(), largest / 100), name


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "phi"])  # tied; soft-capped; with bias
def test_a_patched_model(kind: str) -> None:
    own, model, given = build(kind), patch(on_device(kind)), batch()
    calls = tl.call_counts()
    hold(model(**there(given)).loss, model, own(**given).loss, own)
    assert tl.call_counts() != calls
    # Labels on the CPU are brought to the hidden states, as transformers brings them to the logits.
    given["num_items_in_batch"] = torch.tensor(9)
    moved = there(given) | {"labels": given["labels"]}
    hold(model(**moved).loss, model, own(**given).loss, own)


def test_lora_on_the_head() -> None:
    from peft_models import with_lora

    def adapted(kind: str) -> Any:
        return with_lora(build(kind), target_modules=["lm_head"]).get_base_model()

    own, model, given = adapted("phi"), patch(on_device("phi", adapted)), batch()
    calls = tl.call_counts()
    hold(model(**there(given)).loss, model, own(**given).loss, own)
    assert tl.call_counts() != calls


def test_smoothed_labels() -> None:
    own, model, given = patch(build("qwen2")), patch(on_device("qwen2")), batch()
    ids, labels = given["input_ids"], given["labels"]
    loss, own_loss = (make_compute_loss_func(m, label_smoothing=0.1) for m in (model, own))
    found = loss(model(input_ids=to_device(ids)), to_device(labels))
    hold(found, model, own_loss(own(input_ids=ids), labels), own)


@pytest.mark.skipif(OTHER == 0, reason="NOT RUN: fewer GPUs than 2")
def test_a_head_on_another_device_is_refused() -> None:
    model, given = patch(on_device("phi")), there(batch())
    model.lm_head.weight = torch.nn.Parameter(to_device(get(model.lm_head.weight.detach()), 1))
    words = "^linear_weight: expected a tensor on cuda:0, where input is, got one on cuda:1$"
    with pytest.raises(ValueError, match=words):
        model(**given)


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_trls_fused_head(kind: str) -> None:
    from trl.trainer.utils import add_fused_lm_head

    own, model, given = build(kind), on_device(kind), batch()
    for each in (own, model):
        add_fused_lm_head(each)
    expected = own(**given, fused_lm_head=True).loss
    with trl_integration.patch():
        calls = tl.call_counts()
        hold(model(**there(given), fused_lm_head=True).loss, model, expected, own)
    assert tl.call_counts() != calls


def test_trls_distillation() -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.trainer import distillation_trainer

    torch.manual_seed(3)
    x, teacher, labels = (
        torch.randn(2, 7, VOCAB),
        torch.randn(2, 7, VOCAB),
        batch()["labels"][:, :7],
    )
    jsd = {"labels": labels, "beta": 0.3, "temperature": 0.7}
    mask, heads = labels != -100, torch.randn(2, VOCAB, 16)
    hidden = torch.randn(2, 2, 7, 16)

    def both(put: Any) -> list[Tensor]:
        """Losses and gradients."""
        logits, states = put(x).requires_grad_(), put(hidden[0]).requires_grad_()
        head = put(heads[0]).requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(logits, put(teacher), **tree_map(
            lambda value: put(value) if isinstance(value, Tensor) else value, jsd
        ))  # fmt: skip
        of_heads = distillation_trainer._chunked_divergence_loss(
            states, put(hidden[1]), head, put(heads[1]), put(mask), 0.5
        )
        leaves = logits, states, head
        return [loss, *of_heads, *torch.autograd.grad(loss + of_heads[0], leaves)]

    expected = both(lambda x: x.clone())
    with trl_integration.patch():
        found = both(to_device)
    for mine, other in zip(found, expected, strict=True):
        assert isinstance(mine, CudaTensor)
        least = TOLERANCE * float(other.abs().max())
        torch.testing.assert_close(get(mine.detach()), other.detach(), rtol=TOLERANCE, atol=least)


def test_other_devices_are_refused() -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    elsewhere = torch.empty(2, 3, VOCAB, device="meta")
    with (
        trl_integration.patch(),
        pytest.raises(NotImplementedError, match="CUDA device, got them on meta"),
    ):
        GKDTrainer.generalized_jsd_loss(elsewhere, elsewhere)
