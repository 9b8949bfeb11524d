"""Full-size architectures of known models by their names on the hub, to be built with random weights: no download, no account."""

from __future__ import annotations

from typing import Any

PREFIX = "random:"

# fmt: off
_QWEN25: dict[str, Any] = {
    "model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True,
}
# The members of the models' own config.json that decide sizes and what the forward does.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN25, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B": {
        **_QWEN25, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN25, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "Qwen/Qwen3-1.7B": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "google/gemma-2-2b": {  # soft-caps its logits
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
    "microsoft/phi-2": {  # its head has a bias
        "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.4, "tie_word_embeddings": False,
    },
    "ibm-granite/granite-3.1-2b-base": {  # divides its logits
        "model_type": "granite", "vocab_size": 49152, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
        "logits_scaling": 8.0, "tie_word_embeddings": True,
    },
}
# fmt: on
