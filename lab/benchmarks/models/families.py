"""What small configurations of some families need beyond sizes that are reduced by their names."""

from __future__ import annotations

from typing import Any

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": _ROTARY | {"mrope_section": [2, 1, 1]}}
_EXPERTS = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_WIDE = {"attention_hidden_size": 64, "attention_head_dim": 16}  # twice the hidden size
_WORDS = {"<image>": 90, "IMGIMGA": 91, "<|extra_200|>": 92, "<|visual token 000001|>": 93}

# model_type -> fields: what has no default, and what the rules of `shrink` would set at odds.
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": _WORDS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": _EXPERTS,
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1} | _EXPERTS,
    "emu3": {"vocabulary_map": _WORDS},
    "esm": {"vocab_size": 99, "mask_token_id": 5, "pad_token_id": 1},
    "exaone4_5_vision": {"window_size": 56},
    "glm4v_text": _SECTIONS,
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "glm_image_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 8} | _SECTIONS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "step3p5": {"sliding_window": 4},
    "qwen2_5_vl_vision": {"window_size": 56},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4}
    | _WIDE,
    "zamba2": {"mamba_headdim": 8} | _WIDE,
}
