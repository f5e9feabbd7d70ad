"""The paged KV cache: writing new tokens into pages, the cache as a pytree, and the host's page bookkeeping."""

from pallas_attn.ops.kv_cache.allocator import OutOfPagesError, PageAllocator
from pallas_attn.ops.kv_cache.api import write_kv
from pallas_attn.ops.kv_cache.cache import PagedKVCache
from pallas_attn.ops.kv_cache.convert import convert_layout
from pallas_attn.ops.kv_cache.copying import copy_pages
from pallas_attn.ops.kv_cache.page_scales import page_scales

__all__ = [
    "OutOfPagesError",
    "PageAllocator",
    "PagedKVCache",
    "convert_layout",
    "copy_pages",
    "page_scales",
    "write_kv",
]
