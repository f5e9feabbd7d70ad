"""What the ragged attention kernel is compiled for, and what follows from it for a block of query rows."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.sizes import ceil_div
from pallas_attn._split.problem import PagedCall, SplitKVProblem
from pallas_attn._tile import masking, triton
from pallas_attn._tile.walk import Seen
from pallas_attn.ops.ragged_attention.blocks import CUTS, TOTAL, Block, Lens, Ragged
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig, RaggedTiles
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.spans import Span, span

# There are work items for this many waves of programs where blocks may be cut; more would only start and find nothing
# to do.
MOST_ROUNDS = 4
# Blocks are counted if those of all tokens, in few sequences, are less than this part of the most there may be.
COUNTED = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded(SplitKVProblem):
    """Sequences of one block each: their "lengths" are the tiles that they walk."""

    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        return seq_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(PagedCall):
    """One launch of the kernel, for the sequences that its tiles suit; `pool` is the keys'."""

    num_tokens: int
    value_dim: int
    scale: float
    layout: str
    rules: masking.Rules
    causal: bool
    max_tree: int
    new_apart: bool
    """Whether the new tokens' keys and values are outside the cache."""
    skip_decode: bool
    """Whether sequences with one query token are skipped."""
    launches: tuple[RaggedTiles, ...]
    """Tiles of the call's launches: one for all sequences, or a second one for those with few query rows."""
    launch: int = 0
    """Which of them this is."""
    seen: Any = None
    """In a kernel, a `Seen` of refs: which keys a mask_mod leaves."""

    def each(self) -> Iterator["Problem"]:
        """The launches in order: the short one counts the blocks of the other."""
        return (self.launched(i) for i in reversed(range(len(self.launches))))

    def launched(self, launch: int) -> "Problem":
        return dataclasses.replace(self, launch=launch)

    @property
    def config(self) -> RaggedTiles:
        return self.launches[self.launch]

    @property
    def is_short(self) -> bool:
        return self.launch == 1

    @classmethod
    def of(cls, operands: Operands, config: RaggedAttentionConfig) -> "Problem":
        """The first launch of a call."""
        return cls(
            **vars(operands.sizes),
            num_tokens=operands.query.shape[0],
            value_dim=operands.value_dim,
            scale=operands.scale,
            layout=operands.layout,
            rules=operands.rules,
            causal=operands.causal,
            max_tree=operands.max_tree,
            new_apart=operands.key is not None,
            skip_decode=operands.skip_decode,
            launches=(config.long, config.short) if config.short else (config.long,),
        )

    @property
    def ragged(self) -> Ragged:
        return Ragged(self.num_tokens, self.num_seqs, self.group)

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return self.config.block_q

    @property
    def decoded(self) -> Decoded:
        """The sequences of a short launch."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(PagedCall)}
        return Decoded(**sizes, q_len=1, scale=self.scale, config=self.config)

    @property
    def grid(self) -> tuple[int, int]:
        if self.is_short:
            # Programs of neighbouring KV heads start together: in the NHD layout they read neighbouring bytes.
            return self.pool.num_kv_heads, self.decoded.num_items
        return self.num_items, self.pool.num_kv_heads

    @property
    def num_items(self) -> int:
        """Work items of a long launch for each KV head: for all splits of the blocks that it may serve or, where these
        are counted, for as many as are worth a program."""
        items = self.most_blocks * self.config.num_splits
        if not self.is_counted:
            return items
        enough = MOST_ROUNDS * self.config.target_programs // self.pool.num_kv_heads
        return max(self.most_blocks, min(items, enough))

    @property
    def is_counted(self) -> bool:
        """Whether the short launch counts the long one's blocks: worthwhile if decoded sequences may leave far fewer
        than there are places for. Finding out costs each program a microsecond."""
        if self.is_short or len(self.launches) == 1:
            return False
        return self.num_tokens * self.group // self.rows < COUNTED * self.most_blocks

    @property
    def num_cut(self) -> int:
        """Sequences, or in a long launch places for blocks, that may be cut."""
        return self.decoded.most_cut if self.is_short else self.most_blocks

    @property
    def most_splits(self) -> int:
        """The most splits of one of these."""
        return self.decoded.most_splits if self.is_short else self.config.num_splits

    @property
    def fixed_splits(self) -> bool:
        """Splits depend on the batch."""
        return False

    @property
    def num_places(self) -> int:
        """Places for partial results; 0 if no block is ever cut."""
        if self.is_short:
            return self.decoded.num_places
        return self.num_items if self.config.num_splits > 1 else 0

    @property
    def most_blocks(self) -> int:
        """The most blocks that a long launch serves: every sequence, and the padding, has at most one partial block."""
        least_tokens = self.launches[1].block_q // self.group + 1 if len(self.launches) > 1 else 1
        num_seqs = min(self.num_seqs, self.num_tokens // least_tokens)
        return self.num_tokens * self.group // self.rows + num_seqs + 1

    @property
    def notes(self) -> dict[str, int]:
        """Names and sizes of what this launch writes for later ones."""
        if self.is_short:
            return {TOTAL: 1} if self.launched(0).is_counted else {}
        return {CUTS: self.most_blocks} if self.num_places else {}

    def with_rules(self, refs: Operands) -> "Problem":
        """A window that is known at run time only is one of the rules all the same, and so is what a mask leaves."""
        found = self if refs.seen is None else dataclasses.replace(self, seen=refs.seen)
        if refs.sliding_window is None:
            return found
        window = triton.load(refs.sliding_window.at[np.int32(0)])
        return dataclasses.replace(found, rules=self.rules._replace(sliding_window=window))

    def find(self, lens: Lens, place: jax.Array) -> tuple[Block, jax.Array]:
        """The block at a place, and whether there is one that this launch serves."""
        if self.is_short:
            block = lens.first_block(place)
            return block, ~block.is_padding & self.serves(block.q_len)
        return lens.block_at(place, self.rows, self.num_blocks)

    def num_blocks(self, first: Block) -> jax.Array:
        """Blocks that a long launch serves of each sequence, given the sequences' first blocks."""
        served = first.is_padding | self.serves(first.q_len)
        return jnp.where(served, ceil_div(first.q_len * self.group, self.rows), 0)

    def count_blocks(self, lens: Lens) -> jax.Array:
        """All blocks that a long launch serves; whatever the bounds, no more than there are places for."""
        return jnp.clip(lens.count(self.num_blocks), 0, self.most_blocks)

    def serves(self, q_len: jax.Array) -> jax.Array:
        """Whether sequences of `q_len` query tokens are this launch's."""
        served = q_len > (1 if self.skip_decode else 0)
        if len(self.launches) == 1:
            return served
        is_short = q_len * self.group <= self.launches[1].block_q
        return served & (is_short if self.is_short else ~is_short)

    def lengths(self, lens: Lens, block: Block) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(tokens in a sequence's pages, its length, whether the length is invalid); 0 for padding."""
        stored, q_len = lens.stored(block.seq), jnp.where(block.is_padding, 0, block.q_len)
        in_pages = stored - q_len if self.new_apart else stored
        clamped = jnp.clip(in_pages, 0, self.max_len)
        return clamped, clamped + q_len if self.new_apart else clamped, clamped != in_pages

    def is_tree(self, block: Block) -> jax.Array:
        return block.q_len <= self.max_tree

    def keys_left(self, block: Block) -> Seen | None:
        """The keys that a mask leaves a block; None: all."""
        if self.seen is None:
            return None
        place = (
            self.ragged.first_place(block.seq, block.first_token, self.rows) + block.first_row // self.rows
        )
        place = jnp.minimum(place, self.ragged.places(self.rows) - 1)
        return Seen(*(triton.load(ref.at[place]) for ref in self.seen))

    def spans(self, block: Block, in_pages: jax.Array, seq_len: jax.Array) -> list[Span]:
        """The tiles that a block walks: of the pages and, if they are outside of these, of the new tokens."""
        begins = seq_len - block.q_len
        first = begins + block.first_query(self.group)
        last = begins + block.last_query(self.group, self.rows)
        seen_by_all = None
        if self.max_tree:
            # In a tree a query may see any of the new tokens, and have the position of any.
            is_tree = self.is_tree(block)
            seen_by_all = jnp.where(is_tree, begins, first + 1)
            first, last = jnp.where(is_tree, begins, first), jnp.where(is_tree, seq_len - 1, last)
        parts = [(0, in_pages), (in_pages, seq_len)] if self.new_apart else [(0, in_pages)]
        return [
            span(
                first,
                last,
                begin,
                end,
                causal=self.causal,
                sliding_window=self.rules.sliding_window,
                block_kv=self.config.block_kv,
                seen_by_all=seen_by_all,
                left=self.keys_left(block),
            )
            for begin, end in parts
        ]
