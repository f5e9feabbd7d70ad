"""`convert_layout`: both pools of a cache in another layout."""

from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import LAYOUTS, QUANTIZED_DTYPES, check_pools, packing
from pallas_attn._tile.layout import from_nhd, to_nhd
from pallas_attn._types import KVCache, Layout


def convert_layout(
    key_cache: KVCache, value_cache: KVCache, *, source: Layout, target: Layout
) -> tuple[KVCache, KVCache]:
    """Both pools in another layout, bit for bit: a copy, for moving a cache between engines.

    Args:
        key_cache, value_cache: pools of `source` layout and of one dtype, any that caches have.
        source, target: "NHD", "HND" or "PACKED".

    Raises:
        TypeError: pools that are no arrays of a cache's dtype.
        ValueError: pools that do not have the source layout, an unknown layout, or a head_dim that "PACKED" cannot
            hold.
    """
    check = ArgumentChecker("convert_layout")
    check.one_of("source", source, LAYOUTS)
    check.one_of("target", target, LAYOUTS)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check.dtype_among(name, cache, (*DTYPES, *QUANTIZED_DTYPES))
    pool = check_pools(check, key_cache, value_cache, source, [value_cache.dtype], named="source")
    if target == "PACKED" and pool.head_dim % (x := packing(key_cache.dtype)):
        fail("convert_layout", "key_cache", f"head_dim a multiple of x={x} for 'PACKED'", str(pool.head_dim))
    key = from_nhd(to_nhd(key_cache, source, "key"), target, "key")
    value = from_nhd(to_nhd(value_cache, source, "value"), target, "value")
    return key, value
