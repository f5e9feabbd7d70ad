"""What ops over a paged cache share: inputs, the timed loop, the reference."""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reference
from source import timing

from workloads.base import Runner, Workload

BLOCK = (1 << 22) - 3  # random numbers a pool repeats: a prime, so that no two pages hold the same
SMALL_BLOCK, SMALL_SETS = (1 << 13) - 1, 2
MOST_POOL_BYTES = 30 << 30  # where a case holds much more than it reads (windows), fewer sets take turns
# Rates that calls roughly reach, to choose how many make a burst.
USUAL_FLOPS, USUAL_BYTES = 4e14, 2.5e12
# Of so many calls, or of so long, is a round at least, as peers' graphs are (graphs.py): what a round does besides, a
# launch and two small kernels, is no call's.
ROUND_CALLS, ROUND_SECONDS = 32, 0.04


class Inputs(NamedTuple):
    query: Any
    """[num_seqs, q_len, num_heads, head_dim]"""
    caches: tuple[Any, ...]
    """[num_pages, page_size, num_kv_heads, dim] each"""
    tables: tuple[Any, ...]
    """Block tables of the calls that take turns; of disjoint pages, unless those of one call fill the L2 many times."""
    lengths: Any


Call = Callable[[Any, tuple[Any, ...], Any, Any, Any], tuple[jax.Array, jax.Array]]
"""(query, caches, table, lengths, what was made beforehand) -> (output, a small float array the same kernel writes)"""


class PagedWorkload(Workload):
    value_dim: int | None = None
    """Numbers of a cache row that are the value; None: all."""
    num_caches: int

    @abc.abstractmethod
    def call(self, case: Any, target: str) -> Call: ...

    def beforehand(self, case: Any, target: str, lengths: jax.Array) -> Any:
        """What a model makes once for all its layers."""
        return None

    # ---- inputs

    def query_shape(self, case: Any) -> tuple[int, ...]:
        return (case.num_seqs, case.q_len, case.num_heads, case.head_dim)

    def cache_row(self, case: Any) -> tuple[int, Any]:
        """(elements, dtype) that a cache holds of a token and a KV head."""
        return case.head_dim, jnp.dtype(cache_dtype(case))

    def block(self, pool: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
        """Random numbers of which a pool is made."""
        return _random_block(pool.dtype, seed, SMALL_BLOCK if self.small else BLOCK)

    def table_shape(self, case: Any) -> tuple[int, ...]:
        return case.num_seqs, max(pages_of(case))

    def input_shapes(self, case: Any) -> Inputs:
        struct = jax.ShapeDtypeStruct
        num_sets, pages = self._num_sets(case), sum(pages_of(case))
        width, dtype = self.cache_row(case)
        pool = struct((num_sets * pages, case.page_size, case.num_kv_heads, width), dtype)
        table = struct(self.table_shape(case), jnp.int32)
        return Inputs(
            struct(self.query_shape(case), jnp.dtype(case.dtype)),
            (pool,) * self.num_caches,
            (table,) * max(num_sets, SMALL_SETS if self.small else self._least_calls(case)),
            struct((case.num_seqs,), jnp.int32),
        )

    def inputs(self, case: Any) -> Inputs:
        shapes = self.input_shapes(case)
        # A seed of its own: a query that equals a key would see that token only, and no check would miss the others.
        query = np.random.default_rng(0).standard_normal(shapes.query.shape, np.float32)
        caches = [
            timing.tiled(self.block(pool, seed), pool.shape)
            for seed, pool in enumerate(shapes.caches, start=1)
        ]
        tables = [jnp.asarray(table) for table in self._tables(case, shapes)]
        lengths = jnp.asarray(np.array(case.seq_lens, np.int32))
        made = Inputs(jnp.asarray(query, case.dtype), tuple(caches), tuple(tables), lengths)
        return jax.block_until_ready(made)

    def _num_sets(self, case: Any) -> int:
        width, dtype = self.cache_row(case)
        slots = sum(pages_of(case)) * case.page_size * case.num_kv_heads
        held = self.num_caches * slots * width * dtype.itemsize
        most = SMALL_SETS if self.small else max(1, min(MOST_POOL_BYTES // held, self.most_sets(case)))
        return min(timing.num_sets(min(held, self.cost(case).num_bytes)), most)

    def _least_calls(self, case: Any) -> int:
        """In a round."""
        return max(timing.LEAST_CALLS, min(ROUND_CALLS, math.ceil(ROUND_SECONDS / self._usual_seconds(case))))

    def _usual_seconds(self, case: Any) -> float:
        """That a call roughly takes."""
        return self.cost(case).seconds(USUAL_FLOPS, USUAL_BYTES)

    def most_sets(self, case: Any) -> int:
        """That are of use: calls that products limit need few."""
        return timing.MOST_SETS

    def _tables(self, case: Any, shapes: Inputs) -> list[np.ndarray]:
        rng = np.random.default_rng(3)
        num_sets, pages = self._num_sets(case), pages_of(case)
        sets = np.split(rng.permutation(num_sets * sum(pages)).astype(np.int32), num_sets)
        tables = []
        for number in range(len(shapes.tables)):
            # The second table of a set deals its pages anew.
            own = sets[number] if number < num_sets else rng.permutation(sets[number % num_sets])
            table = np.zeros((case.num_seqs, max(pages)), np.int32)
            for i, part in enumerate(np.split(own, np.cumsum(pages)[:-1])):
                table[i, : len(part)] = part
            tables.append(table)
        return tables

    # ---- what is timed

    def compile(self, case: Any, target: str) -> Callable[[Inputs], Runner]:
        how = self.targets[target]
        before = functools.partial(self.beforehand, case, target)
        # Without a GPU, plain jnp is what a call takes by itself.
        plain = how.implementation == "xla" or (how.implementation is None and jax.default_backend() != "gpu")
        return self.compile_loop(case, self.call(case, target), before, plain, how.compiler_options)

    def compile_loop(
        self,
        case: Any,
        call: Call,
        beforehand: Callable[[jax.Array], Any],
        plain: bool,
        compiler_options: dict[str, Any] | None = None,
    ) -> Callable[[Inputs], Runner]:
        """`plain`: the call is jnp that XLA compiles, which may be tens of times slower than a kernel."""
        shapes = self.input_shapes(case)
        calls_a_round = len(shapes.tables)
        rounds = 1 if plain else timing.num_rounds(self._usual_seconds(case), calls_a_round)

        def loop(inputs: Inputs, made: Any):
            def one(table, lengths):
                return call(inputs.query, inputs.caches, table, lengths, made)

            return timing.looped(one, rounds, inputs.tables, inputs.lengths, plain=plain)

        made_shapes = jax.eval_shape(beforehand, shapes.lengths)
        compiled = jax.jit(loop).lower(shapes, made_shapes).compile(compiler_options=compiler_options)
        memory = compiled.memory_analysis()

        def runner(inputs: Inputs) -> Runner:
            run = functools.partial(compiled, inputs, jax.jit(beforehand)(inputs.lengths))
            return Runner.looped(run, timing.num_calls(rounds, calls_a_round), memory)

        return runner

    def compile_expected(
        self, case: Any, order: str = reference.PAGES_FIRST
    ) -> Callable[[Inputs], list[jax.Array]]:
        shapes = self.input_shapes(case)
        right = functools.partial(
            reference.expected,
            case=case,
            value_dim=self.value_dim or case.head_dim,
            cache_scale=cache_scale(cache_dtype(case)),
            order=order,
        )
        return self.compile_right(right, shapes)

    def compile_right(
        self, right: Callable[..., jax.Array], shapes: Inputs
    ) -> Callable[[Inputs], list[jax.Array]]:
        """(inputs) -> `right` for the first and the last table."""
        compiled = reference.compiled(right, *shapes[:2], shapes.tables[0], shapes.lengths)

        def expected(inputs: Inputs) -> list[jax.Array]:
            ends = (inputs.tables[0], inputs.tables[-1])
            return [compiled(*inputs[:2], table, inputs.lengths) for table in ends]

        return expected


def cache_dtype(case: Any) -> str:
    return getattr(case, "cache_dtype", None) or case.dtype


def cache_scale(dtype: str) -> float:
    """What 1 stands for in a cache: int8 is filled with numbers around 40."""
    return 1 / 40 if dtype == "int8" else 1.0


def pages_of(case: Any) -> Sequence[int]:
    return [math.ceil(length / case.page_size) for length in case.seq_lens]


@functools.cache
def _random_block(dtype: Any, seed: int, size: int) -> jax.Array:
    """[size] normal values."""
    block = np.random.default_rng(seed).standard_normal(size, np.float32)
    scaled = jnp.asarray(block / cache_scale(dtype.name))
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype)
