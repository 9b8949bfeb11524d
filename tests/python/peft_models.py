"""Models that peft adapts."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel


def with_lora(model: PreTrainedModel, **options: Any) -> Any:
    """peft's model around it, with adapters in the attention that do more than nothing."""
    options = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0} | options
    adapted = get_peft_model(model, LoraConfig(r=2, **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.1, generator=torch.Generator().manual_seed(4))
    return adapted
