"""Documents from segment ids on Hopper: one small CUDA kernel of csrc/attention/documents, called through XLA's FFI."""

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch, ffi, symbolic
from pallas_attn._call.device import current_device

TARGET = "pallas_attn_attention_documents_sm90"
FASTER_UP_TO = 2**17
"""Tokens of a row: one CTA has a row. Of a million, sort and scatters take a quarter of its time (one H200)."""
LEAST_SLOTS = 64
"""Of the kernel's hash table (documents.h)."""


def serves(*ids: jax.Array) -> bool:
    """Whether the kernel finds the documents of these, [batch, tokens], on the device a call is traced for: where it
    can, and is faster than jnp."""
    sizes = [size for array in ids for size in array.shape]
    if symbolic.is_open(*sizes) or 0 in sizes or sum(array.shape[1] for array in ids) > FASTER_UP_TO:
        return False
    return current_device().runs_hopper_code and dispatch.installed["cuda"]() is None


def find(query_ids: jax.Array, key_ids: jax.Array | None) -> tuple[jax.Array, ...]:
    """Ranks [batch, tokens] and table [batch, most ranks, 3] of each side, as `segments.Documents` has them; ranks are
    in order of their first tokens, those of queries in front of those of keys.

    Args:
        query_ids, key_ids: int32 [batch, tokens]; None: keys are the queries' own tokens.

    vmap calls it once for each of the batch, one after the other.
    """
    ffi.register()
    batch, q_len = query_ids.shape
    k_len = 0 if key_ids is None else key_ids.shape[1]
    tokens = q_len + k_len
    slots = max(LEAST_SLOTS, 2 ** (2 * tokens - 1).bit_length())

    k_batch = batch if k_len else 0
    ranks_and_tables = (batch, q_len), (batch, tokens, 3), (k_batch, k_len), (k_batch, tokens, 3)
    scratch = batch, 3 * tokens + 1 + slots
    call = jax.ffi.ffi_call(
        TARGET,
        tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (*ranks_and_tables, scratch)),
        vmap_method="sequential",
    )
    found = call(query_ids, jnp.zeros((0, 0), jnp.int32) if key_ids is None else key_ids)
    return tuple(found[: 2 if key_ids is None else 4])
