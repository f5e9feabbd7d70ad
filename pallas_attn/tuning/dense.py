"""What points of ops without block tables share: rotating inputs, and gradients that are timed and checked."""

import abc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn.tuning import timing
from pallas_attn.tuning.errors import LARGEST_GRADIENT_ERROR
from pallas_attn.tuning.points import Inputs, Point

FLOPS_PER_SECOND = 3e14  # a rough estimate, to size bursts
MOST_SETS = 8
FORWARD = ("forward", "prefill", "decode")


class DensePoint(Point):
    """One kernel of an op, named by `kernel`. A gradient's kernel is timed together with the others that the gradient
    needs, whose tiles stay."""

    kernel: str

    @property
    def kind(self) -> str:
        return self.kernel

    def key(self) -> dict[str, Any]:
        return {"kernel": self.kernel} | super().key()

    @property
    def forward(self) -> bool:
        return self.kernel in FORWARD

    @property
    @abc.abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of query, key and value."""

    @abc.abstractmethod
    def attend(self, operands: Any, *floats: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        """The op's (out, lse); `operands` are what `inputs` gives all calls."""

    @property
    @abc.abstractmethod
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all heads of a call."""

    @property
    def usual_seconds(self) -> float:
        work = 4 * self.shapes[0][-1] * self.pairs * (1 if self.forward else 3.5)
        return max(super().usual_seconds, work / FLOPS_PER_SECOND)

    @property
    def error_limit(self) -> float:
        return super().error_limit if self.forward else LARGEST_GRADIENT_ERROR[self.case.dtype]

    @property
    def read_bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * jnp.dtype(self.case.dtype).itemsize

    def inputs(self) -> Inputs:
        def drawn(number: int) -> tuple[jax.Array, ...]:
            keys = jax.random.split(jax.random.key(number), len(self.shapes))
            return tuple(
                jax.random.normal(key, shape, jnp.dtype(self.case.dtype))
                for key, shape in zip(keys, self.shapes, strict=True)
            )

        number = max(2, min(MOST_SETS, timing.num_sets(self.read_bytes)))
        return Inputs(None, tuple(map(drawn, range(number))), None)

    def call(self, operands: Any, table: Any, seq_lens: None, **options: Any) -> Any:
        def attended(*floats: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.attend(operands, *floats, **options)

        return attended(*table) if self.forward else gradients(attended, table)


def gradients(attend: Callable[..., Any], floats: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """([3, number]: some elements of each gradient of a sum of outputs times queries, so that none is dropped)."""
    out, vjp = jax.vjp(lambda *x: attend(*x)[0], *floats)
    found = [x.astype(jnp.float32).reshape(-1) for x in vjp(floats[0][..., : out.shape[-1]])]
    most = max(map(len, found))
    witness = jnp.sum(jnp.stack([x[:1] for x in found]), axis=0)
    return jnp.stack([jnp.pad(x, (0, most - len(x))) for x in found]), witness
