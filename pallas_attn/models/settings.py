"""Reads a config.json of transformers without ignoring anything that would change the computation.

A setting is served by the family that reads it; or fixed, where a decoder implements only one value; or neutral, where
it does not affect how a trained model computes. Any other is refused by name.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pallas_attn._call.checks import fail
from pallas_attn.nn.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongRope, Stretch, Yarn

# Settings that do not affect how a trained model computes.
_NEUTRAL = {
    *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "_name_or_path", "name_or_path"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "classifier_dropout"),
    *("initializer_range", "initializer_factor", "problem_type", "id2label", "label2id", "finetuning_task"),
    *(
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "use_bfloat16",
        "unsloth_fixed",
    ),
    *(
        "unsloth_version",
        "transformers.js_config",
        "is_llama_config",
        "pretraining_tp",
        "cache_implementation",
    ),
    *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tokenizer_class", "prefix"),
    *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
    *("attn_implementation", "_flash_attn_2_enabled", "use_embedding_sharing", "model_max_length"),
    "max_sequence_length",
    # Of training.
    *(
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
    ),
    *("input_jitter_noise", "num_nextn_predict_layers", "_sliding_window_pattern"),
    # Of generation, as older versions wrote them.
    *(
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "max_length",
    ),
    *("min_length", "length_penalty", "diversity_penalty", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "early_stopping", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values", "bad_words_ids", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    *(
        "decoder_start_token_id",
        "task_specific_params",
        "pruned_heads",
        "tie_encoder_decoder",
        "tf_legacy_loss",
    ),
}
# Values of settings that a family does not read: what these decoders compute.
_FIXED: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias", "use_bias", "rope_interleaved"), (False,)),
    **dict.fromkeys(("use_mrope", "use_sliding_window", "use_bidirectional_attention"), (False,)),
    **dict.fromkeys(("add_cross_attention", "use_qk_norm", "use_parallel_embedding"), (False,)),
    "partial_rotary_factor": (1.0,),
}
MOST_LAYERS = 100_000
ANYTHING = None
"""A fixed setting that may have any value."""
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
# Parameters of each kind of rotary embedding: required, and others.
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), (_ORIGINAL,)),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), (_ORIGINAL,)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (("factor",), (_ORIGINAL, *_YARN, "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", _ORIGINAL, "attention_factor")),
}


class Settings:
    """The settings of a config.json, with transformers' defaults for missing ones.

    Args:
        given: the file.
        defaults: of every setting that is read.
        fixed: further values of other settings that are accepted.
        function: for messages.

    Raises:
        ValueError: a setting that may change what is computed, and that nobody reads.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        fixed: Mapping[str, Any] = {},
        function: str = "load_checkpoint",
    ):
        self.given, self._defaults, self._function = given, defaults, function
        able = {**_FIXED, **fixed}
        for name, value in given.items():
            if value is None or name in defaults or (name in _NEUTRAL and name not in fixed):
                continue
            if name not in able:
                self.refuse(name, "no setting that this decoder does not know", value)
            if (values := able[name]) is not ANYTHING and value not in values:
                self.refuse(name, " or ".join(map(repr, values)), value)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self._defaults[name])

    def __contains__(self, name: str) -> bool:
        return name in self._defaults

    def size(self, name: str) -> Any:
        """A setting that may not be null."""
        if (found := self[name]) is None:
            self.refuse(name, "a value", None)
        return found

    def number(self, name: str) -> float:
        """A finite one above 0."""
        found = self.size(name)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            self.refuse(name, "a finite number above 0", found)
        return float(found)

    def flag(self, name: str) -> bool:
        """null is False."""
        if (found := self[name]) not in (True, False, None):
            self.refuse(name, "true or false", found)
        return bool(found)

    def among(self, name: str, values: Mapping[str, Any]) -> Any:
        if not isinstance(found := self[name], str) or found not in values:
            self.refuse(name, " or ".join(map(repr, values)), found)
        return values[found]

    def layer_types(self, num_layers: int, usual: Callable[[int], str]) -> list[str]:
        """Of every layer, "sliding_attention" or "full_attention"."""
        known = ("full_attention", "sliding_attention")
        if "layer_types" not in self or (types := self["layer_types"]) is None:
            return [usual(layer) for layer in range(num_layers)]
        if len(types) != num_layers or not set(types) <= set(known):
            self.refuse("layer_types", f"{num_layers} of {' or '.join(map(repr, known))}", types)
        return list(types)

    def refuse(self, name: str, expected: str, got: Any) -> NoReturn:
        fail(self._function, name, expected, "none" if got is None else f"{got!r:.60}")


def rope_settings(settings: Settings) -> dict[str, Any]:
    """Newer configs say rope_parameters, older ones rope_scaling beside rope_theta."""
    scaling, parameters = settings["rope_scaling"] or {}, settings.given.get("rope_parameters") or {}
    for name, said in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(said, Mapping):
            settings.refuse(name, "an object", said)
    return dict(scaling) | dict(parameters) or dict(settings["rope_parameters"] or {})


def rope_stretch(
    settings: Settings, rope: Mapping[str, Any], context: int
) -> tuple[float | None, Stretch | None, int]:
    """(the base, if `rope` says it, the stretching, the context with it) of a model made for `context` tokens."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        settings.refuse("rope_type", " or ".join(map(repr, _ROPE_TYPES)), kind)
    needed, others = _ROPE_TYPES[kind]
    own = (*needed, *others)
    for name, value in rope.items():
        if name not in _ROPE and name not in own and value is not None:
            settings.refuse(name, f"no setting that rope type {kind!r} does not have", value)
    for name in needed:
        if rope.get(name) is None:
            settings.refuse(name, f"a value with rope type {kind!r}", None)
    for name in ("rope_theta", *own):
        value, lists = rope.get(name), name in ("short_factor", "long_factor")
        if value is not None and not lists and not isinstance(value, int | float):
            settings.refuse(name, "a number", value)
    theta = None if rope.get("rope_theta") is None else float(rope["rope_theta"])
    original = int(rope.get(_ORIGINAL) or context)
    if kind == "default":
        return theta, None, context
    if kind == "longrope":
        return theta, _long_rope(settings, rope, original, context), context
    factor = float(rope["factor"])
    if kind == "linear":
        return theta, LinearScaling(factor), context
    if kind == "dynamic":
        # transformers starts from the file's context length, whatever else it says.
        return theta, DynamicScaling(factor, context), int(factor * context)
    if kind == "llama3":
        low, high = (float(rope[name]) for name in needed[1:])
        return theta, Llama3Scaling(factor, low, high, original), context
    options: dict[str, Any] = {name: float(rope[name]) for name in _YARN if rope.get(name)}
    if rope.get("truncate") is not None:
        options["truncate"] = bool(rope["truncate"])
    return theta, Yarn(factor, original, **options), max(context, int(factor * original))


def _long_rope(settings: Settings, rope: Mapping[str, Any], original: int, context: int) -> LongRope:
    for name in ("short_factor", "long_factor"):
        if not isinstance(rope[name], list) or not all(isinstance(x, int | float) for x in rope[name]):
            settings.refuse(name, "a list of numbers", rope[name])
    scale = rope.get("attention_factor")
    if scale is None:
        scale = long_rope_scale(float(rope.get("factor") or context / original), original)
    short, long = (tuple(map(float, rope[name])) for name in ("short_factor", "long_factor"))
    return LongRope(short, long, original, float(scale))


def long_rope_scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
