"""Where a kernel's tile sizes come from: the caller, else a measured file, else the op's heuristic.

Measured files are `configs/<device>/<op>.json`: {"entries": [{"key": {...}, "config": {...}}, ...]}. A key holds the
few facts that decide (head_dim, group, page size, dtype, ...), and the first entry whose whole key agrees wins.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from pallas_attn._checks import fail
from pallas_attn._device import current_device


@dataclasses.dataclass(frozen=True)
class SplitKVConfig:
    """What every split-KV decode kernel is cut up by; an op's own config adds its defaults and says what they mean."""

    block_q: int
    block_kv: int
    num_splits: int
    min_split_tokens: int = 256
    target_programs: int = 528
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        name_of_type = type(self).__name__
        for name, least in (("block_q", 16), ("block_kv", 16), ("num_warps", 1)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                fail(name_of_type, name, f"a power of two >= {least}", str(size))
        for name in ("num_splits", "min_split_tokens", "target_programs", "num_stages"):
            if getattr(self, name) < 1:
                fail(name_of_type, name, "at least 1", str(getattr(self, name)))


def resolve[C](
    op: str, config_type: type[C], explicit: C | None, key: dict[str, Any], heuristic: Callable[[], C]
) -> C:
    if explicit is not None:
        if not isinstance(explicit, config_type):
            fail(op, "config", config_type.__name__, type(explicit).__name__, TypeError)
        return explicit
    for entry in _measured(current_device().slug, op):
        if all(key.get(name) == value for name, value in entry["key"].items()):
            return config_type(**entry["config"])
    return heuristic()


@functools.cache
def _measured(device: str, op: str) -> list[dict[str, Any]]:
    path = resources.files("pallas_attn") / "configs" / device / f"{op}.json"
    return json.loads(path.read_text())["entries"] if path.is_file() else []
