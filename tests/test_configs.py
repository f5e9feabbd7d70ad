"""config.json of every family: what files do not say, what they say besides, and how far the context reaches."""

from typing import Any

import pytest

from pallas_attn.models.deepseek_config import DeepSeekConfig
from pallas_attn.models.families import FAMILIES, llama_config
from pallas_attn.nn.rotary import LongRope

pytestmark = pytest.mark.once  # nothing of it is JAX's


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_does_not_say_is_what_transformers_takes(family):
    """Nothing, everything, and everything but one."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    usual = auto.CONFIG_MAPPING[family]().to_dict()
    expected = llama_config(usual)
    assert llama_config({"model_type": family}) == expected
    for left_out in usual.keys() - {"model_type"}:
        rest = {name: value for name, value in usual.items() if name != left_out}
        assert llama_config(rest) == expected, left_out


# What files on the hub say besides their sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2": dict(
        model_type="llama", is_llama_config=True, rope_interleaved=False, pretraining_tp=1, rope_scaling=None,
        mlp_bias=False, attention_bias=False, torch_dtype="bfloat16",
        **{"transformers.js_config": {"dtype": "q4"}},
    ),
    "qwen2.5": dict(
        model_type="qwen2", use_mrope=False, use_sliding_window=False, sliding_window=131072, max_window_layers=70
    ),
    "mistral-v0.3": dict(model_type="mistral", sliding_window=None, rope_theta=1e6, new_idea=None),
    "mixtral": dict(model_type="mixtral", output_router_logits=False, router_aux_loss_coef=0.02, sliding_window=None),
    "qwen3-moe": dict(
        model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_experts=128,
        max_window_layers=48, use_sliding_window=False, sliding_window=None, rope_scaling=None, head_dim=128,
    ),
    "gemma": dict(model_type="gemma", hidden_act="gelu", hidden_activation=None),
    "gemma-2": dict(
        model_type="gemma2", cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh", sliding_window_size=4096,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=224,
    ),
    "gemma-3": dict(
        model_type="gemma3_text", rope_local_base_freq=10000, sliding_window_pattern=6, rope_scaling=None,
        attn_logit_softcapping=None, cache_implementation="hybrid", use_bidirectional_attention=False,
    ),
    "gpt-oss": dict(
        model_type="gpt_oss", experts_per_token=4, initial_context_length=4096, swiglu_limit=7.0, rope_theta=150000,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ),
    ),
    "phi-4-mini": dict(
        model_type="phi3", full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False, embd_pdrop=0.0,
        resid_pdrop=0.0, attention_bias=False, auto_map={}, tie_word_embeddings=True, sliding_window=262144,
    ),
    "smollm3": dict(model_type="smollm3", max_window_layers=28, pretraining_tp=2, no_rope_layer_interval=4),
    "cohere-2": dict(
        model_type="cohere2", order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
        rotary_pct=1.0, use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
        use_parallel_embedding=True, sliding_window_pattern=4, layer_switch=4,
    ),
    "granite": dict(model_type="granite", attention_multiplier=0.0078125, residual_multiplier=0.22),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name):
    llama_config(PUBLISHED[name])


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (dict(model_type="qwen3_moe", mlp_only_layers=[0]), "'mlp_only_layers': expected [], got [0]"),
        (dict(model_type="qwen3_moe", decoder_sparse_step=2), "'decoder_sparse_step': expected 1, got 2"),
        (dict(model_type="gemma3_text", use_bidirectional_attention=True), "expected False, got True"),
        (dict(model_type="cohere2", use_parallel_block=False), "'use_parallel_block': expected True"),
        (dict(model_type="phi3", lm_head_bias=True), "'lm_head_bias': expected False, got True"),
        (dict(model_type="llama", layer_types=["full_attention"]), "'layer_types': expected no setting"),
        (
            dict(model_type="gemma2", hidden_activation="gelu"),
            "expected 'silu' or 'gelu_pytorch_tanh', got 'gelu'",
        ),
        (dict(model_type="llama", hidden_act=["silu"]), "'hidden_act': expected 'silu' or"),
        (dict(model_type="llama", rope_scaling="long"), "'rope_scaling': expected an object, got 'long'"),
        (dict(model_type="llama", rope_scaling={"type": ["yarn"]}), "'rope_type': expected 'default' or"),
        (
            dict(model_type="llama", rope_scaling={"type": "linear", "factor": "2"}),
            "'factor': expected a number, got '2'",
        ),
        (dict(model_type="llama", clip_qkv=8.0), "'clip_qkv': expected no setting that"),
        (
            dict(model_type="gemma3_text", rope_parameters={"sliding_attention": {"rope_type": "linear"}}),
            "'rope_type': expected 'default' in layers with a window, got 'linear'",
        ),
        (
            dict(model_type="gemma2", query_pre_attn_scalar=0),
            "'query_pre_attn_scalar': expected a finite number",
        ),
        (dict(model_type="gemma2", query_pre_attn_scalar=-256), "expected a finite number above 0, got -256"),
        (
            dict(model_type="gemma2", attn_logit_softcapping=0.0),
            "'softcap': expected a finite number above 0",
        ),
        (
            dict(model_type="gemma2", final_logit_softcapping=-1.0),
            "'logit_softcap': expected a finite number above 0",
        ),
        (
            dict(model_type="gemma3_text", sliding_window_pattern=0),
            "'sliding_window_pattern': expected at least 1",
        ),
        (
            dict(model_type="granite", logits_scaling=0),
            "'logits_scaling': expected a finite number above 0, got 0",
        ),
        (
            dict(model_type="llama", rope_theta=-1e4),
            "'rope_theta': expected a finite number above 0, got -10000",
        ),
        (
            dict(model_type="llama", rms_norm_eps=-1e-5),
            "'rms_norm_eps': expected a finite number above 0, got -1e-05",
        ),
        (
            dict(model_type="llama", tie_word_embeddings="no"),
            "'tie_word_embeddings': expected true or false, got 'no'",
        ),
        (
            dict(model_type="smollm3", no_rope_layers="1" * 36),
            "'no_rope_layers': expected 36 of 0 or 1, got '111",
        ),
        (
            dict(
                model_type="phi3", rope_scaling=dict(type="longrope", short_factor=[1.0], long_factor=[2.0])
            ),
            "'short_factor': expected 48 numbers, got 1",
        ),
        (
            dict(model_type="mistral", rope_parameters={"full_attention": {"rope_theta": 1.0}}),
            "'rope_parameters': expected one rotary embedding for all layers",
        ),
    ],
)
def test_what_changes_results_and_is_not_served_is_refused_by_name(settings, refused):
    with pytest.raises((ValueError, TypeError)) as error:
        llama_config(settings)
    assert refused in str(error.value)


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        # Qwen 2.5's and Qwen 3's recipes.
        (dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)), 131072),
        (
            dict(
                max_position_embeddings=40960,
                rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
            ),
            131072,
        ),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0)), 131072),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), 65536),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), 32768),
        (dict(max_position_embeddings=131072, rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192)), 131072),
    ],
)  # fmt: skip
def test_how_far_the_context_reaches(settings, context):
    config = llama_config({"model_type": "qwen2", "max_position_embeddings": 32768, **settings})
    assert config.context_length == context
    assert config.rope_stretch is not None


def test_yarn_extends_deepseek_as_well():
    sizes = dict(
        model_type="deepseek_v3", vocab_size=8, hidden_size=8, intermediate_size=8, moe_intermediate_size=8,
        rms_norm_eps=1e-6, num_hidden_layers=1, num_attention_heads=1, first_k_dense_replace=1, kv_lora_rank=512,
        qk_nope_head_dim=8, qk_rope_head_dim=64, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=1,
        n_shared_experts=1,
    )  # fmt: skip
    assert DeepSeekConfig.from_transformers(sizes).context_length == 4096
    rope = dict(type="yarn", factor=40, original_max_position_embeddings=4096)
    assert DeepSeekConfig.from_transformers({**sizes, "rope_scaling": rope}).context_length == 163840


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi_3_has_its_long_context_by_several_names(kind):
    rope = dict(type=kind, short_factor=[1.0] * 48, long_factor=[2.0] * 48)
    config = llama_config(
        {
            "model_type": "phi3",
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": rope,
        }
    )
    assert isinstance(config.rope_stretch, LongRope)
    assert config.rope_stretch.original_context == 4096
    assert config.rope_stretch.attention_factor == pytest.approx(1.1902380714238083)
