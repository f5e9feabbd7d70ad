"""Weights of a published DeepSeek-V2/V3/V3.2 checkpoint, by their names in transformers, into our decoder."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.deepseek_weights"):
    from flax import nnx

from .deepseek import MLP, DeepSeek


def load_transformers_weights(model: DeepSeek, weights: Mapping[str, Any]) -> None:
    """Puts a transformers state dict (names to arrays, e.g. of a safetensors file) into the model, in its dtype.

    Arrays may be numpy's, JAX's or torch's. Experts may be one matrix each, as in published files, or stacked, as in
    transformers' memory. Layers beyond the model's (of multi-token prediction) are left out.

    Raises:
        ValueError: a weight is missing, has another shape, or has no place in the model (scales of an fp8 checkpoint,
            biases).
    """
    config = model.config
    attention = config.attention
    taken = set()

    def array(name: str) -> np.ndarray:
        if name not in weights:
            fail("load_transformers_weights", "weights", f"an entry {name!r}", "none")
        taken.add(name)
        value = weights[name]
        # numpy does not know torch's bfloat16.
        return np.asarray(value.detach().float().cpu() if hasattr(value, "detach") else value)

    def put(param: nnx.Param, name: str, value: Any = None, *, transpose: bool = False) -> None:
        if value is None:
            value = array(name)
        value = value.T if transpose else value
        if value.shape != param.shape:
            fail("load_transformers_weights", name, f"shape {list(param.shape)}", str(list(value.shape)))
        param.set_value(jnp.asarray(value, param.dtype))

    def put_linear(module: nnx.Linear, name: str) -> None:
        put(module.kernel, f"{name}.weight", transpose=True)

    def put_mlp(module: MLP, name: str) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            put_linear(getattr(module, part), f"{name}.{part}")

    put(model.embedding, "model.embed_tokens.weight")
    put(model.norm.weight, "model.norm.weight")
    put(model.lm_head, "lm_head.weight")
    for index, layer in enumerate(model.layers):
        mlp: Any = layer.mlp
        prefix = f"model.layers.{index}"
        attend, name = layer.attention, f"{prefix}.self_attn"
        put(layer.attention_norm.weight, f"{prefix}.input_layernorm.weight")
        put(layer.mlp_norm.weight, f"{prefix}.post_attention_layernorm.weight")
        if attention.q_lora_rank is None:
            put_linear(attend.q_proj, f"{name}.q_proj")
        else:
            put_linear(attend.q_a_proj, f"{name}.q_a_proj")
            put(attend.q_a_norm.weight, f"{name}.q_a_layernorm.weight")
            put_linear(attend.q_b_proj, f"{name}.q_b_proj")
        put_linear(attend.kv_a_proj, f"{name}.kv_a_proj_with_mqa")
        put(attend.kv_a_norm.weight, f"{name}.kv_a_layernorm.weight")
        put_linear(attend.o_proj, f"{name}.o_proj")
        both = array(f"{name}.kv_b_proj.weight")
        rows = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        if both.shape != (shape := (rows, attention.kv_lora_rank)):
            fail(
                "load_transformers_weights",
                f"{name}.kv_b_proj.weight",
                f"shape {list(shape)}",
                str(list(both.shape)),
            )
        both = both.reshape(attention.num_heads, -1, attention.kv_lora_rank)
        put(attend.key_up, f"{name}.kv_b_proj.weight", both[:, : attention.qk_nope_head_dim])
        put(attend.value_up, f"{name}.kv_b_proj.weight", both[:, attention.qk_nope_head_dim :])
        if config.indexer is not None:
            name = f"{prefix}.self_attn.indexer"
            put_linear(layer.indexer.q_proj, f"{name}.wq_b")
            put_linear(layer.indexer.k_proj, f"{name}.wk")
            norm: Any = layer.indexer.k_norm
            put(norm.scale, f"{name}.k_norm.weight")
            put(norm.bias, f"{name}.k_norm.bias")
            put_linear(layer.indexer.weights_proj, f"{name}.weights_proj")
        if index < config.num_dense_layers:
            put_mlp(mlp, f"{prefix}.mlp")
            continue
        name = f"{prefix}.mlp"
        put(mlp.router, f"{name}.gate.weight")
        if config.sigmoid_routing:
            put(mlp.choice_bias, f"{name}.gate.e_score_correction_bias")
        put_mlp(mlp.shared, f"{name}.shared_experts")
        gate_up, down = _expert_weights(weights, array, f"{name}.experts", config.num_experts)
        put(mlp.gate_up, f"{name}.experts.gate_up_proj", gate_up.swapaxes(1, 2))
        put(mlp.down, f"{name}.experts.down_proj", down.swapaxes(1, 2))
    for name in weights:
        beyond = re.match(r"model\.layers\.(\d+)\.", name)
        if name not in taken and not (beyond and int(beyond[1]) >= config.num_layers):
            fail("load_transformers_weights", "weights", "entries that have a place in the model", repr(name))


def _expert_weights(
    weights: Mapping[str, Any], array: Callable[[str], np.ndarray], name: str, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(gate and up [experts, 2 * width, hidden], down [experts, hidden, width])."""
    if f"{name}.gate_up_proj" in weights:
        return array(f"{name}.gate_up_proj"), array(f"{name}.down_proj")

    def stack(part: str) -> np.ndarray:
        return np.stack([array(f"{name}.{i}.{part}.weight") for i in range(count)])

    return np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1), stack("down_proj")
