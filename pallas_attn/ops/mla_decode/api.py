"""`mla_decode`: signature, checks, dispatch."""

import dataclasses
from typing import Literal, overload

import jax
import jax.numpy as jnp

from pallas_attn._call import options
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.dispatch import Implementation
from pallas_attn._call.op import Op
from pallas_attn._call.operands import ready
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import serves_latents
from pallas_attn._tile import triton
from pallas_attn._tile.latents import BYTES, QUERY_DIM, token_width
from pallas_attn._types import BlockTables, ImplementationOrCuda, SeqLens
from pallas_attn.mods.call import PagedSizes, over_pages
from pallas_attn.mods.operands import refused_by_cuda
from pallas_attn.mods.ready import MaskMod, ScoreMod
from pallas_attn.ops.mla_decode import config as tiles
from pallas_attn.ops.mla_decode import cuda
from pallas_attn.ops.mla_decode.config import MLADecodeConfig
from pallas_attn.ops.mla_decode.fitting import known_not_to_fit
from pallas_attn.ops.mla_decode.kernel import mla_decode_pallas
from pallas_attn.ops.mla_decode.operands import Operands
from pallas_attn.ops.mla_decode.reference import mla_decode_xla
from pallas_attn.ops.mla_decode.schedule import METADATA_SIZE, MLASchedule, mla_schedule

# Up to these sizes Pallas is faster on Hopper, too; tokens of all sequences with full tables.
FEW_ROWS = 16
FEW_SEQS = range(1, 5)
FEW_TOKENS = 4 * 32768


def _cuda_supports(operands: Operands) -> str | None:
    if operands.batch_invariant:
        return "is not batch_invariant: its schedule cuts sequences where the batch's work says"
    if (reason := refused_by_cuda(operands.mods)) is not None:
        return reason
    return cuda.unsupported(operands.latent_cache.dtype, operands.pool)


def _cuda_yields(operands: Operands) -> bool:
    """Few rows leave the Hopper kernel's tiles of 64 rows mostly empty: for few tokens of a few sequences Pallas
    measured faster (README)."""
    sizes = operands.sizes
    few_tokens = sizes.num_seqs * sizes.max_len <= FEW_TOKENS
    return sizes.rows <= FEW_ROWS and sizes.num_seqs in FEW_SEQS and few_tokens


def _scheduled(operands: Operands) -> Operands:
    """The operands with a schedule made here."""
    sizes = operands.sizes
    own = mla_schedule(
        operands.seq_lens,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.pool.num_kv_heads,
        q_len=sizes.q_len,
    )
    return dataclasses.replace(operands, schedule=own)


def _share(operands: Operands) -> Operands:
    """A schedule of the whole batch does not fit one device's sequences and heads."""
    return operands if operands.schedule is None else _scheduled(operands)


def _settle(operands: Operands, config: MLADecodeConfig) -> Operands:
    """Where nothing is cut, the schedule is dropped."""
    return dataclasses.replace(operands, schedule=None) if config.num_splits == 1 else operands


def _mla_decode_cuda(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """The Hopper kernel always follows a schedule; without the caller's it makes one in each call."""
    operands = _scheduled(operands) if operands.schedule is None else operands
    assert operands.schedule is not None
    caches = (operands.query, operands.latent_cache, operands.block_tables, operands.seq_lens)
    return cuda.mla_decode_cuda(*caches, *operands.schedule, scale=operands.scale, causal=operands.causal)


OP = Op(
    name="mla_decode",
    implementations={
        "cuda": Implementation(_mla_decode_cuda, _cuda_supports, _cuda_yields, takes_config=False),
        **triton.implementations(mla_decode_pallas, serves_latents),
        "xla": Implementation(mla_decode_xla, options.xla_supports, takes_config=False),
    },
    results=("seqs q heads dim", "seqs q heads"),
    config=MLADecodeConfig,
    key=tiles.key,
    heuristic=tiles.default,
    check_config=tiles.check,
    share=_share,
    settle=_settle,
)


@overload
def mla_decode(
    query: jax.Array, latent_cache: jax.Array, block_tables: BlockTables, seq_lens: SeqLens, *,
    schedule: MLASchedule | None = None, scale: float | None = None, causal: bool = False,
    score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    return_lse: Literal[False] = False, batch_invariant: bool = False,
    implementation: ImplementationOrCuda | None = None, config: MLADecodeConfig | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def mla_decode(
    query: jax.Array, latent_cache: jax.Array, block_tables: BlockTables, seq_lens: SeqLens, *,
    schedule: MLASchedule | None = None, scale: float | None = None, causal: bool = False,
    score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    return_lse: Literal[True], batch_invariant: bool = False,
    implementation: ImplementationOrCuda | None = None, config: MLADecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def mla_decode(
    query: jax.Array, latent_cache: jax.Array, block_tables: BlockTables, seq_lens: SeqLens, *,
    schedule: MLASchedule | None = None, scale: float | None = None, causal: bool = False,
    score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    return_lse: bool = False, batch_invariant: bool = False,
    implementation: ImplementationOrCuda | None = None, config: MLADecodeConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def mla_decode(
    query: jax.Array,
    latent_cache: jax.Array,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    schedule: MLASchedule | None = None,
    scale: float | None = None,
    causal: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: ImplementationOrCuda | None = None,
    config: MLADecodeConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Multi-head latent attention of a few new tokens per sequence over the sequence's paged latents.

    The absorbed form: a cached token is 512 latent elements, which are key and value to all heads, and 64 rotary
    elements, which are key only; the caller has multiplied the up-projections into the queries and will multiply them
    into the output. Works inside jit, scan, while_loop, vmap and shard_map ("interpret" there with check_vma=False).
    Inside jit the host never reads lengths and tables, and the cache is never copied. Softmax and accumulation are
    float32; the same inputs and config give the same bits. Only "xla" has gradients.

    Args:
        query: [num_seqs, q_len, num_heads, 576], bf16, fp16 or float32: the 512 latent, then the 64 rotary elements.
            Any num_heads >= 1 and q_len >= 1; the q_len tokens are the newest of the sequence, in order.
        latent_cache: [num_pages, page_size, num_kv_heads, 576] in query's dtype; or, with a bf16 query, [num_pages,
            page_size, num_kv_heads, 656] uint8 of `quantize_latents`, whose latents are used as rounded to bf16
            ("cuda": to fp16, relative to the largest scale). num_heads is a multiple of num_kv_heads, which is 1 in
            every published model. Any page_size; 16, 32, 64 and 128 are tuned. Slots at or beyond a sequence's length
            may hold anything.
        block_tables: [num_seqs, max_pages] int32, a sequence's pages in order. Entries beyond its last page may
            hold anything.
        seq_lens: [num_seqs] int32, tokens in each sequence's pages, the q_len newest included. A length of 0 gives
            out 0 and lse -inf.
        schedule: from `mla_schedule` for these lengths; made once per step, it serves all layers. None: "pallas" cuts
            sequences by a simpler rule, evaluated in the kernel; "cuda" makes a schedule first, which takes 2 to 3 us
            up to 256 sequences, and some 25 beyond, unless XLA finds that another call has made the same. A schedule
            for OTHER lengths leaves tokens out: the output is wrong and shows no NaN. Outside jit that is an error, for
            which the host reads schedule and lengths. Inside jit it goes unnoticed, so make it from the same array that
            is passed as `seq_lens`. Where tables hold up to 1024 tokens and sequences keep most multiprocessors busy,
            "pallas" cuts none, and ignores the schedule.
        scale: factor of the logits, a number above 0; None means 576 ** -0.5. Models scale by the dimension of
            their heads before absorption, (128 + 64) ** -0.5 in DeepSeek's.
        causal: query token i sees the first seq_len - (q_len - 1 - i) tokens; otherwise all see all. A query token
            before the sequence's first sees nothing: out 0, lse -inf.
        score_mod: a function (score, batch, head, q_idx, kv_idx) -> score of float32 and int32 scalars, applied behind
            scale. `batch` is the sequence; positions are the text's, whatever pages hold it: query token i is at
            seq_len - q_len + i. It is traced once: its operations are elementwise, and of arrays that it captures it
            reads single elements. A function that does the same to arrays of the same shapes compiles nothing.
            `pallas_attn.mods` has some. Not by "cuda".
        mask_mod: a function (batch, head, q_idx, kv_idx) -> bool, likewise; joined with `causal`. What comes before the
            first key that a sequence's query tokens may see, and behind the last, is not read, by blocks of 16 tokens
            (longer ones in tables of more than 32768), and its pages may be anyone's; latents in between must be
            finite. Without a schedule, which knows nothing of it.
        return_lse: also return the natural log-sum-exp of the scaled logits.
        batch_invariant: a sequence's rows have the same bits whatever else is in the batch, in whichever order, and
            however wide the table: how it is cut depends on its own length alone, and tile sizes on heads, q_len, page
            size and the kind of GPU. Partial results then take memory for up to 64 splits of every sequence: 1 GiB for
            64 of 128 heads in long tables, 64 GiB for 4096. Neither "cuda" nor "xla", and no schedule; a `config` must
            have `split_tokens`, and should have `num_splits` 0, which makes room for all splits.
        implementation: None (cuda or pallas on an NVIDIA GPU, whichever measured faster for the case; xla elsewhere),
            "cuda" (sm_90, bf16, fp16 and fp8, page_size 64), "pallas" (sm_80 or newer, bf16, fp16 and fp8), "triton"
            (the same kernel by Triton itself, where Pallas cannot; the extra of that name), "xla" (anywhere, for
            debugging and CPUs) or "interpret" (the Pallas kernel run in Python, slow). "cuda" launches
            cooperatively where that is faster; PALLAS_ATTN_COOPERATIVE=0 in the environment, when a call is traced,
            keeps it from that: such a launch does not overlap with a collective's kernel.
        config: tile sizes for "pallas", "triton" and "interpret"; None takes the measured or the heuristic one.

    Returns:
        out [num_seqs, q_len, num_heads, 512] in query's dtype; with return_lse, also lse [num_seqs, q_len, num_heads]
        float32. A page id in use outside [0, num_pages), or a length that is negative or beyond the table, gives
        NaN in that sequence's rows; nothing out of bounds is read.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Sharded over a mesh, outside shard_map, a call is partitioned over heads and sequences. A pool that would have to
    move is a ValueError; under Auto axes, a JaxRuntimeError of XLA's partitioner that ends in the same message.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1; FlashMLA (DeepSeek, 2025); split-KV after Dao et al.,
    "Flash-Decoding" (2023).
    """
    check = ArgumentChecker("mla_decode")
    check_call(check, query, latent_cache, block_tables, seq_lens, schedule, scale=scale, causal=causal)
    check.flag("return_lse", return_lse)
    check.flag("batch_invariant", batch_invariant)
    if batch_invariant and schedule is not None:
        check.fail("schedule", "None with batch_invariant", "a schedule, which follows from the whole batch")

    if mask_mod is not None and schedule is not None:
        check.fail("schedule", "None beside a mask_mod, of whose keys it knows nothing", "a schedule")
    sizes = PagedSizes(query.shape[0], query.shape[2], block_tables.shape[1], latent_cache.shape[1])
    mods, captured = over_pages(check, sizes, score_mod, mask_mod, shared_seqs=True)
    operands = Operands(
        query=query,
        latent_cache=latent_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        schedule=schedule,
        captured=captured,
        mods=mods,
        scale=float(QUERY_DIM**-0.5 if scale is None else scale),
        causal=bool(causal),
        batch_invariant=bool(batch_invariant),
    )
    out, lse = OP.serve(ready(operands), implementation=implementation, config=config)
    return (out, lse) if return_lse else out


def check_call(
    check: ArgumentChecker, query, latent_cache, block_tables, seq_lens, schedule, *, scale, causal
):
    """Checks for `mla_decode` and for FlashMLA's function."""
    check.array("query", query, ("num_seqs", "q_len", "num_heads", QUERY_DIM), DTYPES)
    stored = (query.dtype, *((BYTES,) if query.dtype == jnp.bfloat16 else ()))
    check.dtype_among("latent_cache", latent_cache, stored)
    shape = ("num_pages", "page_size", "num_kv_heads", token_width(latent_cache.dtype))
    check.array("latent_cache", latent_cache, shape, stored)
    check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
    check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
    for name, array in (("query", query), ("latent_cache", latent_cache), ("block_tables", block_tables)):
        check.non_empty(name, array)
    check.multiple("query", query.shape[2], "num_kv_heads", check.dims["num_kv_heads"])
    check.positive_float("scale", scale)
    check.flag("causal", causal)
    check.instance("schedule", schedule, MLASchedule, optional=True)
    if schedule is None:
        return
    shape = ("num_sm_parts", METADATA_SIZE)
    check.array("schedule.tile_scheduler_metadata", schedule.tile_scheduler_metadata, shape, [jnp.int32])
    check.array("schedule.num_splits", schedule.num_splits, (query.shape[0] + 1,), [jnp.int32])
    check.non_empty("schedule.tile_scheduler_metadata", schedule.tile_scheduler_metadata)
    if known_not_to_fit(schedule, seq_lens):
        check.fail("schedule", f"one made for these {check.spell('seq_lens')}", "one for other lengths")
