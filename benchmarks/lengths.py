"""Kinds of lengths that a batch may have in a table of so many tokens: the same in every process."""

from collections.abc import Callable

import numpy as np

SHORT = 1 / 20  # of the long ones in "bimodal"
GIANTS = 4


def _scaled(shares: np.ndarray, tokens: int) -> np.ndarray:
    """The longest is as long as the table."""
    return shares / shares.max() * tokens


def _bimodal(rng: np.random.Generator, num_seqs: int, tokens: int) -> np.ndarray:
    return rng.permutation(np.where(np.arange(num_seqs) % 2, SHORT, 1.0)) * tokens


def _giants(rng: np.random.Generator, num_seqs: int, tokens: int) -> np.ndarray:
    short = rng.integers(tokens // 64, tokens // 16 + 1, num_seqs)
    return rng.permutation(np.where(np.arange(num_seqs) < GIANTS, tokens, short))


KINDS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "equal": lambda rng, num_seqs, tokens: np.full(num_seqs, tokens),
    "uniform": lambda rng, num_seqs, tokens: rng.integers(1, tokens + 1, num_seqs),
    "exponential": lambda rng, num_seqs, tokens: _scaled(rng.exponential(1, num_seqs), tokens),
    "lognormal": lambda rng, num_seqs, tokens: _scaled(rng.lognormal(0, 1, num_seqs), tokens),
    "narrow": lambda rng, num_seqs, tokens: _scaled(rng.lognormal(0, 0.4, num_seqs), tokens),
    "bimodal": _bimodal,
    "giants": _giants,
}


def drawn(kind: str, num_seqs: int, tokens: int) -> tuple[int, ...]:
    """[num_seqs] lengths of 1 to `tokens`."""
    lengths = KINDS[kind](np.random.default_rng(1), num_seqs, tokens)
    return tuple(int(length) for length in np.clip(np.round(lengths), 1, tokens))
