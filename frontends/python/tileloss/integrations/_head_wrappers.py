"""What others put around an LM head or into it, so that what they do happens although the head's own product does not.

| who | what they do | here |
|---|---|---|
| FSDP2 (`fully_shard`) | hooks of the module gather its parameters and reduce their gradients | called, with another forward |
| FSDP1 (`FullyShardedDataParallel`) | a wrapper does | called; the module in it has another forward |
| accelerate (offload, `device_map`) | a forward around the module's moves weights and inputs | called, around another forward |
| transformers (`tp_plan`) | each rank has some rows of the weight, a DTensor | left out: the loss is cut over the ranks |
| peft (`modules_to_save`) | a wrapper with a copy for each adapter | the active copy |
| peft (`trainable_token_indices`) | some rows of the weight are replaced | the weight with those rows |
| peft (LoRA on the head) | a product of two thin weights is added | as a low-rank part of the head |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tileloss._core.slots import MOST_RANKS
from tileloss.integrations import _forward_source

Function = Callable[[torch.Tensor], Any]

_UNIT: tuple[Any, ...] = ()
_WRAPPER: tuple[Any, ...] = ()
if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    _UNIT, _WRAPPER = (FSDPModule,), (FullyShardedDataParallel,)


def inner_of(module: Any) -> Any:
    """What a wrapper calls; None for any other module."""
    if isinstance(module, _WRAPPER):
        return module.module
    if isinstance(module, _peft("utils.other", "TrainableTokensWrapper")):
        return module.token_adapter
    if isinstance(module, _tokens_layer()) or type(module) in _lora_linear():
        return module.base_layer
    if not isinstance(module, _peft("utils.other", "ModulesToSaveWrapper")):
        return None
    active = [] if module.disable_adapters else module.active_adapters
    if not active or any(adapter not in module.modules_to_save for adapter in active):
        return module.original_module
    return module.modules_to_save[active[0]]


def runs_as(module: Any, forward: Function, hidden: torch.Tensor) -> Any:
    """``forward`` of the hidden states in place of the module's; where something happens around that, within it."""
    if isinstance(module, _WRAPPER):
        place, name = module.module, "forward"
    elif _has_accelerate_hook(module):
        place, name = module, "_old_forward"
    elif isinstance(module, _UNIT):
        place, name = module, "forward"
    elif "_hf_hook" in module.__dict__:
        raise ValueError(
            f"expected an LM head around which accelerate has hooks of its own alone, got one with {module._hf_hook}, whose work "
            "on its output would be lost"
        )
    else:
        return forward(hidden)
    own = place.__dict__.get(name)
    setattr(place, name, forward)
    try:
        return module(hidden)
    finally:
        if own is None:
            delattr(place, name)
        else:
            setattr(place, name, own)


def unknown_around(module: torch.nn.Module) -> str | None:
    """What happens around the module's forward that is not known here, and would be lost; None: nothing."""
    forward = module.__dict__.get("forward")
    # Hooks of accelerate's that are gone leave the module's own.
    is_known = forward is None or getattr(forward, "__func__", None) is type(module).forward
    if not (is_known or is_cut(module) or _has_accelerate_hook(module)):
        return "a forward of its own"
    return "hooks" if has_hooks(module) else None


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether it has hooks that would be lost."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not all(map(_is_hook_of_fsdp, hooks))


def _is_hook_of_fsdp(hook: Callable[..., Any]) -> bool:
    """Those of a unit run where the head would be called; those of a module that shares one say when it is in use."""
    return _forward_source.module_of(getattr(hook, "__func__", hook)).startswith(
        "torch.distributed.fsdp."
    )


def _has_accelerate_hook(module: torch.nn.Module) -> bool:
    """Whether accelerate's `add_hook_to_module` has replaced the forward with a hook of its own around it, which brings weights
    and inputs to a device, and nobody has replaced that one."""
    if "_hf_hook" not in module.__dict__:
        return False
    old = module.__dict__.get("_old_forward")
    return (
        _is_accelerates(module._hf_hook)
        and getattr(old, "__func__", None) is type(module).forward
        and getattr(module.__dict__.get("forward"), "__wrapped__", None) == old
    )


def _is_accelerates(hook: Any) -> bool:
    """One, or several in a row."""
    others = getattr(hook, "hooks", ())
    return type(hook).__module__ == "accelerate.hooks" and all(map(_is_accelerates, others))


def is_cut(module: torch.nn.Module) -> bool:
    """Whether transformers' tensor parallelism has given each rank some rows of the weight."""
    around = _forward_source.module_of(module.__dict__.get("forward"))
    if not around.startswith("transformers.distributed."):
        return False
    from torch.distributed.tensor import DTensor, Shard

    weight = module.weight
    return isinstance(weight, DTensor) and tuple(weight.placements) == (Shard(0),)


def is_linear(head: torch.nn.Module) -> bool:
    """Whether calling it multiplies and no more: a torch.nn.Linear, or one that is a unit of FSDP2 by itself, whose class
    `fully_shard` has replaced with one derived from FSDPModule and Linear."""
    kind = type(head)
    return kind is torch.nn.Linear or (
        isinstance(head, _UNIT) and kind.__bases__ == (*_UNIT, torch.nn.Linear)
    )


def not_linear(head: torch.nn.Module) -> str:
    """The end of an error message: what was expected of a head that is no Linear, what it is, and what to do instead."""
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    message = f"expected a plain torch.nn.Linear as the LM head, got {kind}"
    if isinstance(head, _peft("tuners.tuners_utils", "BaseTunerLayer")):
        message += (
            ", an adapter of peft, whose weight is more than the head's: leave the head out of target_modules, or train it whole "
            "by modules_to_save=[...] in place of that"
        )
    elif isinstance(head, torch.nn.Linear):
        message += (
            ", which may multiply by another weight than it holds: leave the head out of the quantization "
            "(llm_int8_skip_modules=['lm_head'] of bitsandbytes)"
        )
    return message


def with_trained_tokens(module: torch.nn.Module, weight: Any, bias: Any) -> Any:
    """The weight with the rows that peft's `trainable_token_indices` trains, as that module would multiply by it.

    Raises ValueError for a head with bias: peft's releases differ in whether they add it then.
    """
    if not isinstance(module, _tokens_layer()):
        return weight
    active = module.active_adapters
    if module.disable_adapters or not active:
        if module.merged:
            module.unmerge()
        return module.base_layer.weight
    if module.merged:
        return weight
    if bias is not None:
        raise ValueError(
            "expected an LM head without bias under peft's trainable_token_indices, got one with; peft 0.21 leaves the bias out "
            "while the adapter is active, later releases add it: train the head whole by modules_to_save"
        )
    return module.get_merged_weights(active)


def check_adapters(place: str, module: Any) -> None:
    """Raises ValueError where a module of peft's around the head, which is never called, does more than is known here."""
    if not type(module).__module__.startswith("peft."):
        return
    given = (getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values())
    if any(_forward_source.module_of(hook).startswith("peft.") for hook in given):
        raise ValueError(
            f"{place}: expected a batch of one adapter, as peft's {type(module).__name__} is never called, got adapter_names"
        )
    adapters = _active_lora(module)
    rank = sum(module.lora_A[name].out_features for name in adapters)
    for name in adapters:
        second = module.lora_B[name]
        is_plain = name not in module.lora_variant and is_linear(second) and second.bias is None
        if not is_plain:
            what = f"adapter {name!r}, of a variant (DoRA, for instance) or with a bias"
        elif has_hooks(second):
            what = f"hooks of lora_B[{name!r}]"
        elif rank > MOST_RANKS:
            what = f"ranks that add up to {rank}, of {MOST_RANKS} at most"
        else:
            continue
        raise ValueError(
            f"{place}: expected plain LoRA on the LM head, got {what}: leave the head out of target_modules, or train it whole "
            "by modules_to_save=[...] in place of that"
        )


def low_rank_of(module: Any, hidden: torch.Tensor) -> Any:
    """What LoRA adds to the head's product, as ``low_rank`` of the loss: the hidden states through the active adapters' first
    weights, dropped out and scaled as they do it, and their second weights, side by side. None: nothing."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in _active_lora(module):
        first, second = module.lora_A[name], module.lora_B[name]
        given = module._cast_input_dtype(hidden, first.weight.dtype)
        parts.append(
            (first(module.lora_dropout[name](given)) * module.scaling[name], second.weight)
        )
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([x for x, _ in parts], dim=-1), torch.cat([b for _, b in parts], dim=-1)


def _active_lora(module: Any) -> list[str]:
    """The adapters that add something to the product."""
    if type(module) not in _lora_linear():
        return []
    if module.disable_adapters and module.merged:
        module.unmerge()
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]


def is_of_zero3(weight: Any) -> bool:
    """Whether it is a parameter of DeepSpeed's ZeRO-3, which cuts it up again after each module's forward."""
    return hasattr(weight, "ds_id") or hasattr(weight, "ds_shape")


def refuse_zero3(place: str, weight: Any) -> None:
    if is_of_zero3(weight):
        raise NotImplementedError(
            f"{place}: DeepSpeed ZeRO-3 partitions this weight, which TileLoss needs whole until the backward; use ZeRO stage 1 "
            "or 2, or FSDP2, or unpatch()"
        )


def refuse_fsdp1(place: str, weight: Any, modules: Iterable[torch.nn.Module] = ()) -> None:
    """Raises ValueError for a parameter of FSDP1 outside of the forward in which it is whole. ``modules``: around a head that is
    going to be used after the forward."""
    if weight.dim() != 2 or any(isinstance(module, _WRAPPER) for module in modules):
        raise ValueError(
            f"{place}: FSDP1 has this weight whole in its unit's forward alone, and the loss is computed after it "
            "(make_compute_loss_func): give the call its labels, or use FSDP2"
        )


def refuse_meta(place: str, weight: Any, hidden: torch.Tensor) -> None:
    """Raises NotImplementedError for a weight that somebody keeps elsewhere, and brings where TileLoss does not see it."""
    if weight.is_meta and not hidden.is_meta:
        raise NotImplementedError(
            f"{place}: its weight is on the meta device, offloaded by something other than accelerate's hooks on that module; "
            "keep the LM head where it is computed (device_map={'lm_head': 0, ...})"
        )


def _tokens_layer() -> tuple[Any, ...]:
    return _peft("tuners.trainable_tokens.layer", "TrainableTokensLayer")


def _lora_linear() -> tuple[Any, ...]:
    return _peft("tuners.lora.layer", "Linear")


def _peft(module: str, name: str) -> tuple[Any, ...]:
    """A class of peft, for isinstance: whoever has an object of it has imported it."""
    loaded = sys.modules.get(f"peft.{module}")
    return () if loaded is None else (getattr(loaded, name),)
