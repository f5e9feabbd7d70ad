"""Options and help of the commands about single kernels.

What a command does is in a module of its own, imported when it runs.
"""

import enum
from pathlib import Path
from typing import Annotated

from pallas_attn._call.optional import needs_extra
from pallas_attn.tuning.registry import OPS

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer

from .help import PlainCommand
from .options import CacheDtype, TunedDtype, collected

kernels = typer.Typer()


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


@kernels.command(
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
    given = locals()
    from pallas_attn.cli.tune import SIZES, TuneOptions, run_tune

    return run_tune(
        collected(
            TuneOptions,
            given,
            sizes={name: getattr(given[name], "value", given[name]) for name in SIZES},
            num_seqs=num_seqs or [1, 16, 64],
            max_len=max_len or [1024, 8192, 32768],
        )
    )


@kernels.command(
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
    given = locals()
    from pallas_attn.cli.show_layout import OWN, LayoutOptions, run_show_layout

    own = {name: given[name] for options in OWN.values() for name in options}
    return run_show_layout(collected(LayoutOptions, given, own=own))


@kernels.command(
    name="show-mask",
    cls=PlainCommand,
    epilog="""
**Examples**

A window, and pixels of an image that see those around:

    pallas-attn show-mask sliding_window:left=200

    pallas-attn show-mask neighborhood:width=32,height=32,kernel=7 --block-q 32 --block-kv 32

A mask_mod of your own, `near` in `masks.py`:

    pallas-attn show-mask masks:near --num-heads 4
""",
)
def show_mask(
    mask: Annotated[
        str,
        typer.Argument(
            help="A mask of pallas_attn.mods with its numbers, or module:name.", show_default=False
        ),
    ],
    q_len: Annotated[int, typer.Option(help="Queries.")] = 1024,
    kv_len: Annotated[int | None, typer.Option(help="Keys.", show_default="as --q-len")] = None,
    num_heads: Annotated[int, typer.Option(help="Query heads, where the mask tells them apart.")] = 1,
    block_q: Annotated[int, typer.Option(help="Queries of a block.")] = 64,
    block_kv: Annotated[int, typer.Option(help="Keys of a block.")] = 32,
) -> int:
    """Draw which blocks a mask_mod leaves: those that kernels skip, mask, and visit without a mask."""
    given = locals()
    from pallas_attn.cli.show_mask import MaskOptions, run_show_mask

    return run_show_mask(collected(MaskOptions, given))
