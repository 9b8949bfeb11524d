"""TRL: its log-probabilities from logits, its fused LM head, and the loss of its GRPO trainer on top of either.

The loss is a method of GRPOTrainer: it is called here on an object that has what it reads, with the log-probabilities given, so
that no model, data or rewards are needed.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import utils

from tileloss.testing.case import Case, Refused
from tileloss.tools.implementations.loss_types import OPTIONS, trl_arguments

_HEAD = ("softcap", "logit_scale")


def compute(case: Case) -> dict[str, Any]:
    options: tuple[str, ...] = ("temperature", "ignore_index")
    if case.function == "linear_cross_entropy":
        case.refuse_unless([case.function], (*options, *_HEAD, "reduction", "num_items"), ["bias"])
        if case.options.get("reduction", "mean") != "mean":
            raise Refused(f"reduction {case.options['reduction']}: not offered")
        return case.torch_outputs(loss=_fused_head(case).loss)
    functions = (
        "logprobs",
        "policy_loss",
        "linear_logprobs",
        "linear_policy_loss",
        "linear_cross_entropy",
    )
    if case.function.startswith("linear_"):
        options += _HEAD
    if not case.function.endswith("policy_loss"):
        has_several = not case.function.startswith("linear_")
        case.refuse_unless(functions, options, ["bias"], ("logp", "entropy"), has_several)
        if case.labels_per_row > 1:
            return case.torch_outputs(logp=_several_logp(case))
        logp, entropy = _log_probs(case)
        return case.torch_outputs(logp=logp, entropy=entropy)
    tensors = ("bias", "advantages", "old_logp", "ref_logp", "mask")
    case.refuse_unless(functions, (*options, *OPTIONS, "entropy_coef"), tensors)
    logp, entropy = _log_probs(case)
    asked = case.asked({"logp": logp, "entropy": entropy})
    return case.torch_outputs(loss=_loss(case, logp, entropy), **asked)


def _several_logp(case: Case) -> Tensor:
    """[N,K]."""
    labels, scaled = (
        case.torch("labels"),
        case.torch("logits") / case.options.get("temperature", 1.0),
    )
    logp = utils.selective_log_softmax(scaled, labels.clamp(min=0))
    return torch.where(labels != case.ignore_index, logp, 0)


def _log_probs(case: Case) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, [N]."""
    if case.function.startswith("linear_"):
        found = _fused_head(case)
        return found.log_probs.reshape(-1), found.entropy.reshape(-1)
    logits, labels = case.torch("logits"), case.torch("labels").clamp(min=0)
    temperature = case.options.get("temperature", 1.0)
    if not hasattr(utils, "selective_log_softmax_and_entropy"):  # before 1.10
        scaled = logits / temperature
        used = case.torch_in_use()
        logp = torch.where(used, utils.selective_log_softmax(scaled, labels), 0)
        return logp, torch.where(used, utils.entropy_from_logits(scaled), 0)
    logp, entropy = utils.selective_log_softmax_and_entropy(
        logits, labels, temperature=temperature, row_mask=case.torch_in_use()
    )
    return logp, entropy


class _Model(torch.nn.Module):
    """What `add_fused_lm_head` reads of a causal LM whose last hidden states are given."""

    def __init__(
        self, hidden: Tensor, head: Tensor, bias: Tensor | None, options: dict[str, Any]
    ) -> None:
        super().__init__()
        text = SimpleNamespace(
            final_logit_softcapping=options.get("softcap"), logit_scale=options.get("logit_scale")
        )
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.hidden = hidden
        self.head = SimpleNamespace(weight=head, bias=bias)

    def forward(self, **_: Any) -> Any:
        raise NotImplementedError

    def base_model(self, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.hidden, router_logits=None)

    def get_output_embeddings(self) -> Any:
        return self.head


def _fused_head(case: Case) -> Any:
    """The output of a model whose LM head TRL has fused, for rows [1, N]."""
    if not hasattr(utils, "add_fused_lm_head"):
        raise Refused("a fused LM head: not in this release")
    bias = case.torch("bias") if "bias" in case.tensors else None
    model = _Model(case.torch("hidden")[None], case.torch("head"), bias, case.options)
    temperature = case.options.get("temperature", 1.0)
    utils.add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    labels = torch.where(case.torch_in_use(), case.torch("labels"), -100)[None]
    return model(
        shift_labels=labels, fused_lm_head=True, num_items_in_batch=case.options.get("num_items")
    )


def _loss(case: Case, logp: Tensor, entropy: Tensor) -> Tensor:
    shape = (case.batch_size, case.seq_len)
    mask = case.torch_in_use().reshape(shape).long()
    inputs = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": case.torch("labels").clamp(min=0).reshape(shape),
        "completion_mask": mask,
        "advantages": case.torch("advantages"),
        "num_items_in_batch": torch.as_tensor(case.options.get("num_items", mask.sum())),
    }
    for name, of_trl in (("old_logp", "old_per_token_logps"), ("ref_logp", "ref_per_token_logps")):
        if name in case.tensors:
            inputs[of_trl] = case.torch(name).reshape(shape)
    trainer = _trainer(case, logp.reshape(shape), entropy.reshape(shape))
    try:
        return GRPOTrainer._compute_loss(trainer, None, inputs)
    except (AttributeError, KeyError, ValueError) as error:
        raise Refused(f"this release's trainer reads something else: {error}") from error


def _trainer(case: Case, logp: Tensor, entropy: Tensor) -> Any:
    """What GRPOTrainer._compute_loss reads of a trainer in one process, without accumulation."""
    options, arguments = case.options, trl_arguments(case)
    vespo = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    gates = {f"vespo_{name}": options.get(f"vespo_{name}", x) for name, x in vespo.items()}
    args = SimpleNamespace(steps_per_generation=1, **arguments, **gates)
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=False,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    return SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        **arguments,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled="entropy_coef" in options,
        entropy_coef=options.get("entropy_coef", 0.0),
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )
