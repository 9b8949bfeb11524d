"""Head against body: a small causal LM in bfloat16, of which only one sees the tokens as a sampler does, one at a time.

A process of its own, as it imports transformers: prints a line of JSON for each change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from tileloss.tools.audit.invariance import compare, describe

_SEQUENCES, _LENGTH, _VOCAB, _HIDDEN = 4, 48, 4096, 256
Head = Callable[[Tensor, Tensor], Tensor]  # logp [N] of hidden states [N, H] and labels [N]


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=4 * _HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    model.lm_head.weight.data.mul_(10)  # as if trained: probabilities that differ
    tokens = torch.randint(0, _VOCAB, (_SEQUENCES, _LENGTH))
    labels = tokens.roll(-1, 1)
    package = f"transformers {metadata.version('transformers')}, torch {torch.__version__}"
    with torch.no_grad():
        for varied, head, pair in _pairs(model, tokens, labels):
            line = compare("logp", [pair])
            name = "transformers" if varied == "body" else f"transformers, {head} head"
            print(
                json.dumps(
                    describe(name, package, level="model", dtype="bfloat16", varied=varied, **line)
                )
            )


def _pairs(model: Any, tokens: Tensor, labels: Tensor) -> Any:
    """What varied, whose head, and logp of the batch at once and of its tokens one at a time."""
    weight = model.lm_head.weight

    def body(tokens: Tensor) -> Tensor:
        return model.model(tokens).last_hidden_state

    def exact(hidden: Tensor, labels: Tensor) -> Tensor:
        return _log_softmax((hidden.double() @ weight.double().T), labels)

    def torch_logp(hidden: Tensor, labels: Tensor) -> Tensor:
        return _log_softmax(model.lm_head(hidden).float(), labels)

    def tileloss_logp(hidden: Tensor, labels: Tensor) -> Tensor:
        from tileloss.torch import linear_logprobs

        logp = linear_logprobs(hidden, weight, labels).logp
        assert logp is not None
        return logp

    whole, rows = body(tokens).flatten(0, 1), labels.flatten()
    sampled = torch.cat([_one_by_one(model, sequence) for sequence in tokens])
    yield "body", "exact", (exact(whole, rows).numpy(), exact(sampled, rows).numpy())
    heads: dict[str, Head] = {"torch": torch_logp, "tileloss": tileloss_logp}
    for name, head in heads.items():
        parts = [head(whole[k : k + 1], rows[k : k + 1]) for k in range(len(rows))]
        yield "head", name, (head(whole, rows).numpy(), torch.cat(parts).numpy())


def _one_by_one(model: Any, sequence: Tensor) -> Tensor:
    """The hidden states of a sequence whose tokens come one at a time, with a cache."""
    cache, found = None, []
    for k in range(len(sequence)):
        step = model.model(sequence[None, k : k + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        found.append(step.last_hidden_state[0])
    return torch.cat(found)


def _log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]


if __name__ == "__main__":
    main()
