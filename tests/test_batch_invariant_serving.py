"""`batch_invariant` in a model, the engine and `generate`: the scores of a request's tokens are the same bits whatever
runs beside it, wherever it runs, in whichever chunks it came and whatever of it was found in the cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models_support import TINY, tiny_llama

from pallas_attn.models import DeepSeek, DeepSeekConfig, Engine, Sampling, generate
from pallas_attn.models.llama_config import Experts
from pallas_attn.nn import MLAConfig

SIZES: dict[str, Any] = dict(max_len=112, num_rows=8, page_size=8, step_tokens=64)
NEW = 6
CONFIG = dataclasses.replace(TINY, context_length=128, num_layers=2)
CONFIGS = {
    "dense": CONFIG,
    "experts": dataclasses.replace(CONFIG, experts=Experts(5, 2, 24)),
    "windows, sinks, experts with biases": dataclasses.replace(
        CONFIG,
        sliding_window=20,
        full_layers=(1,),
        sinks=True,
        qk_norm=True,
        experts=Experts(5, 2, 24, biases=True),
        activation="clipped_swiglu",
    ),
}


def tiny_deepseek(dtype, implementation: str) -> DeepSeek:
    attention = MLAConfig(hidden_size=32, num_heads=2, q_lora_rank=24, qk_nope_head_dim=16, v_head_dim=16)
    config = DeepSeekConfig(TINY.vocab_size, 2, 1, 48, 24, 4, 2, 1, attention, context_length=128)
    graph, weights = nnx.split(
        DeepSeek(config, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0))
    )
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, weights))


def made(kind: str, dtype: str, implementation: str | None = "interpret") -> Any:
    if kind == "latents":
        return tiny_llama(jnp.dtype(dtype), implementation, config=CONFIG, attention="mla")
    if kind == "deepseek":
        return tiny_deepseek(jnp.dtype(dtype), implementation)
    return tiny_llama(jnp.dtype(dtype), implementation, config=CONFIGS[kind])


def texts(rng, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, TINY.vocab_size, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def prompts() -> tuple[list[int], list[list[int]]]:
    """Of the request that is looked at, and of its neighbours."""
    mine, *others = texts(np.random.default_rng(0), 45, 100, 3, 60, 30, 1, 90, 17)
    return mine, others


@pytest.fixture
def short_splits(monkeypatch):
    """So that short texts are cut up and merged, as long ones are."""
    for op, tokens in (("paged_attention", 16), ("mla_decode", 64)):
        monkeypatch.setattr(f"pallas_attn.ops.{op}.config.INVARIANT_TOKENS", tokens)
    monkeypatch.setattr("pallas_attn.ops.paged_attention.config.LARGE_TILE", (16, 4, 1))


def served(engine: Engine, batch, at: int, sampling=None, **kept) -> tuple[Any, list[int]]:
    """(the request at this place of the batch, the tokens of it that each step computed)"""
    if "scores" not in kept:
        engine.scores = {}
    requests = [
        engine.submit(prompt, max_new_tokens=NEW, sampling=(sampling or {}).get(index))
        for index, prompt in enumerate(batch)
    ]
    chunks, next_step = [], engine._scheduler.next_step

    def spied():
        step = next_step()
        chunks.extend(chunk.count for chunk in step.chunks if chunk.request is requests[at])
        return step

    engine._scheduler.next_step = spied
    while engine.busy:
        engine.step()
    engine._scheduler.next_step = next_step
    return requests[at], chunks


def bits(engine: Engine, request) -> bytes:
    assert engine.scores is not None
    scores = np.stack(engine.scores[request])
    assert scores.shape == (NEW, TINY.vocab_size)
    assert np.isfinite(scores).all()
    return scores.tobytes()


def forget(engine: Engine) -> None:
    engine._scheduler.prefixes.clear()


def everywhere(engine: Engine, mine, others) -> dict[str, bytes]:
    """The request's scores alone, beside others, in other rows and chunks, found in the cache and sent back."""
    alone, whole = served(engine, [mine], 0)
    assert whole == [len(mine), *[1] * (NEW - 1)]
    found = {"alone": bits(engine, alone)}

    again, chunks = served(engine, [mine], 0)
    assert again.reused
    assert chunks[0] == len(mine) - again.reused
    found["its prefix in the cache"] = bits(engine, again)

    for name, before in (("first of eight", 0), ("fourth of eight", 3), ("last of eight", 7)):
        forget(engine)
        request, chunks = served(engine, [*others[:before], mine, *others[before:]], before)
        assert not request.reused
        assert before != 3 or chunks[:-NEW] != whole[:-NEW], "in other chunks"
        found[name] = bits(engine, request)

    forget(engine)
    request, _ = served(engine, [[*mine[:30], 1], *others[:2], mine], 3)
    assert request.reused, "a page of another"
    found["behind another of the same beginning"] = bits(engine, request)

    # The oldest are long and grow until there is no page left.
    forget(engine)
    taken = engine._scheduler.allocator.allocate(engine.free_pages - 26)
    request, _ = served(engine, [others[0], others[2], mine], 2)
    engine._scheduler.allocator.free(taken)
    assert request.preempted or request.number, "it waited"
    found["few pages"] = bits(engine, request)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "cache_dtype"),
    [
        ("dense", "float32", None),
        ("dense", "bfloat16", None),
        ("dense", "bfloat16", "float8_e4m3fn"),
        ("dense", "float32", "float8_e5m2"),
        ("experts", "float32", None),
        ("windows, sinks, experts with biases", "bfloat16", None),
        ("windows, sinks, experts with biases", "float32", "float8_e4m3fn"),
        ("latents", "float32", None),
        ("deepseek", "float32", None),
        ("deepseek", "bfloat16", "float8_e4m3fn"),
    ],
)
def test_scores_are_those_of_the_request_alone(kind, dtype, cache_dtype, prompts, short_splits):
    engine = Engine(made(kind, dtype), **SIZES, batch_invariant=True, cache_dtype=cache_dtype)
    found = everywhere(engine, *prompts)
    assert [name for name, scores in found.items() if scores != found["alone"]] == []
