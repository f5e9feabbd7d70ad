"""The DeepSeek decoder against transformers, with random weights and the real attention dimensions."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from pallas_attn import PagedLatentCache
from pallas_attn.models import DeepSeek, DeepSeekConfig, load_transformers_weights
from pallas_attn.models.deepseek import route
from pallas_attn.nn.mla import MLAConfig, MultiHeadLatentAttention

pytestmark = pytest.mark.once  # its attention is tested on both

ATTENTION = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
SMALL = dict(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=160,
    moe_intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    first_k_dense_replace=1,
    max_position_embeddings=40 * 128,
    **ATTENTION,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=40.0,
    original_max_position_embeddings=128,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=0.8,
)
V2 = dict(n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.5)
V3 = dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
MODELS = {
    "v2-lite": ("V2", dict(**V2, q_lora_rank=None) | dict(topk_method="greedy")),
    "v2-yarn": ("V2", dict(**V2, q_lora_rank=64, rope_parameters=YARN)),
    "v3": ("V3", dict(**V3, q_lora_rank=64)),
    "v3-yarn": ("V3", dict(**V3, q_lora_rank=64, rope_parameters=YARN | dict(mscale=0.707))),
    # 8 of up to 53 tokens; many heads, since a token that none of them likes would tie with others.
    "v3.2-yarn": (
        "V32",
        dict(**V3, q_lora_rank=64, index_topk=8, index_n_heads=16, index_head_dim=80, rope_parameters=YARN),
    ),
}


def theirs(name: str):
    import transformers

    version, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"Deepseek{version}Config")(**SMALL, **options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Wider than the default, so that attention and routing are far from uniform.
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def ours(model) -> DeepSeek:
    config = DeepSeekConfig.from_transformers(model.config.to_dict())
    decoder = nnx.eval_shape(lambda: DeepSeek(config, rngs=nnx.Rngs(0)))  # nothing is drawn to be overwritten
    load_transformers_weights(decoder, {k: v.numpy() for k, v in model.state_dict().items()})
    return decoder


def empty_cache(num_layers: int, num_seqs: int, page_size: int = 16, pages_each: int = 5) -> PagedLatentCache:
    tables = np.random.default_rng(0).permutation(num_seqs * pages_each).reshape(num_seqs, -1)
    return PagedLatentCache.create(
        num_layers=num_layers,
        num_pages=num_seqs * pages_each,
        page_size=page_size,
        block_tables=jnp.asarray(tables, jnp.int32),
        dtype=jnp.float32,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def step(graph, weights, tokens, positions, cache):
    model = nnx.merge(graph, weights)
    hidden, cache = model(tokens, positions, cache)
    return model.logits(hidden), cache


@pytest.mark.parametrize("name", ["v2-lite", "v2-yarn", "v3", "v3-yarn"])
@pytest.mark.sweep(name=lambda name: name.split("-")[:1])
def test_prefill_and_greedy_decoding_equal_transformers(name):
    model = theirs(name)
    graph, weights = nnx.split(ours(model))
    prompts = np.random.default_rng(1).integers(0, 256, (2, 21))
    cache = empty_cache(3, 2)
    positions = jnp.broadcast_to(jnp.arange(21, dtype=jnp.int32), (2, 21))
    logits, cache = step(graph, weights, jnp.asarray(prompts, jnp.int32), positions, cache)
    with torch.no_grad():
        first = model(torch.as_tensor(prompts), use_cache=True)
    np.testing.assert_allclose(logits, first.logits.numpy(), atol=2e-3)
    in_chunks = empty_cache(3, 2)
    for at in np.split(np.arange(21), 3):
        tokens, places = (jnp.asarray(x[:, at], jnp.int32) for x in (prompts, positions))
        chunk, in_chunks = step(graph, weights, tokens, places, in_chunks)
        np.testing.assert_allclose(chunk, first.logits[:, at].numpy(), atol=2e-3)

    expected, past = first.logits[:, -1], first.past_key_values
    token = logits[:, -1].argmax(-1)
    for i in range(32):
        assert token.tolist() == expected.argmax(-1).tolist(), f"step {i}"
        positions = jnp.full((2, 1), 21 + i, jnp.int32)
        logits, cache = step(graph, weights, token[:, None].astype(jnp.int32), positions, cache)
        with torch.no_grad():
            out = model(torch.as_tensor(np.array(token))[:, None], past_key_values=past, use_cache=True)
        expected, past = out.logits[:, -1], out.past_key_values
        np.testing.assert_allclose(logits[:, -1], expected.numpy(), atol=2e-3)
        token = logits[:, -1].argmax(-1)
    assert cache.seq_lens.tolist() == [53, 53]


@functools.partial(nnx.jit, static_argnames="absorbed")
def call(layer, x, cache, positions, absorbed=None):
    return layer(x, cache, 0, positions, absorbed=absorbed)


@pytest.mark.parametrize("q_lora_rank", [None, 40])
@pytest.mark.sweep(q_lora_rank=None)
def test_both_forms_agree(q_lora_rank):
    """As a prompt, as the newest tokens of a sequence, and token by token."""
    config = MLAConfig(hidden_size=64, num_heads=3, q_lora_rank=q_lora_rank, rope_interleaved=False)
    layer = MultiHeadLatentAttention(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 6, 64))
    positions = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))

    prompt, _ = call(layer, x, empty_cache(1, 2), positions)
    packed, _ = call(layer, x, empty_cache(1, 2), positions, absorbed=True)
    np.testing.assert_allclose(packed, prompt, atol=1e-5)
    cache = empty_cache(1, 2)
    for i in range(6):
        single, cache = call(layer, x[:, i : i + 1], cache, positions[:, i : i + 1])
        np.testing.assert_allclose(single[:, 0], prompt[:, i], atol=1e-5)


def test_padding_and_finished_sequences_write_nothing():
    layer = MultiHeadLatentAttention(MLAConfig(hidden_size=64, num_heads=2), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 64))
    positions = jnp.asarray([[0, 1, 2, 3], [0, 1, -1, -1]], jnp.int32)
    _, cache = call(layer, x, empty_cache(1, 2), positions)
    written = np.asarray(jnp.any(cache.latent_cache != 0, axis=(2, 3))).sum()
    assert written == 6
    out, after = call(layer, x[:, :1], cache, jnp.asarray([[4], [-1]], jnp.int32))
    assert (np.asarray(out[1]) == 0).all()
    assert np.asarray(jnp.any(after.latent_cache != 0, axis=(2, 3))).sum() == 7


def test_experts_of_other_groups_are_never_chosen():
    config = dataclasses.replace(
        DeepSeekConfig(8, 1, 0, 8, 8, 16, 4, 1, MLAConfig(64, 1)),
        num_expert_groups=4,
        groups_per_token=1,
        sigmoid_routing=True,
        normalize_weights=True,
    )
    logits = jax.random.normal(jax.random.key(0), (50, 16))
    experts, weights = route(logits, jnp.zeros(16), config)
    assert (np.ptp(np.asarray(experts) // 4, axis=1) == 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)


def test_published_expert_files_are_stacked():
    model = theirs("v3")
    stacked = {k: v.numpy() for k, v in model.state_dict().items()}
    single = {}
    for key, value in stacked.items():
        if key.endswith("experts.gate_up_proj"):
            base = key.removesuffix(".gate_up_proj")
            for i, both in enumerate(value):
                gate, up = np.split(both, 2)
                single[f"{base}.{i}.gate_proj.weight"], single[f"{base}.{i}.up_proj.weight"] = gate, up
                single[f"{base}.{i}.down_proj.weight"] = stacked[f"{base}.down_proj"][i]
        elif not key.endswith("experts.down_proj"):
            single[key] = value
    first, second = ours(model), ours(model)
    load_transformers_weights(second, single)
    for a, b in zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_settings_without_an_equivalent_are_refused():
    base = dict(SMALL, model_type="deepseek_v3", rms_norm_eps=1e-6)
    with pytest.raises(
        ValueError,
        match=r"'model_type': expected 'deepseek_v2' or .* 'deepseek_v32' or 'kimi_k2', got 'llama'",
    ):
        DeepSeekConfig.from_transformers(dict(base, model_type="llama"))
    with pytest.raises(ValueError, match="'attention_bias': expected False"):
        DeepSeekConfig.from_transformers(dict(base, attention_bias=True))
    for setting, value in (("mlp_bias", True), ("tie_word_embeddings", True), ("hidden_act", "gelu")):
        with pytest.raises(ValueError, match=f"'{setting}': expected .*, got {value!r}"):
            DeepSeekConfig.from_transformers(dict(base, **{setting: value}))
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.7)
    config = DeepSeekConfig.from_transformers(dict(base, rope_parameters=yarn | {"truncate": False}))
    assert (config.attention.yarn.rotary_scale, config.attention.yarn.truncate) == (1.7, False)
    linear = dict(rope_type="linear", factor=2.0)
    with pytest.raises(ValueError, match="'rope_type': expected 'default' or 'yarn', got 'linear'"):
        DeepSeekConfig.from_transformers(dict(base, rope_parameters=linear))
    with pytest.raises(ValueError, match="'factor': expected a value with rope type 'linear'"):
        DeepSeekConfig.from_transformers(dict(base, rope_parameters=dict(rope_type="linear")))
    with pytest.raises(ValueError, match="MLAConfig: argument 'kv_lora_rank': expected 512"):
        DeepSeekConfig.from_transformers(dict(base, kv_lora_rank=256))


def test_a_transformers_config_may_be_given_as_it_is():
    config = theirs("v3-yarn").config
    assert DeepSeekConfig.from_transformers(config) == DeepSeekConfig.from_transformers(config.to_dict())


def test_what_is_no_config_is_refused_and_yarn_needs_its_factor():
    from_transformers = DeepSeekConfig.from_transformers
    with pytest.raises(
        TypeError, match="'config': expected a transformers config, or a mapping, got 5 of type int"
    ):
        from_transformers(5)
    base = theirs("v3-yarn").config.to_dict()
    rope = {name: value for name, value in base["rope_parameters"].items() if name != "factor"}
    message = "argument 'factor': expected a value with rope type 'yarn', got none"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_transformers(base | dict(rope_parameters=rope))


def test_what_a_file_does_not_say_is_what_transformers_takes():
    import transformers

    for version in ("V2", "V3", "V32"):
        usual = getattr(transformers, f"Deepseek{version}Config")().to_dict()
        usual |= dict(kv_lora_rank=512, num_experts_per_tok=6)
        for name in ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "q_lora_rank"):
            rest = {key: value for key, value in usual.items() if key != name}
            assert DeepSeekConfig.from_transformers(rest) == DeepSeekConfig.from_transformers(usual), name


def test_settings_of_routing_and_quantisation_without_an_equivalent_are_refused():
    v3, v2, v32 = (theirs(name).config.to_dict() for name in ("v3", "v2-yarn", "v3.2-yarn"))
    for base, setting, value in (
        (v3, "scoring_func", "softmax"),
        (v3, "topk_method", "greedy"),
        (v3, "moe_layer_freq", 2),
        (v3, "mlp_layer_types", ["sparse"] * v3["num_hidden_layers"]),
        (v3, "n_routed_experts", None),
        (v3, "partial_rotary_factor", 0.5),
        (v3, "layer_types", ["sliding_attention"] * 3),
        (v3, "new_trick", 3),
        (v32, "indexer_rope_interleave", True),
        (v32, "index_topk_freq", 2),
        (v32, "layer_types", ["full_attention"] * 3),
        (v2, "scoring_func", "sigmoid"),
        (v2, "topk_method", "noaux_tc"),
        (v2, "norm_topk_prob", True),
    ):
        with pytest.raises(ValueError, match=rf"from_transformers: argument '{setting}': expected "):
            DeepSeekConfig.from_transformers(base | {setting: value})
    with pytest.raises(ValueError, match="argument 'model_type': expected a value, got none"):
        DeepSeekConfig.from_transformers({})


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "'num_hidden_layers': expected at most 100000, got 1000000000"),
        ("first_k_dense_replace", 10**9, "'first_k_dense_replace': expected at most 100000"),
        ("first_k_dense_replace", 99, "'num_dense_layers': expected at most"),
        ("n_routed_experts", 0, "'num_experts': expected at least 1, got 0"),
        ("num_experts_per_tok", 99, "'experts_per_token': expected at most"),
        ("topk_group", 99, "'groups_per_token': expected at most"),
        ("n_group", 7, "'num_experts': expected a multiple of num_expert_groups (7)"),
        ("vocab_size", "9", "'vocab_size': expected an int, got '9' of type str"),
        ("rms_norm_eps", -1.0, "'rms_norm_eps': expected a finite number above 0, got -1.0"),
        ("norm_topk_prob", "yes", "'norm_topk_prob': expected true or false, got 'yes'"),
        (
            "rope_scaling",
            dict(type="linear", factor=2.0),
            "'rope_type': expected 'default' or 'yarn', got 'linear'",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_sizes_that_cannot_be_are_refused(setting, value, message):
    config = dict(SMALL, model_type="deepseek_v3", rms_norm_eps=1e-6)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        DeepSeekConfig.from_transformers(config | {setting: value})


def test_weights_that_are_missing_or_have_no_place_are_named():
    source = theirs("v3")
    config = DeepSeekConfig.from_transformers(source.config.to_dict())
    weights = source.state_dict()
    fresh = functools.partial(nnx.eval_shape, lambda: DeepSeek(config, rngs=nnx.Rngs(0)))
    for part in ("self_attn.kv_b_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        name = next(n for n in weights if n.endswith(part))
        rest = {n: w for n, w in weights.items() if n != name}
        with pytest.raises(ValueError, match=r"argument 'weights': expected an entry"):
            load_transformers_weights(fresh(), rest)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    with pytest.raises(ValueError, match=rf"argument '{name}': expected shape \["):
        load_transformers_weights(fresh(), weights | {name: weights[name][:-1]})
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    with pytest.raises(ValueError, match=rf"expected entries that have a place in the model, got '{scale}'"):
        load_transformers_weights(fresh(), weights | {scale: np.ones((1, 1), np.float32)})
    # Layers of multi-token prediction come behind the model's; torch's bfloat16 is read as well.
    beyond = f"model.layers.{config.num_layers}.eh_proj.weight"
    model = fresh()
    load_transformers_weights(model, {n: w.bfloat16() for n, w in weights.items()} | {beyond: np.ones(3)})
    np.testing.assert_array_equal(model.lm_head[...], weights["lm_head.weight"].bfloat16().float())
