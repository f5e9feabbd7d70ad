"""Prompts, chunks of prompts and decoding through `write` and the ops, while sequences join and leave."""

import doctest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import PageAllocator, PagedKVCache, PagedLatentCache
from pallas_attn.ops.kv_cache import cache as documented

PAGE, ROWS, TABLE, HEADS, KV_HEADS, DIM = 4, 3, 4, 4, 2, 16


def test_the_documented_example_runs():
    failed, tried = doctest.testmod(documented)
    assert tried > 5
    assert failed == 0


class Serving:
    """A batch of three rows that sequences come into and leave; queries, keys and values are random."""

    def __init__(self, latent: bool):
        self.latent, self.rng = latent, np.random.default_rng(0)
        self.allocator = PageAllocator(8)
        sizes = dict(num_layers=2, num_pages=8, page_size=PAGE, dtype="float32")
        tables = jnp.full((ROWS, TABLE), -1, jnp.int32)
        if latent:
            self.cache = PagedLatentCache.create(**sizes, block_tables=tables)
        else:
            self.cache = PagedKVCache.create(
                **sizes, block_tables=tables, num_kv_heads=KV_HEADS, head_dim=DIM
            )
        self.held = [None] * ROWS  # all keys and values of each row's sequence

    def join(self, row: int, tokens: int) -> None:
        pages = self.allocator.allocate(-(-tokens // PAGE))
        table = jnp.asarray(pages + [-1] * (TABLE - len(pages)), jnp.int32)
        self.cache = self.cache.replace(
            block_tables=self.cache.shared_tables.at[row].set(table),
            seq_lens=self.cache.seq_lens.at[row].set(0),
        )
        shape = (0, 576) if self.latent else (0, 2, KV_HEADS, DIM)
        self.held[row] = np.zeros(shape, np.float32)

    def leave(self, row: int) -> None:
        self.allocator.free([int(page) for page in self.cache.shared_tables[row] if page >= 0])
        self.held[row] = None

    def step(self, q_len: int, new: list[int]) -> None:
        """Takes `new` tokens of each row, at most q_len, through layer 1, and compares what they see."""
        column = np.arange(q_len) - q_len
        lens = np.where(new, np.asarray(self.cache.seq_lens) + new, 0)
        positions = np.where(column >= -np.array(new)[:, None], lens[:, None] + column, -1)
        if self.latent:
            query = self.rng.standard_normal((ROWS, q_len, HEADS, 576), np.float32)
            written = self.rng.standard_normal((ROWS, q_len, 576), np.float32)
        else:
            query = self.rng.standard_normal((ROWS, q_len, HEADS, DIM), np.float32)
            written = self.rng.standard_normal((ROWS, q_len, 2, KV_HEADS, DIM), np.float32)
        run = mla_step if self.latent else step
        out, self.cache = run(self.cache, query, written, np.int32(positions), jnp.asarray(lens, jnp.int32))
        for row, count in enumerate(new):
            if count:
                self.held[row] = np.concatenate([self.held[row], written[row, q_len - count :]])
                expected = self.expected(row, query[row, q_len - count :])
                np.testing.assert_allclose(out[row, q_len - count :], expected, atol=2e-5)
            else:
                assert not np.asarray(out[row]).any()

    def expected(self, row: int, query: np.ndarray) -> np.ndarray:
        held = self.held[row]
        if self.latent:
            key = np.broadcast_to(held[:, None], (len(held), HEADS, 576))
            value, scale = key[..., :512], 576**-0.5
        else:
            key, value = (np.repeat(held[:, i], HEADS // KV_HEADS, axis=1) for i in (0, 1))
            scale = DIM**-0.5
        outs = []
        for i, q in enumerate(query):
            seen = len(held) - len(query) + i + 1
            logits = np.einsum("hd,khd->hk", q, key[:seen]) * scale
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            outs.append(np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), value[:seen]))
        return np.stack(outs)


@partial(jax.jit, donate_argnums=0)
def step(cache, query, written, positions, lens):
    cache = cache.write(1, written[:, :, 0], written[:, :, 1], positions).replace(seq_lens=lens)
    tables = cache.layer_tables(1)
    return pallas_attn.paged_attention(query, cache.key_cache, cache.value_cache, tables, lens), cache


@partial(jax.jit, donate_argnums=0)
def mla_step(cache, query, written, positions, lens):
    cache = cache.write(1, written, positions).replace(seq_lens=lens)
    tables = cache.layer_tables(1)
    return pallas_attn.mla_decode(query, cache.latent_cache, tables, lens, causal=True), cache


@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
def test_sequences_join_go_on_and_leave(latent):
    serving = Serving(latent)
    serving.join(0, 12)
    serving.join(2, 6)
    serving.step(5, [5, 0, 3])  # prompts of different lengths, padded on the left, beside an empty row
    serving.step(5, [4, 0, 1])  # a second chunk beside decoding
    serving.join(1, 10)
    serving.step(5, [1, 5, 1])  # a prompt joins
    serving.step(1, [1, 1, 1])
    serving.leave(2)
    serving.step(1, [1, 1, 0])
    serving.join(2, 7)  # in pages that still hold another's tokens
    serving.step(5, [0, 2, 4])
    serving.step(1, [0, 1, 1])
    assert serving.cache.seq_lens.tolist() == [0, 10, 5]
