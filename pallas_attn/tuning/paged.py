"""What points of ops with block tables share: random pools, and rotating tables."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.tuning import timing
from pallas_attn.tuning.points import Inputs, Point

BLOCK = 1 << 22  # random elements, repeated to fill a pool


class PagedPoint(Point):
    """One kind of call of an op over pages."""

    pools: ClassVar[int] = 2
    """Keys and values; of latents there is one pool."""

    @property
    def stored(self) -> Any:
        """The pools' dtype."""
        return self.case.dtype

    @property
    def kind(self) -> str:
        return jnp.dtype(self.stored).name

    @property
    def read_bytes(self) -> int:
        return self.pools * self.streams * self.slots * self.case.head_dim * jnp.dtype(self.stored).itemsize

    @property
    def slots(self) -> int:
        """Tokens that a row of the block table holds."""
        return self.case.max_pages * self.case.page_size

    @property
    def max_len(self) -> int:
        """As in calls, whose keys contain no lengths."""
        return self.slots

    @abc.abstractmethod
    def operands(self, num_pages: int, seq_lens: jax.Array) -> Any:
        """The query, pools of `num_pages` pages, and what else all calls share."""

    def inputs(self) -> Inputs:
        case, num_sets = self.case, timing.num_sets(self.read_bytes)
        pages = np.random.default_rng(0).permutation(num_sets * case.num_seqs * case.max_pages)
        tables = pages.astype(np.int32).reshape(num_sets, case.num_seqs, case.max_pages)
        calls = range(max(num_sets, timing.LEAST_CALLS))
        turns = [np.roll(tables[i % num_sets], i // num_sets, axis=0) for i in calls]
        seq_lens = jnp.asarray(case.seq_lens, jnp.int32)
        return Inputs(self.operands(len(pages), seq_lens), tuple(map(jnp.asarray, turns)), seq_lens)


def random_query(shape: Sequence[int], dtype: str) -> jax.Array:
    # A separate seed: a query equal to a key would see only that token, and no check would notice lost ones.
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape, np.float32), dtype)


def random_pool(shape: Sequence[int], dtype: str, seed: int) -> jax.Array:
    """Normal values, which int8 holds times 40."""
    block = np.random.default_rng(seed).standard_normal(BLOCK, np.float32)
    return timing.tiled(jnp.asarray(block * 40 if dtype == "int8" else block).astype(dtype), tuple(shape))
