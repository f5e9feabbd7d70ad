"""`sparse_mla_decode` and `sparse_mla_prefill`. What takes turns are the ids: the same tokens in other pages."""

import functools
from typing import Any

import costs
import jax
import jax.numpy as jnp
import numpy as np
import reference
from costs import Cost
from source import timing

from workloads.base import Target
from workloads.decode import Call, Inputs
from workloads.latents import LatentWorkload

FP8 = "float8_e4m3fn"
TITLES = {"cuda": "CUDA", "pallas": "Pallas", "triton": "Triton", "xla": "plain jnp"}


class SparseMLA(LatentWorkload):
    """What both ops share. Their implementations are those that the library says it has.

    `Inputs.tables` are slots, page * page_size + offset, and `Inputs.lengths` how many of a token's count.
    """

    error_limit = 5e-3

    def __init__(self, library: Any, small: bool = False):
        super().__init__(library, small)
        names = [name for name in library.available_implementations().get(self.op, ()) if name != "interpret"]
        self.targets = {"auto": Target("ours", None)} | {
            name: Target(f"ours, {TITLES.get(name, name)}", name) for name in names
        }

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        if (kv_heads or 1) != 1:
            raise ValueError(f"{self.op}: expected one KV head, got {kv_heads}")
        return self.case(batch, seqlen, heads, q_len)

    def case(self, batch: int, seqlen: int, heads: int, q_len: int, **options: Any) -> Any:
        """Of `topk` ids, 2048 unless the context is shorter."""
        from pallas_attn.testing import cases

        kind = cases.SparseMLACase if self.op == cases.SparseMLACase.op else cases.SparsePrefillCase
        options = {"topk": min(seqlen, 2048), "q_len": q_len} | options
        return kind((seqlen,) * batch, heads, lengths=f"s{seqlen}", spare_pages=0, **options)

    def cost(self, case: Any) -> Cost:
        drawn = (tuple(case.seq_lens), case.q_len, case.topk)
        return costs.sparse_mla(case, *_counted(*drawn))

    # ---- inputs

    def input_shapes(self, case: Any) -> Inputs:
        lengths = jax.ShapeDtypeStruct(self.counts(case).shape, jnp.int32)
        return super().input_shapes(case)._replace(lengths=lengths)

    def inputs(self, case: Any) -> Inputs:
        return super().inputs(case)._replace(lengths=jnp.asarray(self.counts(case)))

    def counts(self, case: Any) -> np.ndarray:
        """Of ids: of a sequence, or in prefill of a query token."""
        return np.minimum(np.array(case.seq_lens, np.int32), case.topk)

    def table_shape(self, case: Any) -> tuple[int, ...]:
        return case.num_seqs, case.q_len, case.topk

    def _num_sets(self, case: Any) -> int:
        id_bytes = 4 * case.num_seqs * case.q_len * case.topk
        return min(super()._num_sets(case), timing.num_sets(self.cost(case).num_bytes + id_bytes))

    def _tables(self, case: Any, shapes: Inputs) -> list[np.ndarray]:
        chosen = _chosen(case)
        column, offset = np.divmod(np.maximum(chosen, 0), case.page_size)
        seq = np.arange(case.num_seqs)[:, None, None]
        slots = [table[seq, column] * case.page_size + offset for table in super()._tables(case, shapes)]
        return [np.where(chosen >= 0, some, -1).astype(np.int32) for some in slots]

    # ---- what is right

    def compile_expected(self, case: Any, order: str = reference.PAGES_FIRST) -> Any:
        def right(query, caches, slots, _lengths):
            return reference.sparse(
                query, caches, slots, value_dim=costs.LATENT_DIM, scale=costs.MLA_DIM**-0.5
            )

        return self.compile_right(right, self.input_shapes(case))


class SparseMLADecode(SparseMLA):
    op = "sparse_mla_decode"

    def cells(self) -> list[Any]:
        """128 sequences; few; and plain bf16 latents, which FlashMLA's decode kernel does not read."""
        sizes = [(128, 8192, 128, 2), *((128, 8192, heads, 1) for heads in (128, 64, 16, 8))]
        sizes += [(8, 32768, 128, 1), (1, 32768, 128, 1), (1, 32768, 16, 1)]
        plain = [(128, 8192, 128, 2), (128, 8192, 16, 1)]
        return [self.case(*size, cache_dtype=FP8) for size in sizes] + [self.case(*size) for size in plain]

    def tiny(self) -> list[Any]:
        return [
            self.case(2, 100, 3, 2, topk=24, page_size=16),
            self.case(2, 70, 5, 1, topk=90, page_size=16, cache_dtype=FP8),
        ]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        case = super().made(batch, seqlen, heads, kv_heads, q_len)
        return self.case(batch, seqlen, heads, q_len, topk=case.topk, cache_dtype=FP8)

    def call(self, case: Any, target: str) -> Call:
        def call(query, caches, slots, counts, _):
            return self.library.sparse_mla_decode(
                query,
                *caches,
                slots,
                topk_length=counts,
                return_lse=True,
                implementation=self.targets[target].implementation,
            )

        return call


class SparseMLAPrefill(SparseMLA):
    """Over bf16 latents, the pools of all sets side by side."""

    op = "sparse_mla_prefill"

    def cells(self) -> list[Any]:
        sizes = [(8192, 128), (8192, 64), (8192, 16), (32768, 128)]
        return [self.case(1, tokens, heads, 4096) for tokens, heads in sizes]

    def tiny(self) -> list[Any]:
        return [self.case(1, 100, 3, 5, topk=24)]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        if batch != 1:
            raise ValueError(f"{self.op}: expected --batch 1, got {batch}")
        return super().made(batch, seqlen, heads, kv_heads, q_len)

    def counts(self, case: Any) -> np.ndarray:
        return np.repeat(super().counts(case), case.q_len)

    def call(self, case: Any, target: str) -> Call:
        def call(query, caches, slots, counts, _):
            (cache,) = caches
            out, _, lse = self.library.sparse_mla_prefill(
                query[0],
                cache.reshape(-1, 1, cache.shape[-1]),
                slots[0][:, None],
                topk_length=counts,
                implementation=self.targets[target].implementation,
            )
            return out, lse

        return call


def _chosen(case: Any) -> np.ndarray:
    """[num_seqs, q_len, topk] int32 positions, different ones for each query token; -1 where a sequence has no more."""
    return _drawn(tuple(case.seq_lens), case.q_len, case.topk)


@functools.cache
def _drawn(seq_lens: tuple[int, ...], q_len: int, topk: int) -> np.ndarray:
    rng = np.random.default_rng(4)
    found = np.full((len(seq_lens), q_len, topk), -1, np.int32)
    for row, length in zip(found, seq_lens, strict=True):
        for ids in row:
            count = min(length, topk)
            ids[:count] = rng.choice(length, count, replace=False)
    return found


@functools.cache
def _counted(seq_lens: tuple[int, ...], q_len: int, topk: int) -> tuple[int, int]:
    """(pairs of a query token and one that it names, tokens that are named)."""
    chosen = _drawn(seq_lens, q_len, topk)
    return int((chosen >= 0).sum()), sum(len(np.unique(ids[ids >= 0])) for ids in chosen)
