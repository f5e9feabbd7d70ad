"""Trains a small language model with each implementation of flash attention, and draws their losses.

    python benchmarks/training.py                                   # xla and pallas, two seeds each, 300 steps
    python benchmarks/training.py --implementations pallas --steps 1000 --out longer.csv
    python benchmarks/training.py --tiny                            # anywhere, to try it

The text is what Python's own `help()` has to say: the topics of the standard library's pydoc_data, read byte by byte,
each a document. Documents of any lengths are packed one behind the other into rows, and attend to themselves alone, by
`segment_ids`. Same seed, same weights and order of documents: two implementations differ by rounding only, and the
losses of two seeds by more. The last line says whether that is so; exit status 1 if it is not.
"""

import argparse
import csv
import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pallas_attn

BYTES = 256
AVERAGED = 20  # steps that a compared loss is the mean of


class Sizes(NamedTuple):
    """Of the model and of a step."""

    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 6
    rows: int = 8
    length: int = 2048


TINY = Sizes(32, 2, 1, 16, 1, 2, 64)


class Batch(NamedTuple):
    """[..., rows, length] each."""

    tokens: Any
    document: Any
    position: Any
    """In the document."""


def packed(steps: int, sizes: Sizes, seed: int) -> Batch:
    """Documents in a random order, as often as need be, one behind the other; a row's end cuts one."""
    rng = np.random.default_rng(seed)
    texts = [np.frombuffer(text.encode(), np.uint8) for _, text in sorted(topics.items())]
    wanted = steps * sizes.rows * sizes.length
    tokens, document, position = [], [], []
    held = 0
    while held < wanted:
        for i in rng.permutation(len(texts)):
            text = texts[i]
            tokens.append(text)
            document.append(np.full(len(text), len(document), np.int32))
            position.append(np.arange(len(text), dtype=np.int32))
            held += len(text)
    shape = (steps, sizes.rows, sizes.length)
    return Batch(*(np.concatenate(part)[:wanted].reshape(shape) for part in (tokens, document, position)))


def weights(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Layers are stacked, to be scanned over."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    inner, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[-2] ** -0.5

    stack, width = sizes.layers, sizes.width
    layers = {
        "qkv": matrix(stack, width, inner + 2 * kv),
        "out": matrix(stack, inner, width),
        "up": matrix(stack, width, 4 * width),
        "down": matrix(stack, 4 * width, width),
        "norms": jnp.ones((stack, 2, width)),
    }
    return {
        "embedding": matrix(BYTES, width),
        "layers": layers,
        "norm": jnp.ones(width),
        "head": matrix(width, BYTES),
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotated(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary embedding, halves against each other."""
    half = x.shape[-1] // 2
    angle = position[..., None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def loss(weights: dict[str, Any], batch: Batch, *, sizes: Sizes, implementation: Any) -> jax.Array:
    """Of the next byte of the same document, in nats."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        inner, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        product = normed(x, w["norms"][0]) @ w["qkv"]
        parts = jnp.split(product, [inner, inner + kv], axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], -1, sizes.head_dim) for part in parts)
        q, k = (rotated(part, batch.position) for part in (q, k))
        q, k, v = (part.astype(jnp.bfloat16) for part in (q, k, v))
        attended = pallas_attn.flash_attention(
            q, k, v, segment_ids=batch.document, causal=True, implementation=implementation
        )
        x = x + attended.reshape(*x.shape[:2], inner).astype(x.dtype) @ w["out"]
        return x + jax.nn.gelu(normed(x, w["norms"][1]) @ w["up"]) @ w["down"], None

    x = weights["embedding"][batch.tokens] * sizes.width**0.5
    x, _ = jax.lax.scan(layer, x, weights["layers"])
    logits = normed(x, weights["norm"]) @ weights["head"]
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], batch.tokens[:, 1:].astype(jnp.int32)
    )
    own = batch.document[:, 1:] == batch.document[:, :-1]
    return jnp.sum(each * own) / jnp.sum(own)


def trained(implementation: str, seed: int, steps: int, sizes: Sizes) -> tuple[np.ndarray, float]:
    """(the loss of each step, seconds of them all without compiling)."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(1, steps // 20), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    of = functools.partial(loss, sizes=sizes, implementation=implementation)

    def step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        weights, moments = state
        value, gradient = jax.value_and_grad(of)(weights, batch)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(weights, updates), moments), value

    start = weights(sizes, seed)
    state = start, optimizer.init(start)
    batches = jax.tree.map(jnp.asarray, packed(steps, sizes, seed))
    run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches)).lower(state, batches).compile()
    began = time.perf_counter()
    _, losses = jax.block_until_ready(run(state, batches))
    return np.asarray(losses), time.perf_counter() - began


def compared(curves: dict[tuple[str, int], np.ndarray]) -> tuple[float, float]:
    """(largest difference of two implementations with one seed, largest of two seeds with the first one), of the
    mean of the last steps."""
    last = {key: float(np.mean(curve[-AVERAGED:])) for key, curve in curves.items()}
    pairs = list(itertools.combinations(last, 2))
    same_seed = [abs(last[a] - last[b]) for a, b in pairs if a[1] == b[1]]
    # Of the first implementation: what it is compared with may not widen the noise itself.
    first = next(iter(last))[0]
    same_kind = [abs(last[a] - last[b]) for a, b in pairs if a[0] == b[0] == first]
    return max(same_seed, default=0.0), max(same_kind, default=0.0)


def draw(path: Path, curves: dict[tuple[str, int], np.ndarray], about: str) -> None:
    """The losses, which lie on each other, and below them how far the others are from the first implementation's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, apart) = pyplot.subplots(
        2, 1, figsize=(7, 6), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    first = next(iter(curves))[0]
    for (implementation, seed), curve in curves.items():
        plain = implementation == first
        style = dict(color=f"C{seed % 10}", linewidth=1.2 if plain else 0.8, linestyle="-" if plain else "--")
        losses.plot(curve, **style, label=f"{implementation}, seed {seed}")
        if not plain and (first, seed) in curves:
            label = f"{implementation} and {first}, seed {seed}"
            apart.plot(np.abs(curve - curves[first, seed]), color=style["color"], linewidth=0.8, label=label)
    seeds = [seed for implementation, seed in curves if implementation == first]
    for seed in seeds[1:]:
        between = np.abs(curves[first, seed] - curves[first, seeds[0]])
        label = f"{first}, seeds {seed} and {seeds[0]}"
        apart.plot(between, color="0.75", linewidth=0.8, zorder=1, label=label)
    losses.set(
        ylabel="loss of the next byte, nats",
        title=f"Training by flash_attention in bf16, packed documents\n{about}",
    )
    # Seeds differ a hundred times as much as implementations. Losses are kept to five digits.
    apart.set(xlabel="step", ylabel="how far apart, nats", yscale="log", ylim=(1e-5, None))
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementations", nargs="+", default=["xla", "pallas"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("training.csv"), help="the losses; a PNG beside it")
    parser.add_argument("--tiny", action="store_true", help="a model of few thousand weights")
    options = parser.parse_args(arguments)
    sizes = TINY if options.tiny else Sizes()
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: weights(sizes, 0))))
    kind = jax.devices()[0].device_kind
    about = f"{count / 1e6:.2f} million weights, {sizes.rows * sizes.length} bytes a step, {kind}"
    print(about)
    curves: dict[tuple[str, int], np.ndarray] = {}
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["implementation", "seed", "step", "loss"])
        for seed, implementation in itertools.product(options.seeds, options.implementations):
            curve, seconds = trained(implementation, seed, options.steps, sizes)
            curves[implementation, seed] = curve
            writer.writerows([implementation, seed, step, f"{value:.5f}"] for step, value in enumerate(curve))
            file.flush()
            draw(options.out.with_suffix(".png"), curves, about)  # what there is, should this be stopped
            last = np.mean(curve[-AVERAGED:])
            print(
                f"{implementation:10} seed {seed}: loss {curve[0]:.4f} -> {last:.4f}, "
                f"{seconds / options.steps * 1e3:.1f} ms a step",
                flush=True,
            )
    if min(len(options.implementations), len(options.seeds)) < 2:
        print("nothing to compare: that takes two implementations and two seeds")
        return 1
    between, noise = compared(curves)
    agree = bool(between <= noise)
    print(
        f"between implementations {between:.4f}, between seeds {noise:.4f}: {'they agree' if agree else 'THEY DIFFER'}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
