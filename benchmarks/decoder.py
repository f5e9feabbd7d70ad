"""A decoder to train on packed documents, in plain jax: sizes, batches, weights, loss, and a step of AdamW.

Master weights and moments are float32; a step rounds the weights to bf16 and works in that, but for norms, the softmax
and the loss. Layers are alike, so their weights are stacked and scanned over.

The text is what Python's own `help()` has to say, read byte by byte: the topics of the standard library's pydoc_data.
Documents are stretches of it of lognormal lengths, so many that they fill a row.
"""

import functools
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BYTES = 256
NAME = "attention"  # by which jax.checkpoint's policy knows what attention keeps

type Attend = Callable[[jax.Array, jax.Array, jax.Array, "Documents"], jax.Array]
type Weights = dict[str, Any]
type State = tuple[Weights, Weights, Weights, jax.Array]
"""Master weights, Adam's two moments, and the number of steps made."""


class Sizes(NamedTuple):
    """Of the model and of a step: `rows` of `length` tokens, each of so many `documents`."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    rows: int
    length: int
    documents: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


SIZES = {
    "1b": Sizes(2048, 16, 8, 128, 8192, 16, 1, 8192, 16),
    "small": Sizes(256, 4, 2, 64, 768, 6, 8, 2048, 4),
    "tiny": Sizes(32, 2, 1, 16, 64, 1, 2, 64, 3),
}


class Documents(NamedTuple):
    """Where they lie, in every form that some attention asks for."""

    ids: Any
    """[rows, length]: which document of its row a token is of."""
    position: Any
    """[rows, length]: in the document."""
    starts: Any
    """[rows, documents]"""
    sizes: Any
    """[rows, documents]"""


class Batch(NamedTuple):
    tokens: Any
    """[rows, length]"""
    documents: Documents


def document_sizes(rng: np.random.Generator, sizes: Sizes, equal: bool) -> np.ndarray:
    """[documents] that add up to a row: lognormal ones (sigma 1), the rest added to the longest."""
    shares = np.ones(sizes.documents) if equal else rng.lognormal(0, 1, sizes.documents)
    each = np.maximum(1, shares / shares.sum() * sizes.length).astype(np.int32)
    each[np.argmax(each)] += sizes.length - each.sum()
    return each


def batches(steps: int, sizes: Sizes, seed: int, *, equal: bool = False) -> list[Batch]:
    """NumPy's, one a step."""
    rng = np.random.default_rng(seed)
    text = np.frombuffer("".join(text for _, text in sorted(topics.items())).encode(), np.uint8)

    def row() -> tuple[np.ndarray, ...]:
        each = document_sizes(rng, sizes, equal)
        starts = np.cumsum(each) - each
        ids = np.repeat(np.arange(len(each), dtype=np.int32), each)
        position = np.arange(sizes.length, dtype=np.int32) - starts[ids]
        where = rng.integers(0, len(text) - sizes.length, len(each))
        return text[where[ids] + position], ids, position, starts, each

    def batch() -> Batch:
        tokens, *documents = map(np.stack, zip(*(row() for _ in range(sizes.rows)), strict=True))
        return Batch(tokens, Documents(*(x.astype(np.int32) for x in documents)))

    return [batch() for _ in range(steps)]


@functools.partial(jax.jit, static_argnums=0)
def weights(sizes: Sizes, seed: int) -> Weights:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[-2] ** -0.5

    stack, width = sizes.layers, sizes.width
    layers = {
        "qkv": matrix(stack, width, query + 2 * kv),
        "out": matrix(stack, query, width) * (2 * stack) ** -0.5,
        "gate_up": matrix(stack, width, 2 * sizes.inner),
        "down": matrix(stack, sizes.inner, width) * (2 * stack) ** -0.5,
        "norms": jnp.ones((stack, 2, width)),
    }
    return {
        "embedding": matrix(BYTES, width),
        "layers": layers,
        "norm": jnp.ones(width),
        "head": matrix(width, BYTES),
    }


def count(sizes: Sizes) -> int:
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(functools.partial(weights, sizes), 0)))


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale).astype(
        x.dtype
    )


def rotated(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary embedding, halves against each other."""
    half = x.shape[-1] // 2
    angle = position[..., None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def loss(weights: Weights, batch: Batch, *, sizes: Sizes, attend: Attend, remat: bool = False) -> jax.Array:
    """Of the next byte of the same document, in nats."""
    documents = batch.documents
    query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        product = normed(x, w["norms"][0]) @ w["qkv"]
        parts = jnp.split(product, [query, query + kv], axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], -1, sizes.head_dim) for part in parts)
        q, k = (rotated(part, documents.position) for part in (q, k))
        x = x + attend(q, k, v, documents).reshape(*x.shape[:2], query) @ w["out"]
        gate, up = jnp.split(normed(x, w["norms"][1]) @ w["gate_up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ w["down"], None

    if remat:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(NAME))
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    x, _ = jax.lax.scan(layer, rounded["embedding"][batch.tokens], rounded["layers"])
    logits = (normed(x, rounded["norm"]) @ rounded["head"]).astype(jnp.float32)
    following = batch.tokens[:, 1:, None].astype(jnp.int32)
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), following, axis=-1)[..., 0]
    own = documents.ids[:, 1:] == documents.ids[:, :-1]
    return jnp.sum(each * own) / jnp.sum(own)


def start(sizes: Sizes, seed: int) -> State:
    made = weights(sizes, seed)
    return (
        made,
        jax.tree.map(jnp.zeros_like, made),
        jax.tree.map(jnp.zeros_like, made),
        jnp.zeros((), jnp.int32),
    )


def step(state: State, batch: Batch, *, of: Callable[..., jax.Array], steps: int) -> tuple[State, jax.Array]:
    """The next state, and [loss, norm of what only attention's gradients reach: those of `qkv`].

    AdamW (0.9, 0.95; decay 0.1), clipped to a norm of 1; a rate of 1e-3, warm after a twentieth of the `steps`, that
    falls to nothing along a cosine.
    """
    masters, means, squares, number = state
    value, gradients = jax.value_and_grad(of)(masters, batch)
    number = number + 1
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    clip = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    warm = jnp.minimum(1.0, number / max(1, steps // 20))
    rate = 1e-3 * warm * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(1.0, number / (steps + 1))))
    past = [1 - decay ** number.astype(jnp.float32) for decay in (0.9, 0.95)]

    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * clip * g, means, gradients)
    squares = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * jnp.square(clip * g), squares, gradients)
    masters = jax.tree.map(
        lambda w, m, s: w - rate * (m / past[0] / (jnp.sqrt(s / past[1]) + 1e-8) + 0.1 * w),
        masters,
        means,
        squares,
    )
    attended = jnp.sqrt(jnp.sum(jnp.square(gradients["layers"]["qkv"])))
    return (masters, means, squares, number), jnp.stack([value, attended])


def compiled_step(sizes: Sizes, attend: Attend, steps: int, batch: Batch, remat: bool = False) -> Any:
    """(state, batch) -> as `step`; the state's memory is used again."""
    of = functools.partial(loss, sizes=sizes, attend=attend, remat=remat)
    state = jax.eval_shape(functools.partial(start, sizes), 0)
    return (
        jax.jit(functools.partial(step, of=of, steps=steps), donate_argnums=0).lower(state, batch).compile()
    )


def peak_bytes(compiled: Any) -> int | None:
    """Of arguments, results and what is made between."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    shared = memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - shared
