"""The families that `Llama` covers: how each differs from Llama, from a config.json of transformers.

A family is an entry of `FAMILIES`: the options of `LlamaConfig` that follow from its settings, and where its norms lie
in the file's weights. What transformers takes where the file does not say a setting is in family_defaults.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pallas_attn._call.checks import check_int, fail
from pallas_attn.nn.rotary import LongRope

from .family_defaults import DEFAULTS
from .llama_config import Experts, LlamaConfig
from .settings import ANYTHING, MOST_LAYERS, Settings, rope_settings, rope_stretch

type Options = dict[str, Any]


def _biases(settings: Settings) -> Options:
    """One setting for all four projections of attention."""
    return dict.fromkeys(("qkv_bias", "output_bias"), settings.flag("attention_bias"))


def _windows(settings: Settings, usual: Callable[[int], bool] = lambda layer: True) -> Options:
    """The window and the layers without it: by the file, otherwise those that are not `usual`."""
    window, num_layers = settings["sliding_window"], settings.size("num_hidden_layers")
    if window is None or ("use_sliding_window" in settings and not settings.flag("use_sliding_window")):
        return {}
    kinds = {True: "sliding_attention", False: "full_attention"}
    types = settings.layer_types(num_layers, lambda layer: kinds[usual(layer)])
    full = tuple(layer for layer, of in enumerate(types) if of == "full_attention")
    return {} if len(full) == num_layers else {"sliding_window": window, "full_layers": full}


def _every(settings: Settings, count: str | int) -> Callable[[int], bool]:
    """A window in all layers but every so many-th."""
    name, period = (count, settings.size(count)) if isinstance(count, str) else ("period", count)
    check_int("load_checkpoint", name, period, least=1)
    return lambda layer: bool((layer + 1) % period)


def _llama(settings: Settings) -> Options:
    return {**_biases(settings), "mlp_bias": settings.flag("mlp_bias")}


def _qwen_2(settings: Settings) -> Options:
    # It has these biases without a setting for them.
    return {"qkv_bias": True, **_qwen_windows(settings)}


def _qwen_3(settings: Settings) -> Options:
    return {"qk_norm": True, **_biases(settings), **_qwen_windows(settings)}


def _qwen_windows(settings: Settings) -> Options:
    return _windows(settings, lambda layer: layer >= settings["max_window_layers"])


def _mixtral(settings: Settings) -> Options:
    sizes = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    return {"experts": Experts(*map(settings.size, sizes)), **_windows(settings)}


def _qwen_3_moe(settings: Settings) -> Options:
    count = settings["num_experts"] or settings.size("num_local_experts")
    sizes = (settings.size("num_experts_per_tok"), settings.size("moe_intermediate_size"))
    experts = Experts(count, *sizes, normalize=settings.flag("norm_topk_prob"))
    return {"qk_norm": True, "experts": experts, **_biases(settings), **_windows(settings)}


def _gemma(settings: Settings) -> Options:
    scale = settings.size("hidden_size") ** 0.5
    return {"norm": "rms_around_one", "embedding_scale": scale, **_biases(settings)}


def _gemma_2(settings: Settings) -> Options:
    period = "sliding_window_pattern" if "sliding_window_pattern" in settings else 2
    return {
        **_gemma(settings),
        "norm_behind": True,
        "scale": settings.number("query_pre_attn_scalar") ** -0.5,
        "softcap": settings["attn_logit_softcapping"],
        "logit_softcap": settings["final_logit_softcapping"],
        **_windows(settings, _every(settings, period)),
    }


def _gemma_3(settings: Settings) -> Options:
    return {**_gemma_2(settings), "qk_norm": True}


def _gpt_oss(settings: Settings) -> Options:
    sizes = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    return {
        **_biases(settings),
        **_windows(settings, _every(settings, 2)),
        "sinks": True,
        "experts": Experts(*map(settings.size, sizes), biases=True),
        "activation": "clipped_swiglu",
        "swiglu_limit": settings.number("swiglu_limit"),
        "swiglu_alpha": settings.number("swiglu_alpha"),
    }


def _smollm_3(settings: Settings) -> Options:
    num_layers, rotated = settings.size("num_hidden_layers"), settings["no_rope_layers"]
    if rotated is None:
        rotated = [_every(settings, "no_rope_layer_interval")(layer) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers or not set(rotated) <= {0, 1}:
        settings.refuse("no_rope_layers", f"{num_layers} of 0 or 1", rotated)
    return {
        **_llama(settings),
        "unrotated_layers": tuple(layer for layer, turned in enumerate(rotated) if not turned),
        **_windows(settings, lambda layer: not rotated[layer]),
    }


def _olmo_2(settings: Settings) -> Options:
    return {"norm_before": False, "norm_behind": True, "qk_norm": "all", **_biases(settings)}


def _olmo_3(settings: Settings) -> Options:
    return {**_olmo_2(settings), **_windows(settings, _every(settings, 4))}


def _granite(settings: Settings) -> Options:
    return {
        **_llama(settings),
        "scale": settings.number("attention_multiplier"),
        "embedding_scale": settings.number("embedding_multiplier"),
        "residual_scale": settings.number("residual_multiplier"),
        "logit_scale": 1 / settings.number("logits_scaling"),
    }


def _cohere(settings: Settings) -> Options:
    options = {
        **_biases(settings),
        "norm": "layer",
        "rms_norm_eps": settings.number("layer_norm_eps"),
        "parallel": True,
        "rope_interleaved": True,
        "logit_scale": settings.number("logit_scale"),
    }
    if "use_qk_norm" in settings:
        options["qk_norm"] = "each" if settings.flag("use_qk_norm") else False
    return options


def _cohere_2(settings: Settings) -> Options:
    windows = _windows(settings, _every(settings, "sliding_window_pattern"))
    # Only layers with a window are rotated.
    unrotated = windows["full_layers"] if windows else range(settings.size("num_hidden_layers"))
    return {**_cohere(settings), **windows, "unrotated_layers": tuple(unrotated)}


def _glm(settings: Settings) -> Options:
    return {"qkv_bias": settings.flag("attention_bias"), "rope_interleaved": True}


def _glm_4(settings: Settings) -> Options:
    return {**_glm(settings), "norm_behind": True}


_BEHIND = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_AROUND = {**_BEHIND, "attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_ALONE = {"attention_norm": "input_layernorm"}
_AROUND_GLM = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
_BEFORE = {**_ALONE, "mlp_norm": "post_attention_layernorm"}


@dataclasses.dataclass(frozen=True)
class Family:
    """options: what follows from its settings for `LlamaConfig`.
    norms: of a layer, by our names, where the file has them.
    fixed: settings that have one value in all of its models, or that it does not look at.
    window_theta: base of the rotary frequencies in layers with a window, if they have one of their own.
    """

    options: Callable[[Settings], Options] = lambda settings: {}
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: _BEFORE)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    window_theta: float | None = None


_COHERE_2_FIXED = {
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "rotary_pct": (1.0,),
    "position_embedding_type": ("rope_gptj",),
    "order_of_interleaved_layers": ("local_attn_first",),
    # Another name of sliding_window_pattern, and a detail of training.
    "layer_switch": ANYTHING,
    "use_parallel_embedding": ANYTHING,
}
_ACTIVATIONS: dict[str, Any] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(_windows),
    "mixtral": Family(_mixtral),
    "qwen2": Family(_qwen_2),
    "qwen3": Family(_qwen_3),
    "qwen3_moe": Family(
        _qwen_3_moe,
        fixed={"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "max_window_layers": ANYTHING},
    ),
    "gemma": Family(_gemma),
    "gemma2": Family(_gemma_2, _AROUND, fixed={"sliding_window_size": ANYTHING}),
    "gemma3_text": Family(_gemma_3, _AROUND, window_theta=10000.0),
    # OpenAI's names of two settings.
    "gpt_oss": Family(_gpt_oss, fixed={"experts_per_token": ANYTHING, "initial_context_length": ANYTHING}),
    "phi3": Family(_windows, fixed={"full_attn_mod": (1,), "interpolate_factor": (1,)}),
    "smollm3": Family(_smollm_3, fixed={"max_window_layers": ANYTHING}),
    "olmo2": Family(_olmo_2, _BEHIND),
    "olmo3": Family(_olmo_3, _BEHIND, window_theta=500000.0),
    "granite": Family(_granite),
    "cohere": Family(_cohere, _ALONE),
    "cohere2": Family(_cohere_2, _ALONE, fixed=_COHERE_2_FIXED),
    "glm": Family(_glm),
    "glm4": Family(_glm_4, _AROUND_GLM),
}


def llama_config(given: Mapping[str, Any]) -> LlamaConfig:
    """Of a config.json. Raises ValueError for a setting that the decoder cannot follow, by its name."""
    kind = given.get("model_type")
    if kind not in FAMILIES:
        fail("load_checkpoint", "model_type", " or ".join(map(repr, FAMILIES)), repr(kind))
    family = FAMILIES[kind]
    settings = Settings(given, DEFAULTS[kind], family.fixed)
    size = settings.size
    for name in ("num_attention_heads", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        check_int("load_checkpoint", name, size(name), least=1)
    # Lists of this length are made before any weight is read.
    check_int("load_checkpoint", "num_hidden_layers", size("num_hidden_layers"), most=MOST_LAYERS)
    num_heads = size("num_attention_heads")
    head_dim = settings["head_dim"] or max(1, size("hidden_size") // num_heads)
    # Older files of Gemma have both; the second counts.
    second = "hidden_activation" in settings and settings["hidden_activation"] is not None
    activation = "hidden_activation" if second else "hidden_act"
    return LlamaConfig(
        **{
            "vocab_size": size("vocab_size"),
            "hidden_size": size("hidden_size"),
            "intermediate_size": size("intermediate_size"),
            "num_layers": size("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": settings["num_key_value_heads"] or num_heads,
            "head_dim": head_dim,
            "rms_norm_eps": settings.number("rms_norm_eps"),
            "tie_word_embeddings": settings.flag("tie_word_embeddings"),
            # Gemma's first files say "gelu" and mean the tanh approximation.
            "activation": settings.among(
                activation, {**_ACTIVATIONS, "gelu": "gelu"} if kind == "gemma" else _ACTIVATIONS
            ),
            **_rope(settings, family, head_dim),
            **family.options(settings),
        }
    )


def _rope(settings: Settings, family: Family, head_dim: int) -> Options:
    rope, window_theta = rope_settings(settings), family.window_theta
    kinds = {"full_attention", "sliding_attention"}
    if kinds & rope.keys():
        if window_theta is None:
            settings.refuse("rope_parameters", "one rotary embedding for all layers", rope)
        inside = dict(rope.get("sliding_attention") or {})
        if inside.get("rope_type", "default") != "default":
            settings.refuse("rope_type", "'default' in layers with a window", inside["rope_type"])
        window_theta = float(inside.get("rope_theta") or window_theta)
        rope = dict(rope.get("full_attention") or {})
    elif "rope_local_base_freq" in settings:
        window_theta = settings.number("rope_local_base_freq")
    # The name in Phi-3's first files.
    if (original := "original_max_position_embeddings") in settings:
        rope[original] = settings.size(original)
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            rope["rope_type"] = "longrope"
    factor = rope.pop("partial_rotary_factor", None)
    if "partial_rotary_factor" in settings:
        factor = settings.number("partial_rotary_factor") if factor is None else factor
    elif factor not in (None, 1.0):
        settings.refuse("partial_rotary_factor", "1.0", factor)
    rotary_dim = head_dim if factor is None else int(head_dim * factor)
    theta, stretch, context = rope_stretch(settings, rope, settings.size("max_position_embeddings"))
    theta = settings.number("rope_theta") if theta is None else theta
    if isinstance(stretch, LongRope):
        for name, factors in (("short_factor", stretch.short_factors), ("long_factor", stretch.long_factors)):
            if len(factors) != rotary_dim // 2:
                settings.refuse(name, f"{rotary_dim // 2} numbers", len(factors))
    return {
        "context_length": context,
        "rope_theta": theta,
        "rope_stretch": stretch,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "window_rope_theta": window_theta if stretch or window_theta != theta else None,
    }
