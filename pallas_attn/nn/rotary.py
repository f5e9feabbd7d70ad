"""Rotary position embeddings, their frequencies as long contexts stretch them, in the pairings of published weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import LARGEST_FLOAT32, ArgumentChecker, is_number, shown


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN: stretches the context by slowing down the frequencies that would otherwise leave the trained range.

    Attributes:
        factor: how much longer the context becomes.
        original_context: tokens the model was first trained on.
        beta_fast, beta_slow: turns within the original context above which a frequency is kept as it is, and below
            which it is divided by `factor`; in between the two are blended.
        mscale, mscale_all_dim: how the rotated elements, and all logits, are scaled up to make up for it;
            see `rotary_scale` and `logit_scale`.

    Raises:
        TypeError, ValueError: a field that is no number, or out of its range.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023).
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        check = ArgumentChecker("Yarn")
        for name in ("factor", "beta_fast", "beta_slow"):
            check.positive_float(name, getattr(self, name), optional=False)
        check.count("original_context", self.original_context)
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if not is_number(value):
                check.fail(name, "a number", shown(value), TypeError)
            if not 0 <= value <= LARGEST_FLOAT32:
                check.fail(name, "a finite number of at least 0", repr(value))

    def _temperature(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def logit_scale(self) -> float:
        """Factor of all logits."""
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's longer context: slow frequencies are divided, fast ones kept, those in between blended.

    Attributes:
        factor: what the slow ones are divided by.
        low_freq_factor, high_freq_factor: turns within the original context up to which a frequency is slow, and from
            which it is fast; the second is larger.
        original_context: tokens the model was first trained on.

    Raises:
        TypeError, ValueError: a field that is no number, or out of its range.

    Source: Llama 3.1 (Meta, 2024), as its published configs describe it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self):
        check = ArgumentChecker("Llama3Scaling")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check.positive_float(name, getattr(self, name), optional=False)
        check.count("original_context", self.original_context)
        if self.high_freq_factor <= self.low_freq_factor:
            expected = f"more than low_freq_factor ({self.low_freq_factor})"
            check.fail("high_freq_factor", expected, repr(self.high_freq_factor))

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    def stretched(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_context * plain / (2 * math.pi)
        fast = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        fast = np.clip(fast, 0, 1)
        return plain * fast + plain / self.factor * (1 - fast)


type Stretch = Yarn | Llama3Scaling


def rotary_frequencies(dim: int, theta: float, stretch: Stretch | None = None) -> np.ndarray:
    """[dim // 2] float32 radians a position, fastest first."""
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if isinstance(stretch, Llama3Scaling):
        return stretch.stretched(plain).astype(np.float32)
    return (plain if stretch is None else _with_yarn(plain, dim, theta, stretch)).astype(np.float32)


def _with_yarn(plain: np.ndarray, dim: int, theta: float, yarn: Yarn) -> np.ndarray:

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns over the original context."""
        return dim * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    slowed = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
    return plain * (1 - slowed) + plain / yarn.factor * slowed


def rotary_angles(
    positions: jax.Array, frequencies: np.ndarray, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Scaled cosines and sines [..., 1, dim // 2] float32 of integer `positions` [...]; the 1 stands for heads."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turns pairs of elements of `x` [..., heads, dim]: neighbours if `interleaved`, else i and i + dim // 2.

    The result holds all first elements, then all second ones, in either case: queries and keys agree on it.
    """
    wide = x.astype(jnp.float32)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
