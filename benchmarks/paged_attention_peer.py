"""`paged_attention` for the peers harness: what users get, and a sweep over configs.

    python jax_peer.py --module benchmarks/paged_attention_peer.py --peer paged-attention --ids REGEX --out FILE

Peer "paged-attention" takes the default config. Peer "paged-sweep" takes configs from PAGED_VARIANTS, separated by
spaces, each written <block_q>x<block_kv>w<warps>s<stages>n<most splits>t<target programs>m<least tokens a split>:
"16x128w4s3n1t528m256 16x32w4s5n16t264m64".
"""

import os
import re

from pallas_attn import paged_attention
from pallas_attn.ops.paged_attention import PagedAttentionConfig

IMPLEMENTATION = os.environ.get("PAGED_IMPLEMENTATION", "pallas")


class PagedAttention:
    name, op, layout = "paged-attention", "gqa_decode", "nphd"

    def variants(self, sh):
        return [{}]

    def config(self, var) -> PagedAttentionConfig | None:
        return None

    def fn(self, sh, var):
        config = self.config(var)

        def call(query, key_cache, value_cache, block_tables, seq_lens):
            return paged_attention(
                query,
                key_cache,
                value_cache,
                block_tables,
                seq_lens,
                implementation=IMPLEMENTATION,
                config=config,
            )

        return call


class PagedSweep(PagedAttention):
    name = "paged-sweep"

    def variants(self, sh):
        return [dict(v=v) for v in os.environ["PAGED_VARIANTS"].split()]

    def config(self, var):
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)n(\d+)t(\d+)m(\d+)", var["v"])
        assert match, var["v"]
        block_q, block_kv, warps, stages, splits, target, least = map(int, match.groups())
        return PagedAttentionConfig(block_q, block_kv, splits, least, target, warps, stages)


PEERS = {"paged-attention": PagedAttention, "paged-sweep": PagedSweep}
