"""Whole models written out over the ops, against transformers: windows in some layers, sinks, ALiBi, by the kernels as
well. Forwards: other_models.py. What the package's own decoder serves: test_families.py."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import other_models
import pytest
from models_support import import_torch

from pallas_attn import paged_attention, ragged_paged_attention, write_kv
from pallas_attn.nn import alibi_slopes

pytestmark = pytest.mark.once  # its ops are tested on both

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,  # fresh weights would give nearly the same logits whatever attention did
)
WINDOWS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=4.0, beta_fast=8.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=32,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOss",
        other_models.gpt_oss,
        dict(SIZES, **WINDOWS, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN),
    ),
    "bloom": (
        "Bloom",
        other_models.bloom,
        dict(vocab_size=64, hidden_size=96, n_layer=2, n_head=6, initializer_range=0.3),
    ),
}
# What must show when it is left out: what `attend` calls it, or the weights that say the same as nothing.
OPTIONS: list[tuple[str, str, Any]] = [
    ("gpt-oss", "windows", other_models.NO_WINDOW),
    ("gpt-oss", "sinks", -jnp.inf),
    ("bloom", "slopes", 0),
]
LENGTHS, STEPS = (21, 13), 16
PAGE, MAX_PAGES, ROOM = 8, 5, 36
TABLES = np.random.default_rng(2).permutation(2 * MAX_PAGES).astype(np.int32).reshape(2, MAX_PAGES)
TOKENS = np.random.default_rng(1).integers(0, 64, (2, max(LENGTHS) + STEPS))


class Model(NamedTuple):
    """A family's random model: its weights and config, and the logits of TOKENS by transformers."""

    family: str
    weights: dict[str, jax.Array]
    config: Any
    expected: np.ndarray
    pools: list[tuple[jax.Array, jax.Array]]


@functools.cache
def model_of(family: str) -> Model:
    torch = import_torch()
    import transformers

    name, _, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or "experts" in str(parameter.shape):  # biases and norms, else 0 and 1
                parameter += 0.3 * torch.randn_like(parameter)
        expected = model(torch.as_tensor(TOKENS)).logits.numpy()
    weights = {key: jnp.asarray(value.numpy()) for key, value in model.state_dict().items()}
    weights |= {"windows": jnp.asarray(other_models.windows_of(config))}
    if family == "bloom":
        weights["slopes"] = jnp.asarray(alibi_slopes(config.n_head), jnp.float32)
    heads, dim = (config.n_head, 16) if family == "bloom" else (2, 16)
    pools = [(jnp.zeros((2 * MAX_PAGES + 1, PAGE, heads, dim)),) * 2 for _ in range(2)]
    return Model(family, weights, config, expected, pools)


@functools.partial(jax.jit, static_argnames=("family", "implementation", "without"))
def run(weights, pools, tokens, positions, cu_q_lens, seq_lens, *, family, implementation="xla", without=""):
    """(logits, pools) of new tokens one after the other; cu_q_lens None: one of each sequence."""
    _, forward, _ = FAMILIES[family]
    config, tables, pools = model_of(family).config, jnp.asarray(TABLES), list(pools)
    counts = jnp.ones(2, jnp.int32) if cu_q_lens is None else jnp.diff(cu_q_lens)
    seq = jnp.repeat(jnp.arange(2), counts, total_repeat_length=len(tokens))
    page = tables[seq, jnp.maximum(positions, 0) // PAGE]
    slots = jnp.where(positions >= 0, page * PAGE + positions % PAGE, -1)

    def attend(layer, query, key, value, **options):
        pools[layer] = write_kv(key, value, *pools[layer], slots, implementation=implementation)
        options = {name: value for name, value in options.items() if name != without}
        options["implementation"] = implementation
        if cu_q_lens is None:
            return paged_attention(query, *pools[layer], tables, seq_lens, **options)
        return ragged_paged_attention(query, *pools[layer], tables, seq_lens, cu_q_lens, **options)

    return forward(weights, config, tokens, positions, attend), pools


def prompt_step(model: Model, pools, before, after, **options):
    """Tokens [before, after) of each prompt; logits of each prompt's, and the pools."""
    parts = [np.arange(first, end) for first, end in zip(before, after, strict=True)]
    count = sum(map(len, parts))
    tokens, positions = np.zeros(ROOM, np.int32), np.full(ROOM, -1, np.int32)
    positions[:count] = np.concatenate(parts)
    tokens[:count] = np.concatenate([row[part] for row, part in zip(TOKENS, parts, strict=True)])
    cu = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    logits, pools = run(
        model.weights, pools, tokens, positions, jnp.asarray(cu), np.array(after, np.int32),
        family=model.family, **options,
    )  # fmt: skip
    return [np.asarray(logits)[cu[i] : cu[i + 1]] for i in range(2)], pools


def assert_close(model: Model, logits, before) -> None:
    for row, first, expected in zip(logits, before, model.expected, strict=True):
        np.testing.assert_allclose(row, expected[first : first + len(row)], atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    """Prompts whole and in chunks, both in one call with padding behind them, then 16 steps."""
    model = model_of(family)
    assert np.abs(model.expected).max() > 1, "logits that differ"
    none, half = (0, 0), (12, 5)
    assert_close(model, prompt_step(model, model.pools, none, LENGTHS)[0], none)
    logits, pools = prompt_step(model, model.pools, none, half)
    assert_close(model, logits, none)
    logits, pools = prompt_step(model, pools, half, LENGTHS)
    assert_close(model, logits, half)
    for step in range(STEPS):
        at = np.array(LENGTHS, np.int32) + step
        new = TOKENS[np.arange(2), at].astype(np.int32)
        logits, pools = run(model.weights, pools, new, at, None, at + 1, family=family)
        assert_close(model, logits[:, None], at)


@pytest.mark.parametrize(("family", "option", "nothing"), OPTIONS)
@pytest.mark.control
def test_an_option_that_were_ignored_would_show(family, option, nothing):
    model, options = model_of(family), {"without": option}
    if nothing is not None:
        kept = {name: jnp.full_like(w, nothing) if option in name else w for name, w in model.weights.items()}
        model, options = model._replace(weights=kept), {}
    logits, _ = prompt_step(model, model.pools, (0, 0), LENGTHS, **options)
    errors = [np.abs(row - want[: len(row)]).max() for row, want in zip(logits, model.expected, strict=True)]
    assert max(errors) > 0.05


@pytest.mark.parametrize("family", ["gpt-oss", "bloom"])
def test_the_kernels_give_the_same(family):
    """One step of decoding through the Pallas kernel, interpreted, behind a prompt."""
    model = model_of(family)
    _, pools = prompt_step(model, model.pools, (0, 0), LENGTHS)
    at = np.array(LENGTHS, np.int32)
    new = TOKENS[np.arange(2), at].astype(np.int32)
    logits, _ = run(model.weights, pools, new, at, None, at + 1, family=family, implementation="interpret")
    assert_close(model, logits[:, None], at)
