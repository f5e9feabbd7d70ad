"""A decode step of a whole model's attention: 60 layers of absorbed MLA as DeepSeek-V3 has it, around a paged cache.

All layers share a schedule and small projections (hidden size 256), so that what a step takes beyond its kernels,
launches and writes, shows. Cost and bandwidth count attention alone.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import costs
import jax
import jax.numpy as jnp
import numpy as np

from workloads.base import Runner, Target, Workload

HIDDEN, Q_LORA = 256, 128


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One new token after `tokens` of each sequence."""

    num_seqs: int
    tokens: int
    num_heads: int = 128
    num_layers: int = 60
    page_size: int = 64
    q_len: int = 1
    dtype: str = "bfloat16"

    num_kv_heads = 1

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return (self.tokens + 1,) * self.num_seqs

    @property
    def id(self) -> str:
        return f"b{self.num_seqs}-s{self.tokens}-q{self.num_heads}-layers{self.num_layers}"


class Inputs(NamedTuple):
    weights: Any
    cache: Any
    x: jax.Array


class MLAStep(Workload):
    op = "mla_step"
    dispatched = "mla_decode"
    targets: ClassVar[dict[str, Target]] = {
        "auto": Target("ours", None),
        "auto-scan": Target("ours, layers in a scan", None),
        "cuda": Target("ours, CUDA", "cuda"),
        "pallas": Target("ours, Pallas", "pallas"),
        "triton": Target("ours, by Triton itself", "triton"),
        "xla": Target("ours, plain jnp", "xla"),
    }
    error_limit = 2e-2  # of what 60 layers added to x, each in bf16

    def cells(self) -> list[Any]:
        return [StepCase(64, 1024), StepCase(64, 4096), StepCase(8, 8192)]

    def tiny(self) -> list[Any]:
        return [StepCase(2, 40, num_heads=2, num_layers=2, page_size=16)]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        if (kv_heads or 1, q_len) != (1, 1):
            raise ValueError(
                f"mla_step: expected one KV head and one query token, got {kv_heads} and {q_len}"
            )
        return StepCase(batch, seqlen, heads)

    def cost(self, case: Any) -> costs.Cost:
        layer = costs.mla_decode(case)
        return costs.Cost(case.num_layers * layer.flops, case.num_layers * layer.num_bytes)

    def inputs(self, case: Any) -> Inputs:
        _, weights = self._module(case, "bfloat16", None)
        return Inputs(weights, self._cache(case), jax.random.normal(jax.random.key(1), _x(case).shape))

    def compile(self, case: Any, target: str) -> Callable[[Inputs], Runner]:
        scan = target in ("auto-scan", "xla")  # plain jnp, 60 times over, takes long to compile
        compiled = self._compiled(case, case.dtype, self.targets[target].implementation, scan)

        def runner(inputs: Inputs) -> Runner:
            # The step takes its cache over, so the runner has one of its own.
            state = [jax.tree.map(jnp.copy, inputs.cache)]

            def run() -> jax.Array:
                out, state[0] = compiled(inputs.weights, state[0], inputs.x)
                return out

            return Runner.looped(run, 1, compiled.memory_analysis(), lambda: [(run() - inputs.x)[:, 0]])

        return runner

    def compile_expected(self, case: Any) -> Callable[[Inputs], list[jax.Array]]:
        """The same weights and latents in float32, attention in plain jnp."""
        compiled = self._compiled(case, "float32", "xla", scan=True)

        def expected(inputs: Inputs) -> list[jax.Array]:
            # A copy of the cache, which the step takes over.
            weights, cache = jax.tree.map(lambda leaf: _widened(leaf.copy()), (inputs.weights, inputs.cache))
            out, _ = compiled(weights, cache, inputs.x)
            return [(out - inputs.x)[:, 0]]

        return expected

    # ---- the step

    def _module(self, case: Any, dtype: str, implementation: str | None) -> tuple[Any, Any]:
        """(graph, weights) of the layer that is applied over and over."""
        from flax import nnx

        nn = importlib.import_module(f"{self.library.__name__}.nn")
        config = nn.MLAConfig(HIDDEN, case.num_heads, q_lora_rank=Q_LORA)
        layer = nn.MultiHeadLatentAttention(
            config, dtype=jnp.dtype(dtype), implementation=implementation, rngs=nnx.Rngs(0)
        )
        return nnx.split(layer)

    def _cache(self, case: Any) -> Any:
        pages = case.tokens // case.page_size + 1
        tables = np.random.default_rng(0).permutation(case.num_seqs * pages).reshape(case.num_seqs, pages)
        cache = self.library.PagedLatentCache.create(
            num_layers=case.num_layers,
            num_pages=case.num_seqs * pages,
            page_size=case.page_size,
            block_tables=jnp.asarray(tables, jnp.int32),
        )
        noise = jax.random.normal(jax.random.key(0), cache.latent_cache.shape, case.dtype)
        return cache.replace(latent_cache=noise, seq_lens=jnp.full(case.num_seqs, case.tokens, jnp.int32))

    def _compiled(self, case: Any, dtype: str, implementation: str | None, scan: bool) -> Any:
        from flax import nnx

        graph, weights = self._module(case, dtype, implementation)

        def step(weights, cache, x):
            """x after all layers, and a cache whose lengths are as before: every step decodes the same token."""
            attention = nnx.merge(graph, weights)
            schedule = self.library.mla_schedule(cache.seq_lens + 1, num_heads=case.num_heads)
            positions = cache.seq_lens[:, None]

            def layer(carry, index):
                x, cache = carry
                added, cache = attention(x.astype(dtype), cache, index, positions, schedule=schedule)
                return (x + added, cache), None

            if scan:
                return jax.lax.scan(layer, (x, cache), jnp.arange(case.num_layers))[0]
            for index in range(case.num_layers):
                (x, cache), _ = layer((x, cache), index)
            return x, cache

        shapes = jax.eval_shape(
            lambda: jax.tree.map(_widened if dtype == "float32" else jnp.asarray, self._cache(case))
        )
        return jax.jit(step, donate_argnums=1).lower(weights, shapes, _x(case)).compile()


def _x(case: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((case.num_seqs, 1, HIDDEN), jnp.float32)


def _widened(leaf: Any) -> Any:
    """Floating-point numbers as float32."""
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
