"""What ops over dense queries and keys share: inputs that take turns, the timed loop, references in float32."""

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import reference
from source import timing

from workloads.base import Runner, Workload

# Rates that calls roughly reach, to choose how many make a burst.
USUAL_FLOPS, USUAL_BYTES = 3e14, 2.5e12
MOST_BYTES = 2 << 30  # of all inputs; the first comes back no earlier than the L2 has been filled anew
REFERENCE_QUERIES = 256  # whose logits are worked out at once


class Inputs(NamedTuple):
    tables: tuple[Any, ...]
    """What calls that take turns are given, a pytree each."""
    lengths: None = None


Call = Callable[[Any], tuple[jax.Array, jax.Array]]
"""set -> (output, a small float array that needs all of the work)"""


class DenseWorkload(Workload):
    @abc.abstractmethod
    def call(self, case: Any, target: str) -> Call: ...

    def whole(self, case: Any, attend: Any) -> Call:
        """What is timed of `attend`, a function of query, key and value that returns (out, a small float array)."""
        raise NotImplementedError(f"{self.op} has no peers on JAX")

    @abc.abstractmethod
    def drawn(self, case: Any, seed: Any) -> Any:
        """One set of inputs. Traced."""

    @abc.abstractmethod
    def right(self, case: Any, given: Any) -> jax.Array:
        """The output in float32. Traced."""

    def _sets(self, case: Any) -> int:
        one = jax.eval_shape(functools.partial(self.drawn, case), 0)
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
        return 2 if self.small else max(2, min(timing.num_sets(num_bytes), MOST_BYTES // num_bytes))

    def inputs(self, case: Any) -> Inputs:
        draw = jax.jit(functools.partial(self.drawn, case))
        made = tuple(draw(seed) for seed in range(self._sets(case)))
        return jax.block_until_ready(Inputs(made))

    def _shapes(self, case: Any) -> Inputs:
        one = jax.eval_shape(functools.partial(self.drawn, case), 0)
        return Inputs((one,) * self._sets(case))

    def compile(self, case: Any, target: str) -> Callable[[Inputs], Runner]:
        how = self.targets[target]
        plain = how.implementation == "xla" or (how.implementation is None and jax.default_backend() != "gpu")
        return self.compile_call(case, self.call(case, target), plain)

    def compile_call(self, case: Any, call: Call, plain: bool) -> Callable[[Inputs], Runner]:
        shapes = self._shapes(case)
        calls_a_round = len(shapes.tables)
        usual = self.cost(case).seconds(USUAL_FLOPS, USUAL_BYTES)
        rounds = 1 if plain else timing.num_rounds(usual, calls_a_round)

        def loop(inputs: Inputs):
            return timing.looped(lambda given, _: call(given), rounds, inputs.tables, None, plain=plain)

        compiled = jax.jit(loop).lower(shapes).compile()
        memory = jax.jit(call).lower(shapes.tables[0]).compile().memory_analysis()

        def runner(inputs: Inputs) -> Runner:
            run = functools.partial(compiled, inputs)
            return Runner.looped(run, timing.num_calls(rounds, calls_a_round), memory)

        return runner

    def compile_expected(self, case: Any) -> Callable[[Inputs], list[jax.Array]]:
        compiled = reference.compiled(functools.partial(self.right, case), self._shapes(case).tables[0])
        return lambda inputs: [compiled(inputs.tables[0]), compiled(inputs.tables[-1])]


def normal(seed: Any, number: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), number)
    return jax.random.normal(key, shape, jnp.bfloat16 if dtype != "float32" else dtype).astype(dtype)


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: Callable[..., jax.Array]
) -> jax.Array:
    """query [tokens, heads, dim], keys and values [tokens, kv_heads, dim] -> float32, some queries at a time.

    `seen(query positions, key positions)` is [heads or 1, queries, keys]; what sees nothing is 0. Differentiable.
    """
    tokens, heads, dim = query.shape
    product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    size = min(REFERENCE_QUERIES, tokens)
    padded = jnp.pad(query.astype(jnp.float32), ((0, -tokens % size), (0, 0), (0, 0)))
    keys, values = key.astype(jnp.float32), value.astype(jnp.float32)

    @jax.checkpoint
    def some(one: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, first = one
        grouped = rows.reshape(size, keys.shape[1], -1, dim) * dim**-0.5
        logits = product("qhgd,thd->hgqt", grouped, keys).reshape(heads, size, -1)
        visible = seen(first + jnp.arange(size), jnp.arange(keys.shape[0]))
        # Of -inf alone the softmax has no gradients.
        some = jnp.any(visible, axis=-1, keepdims=True)
        weights = jnp.where(some, jax.nn.softmax(jnp.where(visible | ~some, logits, -jnp.inf), axis=-1), 0.0)
        weights = weights.reshape(keys.shape[1], -1, size, keys.shape[0])
        return product("hgqt,thv->qhgv", weights, values).reshape(size, heads, -1)

    blocks = padded.reshape(-1, size, heads, dim)
    out = jax.lax.map(some, (blocks, jnp.arange(len(blocks)) * size))
    return out.reshape(-1, heads, value.shape[-1])[:tokens]


def flat(gradients: Any) -> jax.Array:
    """[3, number]: a row for each of the arrays, which has an error as a whole."""
    rows = [x.astype(jnp.float32).reshape(-1) for x in gradients]
    most = max(map(len, rows))
    return jnp.stack([jnp.pad(row, (0, most - len(row))) for row in rows])
