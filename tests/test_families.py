"""Every family that a `Llama` is: small random models of transformers' own classes give the same tokens and logits, and
would not if what the family has that Llama has not were left out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models_support import import_torch, write_tokenizer

from pallas_attn.models import Engine, Llama, generate, load_checkpoint

# Files, models of both other frameworks, and programs of XLA's.
pytestmark = pytest.mark.once

SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.4,  # fresh weights would give nearly the same logits whatever attention did
)
WINDOWS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=4.0, beta_fast=8.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=32,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
LINEAR = dict(rope_type="linear", rope_theta=100.0, factor=3.0)
# 30 is crossed by the answer, 8 by the prompt.
DYNAMIC = dict(rope_type="dynamic", rope_theta=100.0, factor=3.0)
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.3, 1.4], [2.0, 5.0, 9.0, 20.0, 30.0, 30.0]
PARTIAL_HEADS = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16)
PARTIAL_LONG = dict(
    rope_type="longrope", rope_theta=100.0, short_factor=SHORT, long_factor=LONG, partial_rotary_factor=0.75,
)  # fmt: skip
EXPERTS = dict(num_local_experts=5, num_experts_per_tok=2)

# A name, transformers' class, options, and what is left out one after the other.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True), ("output_bias", "mlp_bias")),
    "llama-3.1": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True), ("rope_stretch",)),
    "linear": ("Llama", dict(rope_parameters=LINEAR), ("rope_stretch",)),
    "dynamic": ("Llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=8), ("rope_stretch",)),
    "mistral": ("Mistral", dict(sliding_window=7), ("window",)),
    "mixtral": ("Mixtral", EXPERTS, ("second_expert",)),
    "qwen-2": ("Qwen2", dict(rope_parameters=YARN | {"truncate": True}), ("rope_stretch", "qkv_bias")),
    "qwen-3": ("Qwen3", {}, ("qk_norm",)),
    "qwen-3-moe": (
        "Qwen3Moe",
        dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False),
        ("router_scale", "qk_norm"),
    ),
    "gemma": ("Gemma", {}, ("around_one", "embedding_scale")),
    "gemma-2": (
        "Gemma2",
        dict(WINDOWS, query_pre_attn_scalar=7, attn_logit_softcapping=1.5, final_logit_softcapping=9.0),
        ("softcap", "logit_softcap", "scale", "window", "norm_behind"),
    ),
    "gemma-3": (
        "Gemma3",
        dict(WINDOWS, query_pre_attn_scalar=24, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
        }),
        ("window_rope_theta", "qk_norm"),
    ),
    "gpt-oss": (
        "GptOss", dict(WINDOWS, **EXPERTS, rope_parameters=YARN), ("sinks", "clip", "router_bias", "truncate")
    ),
    "phi-3": ("Phi3", {}, ("residual_scale",)),
    "phi-4-mini": (
        "Phi3",
        dict(PARTIAL_HEADS, rope_parameters=PARTIAL_LONG, original_max_position_embeddings=30),
        ("rope_stretch", "rotary_dim"),
    ),
    "phi-4-mini-long": (
        "Phi3",
        dict(PARTIAL_HEADS, rope_parameters=PARTIAL_LONG, original_max_position_embeddings=8),
        ("rope_length",),
    ),
    "smollm-3": ("SmolLM3", dict(no_rope_layers=[1, 0]), ("unrotated_layers",)),
    "olmo-2": ("Olmo2", {}, ("qk_norm", "norm_behind")),
    "olmo-3": (
        "Olmo3",
        dict(WINDOWS, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": YARN | {"truncate": True},
        }),
        ("window", "window_rope_theta"),
    ),
    "granite": (
        "Granite",
        dict(attention_multiplier=0.5, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=4.0),
        ("scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "cohere": (
        "Cohere",
        dict(use_qk_norm=True, logit_scale=0.3),
        ("logit_scale", "qk_norm", "interleaved", "parallel", "layer_norm"),
    ),
    "cohere-2": ("Cohere2", dict(WINDOWS, logit_scale=0.3), ("unrotated_layers", "window")),
    "glm": ("Glm", {}, ("rotary_dim", "interleaved", "qkv_bias")),
    "glm-4": ("Glm4", {}, ("norm_behind",)),
}  # fmt: skip
# Prompt and answer together cross the original contexts above; Phi's own generate computes the cache anew there.
PROMPT = np.random.default_rng(0).integers(3, SIZES["vocab_size"], 21).tolist()
NEW = 32


@functools.cache
def theirs(case: str) -> Any:
    torch = import_torch()
    import transformers

    name, options, _ = CASES[case]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**{**SIZES, **options})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name or "sinks" in parameter_name:
                parameter += 0.3 * torch.randn_like(parameter)  # else 0 and 1
            elif parameter.ndim == 3 or "gate.weight" in parameter_name or "router" in parameter_name:
                parameter.copy_(0.4 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @functools.cache
    def folder(case: str):
        path = tmp_path_factory.mktemp(case)
        theirs(case).save_pretrained(path)
        write_tokenizer(path, SIZES["vocab_size"])
        return path

    return folder


def logits_of(model: Llama, tokens: list[int]) -> np.ndarray:
    """Of all tokens, read at once."""

    @jax.jit
    def run(weights, tokens):
        model = nnx.merge(graph, weights)
        tables = jnp.arange(-(-tokens.size // 16), dtype=jnp.int32)[None]
        cache = model.create_cache(num_pages=tables.size, page_size=16, block_tables=tables)
        hidden, _ = model(tokens[None], jnp.arange(tokens.size, dtype=jnp.int32)[None], cache)
        return model.logits(hidden[0])

    graph, weights = nnx.split(model)
    return np.asarray(run(weights, jnp.array(tokens, jnp.int32)))


def expected_logits(case: str, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(case)(torch.tensor([tokens])).logits[0].numpy()


# A sample has the families with most of their own, and of each what would show were it left out, below.
@pytest.mark.sweep(case=lambda case: CASES[case][2] if len(CASES[case][2]) > 3 else ())
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_transformers(folders, case):
    import torch

    model = load_checkpoint(folders(case)).model
    # Where frequencies go by the length, tokens of an answer keep what they were given.
    assert model.config.context_length >= len(PROMPT) or case == "phi-4-mini-long"
    model.config = dataclasses.replace(model.config, context_length=len(PROMPT) + NEW)
    ours = generate(model, [PROMPT], max_new_tokens=NEW, return_logits=True)
    assert ours.logits is not None
    reference = theirs(case)
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True, temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
    expected = torch.cat(out.logits).float().numpy()
    same = NEW
    if case == "phi-4-mini":
        # Theirs computes the whole cache anew where the long factors begin; here, what was written stays.
        same = 30 - len(PROMPT)
    assert ours.row(0)[:same] == out.sequences[0, len(PROMPT) :].tolist()[:same]
    spread = expected.std()
    assert spread > 0.1
    assert np.abs(ours.logits[0, :same] - expected[:same]).max() < 2e-3 * spread


def leave_out(model: Llama, what: str) -> None:
    layers, config = model.layers, model.config
    changes: dict[str, Any] = {
        "rope_stretch": {"rope_stretch": None},
        "rope_length": {"rope_length": 8},
        "rotary_dim": {"rotary_dim": None, "rope_stretch": None},
        "interleaved": {"rope_interleaved": False},
        "embedding_scale": {"embedding_scale": 1.0},
        "residual_scale": {"residual_scale": 1.0 if config.residual_scale != 1 else 0.5},
        "logit_scale": {"logit_scale": 1.0},
        "logit_softcap": {"logit_softcap": None},
        "window_rope_theta": {"window_rope_theta": None},
        "unrotated_layers": {"unrotated_layers": ()},
        "window": {"sliding_window": None},
        "clip": {"swiglu_limit": 1e9},
        "second_expert": {"experts": config.experts and dataclasses.replace(config.experts, per_token=1)},
        "router_scale": {"experts": config.experts and dataclasses.replace(config.experts, normalize=True)},
    }  # fmt: skip
    if what in changes:
        changed = dataclasses.replace(config, **changes[what])
        model.config = layers.config = layers.attention.config = layers.mlp.config = changed
    attend = layers.attention.attend
    if what == "truncate":
        rounded = dataclasses.replace(config.rope_stretch, truncate=True)
        model.config = dataclasses.replace(config, rope_stretch=rounded)
    elif what == "window":
        attend.options = dataclasses.replace(attend.options, sliding_window=None)
    elif what in ("scale", "softcap"):
        attend.options = dataclasses.replace(attend.options, **{what: None})
    elif what == "sinks":
        attend.sinks[...] = jnp.full_like(attend.sinks[...], -jnp.inf)
    elif what == "qk_norm":
        layers.attention.q_norm = layers.attention.k_norm = None
    elif what == "norm_behind":
        layers.attention_output_norm = layers.mlp_output_norm = None
    elif what == "around_one":
        layers.attention_norm.around_one = False
    elif what == "parallel":
        layers.config = dataclasses.replace(config, parallel=False)
    elif what == "layer_norm":
        model.norm = nn_rms_of(model.norm)
    elif what in ("qkv_bias", "output_bias"):
        projection = layers.attention.qkv_proj if what == "qkv_bias" else layers.attention.o_proj
        projection.bias[...] = jnp.zeros_like(projection.bias[...])
    elif what == "mlp_bias":
        layers.mlp.down_proj.bias[...] = jnp.zeros_like(layers.mlp.down_proj.bias[...])
    elif what == "router_bias":
        layers.mlp.router_bias[...] = jnp.zeros_like(layers.mlp.router_bias[...])
    else:
        assert what in changes


def nn_rms_of(norm):
    from pallas_attn.nn.layers import RMSNorm

    rms = RMSNorm(norm.weight.shape[0], norm.eps, jnp.float32)
    rms.weight[...] = norm.weight[...]
    return rms


@pytest.mark.parametrize(("case", "what"), [(case, what) for case in CASES for what in CASES[case][2]])
@pytest.mark.control
def test_what_a_family_has_of_its_own_would_show(folders, case, what):
    tokens = [*PROMPT, *PROMPT[::-1]]
    expected = expected_logits(case, tokens)
    model = load_checkpoint(folders(case)).model
    leave_out(model, what)
    assert np.abs(logits_of(model, tokens) - expected).max() > 0.05 * expected.std()


@pytest.mark.slow
def test_an_engine_has_one_rotary_embedding_for_all_lengths(folders):
    """Of the long factors if a text may be long, whatever is read in which chunks: prefixes are shared."""
    model = load_checkpoint(folders("phi-4-mini")).model
    long = dataclasses.replace(model.config, rope_length=40)
    short = dataclasses.replace(model.config, rope_length=30)
    answers = []
    for most in (40, 30):
        engine = Engine(model, max_len=most, num_rows=2, page_size=4, step_tokens=8)
        requests = [engine.submit(PROMPT[:n], max_new_tokens=8) for n in (20, 9)]
        while engine.busy:
            engine.step()
        answers.append([request.answer for request in requests])
    for config, answered in zip((long, short), answers, strict=True):
        model.config = config
        got = generate(model, [PROMPT[:20], PROMPT[:9]], max_new_tokens=8, page_size=4)
        assert [got.row(0), got.row(1)] == answered
    assert answers[0] != answers[1]
