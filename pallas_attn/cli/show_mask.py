"""`pallas-attn show-mask`: which blocks a mask_mod leaves, drawn in the terminal."""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_attn import mods
from pallas_attn.mods import block_mask
from pallas_attn.mods.blocks import EMPTY, FULL

READY: dict[str, Callable[..., Any]] = {
    name: getattr(mods, name)
    for name in ("causal", "sliding_window", "sinks_and_window", "dilated", "neighborhood", "block_diffusion")
}
SIGNS = "█▒·"  # of full, partial and empty blocks
MOST_ACROSS = 200


@dataclasses.dataclass(frozen=True)
class MaskOptions:
    """The command's options."""

    mask: str
    q_len: int
    kv_len: int | None
    num_heads: int
    block_q: int
    block_kv: int


def run_show_mask(options: MaskOptions) -> int:
    """Draws; errors are one line on stderr and status 2."""
    try:
        mask = named(options.mask)
        kv_len = options.q_len if options.kv_len is None else options.kv_len
        if kv_len > MOST_ACROSS * options.block_kv:
            most = f"at most {MOST_ACROSS} blocks ({MOST_ACROSS * options.block_kv} keys)"
            raise ValueError(f"show-mask: argument 'kv_len': expected {most}, got {kv_len}")
        found = block_mask(
            mask,
            q_len=options.q_len,
            kv_len=kv_len,
            num_heads=options.num_heads,
            block_q=options.block_q,
            block_kv=options.block_kv,
        )
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"pallas-attn: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    kinds = np.asarray(found.kinds())[0]
    for head, picture in enumerate(kinds):
        visited = float((picture != EMPTY).mean())
        name = f"head {head}" if len(kinds) > 1 else "all heads"
        print(
            f"{name}: {visited:.0%} of blocks visited, {float((picture == FULL).mean()):.0%} without a mask"
        )
        print("\n".join("".join(SIGNS[kind] for kind in row) for row in picture))
    print(f"queries downwards, keys to the right; {SIGNS[0]} all seen, {SIGNS[1]} some, {SIGNS[2]} none")
    return 0


def named(spelled: str) -> Any:
    """ "causal", "sliding_window:left=100", or "package.module:mask", a mask_mod of the user's."""
    name, _, rest = spelled.partition(":")
    if name not in READY:
        if not rest:
            known = ", ".join(READY)
            raise ValueError(
                f"show-mask: argument 'mask': expected module:name or one of {known}, got {spelled!r}"
            )
        return getattr(importlib.import_module(name), rest)
    given: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if not value.lstrip("-").isdigit():
            raise ValueError(f"show-mask: argument 'mask': expected {name}:name=number, got {part!r}")
        given[key] = int(value)
    try:
        inspect.signature(READY[name]).bind(**given)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(READY[name]).parameters)
        raise ValueError(
            f"show-mask: argument 'mask': expected {name} of {parameters}, got {error}"
        ) from error
    return READY[name](**given)
