"""Random transformers models of two to four layers, one for each kind of attention."""

from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 101
WINDOW = 6
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EVERY_OTHER = ["sliding_attention", "full_attention"]
_KINDS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),  # K and Q normalised
    "mistral": ("Mistral", {"sliding_window": WINDOW}),  # every layer has a window
    "gemma2": (  # softcap, query scale, a window in half of the layers
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": _EVERY_OTHER,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 3,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "layer_types": _EVERY_OTHER}),
    "gemma3n": (  # the last two layers reuse K and V of the first two
        "Gemma3n",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": _EVERY_OTHER * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
        },
    ),
    "gpt_oss": (  # sinks
        "GptOss",
        {
            "sliding_window": WINDOW,
            "layer_types": _EVERY_OTHER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2_moe": (  # a window that only the mask tells
        "Qwen2Moe",
        {
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "layer_types": _EVERY_OTHER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "deepseek_v3": (  # K and V of different widths
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
    ),
}
KINDS = [kind for kind, (name, _) in _KINDS.items() if hasattr(transformers, f"{name}ForCausalLM")]


@cache
def tiny_model(kind, dtype=torch.float32, attention="eager"):
    """Equal weights for each dtype and attention. Kept between tests, so nobody may change it."""
    name, extra = _KINDS[kind]
    config_type = getattr(transformers, f"{name}TextConfig", None)
    config_type = config_type or getattr(transformers, f"{name}Config")
    config = config_type(**(_SIZES | extra), attn_implementation=attention)
    config._experts_implementation = "eager"  # the others know no float64
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) / 2)
    model.generation_config.pad_token_id = 0
    return model.to(dtype)
