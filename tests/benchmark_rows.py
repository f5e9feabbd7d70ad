"""Rows of benchmark results, as the tests of what reads them make them up."""

from typing import Any

from results import Row

KNOWN: dict[str, Any] = dict(
    device="Card",
    driver="",
    jax="",
    torch="",
    commit="c",
    options="",
    op="mla_decode",
    method="loop",
    dtype="bfloat16",
    batch=1,
    seqlen=1,
    heads=1,
    kv_heads=1,
    q_len=1,
)


def row(case: str, us: float | None, spread: float = 0.0, implementation: str = "ours", **fields: Any) -> Row:
    """Timed, or not (`us` is None); p20 and p80 lie `spread` of the median around it."""
    timed: dict[str, Any] = {}
    if us is not None:
        timed = dict(median_us=us, p20_us=us * (1 - spread), p80_us=us * (1 + spread), ok=True)
    return Row(**{**KNOWN, "case": case, "implementation": implementation, **timed, **fields})
