"""`pallas-attn show-layout`: a picture of a block-sparse layout."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np

from pallas_attn._call.optional import MissingExtraError, needs_extra
from pallas_attn._tile.masking import LocalStride
from pallas_attn.cli.options import taken
from pallas_attn.ops.blocksparse_attention import builders
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout

MOST_SHOWN = 16  # heads
ACROSS = 4
AHEAD, SEEN, HIDDEN = (0.93, 0.93, 0.93), (0.13, 0.35, 0.60), (1.0, 1.0, 1.0)


# Each pattern's options besides the sizes, with defaults.
OWN = {
    "dense": {},
    "window": {"window": 1024},
    "local-stride": {
        "local_blocks": 16,
        "vert_stride": 8,
        "head_sliding_step": 1,
        "num_heads": 4,
        "num_kv_heads": 1,
        "tp_rank": 0,
    },
}


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """The command's options; `own` are those of a pattern, None if not given."""

    pattern: str
    max_len: int
    block_size: int
    q_block_size: int | None
    own: dict[str, int | None]
    output: Path


def run_show_layout(options: LayoutOptions) -> int:
    """Writes the picture and reports it; wrong or too large sizes are one line on stderr and status 2."""
    try:
        layout = build(options)
        draw(layout, options.output)
    except (ValueError, MissingExtraError, OSError, MemoryError) as error:
        print(f"pallas-attn: error: {error}", file=sys.stderr)
        return 2
    heads = f"{layout.layout_heads} heads" if layout.layout_heads > 1 else "all heads alike"
    print(f"{options.output}: {heads}, live fraction {layout.live_fraction():.3f}")
    return 0


def build(options: LayoutOptions) -> SparseLayout:
    """ValueError for impossible sizes, and for options that the pattern does not take."""
    own = taken("show-layout", OWN[options.pattern], options.own, f"--pattern {options.pattern}")
    sizes = {"block_size": options.block_size, "q_block_size": options.q_block_size}
    match options.pattern:
        case "dense":
            return builders.dense_causal(options.max_len, **sizes)
        case "window":
            return builders.sliding_window(own["window"], options.max_len, **sizes)
    names = ("local_blocks", "vert_stride", "head_sliding_step", "tp_rank")
    pattern = LocalStride(options.block_size, *(own[name] for name in names))
    heads = {name: own[name] for name in ("num_heads", "num_kv_heads")}
    return builders.local_stride(pattern, options.max_len, **heads, q_block_size=options.q_block_size)


def draw(layout: SparseLayout, output: Path) -> None:
    """One panel a head: blocks of queries downwards, blocks of keys to the right."""
    with needs_extra("bench", user="pallas-attn show-layout"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    mask = layout.to_block_mask()
    heads = min(len(mask), MOST_SHOWN)
    across = min(heads, ACROSS)
    down = math.ceil(heads / across)
    figure = Figure(figsize=(3.2 * across, 3.4 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False)
    rows = np.arange(mask.shape[1])[:, None] * layout.q_block_size
    ahead = np.arange(mask.shape[2]) * layout.block_size > rows + layout.q_block_size - 1
    for head, panel in enumerate(panels.flat):
        if head >= heads:
            panel.set_axis_off()
            continue
        picture = np.where(mask[head, :, :, None], SEEN, np.where(ahead[:, :, None], AHEAD, HIDDEN))
        extent = (0, mask.shape[2] * layout.block_size, layout.max_len, 0)
        panel.imshow(picture, extent=extent, interpolation="nearest", aspect="equal")
        live = mask[head].sum() / (~ahead).sum()
        name = f"head {head}" if len(mask) > 1 else "all heads"
        panel.set_title(f"{name}: {live:.0%} of causal blocks seen", fontsize=9)
        panel.tick_params(labelsize=7)
    for panel in panels[:, 0]:
        panel.set_ylabel("query position", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("key position", fontsize=8)
    blocks = f"blocks of {layout.q_block_size} queries by {layout.block_size} keys"
    shown = "" if heads == len(mask) else f", the first {heads} of {len(mask)} heads"
    figure.suptitle(f"{blocks}{shown}", fontsize=10)
    meanings = ((SEEN, "seen"), (HIDDEN, "left out by the layout"), (AHEAD, "ahead of the queries (causal)"))
    legend = [Patch(facecolor=color, edgecolor="0.4", label=meaning) for color, meaning in meanings]
    figure.legend(handles=legend, loc="outside lower center", ncols=3 if across > 1 else 1, fontsize=8)
    # Always this format: matplotlib would choose by the file's name, and rename one without a suffix.
    figure.savefig(output, format="png", dpi=110, bbox_inches="tight")
