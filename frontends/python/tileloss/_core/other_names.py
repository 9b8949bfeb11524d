"""What the public functions say of their arguments: their signature, and arguments by the names that other libraries have for
them, which are refused with the name that stands for them here.

docs/users/coming-from.md has the whole table, with where defaults differ.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Container
from typing import Any, TypeVar, cast

from tileloss._core.functions import FLAG, FUNCTIONS

_WEIGHTS, _SAMPLER = "label_weight divergence_weight", "sampler_logp sampler_correction"
# By the other name: names here, of which a function names those that it has.
_HERE = {
    # torch, optax, JAX
    "size_average": "reduction", "reduce": "reduction", "where": "mask", "labels": "target", "target": "labels",
    "input": "logits hidden", "linear_weight": "head", "linear_bias": "bias", "logits": "input", "head": "linear_weight",
    "bias": "linear_bias", "reduction": "aggregation", "label_weights": "token_weights",
    # the C ABI, peft
    "class_weights": "weight", "hidden_r": "low_rank", "head_r": "low_rank", "lora": "low_rank",
    "main_grad": "linear_weight_grad",
    # Liger
    "lse_square_scale": "z_loss", "ce_weight": "weight", "weight_hard_loss": "label_weight",
    "weight_soft_loss": "divergence_weight", "alpha": _WEIGHTS, "kd_ratio": _WEIGHTS, "attention_mask": "mask",
    "vllm_is_ratio": _SAMPLER,
    # TRL
    "num_items_in_batch": "num_items", "loss_type": "preset", "epsilon": "epsilon_low epsilon_high",
    "importance_sampling_level": "ratio_level", "sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg",
    "max_completion_length": "max_length", "completion_mask": "mask", "old_per_token_logps": "old_logp",
    "ref_per_token_logps": "ref_logp", "use_bias_correction_kl": "kl_importance",
    "off_policy_mask_threshold": "off_policy_threshold", "top_entropy_quantile": "entropy_quantile",
    "importance_sampling_ratio": _SAMPLER,
    # verl
    "loss_mode": "preset", "loss_agg_mode": "aggregation", "loss_scale_factor": "max_length", "response_mask": "mask",
    "clip_ratio": "epsilon_low epsilon_high", "clip_ratio_low": "epsilon_low", "clip_ratio_high": "epsilon_high",
    "clip_ratio_c": "dual_clip", "old_log_prob": "old_logp", "ref_log_prob": "ref_logp", "kl_loss_coef": "beta",
    "kl_loss_type": "kl_estimator", "entropy_coeff": "entropy_coef", "rollout_is_weights": _SAMPLER,
    "batch_num_tokens": "num_items",
}  # fmt: skip
# What only some of our functions have, and what does the same in the others.
_ELSEWHERE = {
    "mask": "give the rows that do not count the label ignore_index",
    "token_weights": "multiply by them what is made of each row: the advantages, or logp",
    "workspace_bytes": "nothing is held here that it could cap: docs/users/memory.md",
    "where": "give the rows that do not count the label ignore_index",
}

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = re.compile(r"Unpack\[((\w+)(?:Arguments|Options))\[(\w+)\]\]")


def explains_names(function: F) -> F:
    """A function with ``**options`` of arguments.py: with a signature that names them, and a hint in the TypeError of an argument
    that it does not have."""
    signature = _signature(function)
    known = frozenset(signature.parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(_refusal(function.__qualname__, name, known))
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return cast(F, call)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    *own, options = signature.parameters.values()
    found = _OPTIONS.fullmatch(options.annotation)
    assert found is not None
    kind, title, array = found.groups()
    described = FUNCTIONS[re.sub(r"(?<!^)(?=[A-Z])", "_", title).lower()]
    places = {name: place for place, name in enumerate(described.options)}
    taken = function.__globals__[kind].__annotations__.items()
    for name, annotation in sorted(taken, key=lambda item: places.get(item[0], -1)):
        option, default = described.options.get(name), None
        if option is not None and not option.may_be_absent and not described.presets:
            default = False if option.choices == FLAG else option.usual
        text = annotation.__forward_arg__.replace("Array", array)
        parameter = inspect.Parameter(name, options.KEYWORD_ONLY, default=default, annotation=text)
        own.append(parameter)
    return signature.replace(parameters=own)


def _refusal(function: str, name: str, known: Container[str]) -> str:
    here = [one for one in _HERE.get(name, "").split() if one in known]
    elsewhere = {} if "self" in known else _ELSEWHERE  # a module's calls take more
    hint = f"here that is {' and '.join(here)}" if here else elsewhere.get(name, "")
    said = f"{function}() got an unexpected keyword argument {name!r}"  # as Python says it
    return f"{said}; {hint}" if hint else said
