"""A whole training step, as users of Hugging Face transformers know it: forward and backward of a small Qwen2, with and without
`tileloss.integrations.transformers.patch`.

Two of Qwen2-0.5B's layers, with random weights; the vocabulary and the number of tokens are the comparison's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from comparison import contestants
from comparison.contestants import Output, Step, contestant
from comparison.inputs import SAMPLES, SEED, Inputs, Shape, Truth, new_generator, relative

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIDDEN, LAYERS = 896, 2
CHUNK = 256  # rows of the truth's float32 logits at a time: 156 MB at 151,936 classes


def make_model(vocab: int) -> PreTrainedModel:
    """Qwen2-0.5B but for its number of layers, bfloat16, in training."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=4864,
        num_hidden_layers=LAYERS,
        num_attention_heads=14,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    return Qwen2ForCausalLM(config).to(torch.bfloat16).train()


def make_inputs(shape: Shape) -> Inputs:
    """Two sequences (one, if the tokens cannot be halved) whose labels are the tokens themselves."""
    generator = new_generator()
    sequences = 2 if shape.tokens % 2 == 0 else 1
    ids = torch.randint(0, shape.vocab, (sequences, shape.tokens // sequences), generator=generator)
    nothing = torch.empty(0)
    return Inputs(shape, ids, nothing, nothing, model=make_model(shape.vocab))


def make_truth(inputs: Inputs) -> Truth:
    """The loss and the gradients of the same weights in float32, rows of the head a chunk at a time."""
    assert inputs.model is not None
    model = copy.deepcopy(inputs.model).float()
    hidden = model.model(input_ids=inputs.labels).last_hidden_state[:, :-1].reshape(-1, HIDDEN)
    labels = inputs.labels[:, 1:].reshape(-1)
    rows = hidden.detach().requires_grad_()
    loss = 0.0
    for begin in range(0, len(labels), CHUNK):
        part = slice(begin, begin + CHUNK)
        chunk = F.cross_entropy(model.lm_head(rows[part]), labels[part], reduction="sum")
        (chunk / len(labels)).backward()
        loss += chunk.item() / len(labels)
    hidden.backward(rows.grad)

    generator = new_generator()
    other = torch.randint(0, inputs.shape.vocab, (SAMPLES,), generator=generator)
    classes = torch.cat([labels[:SAMPLES], other])
    head, *body = [parameter.grad for parameter in model.parameters()]
    return Truth(loss, loss, torch.empty(0), classes, dhead=head[classes], body=tuple(body))


def gradient_error(gradients: tuple[torch.Tensor, ...], truth: Truth) -> float:
    """The worst of: rows of the head that are labels, other rows of it, which weigh less, and each other parameter."""
    assert truth.dhead is not None and truth.body is not None
    head, *body = gradients
    sampled = head[truth.classes]
    labels, others = slice(0, SAMPLES), slice(SAMPLES, None)
    pairs = [(sampled[part], truth.dhead[part]) for part in (labels, others)]
    return max(relative(*pair) for pair in [*pairs, *zip(body, truth.body, strict=True)])


def step_of(inputs: Inputs, call: Any) -> Step:
    """A step that leaves no gradients behind: they are the output."""
    assert inputs.model is not None
    parameters = list(inputs.model.parameters())

    def step() -> Output:
        loss = call(input_ids=inputs.labels, labels=inputs.labels).loss
        loss.backward()
        gradients = tuple(parameter.grad for parameter in parameters)
        for parameter in parameters:
            parameter.grad = None
        return loss, gradients

    return step


def twin(inputs: Inputs) -> PreTrainedModel:
    """A model that can be patched alone; its parameters are the same objects."""
    assert inputs.model is not None
    return copy.deepcopy(inputs.model, {id(each): each for each in inputs.model.parameters()})


def patched(inputs: Inputs) -> PreTrainedModel:
    from tileloss.integrations.transformers import patch

    return patch(twin(inputs))


def register(name: str, prepared: Callable[[Inputs], PreTrainedModel]) -> None:
    """With and without torch.compile."""

    @contestant("training_step", name)
    def _(inputs: Inputs) -> Step:
        return step_of(inputs, prepared(inputs))

    @contestant("training_step", f"{name}, torch.compile")
    def _(inputs: Inputs) -> Step:
        return step_of(inputs, contestants.compiled(prepared(inputs)))


register("TileLoss", patched)
register("transformers", twin)
