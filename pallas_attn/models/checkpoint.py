"""Models out of a Hugging Face folder: config.json, safetensors, tokenizer.json. No torch, no download."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # registers bfloat16 with numpy, which safetensors needs
import numpy as np
from jax.typing import DTypeLike

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.checkpoint"):
    import safetensors
    import tokenizers
    from flax import nnx

from .chat_template import Templates
from .deepseek import DeepSeek
from .deepseek_config import DEEPSEEK_LIKE, DeepSeekConfig
from .deepseek_weights import load_transformers_weights
from .dequantize import dequantized
from .families import FAMILIES, llama_config
from .gguf_loader import LoadedModel
from .hub import found, is_name
from .llama import Attending
from .llama_weights import from_transformers
from .sampling import Sampling
from .tokenizer import Tokenizer


def load_checkpoint(
    path: str | pathlib.Path,
    *,
    dtype: DTypeLike = "float32",
    attention: Attending = "gqa",
    implementation: str | None = None,
    batch_invariant: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Loads a model from a folder as `save_pretrained` writes it and the Hugging Face hub holds it.

    Args:
        path: the folder, or ORG/NAME of the hub where that lies in its local cache. Its `model_type` is llama or of a
            relative (`pallas_attn.models.families` lists them), for a `Llama`; or deepseek_v2, deepseek_v3,
            deepseek_v32, kimi_k2, for a `DeepSeek`.
        dtype: of the weights in memory, float32 or bfloat16.
        attention: which op a `Llama` decodes with; a `DeepSeek` has one.
        implementation: which implementation of the attention ops the model is to force.
        batch_invariant: whether what is computed of a request is to have the same bits whatever it is computed with,
            as in `Llama` and `DeepSeek`.
        progress: called with (tensors read, tensors in all) after each tensor.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing in it.
        ValueError: a setting, a tensor or a kind of tokenizer that the model has no place for, by its name; settings
            and names are looked at before any weight is read.
    """
    folder = found(path) if is_name(path) else pathlib.Path(path)
    if not folder.is_dir():
        fail("load_checkpoint", "path", "an existing folder", repr(str(path)), FileNotFoundError)
    settings = _json(folder, "config.json")
    kind = settings.get("model_type")
    if kind not in (*FAMILIES, *DEEPSEEK_LIKE):
        known = ", ".join((*FAMILIES, *DEEPSEEK_LIKE))
        fail("load_checkpoint", "path", f"a config.json with a model_type of {known}", repr(kind))
    tokenizer = load_tokenizer(folder)
    weights = dequantized(Weights(folder, progress), settings.get("quantization_config"))
    options: dict[str, Any] = dict(
        dtype=dtype, implementation=implementation, batch_invariant=batch_invariant
    )
    if kind in FAMILIES:
        config = llama_config(settings)
        options["attention"] = attention
        model = from_transformers(config, FAMILIES[kind].norms, weights, options)
    else:
        if attention != "gqa":
            fail("load_checkpoint", "attention", "'gqa' for a model with latents of its own", repr(attention))
        config = DeepSeekConfig.from_transformers(settings)
        model = nnx.eval_shape(lambda: DeepSeek(config, **options, rngs=nnx.Rngs(0)))
        load_transformers_weights(model, weights)
    asked = Sampling.from_generation_config(_json(folder, "generation_config.json", {}))
    return LoadedModel(model, tokenizer, str(path) if is_name(path) else folder.resolve().name, asked)


class Weights(Mapping[str, np.ndarray]):
    """The tensors of a folder's safetensors files, each read when it is asked for."""

    def __init__(self, folder: pathlib.Path, progress: Callable[[int, int], None] | None = None):
        self._files: dict[str, tuple[pathlib.Path, Any]] = {}
        self._progress, self._read = progress, set()
        for path in _weight_files(folder):
            try:
                file = safetensors.safe_open(path, "numpy")
            except safetensors.SafetensorError as error:
                fail("load_checkpoint", "path", "complete safetensors files", f"{path.name!r} ({error})")
            self._files |= dict.fromkeys(file.keys(), (path, file))

    def __getitem__(self, name: str) -> np.ndarray:
        path, file = self._files[name]
        # safetensors would ask numpy for fp8, which it lacks.
        is_fp8 = file.get_slice(name).get_dtype() == "F8_E4M3"
        array = _fp8(path, name) if is_fp8 else file.get_tensor(name)
        self._read.add(name)
        if self._progress is not None:
            self._progress(len(self._read), len(self))
        return array

    def __iter__(self):
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files


def _fp8(path: pathlib.Path, name: str) -> np.ndarray:
    """Reads a tensor. A file is the header's length in 8 bytes, the header in JSON, and the tensors' bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(size))[name]
        first, end = about["data_offsets"]
        file.seek(8 + size + first)
        return np.frombuffer(file.read(end - first), ml_dtypes.float8_e4m3fn).reshape(about["shape"])


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / "model.safetensors.index.json").is_file():
        index = _json(folder, "model.safetensors.index.json")
        names = sorted(set(index.get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    for name in names or ["model.safetensors"]:
        if name != pathlib.PurePath(name).name:
            fail("load_checkpoint", "path", "weights in the folder itself", repr(name))
        if not (folder / name).is_file():
            fail("load_checkpoint", "path", f"a folder with {name}", repr(str(folder)), FileNotFoundError)
    return [folder / name for name in names]


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with special tokens and chat template from the files beside it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        fail("load_checkpoint", "path", "a folder with tokenizer.json", repr(str(folder)), FileNotFoundError)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        fail("load_checkpoint", "path", "a tokenizer.json that can be read", f"{error}")
    # Otherwise the beginning-of-sequence token would be taken for padding.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json(folder, "tokenizer_config.json", {})
    generation = _json(folder, "generation_config.json", {})
    config = _json(folder, "config.json", {})

    def text_of(token: Any) -> Any:
        return token.get("content") if isinstance(token, dict) else token

    def token_id(name: str) -> int | None:
        text = text_of(settings.get(f"{name}_token"))
        if text is None:
            found = config.get(f"{name}_token_id")
            return found[0] if isinstance(found, list) else found
        if (found := tokenizer.token_to_id(text)) is None:
            fail("load_checkpoint", f"{name}_token", "a token of tokenizer.json", repr(text))
        return found

    eos = token_id("eos")
    stops = generation.get("eos_token_id", config.get("eos_token_id"))
    names = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    special = {name: text for name in names if isinstance(text := text_of(settings.get(name)), str)}
    # Only the tokenizer's own rules know whether a beginning-of-sequence token belongs in front.
    bos = token_id("bos")
    begins = tokenizer.encode("", add_special_tokens=True).ids[:1]
    return Tokenizer(
        tokenizer,
        bos_token_id=bos,
        eos_token_id=eos,
        stop_token_ids=[i for i in (eos, *(stops if isinstance(stops, list) else [stops])) if i is not None],
        add_bos=bos is not None and begins == [bos],
        chat_template=_chat_templates(folder, settings.get("chat_template")),
        special_tokens=special,
    )


def _chat_templates(folder: pathlib.Path, said: Any) -> Templates:
    """The chat templates, from files of their own or else from tokenizer_config.json."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (usual := folder / "chat_template.jinja").is_file():
        files["default"] = usual
    if files:
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    elif isinstance(said, list):
        templates = {of["name"]: of["template"] for of in said}
    else:
        return said
    return templates["default"] if list(templates) == ["default"] else templates


def _json(folder: pathlib.Path, name: str, default: Any = None) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        if default is not None:
            return default
        fail("load_checkpoint", "path", f"a folder with {name}", repr(str(folder)), FileNotFoundError)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fail("load_checkpoint", "path", f"a {name} that is JSON", str(error))
    if not isinstance(found, dict):
        fail("load_checkpoint", "path", f"a {name} that holds an object", type(found).__name__)
    return found
