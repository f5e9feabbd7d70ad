"""Cases and inputs of `mla_decode`; see `cases.py` and `inputs.py` for what they are for."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_attn.testing.cases import SHORT_DTYPE
from pallas_attn.testing.inputs import block_tables, token_places


@dataclasses.dataclass(frozen=True)
class MLADecodeCase:
    """One call of `mla_decode`: the `q_len` newest tokens of each sequence.

    `num_parts` is the number of parts of its schedule; None goes without one. `config` overrides fields of the
    kernel's config.
    """

    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int = 1
    q_len: int = 1
    page_size: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    num_parts: int | None = None
    spare_pages: int = 3
    config: tuple[tuple[str, int], ...] = ()

    head_dim = 576

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def id(self) -> str:
        parts = [f"b{self.num_seqs}", f"q{self.num_heads}kv{self.num_kv_heads}", f"s{self.q_len}"]
        parts += ["causal"] if self.causal else []
        parts += [f"p{self.page_size}", SHORT_DTYPE[self.dtype]]
        parts += [f"parts{self.num_parts}"] if self.num_parts else []
        parts += [f"{name.removeprefix('num_')}{value}" for name, value in self.config]
        return "-".join(parts)


def mla_decode_cases() -> list[MLADecodeCase]:
    """Head counts, q_len, page sizes, dtypes and both ways to cut the work of `mla_decode`, each at least once."""
    splits = (("num_splits", 4), ("min_split_tokens", 128), ("target_programs", 64))
    lens = (0, 1, 63, 64, 65, 255, 257, 521)
    return [
        MLADecodeCase(lens, 1),
        MLADecodeCase(lens, 3, config=splits),
        MLADecodeCase(lens, 16, num_parts=7),
        MLADecodeCase(lens, 9, q_len=2, causal=True, config=splits),
        MLADecodeCase(lens, 6, 2, q_len=4, causal=True, page_size=16, num_parts=13),
        MLADecodeCase(lens, 4, q_len=4, page_size=32, num_parts=4),
        MLADecodeCase(lens, 8, 4, page_size=16, config=splits),
        MLADecodeCase(lens, 63, page_size=128, num_parts=5),
        MLADecodeCase(lens, 126, num_parts=9),
        MLADecodeCase(lens, 63, q_len=2, causal=True, page_size=16),
        MLADecodeCase(lens, 16, dtype="float16", num_parts=7),
        MLADecodeCase(lens, 5, q_len=2, causal=True, dtype="float16", page_size=128, config=splits),
        MLADecodeCase(lens, 4, dtype="float32", config=(*splits, ("block_kv", 16))),
        MLADecodeCase(lens, 4, q_len=2, causal=True, dtype="float32", page_size=24, num_parts=3),
        # tiles larger than a page, and larger than a block of the schedule
        MLADecodeCase(lens, 4, page_size=16, config=(("block_kv", 64),)),
        MLADecodeCase(lens, 4, page_size=128, num_parts=5, config=(("block_kv", 128), ("num_stages", 2))),
    ]


def _outweighing(queries: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """A key whose logit with each query is the log-sum-exp of the others plus 0.5."""
    logits = queries @ keys.T * scale
    peak = logits.max(axis=1, initial=-30.0)
    target = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1) + 1e-30) + 0.5
    # The least key that meets every query at its target.
    return np.linalg.lstsq(queries, np.maximum(target, 0.5) / scale, rcond=None)[0]


@dataclasses.dataclass
class LatentInputs:
    """Arguments of one call of `mla_decode`, as numpy arrays."""

    query: np.ndarray
    latent_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray

    def arguments(self) -> tuple:
        return tuple(map(jnp.asarray, dataclasses.astuple(self)))


def mla_decode_inputs(case: MLADecodeCase, seed: int = 0) -> LatentInputs:
    """N(0, 1) queries and latents; NaN in every slot that no sequence owns."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    tables, num_pages = block_tables(rng, case.seq_lens, case.page_size, case.spare_pages)
    query = rng.standard_normal((case.num_seqs, case.q_len, case.num_heads, case.head_dim)).astype(dtype)
    cache = np.full((num_pages, case.page_size, case.num_kv_heads, case.head_dim), np.nan, dtype)
    for seq, length in enumerate(case.seq_lens):
        place = token_places(tables[seq], length, case.page_size)
        cache[place] = rng.standard_normal((length, case.num_kv_heads, case.head_dim)).astype(dtype)
    return LatentInputs(query, cache, tables, np.asarray(case.seq_lens, np.int32))


def plant_latent_needles(case: MLADecodeCase, inputs: LatentInputs, positions: dict[int, int]) -> None:
    """`plant_needles` for a latent cache: the token outweighs the sequence's others for every query row."""
    for seq, position in positions.items():
        length = case.seq_lens[seq]
        page, offset = token_places(inputs.block_tables[seq], length, case.page_size)
        others = np.arange(length) != position
        for head in range(case.num_kv_heads):
            heads = slice(head * case.group, (head + 1) * case.group)
            queries = inputs.query[seq, :, heads].astype(np.float64).reshape(-1, case.head_dim)
            keys = inputs.latent_cache[page, offset, head].astype(np.float64)[others]
            needle = _outweighing(queries, keys, case.head_dim**-0.5)
            spot = (page[position], offset[position], head)
            inputs.latent_cache[spot] = needle.astype(inputs.latent_cache.dtype)
