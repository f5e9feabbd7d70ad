"""Where a kernel's tile sizes come from: the caller, else a measured file, else the op's heuristic.

Measured files are `configs/<device>/<op>.json`: {"entries": [{"key": {...}, "config": {...}}, ...]}. A key holds the
few facts that decide (head_dim, group, page size, dtype, ...), and the first entry whose whole key agrees wins.
"""

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from pallas_attn._device import current_device


def resolve[C](
    op: str, config_type: type[C], explicit: C | None, key: dict[str, Any], heuristic: Callable[[], C]
) -> C:
    if explicit is not None:
        if not isinstance(explicit, config_type):
            raise TypeError(
                f"{op}: argument 'config': expected {config_type.__name__}, got {type(explicit).__name__}"
            )
        return explicit
    for entry in _measured(current_device().slug, op):
        if all(key.get(name) == value for name, value in entry["key"].items()):
            return config_type(**entry["config"])
    return heuristic()


@functools.cache
def _measured(device: str, op: str) -> list[dict[str, Any]]:
    path = resources.files("pallas_attn") / "configs" / device / f"{op}.json"
    return json.loads(path.read_text())["entries"] if path.is_file() else []
