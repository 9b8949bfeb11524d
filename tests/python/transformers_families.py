"""Tiny random models of classes whose forward is spelt unlike Llama's: by class, what its config says beyond the sizes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from transformers_models import VOCAB

_SIZES: dict[str, Any] = {}
for _value, _names in {
    VOCAB: "vocab_size decoder_vocab_size",
    64: "max_position_embeddings",
    32: "hidden_size d_model embed_dim embedding_size projection_dim projector_hidden_size decoder_hidden_size out_hidden_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size",
    28: "image_size",
    16: "mlp_dim output_channels post_conv_in_channels post_conv_mid_channels post_conv_out_channels",
    14: "patch_size",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank moe_hidden_size moe_intermediate_size",
    4: "num_attention_heads num_key_value_heads n_head attention_heads decoder_attention_heads encoder_attention_heads num_heads "
    "num_local_experts num_experts n_routed_experts",
    2: "num_hidden_layers num_layers n_layer decoder_layers encoder_layers num_decoder_layers num_experts_per_tok",
    1: "depth",
    0.0: "hidden_dropout_prob attention_probs_dropout_prob dropout attention_dropout activation_dropout layerdrop "
    "decoder_layerdrop dropout_p dropout_rate hidden_dropout drop_path_rate projector_dropout",
}.items():
    _SIZES |= dict.fromkeys(_names.split(), _value)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_CAPPED = {"text_config.final_logit_softcapping": 2.0}
_MUSE = _CAPPED | {"text_config.layer_rope_theta": [1e4, 1e4]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

_PROJECTOR = ("vision_output_dim", "projector_input_dim", "projector_output_dim")

# By what is special in their forward. Names without an ending end in ForCausalLM.
_PLAIN = {
    "torch's CrossEntropyLoss of labels that are not shifted": "Bart BigBirdPegasus Blenderbot BlenderbotSmall CpmAnt MBart "
    "Marian Mvp PLBart Pegasus TrOCR Whisper XLNetLMHeadModel",
    "a head of several modules": "BertGenerationDecoder BertLMHeadModel Camembert Data2VecText Electra Ernie MegatronBert "
    "ModernBertDecoder Roberta RobertaPreLayerNorm XLMRoberta XLMRobertaXL",
    "a decorator": "DeepseekVLHybridForConditionalGeneration Fuyu LightOnOcrForConditionalGeneration "
    "LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration "
    "Mistral3ForConditionalGeneration VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration XGLM",
    "hidden states, or a variable, returned": "EvollaForProteinText2Text Moshi",
    "labels that are not shifted, popped from the arguments": "PPFormulaNetForConditionalGeneration",
}
CLASSES: dict[str, dict[str, Any]] = {
    **{name: {} for names in _PLAIN.values() for name in names.split()},
    "Xmod": {"default_language": "en_XX"},
    # a decorator, and scaled logits
    "Granite4VisionForConditionalGeneration": {
        "text_config.logits_scaling": 3.0,
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
    },
    # a soft-cap that is always on, the first under a decorator
    "MistralLarge4ForConditionalGeneration": _CAPPED,
    "MuseGlimmerForConditionalGeneration": _MUSE,
    "MuseSparkForConditionalGeneration": _MUSE
    | {"audio_config.hidden_sizes": (8,) * 4, "audio_config.depths": (1,) * 4},
    # a soft-cap, or a scale, that may be missing
    "PaliGemmaForConditionalGeneration": _CAPPED,
    "CohereCompassForConditionalGeneration": {
        "text_config.logit_scale": 0.3,
        "text_config.rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "vision_config.deepstack_visual_indexes": (),
    },
    # logits cut to a part of the vocabulary
    "Inkling": {"unpadded_vocab_size": VOCAB - 5},
    "InklingForConditionalGeneration": {"text_config.unpadded_vocab_size": VOCAB - 5},
    # labels that are not shifted, by transformers' own losses
    "Florence2ForConditionalGeneration": {
        "vision_config.depths": (1,) * 4,
        "vision_config.embed_dim": (8,) * 4,
        "vision_config.num_heads": (1,) * 4,
        "vision_config.num_groups": (1,) * 4,
        "vision_config.window_size": 4,
    },
    # a causal LM inside
    "Llama4ForConditionalGeneration": {
        "text_config.intermediate_size_mlp": 48,
        **{f"vision_config.{name}": 32 for name in _PROJECTOR},
    },
    "NemotronH_Omni_Reasoning_V3": {
        "text_config.layers_block_type": ["full_attention", "mlp"],
        "text_config.num_hidden_layers": 2,
    },
    "T5Gemma2ForConditionalGeneration": {"decoder.final_logit_softcapping": 2.0},
}
WITH_PICTURES = ("PPFormulaNetForConditionalGeneration",)


def class_of(name: str) -> type[PreTrainedModel]:
    found: type[PreTrainedModel] = getattr(
        transformers, name if hasattr(transformers, name) else f"{name}ForCausalLM"
    )
    return found


def build_small(name: str, **options: Any) -> PreTrainedModel:
    """A model in training, float32, without dropout, with weights large enough for logits that differ."""
    config = _shrunk(class_of(name).config_class())
    for path, value in (CLASSES.get(name, {}) | options).items():
        owner, _, option = path.rpartition(".")
        setattr(getattr(config, owner) if owner else config, option, value)
    torch.manual_seed(0)
    model = class_of(name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    for name, value in _SIZES.items():
        if isinstance(getattr(config, name, None), int | float):
            with contextlib.suppress(NotImplementedError):  # XLNet's has no such limit
                setattr(config, name, value)
    for name, value in _TOKENS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            _shrunk(part)
    return config
