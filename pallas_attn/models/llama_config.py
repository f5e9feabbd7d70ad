"""Sizes of a `Llama` out of a config.json of transformers: Llama, Mistral, Qwen 2 and Qwen 3.

A setting that this decoder does not know may change what is computed, so it is refused by its name.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from pallas_attn._call.checks import fail
from pallas_attn.nn.rotary import Llama3Scaling, Stretch, Yarn

from .llama import LlamaConfig

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")

_SERVED = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
# What says nothing about how a trained model computes.
_NEUTRAL = {
    *("architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "attention_dropout", "id2label"),
    *(
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "problem_type",
        "unsloth_version",
    ),
    *("chunk_size_feed_forward", "is_encoder_decoder", "_attn_implementation", "auto_map"),
}
# What others may say, where a value is this decoder's.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "quantization_config": None,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
}
_ROPE = {"rope_type", "type", "rope_theta"}


def llama_config(settings: Mapping[str, Any]) -> LlamaConfig:
    """Raises ValueError for a setting that is missing, or not one that the decoder can follow."""
    kind = settings.get("model_type")
    if kind not in LLAMA_LIKE:
        _refuse("model_type", " or ".join(map(repr, LLAMA_LIKE)), kind)
    for name, value in settings.items():
        if name in _FIXED and value is not None and value != _FIXED[name]:
            _refuse(name, repr(_FIXED[name]), value)
        if name not in {*_SERVED, *_NEUTRAL, *_FIXED}:
            _refuse(name, "no setting that this decoder does not know", value)

    def size(name: str, default: int | None = None) -> Any:
        found = settings.get(name)
        found = default if found is None else found
        if found is None:
            _refuse(name, "a value", None)
        return found

    num_heads, num_layers = size("num_attention_heads"), size("num_hidden_layers")
    # Qwen 2 has these biases and no setting for them; with the setting, others have one on the output as well.
    if settings.get("attention_bias"):
        _refuse("attention_bias", "False", True)
    theta, stretch = _rope(settings)
    window, full = _windows(settings, kind, num_layers)
    return LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", max(1, size("hidden_size") // num_heads)),
        context_length=size("max_position_embeddings"),
        rope_theta=theta,
        rms_norm_eps=float(size("rms_norm_eps")),
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=window,
        full_layers=full,
        rope_stretch=stretch,
    )


def _windows(settings: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers without it."""
    window = settings.get("sliding_window")
    if kind == "llama" and window is not None:
        _refuse("sliding_window", "None for a llama", window)
    if window is None or (kind != "mistral" and not settings.get("use_sliding_window", False)):
        return None, ()
    if (types := settings.get("layer_types")) is not None:
        known = ("full_attention", "sliding_attention")
        if len(types) != num_layers or not set(types) <= set(known):
            _refuse("layer_types", f"{num_layers} of {' or '.join(map(repr, known))}", types)
        full = tuple(layer for layer, of in enumerate(types) if of == "full_attention")
    else:
        before = settings.get("max_window_layers", 0) if kind != "mistral" else 0
        full = tuple(range(min(before, num_layers)))
    return (None, ()) if len(full) == num_layers else (window, full)


def _rope(settings: Mapping[str, Any]) -> tuple[float, Stretch | None]:
    """Base and stretching. Newer configs say rope_parameters, older ones rope_scaling beside rope_theta."""
    rope = dict(settings.get("rope_scaling") or {}) | dict(settings.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta", settings.get("rope_theta") or 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    own = {
        "default": (),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    }
    if kind not in own:
        _refuse("rope_type", " or ".join(map(repr, own)), kind)
    for name, value in rope.items():
        if name not in _ROPE and name not in own[kind] and value is not None:
            _refuse(name, f"no setting that rope type {kind!r} does not have", value)
    if kind == "default":
        return theta, None
    for name in own[kind][: 2 if kind == "yarn" else None]:
        if rope.get(name) is None:
            _refuse(name, f"a value with rope type {kind!r}", None)
    original = int(rope["original_max_position_embeddings"])
    if kind == "llama3":
        factors = {name: float(rope[name]) for name in own[kind][:3]}
        return theta, Llama3Scaling(**factors, original_context=original)
    beta = {name: float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name) is not None}
    return theta, Yarn(factor=float(rope["factor"]), original_context=original, **beta)


def _refuse(name: str, expected: str, got: Any) -> NoReturn:
    fail("load_checkpoint", name, expected, "none" if got is None else f"{got!r:.60}")
