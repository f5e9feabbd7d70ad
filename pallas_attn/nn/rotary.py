"""Rotary position embeddings: frequencies, how long contexts stretch them, and the pairings of published weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import LARGEST_FLOAT32, ArgumentChecker, fail, is_number, shown


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
        attention_factor: `rotary_scale` itself, where a model says it; None follows from the other fields.
        truncate: whether the pairs between which frequencies are blended are rounded to whole ones.

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
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        check = ArgumentChecker("Yarn")
        for name in ("factor", "beta_fast", "beta_slow"):
            check.positive_float(name, getattr(self, name), optional=False)
        check.positive_float("attention_factor", self.attention_factor)
        check.flag("truncate", self.truncate)
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
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def logit_scale(self) -> float:
        """Factor of all logits."""
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def stretched(self, plain: np.ndarray, theta: float) -> np.ndarray:
        dim = 2 * plain.size

        def pair_with(turns: float) -> float:
            """The (fractional) pair that makes `turns` turns over the original context."""
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        # If the two coincide, one frequency is kept and the next one slowed.
        slowed = np.clip((np.arange(dim // 2) - first) / ((last - first) or 0.001), 0, 1)
        return plain * (1 - slowed) + plain / self.factor * slowed


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

    def stretched(self, plain: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_context * plain / (2 * math.pi)
        fast = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        fast = np.clip(fast, 0, 1)
        return plain * fast + plain / self.factor * (1 - fast)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions, and so all frequencies, divided by `factor`, a number above 0.

    Source: kaiokendev, "Things I'm learning while training SuperHOT" (2023); Chen et al. (2023).
    """

    factor: float

    def __post_init__(self):
        ArgumentChecker("LinearScaling").positive_float("factor", self.factor, optional=False)

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    def stretched(self, plain: np.ndarray, theta: float) -> np.ndarray:
        return plain / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """A larger base for a longer sequence (dynamic NTK): frequencies depend on a sequence's length.

    Attributes:
        factor: how fast the base grows; 1 or more.
        original_context: tokens up to which frequencies are the plain ones.

    Raises:
        TypeError, ValueError: a field that is no number, or out of its range.

    Source: emozilla, bloc97 (2023), as transformers has it.
    """

    factor: float
    original_context: int

    def __post_init__(self):
        check = ArgumentChecker("DynamicScaling")
        check.positive_float("factor", self.factor, optional=False)
        check.count("original_context", self.original_context)

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    def at_lengths(self, plain: np.ndarray, theta: float, lengths: jax.Array) -> jax.Array:
        dim = 2 * plain.size
        longer = jnp.maximum(lengths / self.original_context, 1.0)
        growth = (self.factor * longer - (self.factor - 1)) ** (dim / max(dim - 2, 1))
        # `plain` contains theta already: this is the effect of its growth on each frequency.
        exponents = jnp.arange(plain.size, dtype=jnp.float32) * (-2 / dim)
        return jnp.asarray(plain) * growth[..., None] ** exponents


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE: every frequency divided by a factor of its own, of which there are two sets: for sequences within the
    original context, and for longer ones.

    Attributes:
        short_factors, long_factors: [rotated elements of a head // 2] numbers above 0.
        original_context: tokens of the longest sequence that the short ones are for.
        attention_factor: factor of cosines and sines, in sequences of any length.

    Raises:
        TypeError, ValueError: a field that is no number, or out of its range.

    Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024).
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float

    def __post_init__(self):
        check = ArgumentChecker("LongRope")
        for name in ("short_factors", "long_factors"):
            for factor in getattr(self, name):
                check.positive_float(name, factor, optional=False)
        if len(self.short_factors) != len(self.long_factors):
            check.fail("long_factors", f"{len(self.short_factors)} numbers", str(len(self.long_factors)))
        check.count("original_context", self.original_context)
        check.positive_float("attention_factor", self.attention_factor, optional=False)

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        return self.attention_factor

    def at_lengths(self, plain: np.ndarray, theta: float, lengths: jax.Array) -> jax.Array:
        if plain.size != len(self.short_factors):
            fail("LongRope", "short_factors", f"{plain.size} numbers", str(len(self.short_factors)))
        short, long = (
            (plain / np.array(factors)).astype(np.float32)
            for factors in (self.short_factors, self.long_factors)
        )
        return jnp.where((lengths > self.original_context)[..., None], long, short)


ByLength = DynamicScaling | LongRope
"""The stretchings that depend on a sequence's length."""
type Stretch = Yarn | Llama3Scaling | LinearScaling | ByLength


def rotary_frequencies(
    dim: int, theta: float, stretch: Stretch | None = None, lengths: jax.Array | None = None
) -> np.ndarray | jax.Array:
    """[dim // 2] float32 radians a position, fastest first; where they depend on a sequence's length,
    [..., 1, dim // 2] of `lengths` [...] (1 stands for heads)."""
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if isinstance(stretch, ByLength):
        assert lengths is not None
        return stretch.at_lengths(plain.astype(np.float32), theta, lengths)[..., None, :]
    return (plain if stretch is None else stretch.stretched(plain, theta)).astype(np.float32)


def rotary_angles(
    positions: jax.Array, frequencies: np.ndarray | jax.Array, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Scaled cosines and sines [..., 1, dim // 2] float32 of integer `positions` [...]; the 1 stands for heads."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turns pairs of elements of `x` [..., heads, dim]: neighbours if `interleaved`, else i and i + dim // 2.

    The result holds all first elements, then all second ones, in either case: queries and keys agree on it. Elements
    beyond those that the cosines are for stay as they are.
    """
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        turned = apply_rotary(x[..., :rotated], cos, sin, interleaved=interleaved)
        return jnp.concatenate([turned, x[..., rotated:]], axis=-1)
    wide = x.astype(jnp.float32)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
