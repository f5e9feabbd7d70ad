"""`jax.nn.dot_product_attention` over pages gathered beforehand: what JAX gives without a kernel for pages."""

from typing import Any

import jax
import reference
from workloads.decode import Call

import baselines

TITLE = "jax.nn, pages gathered"
OPS = ("paged_attention",)
PLAIN = True
ORDER = reference.PAGES_FIRST
ERROR_LIMIT = None


def available() -> str | None:
    return None


def supports(case: Any) -> str | None:
    return "is set up for one query token a sequence here" if case.q_len > 1 else baselines.plain_only(case)


def variants(case: Any) -> dict[str, Call]:
    def call(query, caches, table, lengths, _):
        keys, values = (cache[table].reshape(case.num_seqs, -1, *cache.shape[2:]) for cache in caches)
        out = jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=lengths)
        return out, out

    return {"": call}
