"""Sizes of a DeepSeek decoder, out of a config.json of transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_attn._call.checks import ArgumentChecker, check_int, fail
from pallas_attn.nn.indexer import IndexerConfig
from pallas_attn.nn.mla import MLAConfig
from pallas_attn.nn.rotary import Yarn

from .settings import ANYTHING, MOST_LAYERS, Settings, rope_settings, rope_stretch

# Kimi K2 is a V3 with other sizes.
DEEPSEEK_LIKE = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
# Sizes, which every file states.
_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "rms_norm_eps"),
    *("num_hidden_layers", "num_attention_heads", "first_k_dense_replace"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
)
# Of V3.2, by `IndexerConfig`'s names.
_INDEXER = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}
# transformers' defaults for settings that a file leaves out.
_V2: dict[str, Any] = {
    **dict.fromkeys(_REQUIRED),
    "q_lora_rank": 1536,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "quantization_config": None,
}
_V3 = {
    **_V2,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
}
_DEFAULTS = {
    "deepseek_v2": _V2,
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "deepseek_v32": {**_V3, "max_position_embeddings": 163840, **dict.fromkeys(_INDEXER.values())},
}


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """Sizes of a DeepSeek decoder.

    Attributes:
        vocab_size: rows of the embedding.
        num_layers: decoder layers; the first `num_dense_layers` have an ordinary MLP, the others experts.
        intermediate_size: width of the ordinary MLP.
        expert_intermediate_size: width of an expert.
        num_experts, experts_per_token: routed experts, and how many a token goes to.
        num_shared_experts: experts' widths that every token goes through.
        num_expert_groups, groups_per_token: a token chooses only among the experts of its best groups.
        sigmoid_routing: V3's routing: sigmoid scores, a bias that only the choice sees, groups judged by their two
            best; otherwise V2's: softmax scores, groups judged by their best.
        normalize_weights: whether a token's expert weights are made to sum to 1.
        routed_scale: factor of the routed experts' sum.
        rms_norm_eps: of the decoder's own norms.
        attention: sizes of the attention layers.
        indexer: sizes of the indexers, for sparse attention (V3.2); None for dense attention.
        context_length: most tokens, prompt and answer together, that the model was trained on.
    """

    vocab_size: int
    num_layers: int
    num_dense_layers: int
    intermediate_size: int
    expert_intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    attention: MLAConfig
    num_expert_groups: int = 1
    groups_per_token: int = 1
    sigmoid_routing: bool = False
    normalize_weights: bool = False
    routed_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    context_length: int = 4096
    indexer: IndexerConfig | None = None

    def __post_init__(self):
        check = ArgumentChecker("DeepSeekConfig")
        least = {"num_dense_layers": 0, "num_shared_experts": 0}
        most = {"num_layers": MOST_LAYERS, "num_dense_layers": self.num_layers}
        most |= {"experts_per_token": self.num_experts, "groups_per_token": self.num_expert_groups}
        for field in dataclasses.fields(self):
            if field.type is int:
                check_int(
                    check.function, field.name, getattr(self, field.name), least=least.get(field.name, 1)
                )
        for name, limit in most.items():
            check_int(check.function, name, getattr(self, name), most=limit)
        if self.num_experts % self.num_expert_groups:
            expected = f"a multiple of num_expert_groups ({self.num_expert_groups})"
            check.fail("num_experts", expected, str(self.num_experts))
        for name in ("routed_scale", "rms_norm_eps"):
            check.positive_float(name, getattr(self, name), optional=False)

    @classmethod
    def from_transformers(cls, config: Any) -> "DeepSeekConfig":
        """From a transformers config of model type "deepseek_v2", "deepseek_v3", "deepseek_v32" or "kimi_k2", or its
        `config.json` as a mapping.

        Raises:
            TypeError: neither of these.
            ValueError: another model type, a size that is missing, or a setting that this decoder does not follow.
        """
        function = "DeepSeekConfig.from_transformers"
        if hasattr(config, "to_dict"):
            config = config.to_dict()
        if not isinstance(config, Mapping):
            expected = "a transformers config, or a mapping"
            fail(function, "config", expected, f"{config!r:.40} of type {type(config).__name__}", TypeError)
        if (kind := config.get("model_type")) is None:
            fail(function, "model_type", "a value", "none")
        if kind not in DEEPSEEK_LIKE:
            fail(function, "model_type", " or ".join(map(repr, DEEPSEEK_LIKE)), repr(kind))
        v3, sparse = kind != "deepseek_v2", kind == "deepseek_v32"
        for name in ("num_hidden_layers", "first_k_dense_replace"):  # lists are made of them
            if config.get(name) is not None:
                check_int(function, name, config[name], least=0, most=MOST_LAYERS)
        settings = Settings(config, _DEFAULTS[kind], _fixed(config, kind), function)
        for name in (*_REQUIRED, *(_INDEXER.values() if sparse else ())):
            settings.size(name)
        methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
        method = settings.among("topk_method", {name: name for name in methods})
        grouped = v3 or method == "group_limited_greedy"
        context = settings.size("max_position_embeddings")
        rope = rope_settings(settings)
        theta, yarn, context = rope_stretch(settings, rope, context)
        if not isinstance(yarn, Yarn | None):
            settings.refuse("rope_type", "'default' or 'yarn'", rope.get("rope_type", rope.get("type")))
        attention = MLAConfig(
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            q_lora_rank=settings["q_lora_rank"],
            kv_lora_rank=config["kv_lora_rank"],
            qk_nope_head_dim=config["qk_nope_head_dim"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
            rope_theta=settings.number("rope_theta") if theta is None else theta,
            yarn=yarn,
            rope_interleaved=settings.flag("rope_interleave") if v3 else True,
        )
        return cls(
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_dense_layers=config["first_k_dense_replace"],
            intermediate_size=config["intermediate_size"],
            expert_intermediate_size=config["moe_intermediate_size"],
            num_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            num_shared_experts=config["n_shared_experts"],
            attention=attention,
            num_expert_groups=(settings["n_group"] or 1) if grouped else 1,
            groups_per_token=(settings["topk_group"] or 1) if grouped else 1,
            sigmoid_routing=v3,
            normalize_weights=v3 and settings.flag("norm_topk_prob"),
            routed_scale=settings.number("routed_scaling_factor"),
            rms_norm_eps=config["rms_norm_eps"],
            context_length=context,
            indexer=IndexerConfig(**{ours: config[theirs] for ours, theirs in _INDEXER.items()})
            if sparse
            else None,
        )


def _fixed(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Settings with a single accepted value: what this decoder computes, or what follows from other settings."""
    layers, dense = config.get("num_hidden_layers") or 0, config.get("first_k_dense_replace") or 0
    nope, rope = config.get("qk_nope_head_dim") or 0, config.get("qk_rope_head_dim") or 0
    fixed: dict[str, Any] = {
        "hidden_act": ("silu",),
        "tie_word_embeddings": (False,),
        "moe_layer_freq": (1,),
        "mlp_layer_types": (["dense"] * dense + ["sparse"] * (layers - dense),),
        "scoring_func": ("softmax" if kind == "deepseek_v2" else "sigmoid",),
        "num_key_value_heads": ANYTHING,  # all heads share the latents
        "head_dim": (rope,),
        "qk_head_dim": (nope + rope,),
    }
    if kind == "deepseek_v2":
        # Its router has neither.
        fixed |= {"norm_topk_prob": (False,), "rope_interleave": (True,)}
    if kind == "deepseek_v32":
        fixed |= {
            "layer_types": (["indexed_attention"] * layers,),
            "indexer_rope_interleave": (False,),
            "index_topk_freq": (1,),
            "num_experts": (config.get("n_routed_experts"),),
        }
    return fixed
