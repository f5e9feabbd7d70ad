"""`flash_attention`: signature, checks, dispatch."""

import functools
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch, options
from pallas_attn._call.checks import ArgumentChecker, check_int
from pallas_attn._call.dispatch import Implementation
from pallas_attn._call.op import Op
from pallas_attn._call.operands import ready
from pallas_attn._call.pools import handles
from pallas_attn._call.sizes import too_wide
from pallas_attn._tile import triton
from pallas_attn._tile.dense import DenseLayout
from pallas_attn._types import ImplementationOrCuda
from pallas_attn.mods.blocks import BlockMask
from pallas_attn.mods.call import Sizes, of_call
from pallas_attn.mods.ready import MaskMod, ScoreMod
from pallas_attn.ops.flash_attention import arguments, captured, cuda, gradients, kernel, reference, segments
from pallas_attn.ops.flash_attention import backward as tiled
from pallas_attn.ops.flash_attention import config as tiles
from pallas_attn.ops.flash_attention.config import FlashAttentionConfig, FlashAttentionCudaConfig
from pallas_attn.ops.flash_attention.operands import Operands, Rules
from pallas_attn.ops.flash_attention.problem import Problem


def _supports(operands: Operands, lowering: triton.Lowering) -> str | None:
    problem, mask_elements = Problem.of(operands), 0 if operands.mask is None else operands.mask.size
    dims = {"head_dim": problem.head_dim, "value_dim": problem.value_dim}
    return too_wide(dims) or handles("masks", mask_elements, jnp.int8, lowering)


def _steps(
    backward: Any, bias_gradient: Any, captured_gradients: Any, takes_config: bool
) -> dict[str, Implementation]:
    return {
        "captured_gradients": Implementation(gradients.shared(captured_gradients), takes_config=takes_config),
        "backward": Implementation(backward, takes_config=takes_config),
        "bias_gradient": Implementation(gradients.summed(bias_gradient), takes_config=takes_config),
    }


def _tiled(lowering: triton.Lowering) -> Implementation:
    forward, *backward = (
        functools.partial(fn, lowering=lowering)
        for fn in (kernel.forward, tiled.backward, tiled.bias_gradient, captured.gradients)
    )
    supports = functools.partial(_supports, lowering=lowering)
    steps = _steps(*backward, takes_config=True)
    return Implementation(gradients.padded(forward), supports, prepare=gradients.without_bits, steps=steps)


TILED = {lowering: _tiled(lowering) for lowering in get_args(triton.Lowering)}
OP = Op(
    name="flash_attention",
    implementations={
        **TILED,
        "cuda": Implementation(
            gradients.padded(cuda.forward),
            cuda.unsupported,
            cuda.is_slower,
            takes_config=False,
            own_config=FlashAttentionCudaConfig,
            check_config=cuda.check,
            steps={
                **TILED[triton.first_lowering()].steps,
                "cuda_backward": Implementation(cuda.backward, takes_config=False),
            },
        ),
        "xla": Implementation(
            gradients.padded(reference.forward),
            takes_config=False,
            prepare=gradients.without_bits,
            steps=_steps(reference.backward, reference.bias_gradient, reference.captured_gradients, False),
        ),
    },
    config=FlashAttentionConfig,
    key=tiles.key,
    heuristic=tiles.default,
    check_config=tiles.check,
    kernels={kernel: (kernel,) for kernel in tiles.KERNELS},
    derivative=gradients.attend,
)


@overload
def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bias: jax.Array | None = None,
    mask: jax.Array | None = None, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None, segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    cu_q_lens: jax.Array | None = None, causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None, q_offset: int = 0,
    scale: float | None = None, softcap: float | None = None, sinks: jax.Array | None = None,
    return_lse: Literal[False] = False, layout: DenseLayout = "BTNH",
    implementation: ImplementationOrCuda | None = None,
    config: FlashAttentionConfig | FlashAttentionCudaConfig | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bias: jax.Array | None = None,
    mask: jax.Array | None = None, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None, segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    cu_q_lens: jax.Array | None = None, causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None, q_offset: int = 0,
    scale: float | None = None, softcap: float | None = None, sinks: jax.Array | None = None,
    return_lse: Literal[True], layout: DenseLayout = "BTNH", implementation: ImplementationOrCuda | None = None,
    config: FlashAttentionConfig | FlashAttentionCudaConfig | None = None, residual_checkpoint_name: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bias: jax.Array | None = None,
    mask: jax.Array | None = None, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None, segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    cu_q_lens: jax.Array | None = None, causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None, q_offset: int = 0,
    scale: float | None = None, softcap: float | None = None, sinks: jax.Array | None = None,
    return_lse: bool = False, layout: DenseLayout = "BTNH", implementation: ImplementationOrCuda | None = None,
    config: FlashAttentionConfig | FlashAttentionCudaConfig | None = None, residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    cu_q_lens: jax.Array | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    q_offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    layout: DenseLayout = "BTNH",
    implementation: ImplementationOrCuda | None = None,
    config: FlashAttentionConfig | FlashAttentionCudaConfig | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of dense queries over dense keys and values, with gradients, in memory linear in their number.

    Nothing of size q_len x kv_len is made, forward or backward, except by the caller (`bias` and `mask`, which are
    broadcast over the keys where they have q_len rows of one element). Softmax and accumulation are float32; the same
    inputs and config give the same bits, gradients too: nothing is summed in an order that may change. 16-bit gradients
    of keys or values that share an offset are as exact as of others. Works inside jit, scan, vmap, checkpoint and
    shard_map; there are first derivatives in reverse mode (jax.grad, jax.vjp), by "xla" second ones too, and none in
    forward mode (jax.jvp, jax.hessian, jax.linear_transpose). Under jit, and for linear_transpose always, the error is
    JAX's own, about a custom_vjp function. All options combine. Keys and values that `causal` and `sliding_window` hide
    from every query may hold anything, NaN included; what some query sees must be finite, or its neighbours may get NaN
    too.

    Args:
        query, key, value: [batch, q_len, num_heads, head_dim], [batch, kv_len, num_kv_heads, head_dim] and
            [batch, kv_len, num_kv_heads, value_dim]; with `layout` "BNTH" heads come before tokens. One dtype: bf16,
            fp16 or float32 (whose products are not rounded to TF32). num_heads is a multiple of num_kv_heads; query
            head h uses KV head h // (num_heads / num_kv_heads). head_dim and value_dim are each up to 256 on the GPU.
        bias: [batch or 1, num_heads or 1, q_len or 1, kv_len or 1], added to the logits after the soft cap; bf16, fp16
            or float32. It has gradients. Logits are float32: in a row whose biases are all around -1e6 or less,
            rounding hides the differences between keys. Softmax and gradients are those of the rounded logits, as in
            jax.nn, where finfo(float32).min everywhere makes all keys equal. -inf and `mask` say that a key is not
            seen; a query that sees none has 0.
        mask: bool, of the same shapes; a query sees a key where it is True. Masked keys and values must be finite.
        score_mod: a function (score, batch, head, q_idx, kv_idx) -> score of float32 and int32 scalars, applied behind
            scale and soft cap and in front of bias and masks; `head` is the query's, q_idx and kv_idx count from 0
            whatever `q_offset` is. It is traced once: its operations are elementwise, and of arrays that it captures it
            reads single elements. A function that does the same to arrays of the same shapes compiles nothing. It has
            gradients, and so have floating-point arrays that it captures and reads by head or sequence, by query, by
            key, or by the distance of the two ("xla" has them of any). `pallas_attn.mods` has some.
        mask_mod: a function (batch, head, q_idx, kv_idx) -> bool, likewise; a query sees a key where it is True. Blocks
            of 128 x 128 that it empties are not visited; keys and values of others must be finite. It is joined with
            `causal` and `sliding_window`, and takes the place of documents.
        block_mask: in place of `mask_mod`, the result of `block_mask`, made once for many calls.
        segment_ids: int32 [batch, tokens], or a pair of such for queries and keys: a query sees the keys of its own id.
            Packed documents, each with an id, are then served one by one: outputs and gradients of one do not change in
            a single bit when another's contents do, even to NaN, and pairs of different documents cost no time. Any
            order of ids is right; contiguous documents with ascending ids are fast.
        cu_q_lens: [num_seqs + 1] int32, instead of segment_ids: batch is 1, and document i has tokens [cu_q_lens[i],
            cu_q_lens[i + 1]). Tokens beyond the last are padding: out 0, lse -inf, with sinks too, and no gradient from
            or to them, whatever they hold. An array that descends is refused where its values are known; a traced one
            makes all tokens padding.
        causal: query i sees keys up to i + q_offset.
        sliding_window: an int w >= 1: query i sees the keys less than w away from i + q_offset, on both sides; with
            `causal`, the newest w up to itself. Or (left, right), each >= 0 or None for no bound: keys from
            i + q_offset - left to i + q_offset + right.
        q_offset: position of query 0 among the keys; kv_len - q_len puts the last query at the last key.
        scale: factor of the logits, a number above 0; None means head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap); a number above 0 and up to 1e30, or None.
        sinks: [num_heads]; a logit without a value that joins each head's softmax (and its lse). It has gradients.
        return_lse: also return the natural log-sum-exp of the logits; it has gradients.
        layout: "BTNH" as jax.nn has it, or "BNTH".
        implementation: None (on an NVIDIA GPU pallas, or cuda where that is faster, xla elsewhere), "cuda" (sm_90; 16
            bits without bias, mask or mods but for ALiBi and a block_mask made with `max_partial`; whose gradients are,
            `config` says), "pallas" (sm_80 or newer), "triton" (the same kernels by Triton itself, where Pallas cannot;
            the extra of that name), "xla" (anywhere) or "interpret" (the Pallas kernels run in Python, slow).
        config: tile sizes for "pallas", "triton" and "interpret", None takes the measured or the heuristic ones; or,
            for "cuda", a FlashAttentionCudaConfig, which says whose gradients are.
        residual_checkpoint_name: the name by which jax.checkpoint's policies know what the backward pass needs of the
            forward pass: with `jax.checkpoint_policies.save_only_these_names(name)` the forward kernel runs once, and
            out, lse and a byte for each element of a 16-bit out are kept. None: they have no name.

    Returns:
        out, of query's shape with value_dim, in query's dtype; with return_lse, also lse, of query's shape without
        head_dim, float32. A query that sees no key has out 0 and lse -inf, and passes no gradient on, even if its
        cotangent is NaN; with `sinks` its lse is the head's sink, which has a gradient through it.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Sharded over a mesh, outside shard_map, a call is partitioned over the batch and over KV heads.

    Source: Dao et al., "FlashAttention" (2022) and Dao, "FlashAttention-2" (2023).
    """
    return serve(
        ArgumentChecker(OP.name),
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        segment_ids=segment_ids,
        cu_q_lens=cu_q_lens,
        causal=causal,
        sliding_window=sliding_window,
        q_offset=q_offset,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        layout=layout,
        implementation=implementation,
        config=config,
        residual_checkpoint_name=residual_checkpoint_name,
    )


def serve(
    check: ArgumentChecker,
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any,
    mask: Any,
    segment_ids: Any,
    causal: Any,
    sliding_window: Any,
    scale: Any,
    return_lse: Any,
    implementation: Any,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    cu_q_lens: Any = None,
    lengths: Any = None,
    q_offset: Any = 0,
    softcap: Any = None,
    sinks: Any = None,
    layout: Any = "BTNH",
    config: Any = None,
    residual_checkpoint_name: Any = None,
    without_tokens: bool = False,
) -> Any:
    """`flash_attention`, for functions that have some of its arguments under other names, which `check` knows.

    `lengths`: those of `dot_product_attention` that are not None, by name. `without_tokens` also takes, where there are
    neither documents nor sinks, a batch, queries or keys of none.
    """
    check.one_of("layout", layout, ("BTNH", "BNTH"))
    dims = arguments.check_arrays(check, query, key, value, layout, without_tokens)
    check.positive_float("scale", scale)
    softcap = options.softcap(check, softcap)
    check.flag("causal", causal)
    check.flag("return_lse", return_lse)
    check_int(check.function, "q_offset", q_offset, -arguments.LONGEST, arguments.LONGEST)
    dispatch.check_name(check.function, OP.name, implementation)
    check.instance("residual_checkpoint_name", residual_checkpoint_name, str, optional=True)
    band = arguments.band(check, causal, sliding_window, int(q_offset))
    group = dims["num_heads"] // dims["num_kv_heads"]

    if sinks is not None:
        check.array("sinks", sinks, ("num_heads",), options.DTYPES)
        sinks = sinks.astype(jnp.float32).reshape(-1, group)
    if bias is not None:
        bias = arguments.pairwise(check, "bias", bias, options.DTYPES, group)
    if mask is not None:
        mask = arguments.pairwise(check, "mask", mask, (jnp.bool_,), group).astype(jnp.int8)
    found = arguments.documents(check, segment_ids, cu_q_lens, lengths or {}, implementation)
    queries, keys = found or (None, None)
    given = ("mask_mod", mask_mod), ("block_mask", block_mask)
    if queries is not None and (name := next((name for name, mod in given if mod is not None), None)):
        check.fail(name, "None beside documents (they may be part of it: mods.documents)", "both")
    sizes = Sizes(dims["batch"], dims["num_kv_heads"], group, dims["q_len"], dims["kv_len"])
    mods, floats, band = of_call(check, sizes, score_mod, mask_mod, block_mask, band)
    operands = Operands(
        query=arguments.split_heads(query, layout, group),
        key=key,
        value=value,
        sinks=sinks,
        bias=bias,
        mask=mask,
        q_documents=queries,
        kv_documents=keys,
        captured=floats,
        mods=mods,
        padding=segments.padding(queries)
        if queries and cu_q_lens is not None and sinks is not None
        else None,
        rules=Rules(layout, float(dims["head_dim"] ** -0.5 if scale is None else scale), softcap, band),
        checkpoint_name=residual_checkpoint_name,
    )
    out, lse = OP.serve(ready(operands), implementation=implementation, config=config)
    out = out.reshape(*query.shape[:-1], dims["value_dim"])
    if not return_lse:
        return out
    lse = lse.reshape(dims["batch"], dims["num_heads"], dims["q_len"])
    return out, jnp.swapaxes(lse, 1, 2) if layout == "BTNH" else lse
