"""What this device does at best, measured: bytes a second (copied, and only read) and bf16 operations a second.

run.py measures the roofs once a table and keeps them there as rows of op "roof"; `roof_percent` and plots refer to
them. By hand:

    python benchmarks/roofline.py
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from source import timing

OP, IMPLEMENTATION = "roof", "measured roof"
COPY, READ, PRODUCT = "copy", "read", "bf16-product"
STEPS = 8  # inside one jitted loop, so that a launch is a small part of it
# GB/s and TFLOPS (dense bf16) that the maker states. What is faster was measured wrongly: an L2 that helped, a call
# that XLA dropped. The first name that the device's contains counts.
STATED = {
    "H200": (4900, 990),
    "H100 NVL": (3940, 836),
    "H100 PCIe": (2040, 757),
    "H100": (3360, 990),
    "B200": (8000, 2250),
    "A100-SXM4-80GB": (2040, 312),
    "A100": (1940, 312),
    "L40": (864, 363),
}


class Sizes(NamedTuple):
    """Of what the roofs are measured with."""

    num_bytes: int = 4 << 30
    width: int = 8192
    """Of square matrices."""


SMALL = Sizes(1 << 20, 128)


class Roof(NamedTuple):
    """Rates of one device: bytes and operations a second."""

    bytes_a_second: float
    flops_a_second: float


def stated(device_kind: str) -> tuple[float, float] | None:
    """(GB/s, TFLOPS) that this device's maker states; None for a device not listed."""
    return next((rates for name, rates in STATED.items() if name.lower() in device_kind.lower()), None)


def broken(device_kind: str, tflops: float, gbs: float) -> str | None:
    """Why a figure cannot be true."""
    limits = stated(device_kind)
    if limits is None:
        return None
    for figure, limit, unit in ((gbs, limits[0], "GB/s"), (tflops, limits[1], "TFLOPS")):
        if figure > limit:
            return f"broken: {figure:.0f} {unit} is more than the {limit} that this device has"
    return None


def measurements(sizes: Sizes) -> dict[str, tuple[Callable[[], Any], int, int]]:
    """{roof: (a dispatch of STEPS steps, operations of a step, bytes of a step)}."""
    words = jnp.arange(sizes.num_bytes // 4, dtype=jnp.int32).reshape(-1, 1 << 12)

    @jax.jit
    def copied(words):
        return jax.lax.fori_loop(0, STEPS, lambda _, words: words + 1, words)

    @jax.jit
    def read(words):
        # Each step needs the one before, or XLA would read once.
        return jax.lax.fori_loop(0, STEPS, lambda _, most: jnp.max(words ^ most), jnp.int32(0))

    @jax.jit
    def multiplied(left, right):
        return jax.lax.fori_loop(0, STEPS, lambda _, left: left @ right, left)

    def matrix(seed: int, scale: float) -> jax.Array:
        noise = jax.random.normal(jax.random.key(seed), (sizes.width, sizes.width), jnp.float32)
        return (noise * scale).astype(jnp.bfloat16)

    # Products keep their size, so that no step multiplies infinities, which takes less power.
    matrices = matrix(0, 1.0), matrix(1, sizes.width**-0.5)
    return {
        COPY: (functools.partial(copied, words), 0, 2 * words.nbytes),
        READ: (functools.partial(read, words), 0, words.nbytes),
        PRODUCT: (functools.partial(multiplied, *matrices), 2 * sizes.width**3, 0),
    }


def of(rates: Iterable[tuple[str, float | None, float | None]]) -> Roof | None:
    """The roof of (case, TFLOPS, GB/s) triples, as rows have them; None unless all three were measured."""
    found = {case: (tflops, gbs) for case, tflops, gbs in rates}
    copy, read, product = (found.get(case, (None, None)) for case in (COPY, READ, PRODUCT))
    if copy[1] is None or read[1] is None or product[0] is None:
        return None
    return Roof(max(copy[1], read[1]) * 1e9, product[0] * 1e12)


def main() -> None:
    for name, (run, flops, num_bytes) in measurements(Sizes()).items():
        timing.warm_up(run)
        seconds = timing.device_seconds(run) / STEPS
        figure = f"{flops / seconds / 1e12:.0f} TFLOPS" if flops else f"{num_bytes / seconds / 1e9:.0f} GB/s"
        print(f"{name:14}{seconds * 1e6:10.1f} us  {figure}")


if __name__ == "__main__":
    main()
