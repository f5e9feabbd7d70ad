"""What several test files need."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedKVCache
from pallas_attn._call import dispatch

COMPILED = ("pallas", "triton")
"""The ways a kernel is compiled for a GPU: a test of one is a test of both."""
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in COMPILED]


def close(got: Any, want: Any, limit: float = 2e-5) -> None:
    """Within `limit` of the largest, or of 1, where `want` is finite; -inf in the same places."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    scale = max(np.abs(want[finite]).max(initial=0), 1.0)
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= limit * scale


def unchecked(function: Any) -> Any:
    """As users have it, without the shape checks that jaxtyping adds in tests."""
    return getattr(function, "__wrapped__", function)


def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CUDA library were there, for calls that are only lowered."""
    monkeypatch.setitem(dispatch.installed, "cuda", lambda: None)
    monkeypatch.setattr("pallas_attn._call.ffi.register", lambda: None)


def small_cache(**changes) -> PagedKVCache:
    tables = jnp.array([[2, 0, 9], [1, -1, 3]], jnp.int32)
    defaults = dict(
        num_layers=2,
        num_pages=4,
        page_size=8,
        num_kv_heads=2,
        head_dim=16,
        block_tables=tables,
        dtype="float32",
    )
    return PagedKVCache.create(**{**defaults, **changes})


def of_any_bits(rng, shape: tuple[int, ...], dtype) -> jax.Array:
    """NaNs with every payload among them."""
    size = jnp.dtype(dtype).itemsize
    return jnp.asarray(rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype))
