"""How pictures name and draw implementations, cells and cards, the same in each."""

import re
from collections.abc import Sequence

from results import Row

OURS = "ours"
# Implementations keep their look from picture to picture; what is not here gets what is left.
LOOKS = {
    "ours": ("#b2182b", "o"),
    "ours, CUDA": ("#b2182b", "h"),
    "ours, Pallas": ("#ef8a62", "s"),
    "ours, Pallas without a schedule": ("#f4b393", "v"),
    "ours, CUDA without a schedule": ("#d6604d", "^"),
    "ours, CUDA in a graph": ("#67001f", "p"),
    "ours, by Triton itself": ("#fdae61", "d"),
    "ours, plain jnp": ("#999999", "x"),
    "FlashMLA": ("#2166ac", "D"),
    "FA3 (vLLM)": ("#1b7837", "P"),
    "FlashInfer": ("#762a83", "X"),
    "cuDNN (jax.nn)": ("#4393c3", "^"),
    "vLLM's Triton": ("#8c510a", "<"),
    "jax's deprecated kernel": ("#35978f", ">"),
}
SPARE_LOOKS = (("#4d4d4d", "H"), ("#878787", "*"), ("#dfc27d", "d"))
TITLES = {
    "mla_decode": "MLA decode",
    "mla_step": "MLA decode step",
    "paged_attention": "Paged attention, decode",
    "ragged_paged_attention": "Ragged paged attention",
    "flash_attention": "Flash attention, forward",
    "flash_attention_gradients": "Flash attention, forward and backward",
    "blocksparse_attention": "Block-sparse attention, forward",
    "sparse_mla_decode": "Sparse MLA, decode",
    "sparse_mla_prefill": "Sparse MLA, prompts",
}
DTYPES = ("bf16", "bfloat16", "fp16", "f32")
# A part of a cell's id, and what a reader calls it; "" for what is said elsewhere.
WORDS = [
    (r"b\d+|bf16|bfloat16|fp16|f32|p\d+|q\d+kv\d+", ""),
    (r"(\d+)of\1", r"\1 tokens"),
    (r"dense", "dense"),
    (r"0\.(\d+)", r"0.\1 of the blocks"),
    (r"local16stride8step1", "Phi-3-small's pattern"),
    (r"b(\d+)x\1", r"blocks of \1"),
    (r"top(\d+)", r"\1 chosen"),
    (r"1x(\d+)", r"prompt of \1 tokens"),
    (r"(\d+)x(\d+)", r"\1 sequences of \2 tokens"),
    (r"(\d+)on(\d+)", r"\1 new tokens on \2"),
    (r"ragged(\d+)", r"\1 prompts, unequal, on unequal contexts"),
    (r"(\d+)decodes(\d+)prompts", r"\1 decodes and \2 prompts"),
    (r"t(\d+)s\1", r"\1 tokens"),
    (r"t(\d+)s(\d+)", r"\1 queries, \2 keys"),
    (r"t(\d+)", ""),
    (r"s(\d+)", r"\1 tokens"),
    (r"(normal|lognormal|exponential)(\d+)", r"about \2 tokens (\1)"),
    (r"from(\d+)", r"\1 tokens and more"),
    (r"d576", ""),
    (r"d(\d+)", r"dim \1"),
    (r"v(\d+)", r"values \1"),
    (r"qlen(\d+)", r"\1 new tokens"),
    (r"kv(e4m3|e5m2|int8)", r"\1 cache"),
    (r"sliding_window(\d+)|w(\d+)", r"window \1\2"),
    (r"documents(\d+)", r"\1 documents"),
]


def looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    spare = iter(SPARE_LOOKS * len(names))
    return {name: LOOKS.get(name) or next(spare) for name in names}


def in_order(names: set[str]) -> list[str]:
    """Ours first, then as in LOOKS."""
    known = list(LOOKS)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def is_ours(row: Row) -> bool:
    return row.implementation == OURS or row.implementation.startswith(f"{OURS}, ")


def shown(implementation: str) -> str:
    """For who does not know whose tables these are."""
    return re.sub(rf"^{OURS}\b", "pallas_attn", implementation)


def op_title(rows: Sequence[Row], between: str = ", ") -> str:
    """The op, the dtype of its queries, and the card."""
    named = (part for row in rows for part in row.case.split("-") if part in DTYPES)
    dtypes = ", ".join(dict.fromkeys(named)) or rows[0].dtype
    return f"{TITLES.get(rows[0].op, rows[0].op)}{between}{dtypes}, {rows[0].device}"


def cell(row: Row) -> list[str]:
    """A cell in words."""
    heads = f"{row.heads} heads" + (f" over {row.kv_heads}" if row.kv_heads not in (1, row.heads) else "")
    words = []
    for part in row.case.split("-"):
        known = (re.sub(of, to, part) for of, to in WORDS if re.fullmatch(of, part))
        words.append(next(known, part))
    first, *others = [word for word in words if word]
    # Where the id says how long one sequence is, rather than what the whole batch is.
    of_each = re.search(r"(^|-)(t\d+)?(s|normal|from|lognormal|exponential)\d+(-|$)", row.case)
    return [f"{row.batch} x {first}" if of_each else first, heads, *others]
