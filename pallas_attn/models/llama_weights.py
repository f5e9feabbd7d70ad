"""Loads a Llama's weights layer by layer; and each family's names of weights in transformers' files."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.llama_weights"):
    from flax import nnx

from .llama import Llama, LlamaConfig


def assemble(
    config: LlamaConfig,
    layer: Callable[[int], Mapping[str, np.ndarray]],
    others: Mapping[str, np.ndarray],
    options: dict[str, Any],
) -> Llama:
    """Fills an abstract `Llama`, without ever drawing random weights.

    `layer(index)` and `others` name parameters by their dotted paths in a `DecoderLayer` and in the `Llama`;
    kernels are [in, out]. `options` are the model's.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0))))
    # float32 for routers and sinks, whatever the others have.
    dtypes = {".".join(map(str, path)): leaf.dtype for path, leaf in nnx.to_flat_state(state)}
    stacked: dict[str, np.ndarray] = {}
    for index in range(config.num_layers):
        for name, array in layer(index).items():
            if index == 0:
                stacked[name] = np.empty((config.num_layers, *array.shape), dtypes[f"layers.{name}"])
            stacked[name][index] = array
    weights = {**others, **{f"layers.{name}": array for name, array in stacked.items()}}
    nnx.replace_by_pure_dict(state, _nested(weights, dtypes))
    return nnx.merge(graph, state)


def _nested(weights: Mapping[str, np.ndarray], dtypes: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in weights.items():
        *modules, name = path.split(".")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = jnp.asarray(array, dtypes[path])
    return tree


class Place(NamedTuple):
    """A parameter, the tensors that it is made from with their shapes, and how."""

    ours: str
    theirs: Mapping[str, tuple[int, ...]]
    make: Callable[..., np.ndarray] = lambda array: array


def from_transformers(
    config: LlamaConfig, norms: Mapping[str, str], weights: Mapping[str, Any], options: dict[str, Any]
) -> Llama:
    """A Llama from a file's tensors. ValueError, before any is read, for one that is missing or superfluous.

    norms: of a layer, by our names, where the file has them.
    """
    hidden = config.hidden_size
    top = [
        Place("embedding", {"model.embed_tokens.weight": (config.vocab_size, hidden)}),
        Place("norm.weight", {"model.norm.weight": (hidden,)}),
    ]
    if not config.tie_word_embeddings:
        top.append(Place("lm_head", {"lm_head.weight": (config.vocab_size, hidden)}))
    prefixes = [f"model.layers.{index}." for index in range(config.num_layers)]
    layers = [list(_layer(config, norms, prefix, weights)) for prefix in prefixes]
    wanted = {name: shape for place in itertools.chain(top, *layers) for name, shape in place.theirs.items()}
    # A tied output projection repeats the embedding; frequencies follow from the config.
    spare = {"lm_head.weight"} | {f"{prefix}self_attn.rotary_emb.inv_freq" for prefix in prefixes}
    for name in wanted:
        if name not in weights:
            fail("load_checkpoint", "path", f"a tensor {name}", "none")
    for name in weights:
        if name not in wanted and name not in spare:
            fail("load_checkpoint", "path", "only tensors that the model uses", repr(name))

    def read(name: str) -> np.ndarray:
        array = weights[name]
        if array.shape != wanted[name]:
            fail("load_checkpoint", name, f"shape {list(wanted[name])}", str(list(array.shape)))
        if array.dtype.kind not in "fV":  # numpy knows bfloat16 and fp8 as void
            fail("load_checkpoint", name, "floating-point numbers", str(array.dtype))
        return array

    def of(places: Sequence[Place]) -> dict[str, np.ndarray]:
        return {place.ours: place.make(*map(read, place.theirs)) for place in places}

    return assemble(config, lambda index: of(layers[index]), of(top), options)


def _columns(*rows: np.ndarray) -> np.ndarray:
    """Kernels are [in, out], concatenated for projections of the same input."""
    return np.concatenate(rows).T


def _joined(*vectors: np.ndarray) -> np.ndarray:
    return np.concatenate(vectors)


def _layer(
    config: LlamaConfig, norms: Mapping[str, str], prefix: str, weights: Mapping[str, Any]
) -> Iterator[Place]:
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    for ours, theirs in norms.items():
        yield Place(f"{ours}.weight", {f"{prefix}{theirs}.weight": (hidden,)})
    attention = f"{prefix}self_attn."
    parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    if f"{attention}qkv_proj.weight" in weights:
        parts = {"qkv_proj": sum(parts.values())}
    yield from _projections("attention.qkv_proj", attention, parts, hidden, config.qkv_bias)
    yield from _projections("attention.o_proj", attention, {"o_proj": hidden}, q_size, config.output_bias)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    for part, count in heads.items() if config.qk_norm else ():
        shape = {True: (dim,), "each": (count, dim), "all": (count * dim,)}[config.qk_norm]
        yield Place(f"attention.{part}_norm.weight", {f"{attention}{part}_norm.weight": shape})
    if config.sinks:
        yield Place("attention.attend.sinks", {f"{attention}sinks": (config.num_heads,)})
    if config.experts is not None:
        yield from _experts(config, prefix, weights)
        return
    width, mlp = config.intermediate_size, f"{prefix}mlp."
    parts = {"gate_proj": width, "up_proj": width}
    if f"{mlp}gate_up_proj.weight" in weights:
        parts = {"gate_up_proj": 2 * width}
    yield from _projections("mlp.gate_up_proj", mlp, parts, hidden, config.mlp_bias)
    yield from _projections("mlp.down_proj", mlp, {"down_proj": hidden}, width, config.mlp_bias)


def _projections(
    ours: str, prefix: str, sizes: Mapping[str, int], in_size: int, bias: bool
) -> Iterator[Place]:
    shapes = {f"{prefix}{name}.weight": (size, in_size) for name, size in sizes.items()}
    yield Place(f"{ours}.kernel", shapes, _columns)
    if bias:
        yield Place(
            f"{ours}.bias", {f"{prefix}{name}.bias": (size,) for name, size in sizes.items()}, _joined
        )


def _experts(config: LlamaConfig, prefix: str, weights: Mapping[str, Any]) -> Iterator[Place]:
    """Experts of one matrix each (published files), stacked (transformers' memory), or GPT-OSS's."""
    experts = config.experts
    assert experts is not None
    hidden, width, count = config.hidden_size, experts.width, experts.count
    block = (
        f"{prefix}block_sparse_moe."
        if f"{prefix}block_sparse_moe.gate.weight" in weights
        else f"{prefix}mlp."
    )
    router = f"{block}router" if experts.biases else f"{block}gate"
    yield Place("mlp.router", {f"{router}.weight": (count, hidden)})
    both, down = f"{block}experts.gate_up_proj", f"{block}experts.down_proj"
    if experts.biases:
        yield Place("mlp.router_bias", {f"{router}.bias": (count,)})
        yield Place("mlp.gate_up", {both: (count, hidden, 2 * width)}, _taking_turns)
        yield Place("mlp.gate_up_bias", {f"{both}_bias": (count, 2 * width)}, _taking_turns)
        yield Place("mlp.down", {down: (count, width, hidden)})
        yield Place("mlp.down_bias", {f"{down}_bias": (count, hidden)})
        return
    if both in weights:
        yield Place("mlp.gate_up", {both: (count, 2 * width, hidden)}, lambda rows: rows.swapaxes(1, 2))
        yield Place("mlp.down", {down: (count, hidden, width)}, lambda rows: rows.swapaxes(1, 2))
        return
    old = block.endswith("block_sparse_moe.")
    gate, up, last = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    names = [f"{block}experts.{expert}.{part}.weight" for expert in range(count) for part in (gate, up)]
    yield Place(
        "mlp.gate_up",
        dict.fromkeys(names, (width, hidden)),
        lambda *rows: np.concatenate(rows).reshape(count, 2 * width, hidden).swapaxes(1, 2),
    )
    yield Place(
        "mlp.down",
        {f"{block}experts.{expert}.{last}.weight": (hidden, width) for expert in range(count)},
        lambda *rows: np.stack(rows).swapaxes(1, 2),
    )


def _taking_turns(both: np.ndarray) -> np.ndarray:
    """Gate and up, concatenated; in GPT-OSS their columns alternate."""
    return np.concatenate([both[..., ::2], both[..., 1::2]], axis=-1)
