"""Draws the pages' drawings: python docs/draw.py. A schedule is lanes over time; nothing is to scale.

Letters: K, V, Q keys, values, queries on their way; S scores; P the softmax's weights; O the product with values.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

PLACE = Path(__file__).parent / "pages/pictures"
COLORS = {
    "copy": "#c6dbef",  # on its way from memory
    "product": "#fdd0a2",  # on the tensor cores
    "softmax": "#c7e9c0",  # in registers
    "store": "#dadaeb",
    "look": "#d9d9d9",  # finding out what comes next
    "wait": "#ffffff",
    "ground": "#fff",
}
LEFT, UNIT, ROW, GAP, TOP = 132, 42, 26, 8, 34

Block = tuple[float, float, str, str]
"""From, to, kind (of COLORS), what is written in it."""


def _text(
    x: float, y: float, text: str, anchor: str = "middle", size: int = 11, weight: str = "normal"
) -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    dashed = ' stroke-dasharray="3 2"' if color == COLORS["wait"] else ""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="2" fill="{color}" stroke="#555" stroke-width="0.7"{dashed}/>'


def _arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="#333" stroke-width="1.1" marker-end="url(#to)"/>'


def _picture(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    box = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    marker = (
        '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#333"/></marker>'
    )
    ground = _box(-1, -1, width + 2, height + 2, COLORS["ground"])
    body = "\n".join([f"<title>{escape(title)}</title>", f"<defs>{marker}</defs>", ground, *parts])
    letters = 'font-family="sans-serif" fill="#111"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {letters}>\n{body}\n</svg>\n'


def schedule(
    title: str,
    lanes: Sequence[tuple[str, Sequence[Block]]],
    arrows: Sequence[tuple] = (),
    over: str = "time",
    legend: bool = True,
) -> str:
    """`arrows`: (lane, time, lane, time), from a lane's lower edge to another's upper one, or the other way round."""
    width = LEFT + UNIT * max(block[1] for _, blocks in lanes for block in blocks) + 12
    top = [TOP + number * (ROW + GAP) for number in range(len(lanes))]
    parts = [_text(8, 20, title, "start", 13, "bold")]
    for y, (name, blocks) in zip(top, lanes, strict=True):
        parts.append(_text(8, y + 17, name, "start"))
        for start, end, kind, label in blocks:
            x = LEFT + UNIT * start
            parts.append(_box(x, y, UNIT * (end - start), ROW, COLORS[kind]))
            parts.append(_text(x + UNIT * (end - start) / 2, y + 17, label, size=10))
    for lane, at, other, then in arrows:
        edge = ROW if other > lane else 0
        parts.append(_arrow(LEFT + UNIT * at, top[lane] + edge, LEFT + UNIT * then, top[other] + ROW - edge))
    y = top[-1] + ROW + 24
    x = LEFT
    keys = (
        ("copy", "copy"),
        ("product", "tensor cores"),
        ("softmax", "softmax"),
        ("store", "store"),
    )
    for kind, words in keys if legend else ():
        parts += [_box(x, y - 10, 14, 12, COLORS[kind]), _text(x + 19, y, words, "start", 10)]
        x += 34 + 6 * len(words)
    parts.append(_text(width - 12, y, f"{over} →", "end", 10))
    return _picture(width, y + 14, title, parts)


def way() -> str:
    """The way of a call, from above downwards."""
    steps = (
        ("paged_attention(query, key_cache, ...)", "the public function: api.py"),
        ("checks", "one line for what is wrong; arrays become the op's operands"),
        ("dispatch", "which implementation serves, or why none does"),
        ("partition", "each device's share, where operands are sharded"),
        ("config", "tile sizes: the caller's, a measured file's, the heuristic's"),
    )
    parts, y = [], 12
    for name, words in steps:
        parts += [
            _box(16, y, 250, 28, COLORS["copy"]),
            _text(141, y + 18, name),
            _text(280, y + 18, words, "start"),
        ]
        parts.append(_arrow(141, y + 28, 141, y + 42))
        y += 42
    kinds = ("cuda", "pallas", "triton", "xla")
    for number, kind in enumerate(kinds):
        parts += [_box(16 + 64 * number, y, 58, 28, COLORS["product"]), _text(45 + 64 * number, y + 18, kind)]
    parts.append(_text(280, y + 18, "the kernel, one of these; xla is plain jnp", "start"))
    parts.append(_arrow(141, y + 28, 141, y + 42))
    y += 42
    parts += [_box(16, y, 250, 28, COLORS["softmax"]), _text(141, y + 18, "merge")]
    parts.append(_text(280, y + 18, "float32 splits of long sequences, in one order", "start"))
    parts.append(_arrow(141, y + 28, 141, y + 42))
    parts += [_box(16, y + 42, 250, 28, COLORS["store"]), _text(141, y + 60, "out, lse")]
    return _picture(640, y + 82, "A call's way", parts)


def attention() -> str:
    keys = [(i, i + 1, "copy", f"K{5 - i}") for i in range(6)] + [
        (7, 8, "copy", "K7'"),
        (8.2, 9.2, "copy", "K6'"),
    ]
    values = [(i + 1, i + 2, "copy", f"V{5 - i}") for i in range(6)] + [(8.2, 9.2, "copy", "V7'")]
    products: list[Block] = [(1.2, 2, "product", "S5")]
    softmax: list[Block] = [(2, 3, "softmax", "P5")]
    for i in range(5):
        at = 3 + 1.6 * i
        products += [(at, at + 0.7, "product", f"S{4 - i}"), (at + 0.7, at + 1.5, "product", f"O{5 - i}")]
        softmax.append((at + 0.7, at + 1.5, "softmax", f"P{4 - i}"))
    products += [(11, 11.7, "product", "S7'"), (11.7, 12.5, "product", "O0"), (12.7, 13.4, "product", "S6'")]
    softmax += [(11.7, 12.5, "softmax", "P7'")]
    scout = [(0, 1, "look", "tile 2"), (5, 6, "copy", "its Q"), (10.4, 11.4, "look", "tile 3")]
    lanes = (
        ("scout", scout),
        ("keys", keys),
        ("values", values),
        ("math 0: products", products),
        ("math 0: softmax", [*softmax, (12.5, 13.4, "store", "store")]),
    )
    return schedule("Attention forward: tile 1, keys 5 to 0, and the start of tile 2 (')", lanes)


def mla() -> str:
    even = [
        (0, 2.2, "product", "S even"),
        (2.2, 4, "softmax", "P even"),
        (4, 6, "product", "lo += P even"),
        (6, 7.2, "wait", ""),
        (7.2, 9.2, "product", "lo += P odd"),
        (9.2, 11.4, "product", "next S even"),
    ]
    odd = [
        (0, 2.2, "product", "hi, pair before"),
        (2.2, 4, "product", "S odd"),
        (4, 6, "product", "hi += P even"),
        (6, 7.2, "softmax", "P odd"),
        (7.2, 9.2, "product", "hi += P odd"),
        (9.2, 11.4, "wait", ""),
    ]
    loads = [
        (0.6, 2.4, "copy", "odd: hi, lo"),
        (6.1, 7.4, "copy", "even: lo"),
        (7.4, 8.7, "copy", "even: hi"),
        (9.4, 11.2, "copy", "odd: hi, lo"),
    ]
    lanes = (("even pages' group", even), ("odd pages' group", odd), ("producer", loads))
    return schedule("MLA decode: a pair of pages", lanes, [(0, 4, 1, 4.2), (1, 7.2, 0, 7.4)])


def mla_bytes() -> str:
    def step(at: float, page: int) -> list[Block]:
        return [
            (at, at + 2, "product", f"S{page}"),
            (at + 2, at + 3, "product", f"O{page - 1}"),
            (at + 3, at + 4, "softmax", f"P{page}"),
            (at + 4, at + 5, "product", f"O{page}"),
        ]

    first = step(0, 2) + step(5.4, 4)
    second = [(0, 0.4, "softmax", ""), (0.4, 1.4, "product", "O1"), *step(2.7, 3), (8, 9.6, "product", "S5")]
    loads = [(0, 1.2, "copy", "page 4"), (2.6, 3.8, "copy", "page 5"), (5.4, 6.6, "copy", "page 6")]
    lanes = (("math 0", first), ("math 1", second), ("producer", loads))
    return schedule(
        "MLA over 656 bytes: two groups take turns with pages", lanes, [(0, 4, 1, 4.8), (1, 6.7, 0, 7.5)]
    )


def chosen() -> str:
    lanes = (
        ("ids", [(0, 1, "look", "ids 3"), (4, 5, "look", "ids 4"), (8, 9, "look", "ids 5")]),
        ("rows", [(1, 2, "look", "rows 2"), (5, 6, "look", "rows 3"), (9, 10, "look", "rows 4")]),
        (
            "gather, 4 warps",
            [
                (0.2, 3.6, "copy", "tile 1: 64 tokens"),
                (4.2, 7.6, "copy", "tile 2"),
                (8.2, 11, "copy", "tile 3"),
            ],
        ),
        (
            "math",
            [
                (0, 3.8, "product", "tile 0: S, P, O"),
                (4, 7.8, "product", "tile 1"),
                (8, 11, "product", "tile 2"),
            ],
        ),
    )
    return schedule(
        "MLA over chosen tokens: what feeds the same products", lanes, [(2, 3.6, 3, 4.1), (2, 7.6, 3, 8.1)]
    )


def blocksparse() -> str:
    lanes = (
        ("scout", [(0, 1.4, "look", "tile 2"), (1.4, 2.4, "copy", "its Q"), (6.4, 7.8, "look", "tile 3")]),
        (
            "keys",
            [(0, 1, "copy", "K1"), (1.2, 2.2, "copy", "K2"), (3, 4, "copy", "own K'"), (5, 6, "copy", "K1'")],
        ),
        (
            "values",
            [
                (0, 1, "copy", "own V"),
                (1.6, 2.6, "copy", "V1"),
                (3.4, 4.4, "copy", "V2"),
                (6, 7, "copy", "own V'"),
            ],
        ),
        (
            "math: products",
            [
                (0, 1, "product", "own S"),
                (2, 3, "product", "S1"),
                (3, 4, "product", "own O"),
                (4.2, 5.2, "product", "S2"),
                (5.2, 6.2, "product", "O1"),
                (6.4, 7.4, "product", "own S'"),
                (7.4, 8.4, "product", "O2"),
                (8.8, 9.8, "product", "S1'"),
            ],
        ),
        (
            "math: softmax",
            [
                (1, 2, "softmax", "own P"),
                (3, 4, "softmax", "P1"),
                (5.2, 6.2, "softmax", "P2"),
                (7.4, 8.4, "softmax", "own P'"),
                (8.8, 9.8, "store", "tile 1"),
            ],
        ),
    )
    return schedule("Block-sparse prefill: the end of a tile and the next (')", lanes)


def paged() -> str:
    def tile(at: float, name: str) -> list[Block]:
        steps = (
            ("wait", "wait", 1.0),
            ("product", f"S {name}", 1.2),
            ("softmax", "softmax", 1.4),
            ("product", "O += P V", 1.4),
        )
        blocks = []
        for kind, label, long in steps:
            blocks.append((at, at + long, kind, label))
            at += long
        return blocks

    lanes = (
        (
            "once",
            [(0, 1.2, "look", "length"), (1.2, 2.4, "look", "page ids"), (2.4, 3.6, "copy", "first K, V")],
        ),
        ("tile i", [*tile(3.6, "i"), *tile(8.6, "i + 1")]),
        (
            "loads",
            [(3.6, 7.2, "copy", "K, V of tiles ahead"), (7.2, 8.6, "copy", "of i + 3")],
        ),
        ("page ids", [(7.2, 8.6, "look", "of i + 4")]),
        ("at last", [(13.6, 15.4, "store", "out, or a split")]),
    )
    return schedule("Paged attention in Pallas: one program", lanes)


def ragged() -> str:
    def tile(at: float, name: str) -> list[Block]:
        return [
            (at, at + 1.2, "product", f"S {name}"),
            (at + 1.2, at + 2.6, "softmax", "softmax"),
            (at + 2.6, at + 4, "product", "O += P V"),
        ]

    lanes = (
        (
            "once",
            [(0, 1.2, "look", "sequence"), (1.2, 2.4, "look", "page ids"), (2.4, 3.6, "copy", "first K, V")],
        ),
        ("whole tiles", [*tile(3.6, "i"), *tile(7.6, "i + 1")]),
        ("edges, masked", tile(11.6, "n")),
        ("loads", [(6.2, 7.6, "copy", "of i + 2"), (10.2, 11.6, "copy", "of i + 3")]),
        ("page ids", [(6.2, 7.6, "look", "of i + 3"), (10.2, 11.6, "look", "of i + 4")]),
    )
    return schedule("Ragged attention in Pallas: 128 rows of a sequence and a KV head", lanes)


def parts() -> str:
    sequences = [
        (0, 3.5, "copy", "0"),
        (3.5, 4.6, "product", "1"),
        (4.6, 5.6, "softmax", "2"),
        (5.6, 12, "store", "3"),
    ]
    dealt = [(2.4 * i, 2.4 * i + 2.4, "look", f"part {i}") for i in range(5)]
    splits = [
        (0, 2.4, "copy", "0.0"),
        (2.4, 3.5, "copy", "0.1"),
        (3.5, 4.6, "product", "1.0"),
        (4.6, 5.6, "softmax", "2.0"),
        (5.6, 7.2, "store", "3.0"),
        (7.2, 9.6, "store", "3.1"),
        (9.6, 12, "store", "3.2"),
    ]
    lanes = (("sequences", sequences), ("multiprocessors", dealt), ("splits", splits))
    return schedule("A schedule: equal parts of all tokens", lanes, over="tokens", legend=False)


PICTURES = {
    "way": way,
    "paged": paged,
    "ragged": ragged,
    "parts": parts,
    "attention": attention,
    "mla": mla,
    "mla_bytes": mla_bytes,
    "chosen": chosen,
    "blocksparse": blocksparse,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (PLACE / f"{name}.svg").write_text(draw())
