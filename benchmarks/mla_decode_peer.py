"""`mla_decode` for the peers harness: what users get, and a sweep over configs and ways to cut the work.

    python jax_peer.py --module benchmarks/mla_decode_peer.py --peer mla-decode --all-variants --ids REGEX --out FILE

Peer "mla-decode" times the heuristic's config three ways: with the tile scheduler (made beforehand, as the peers'
metadata are), without it, and never cutting a sequence (`cut=no`), which is for batches of equal lengths.

Peer "mla-sweep" takes configs from MLA_VARIANTS, separated by spaces, each written
<block_q>x<block_kv>w<warps>s<stages> and then g<programs a core>m<least tokens a piece> for the grid, or
p<parts>o<overhead in blocks> for the tile scheduler: "16x64w4s3g1m64 16x64w4s3p132o1".
"""

import dataclasses
import os
import re

import jax.numpy as jnp
import numpy as np

from pallas_attn._call.device import Device
from pallas_attn.ops.mla_decode import MLADecodeConfig, mla_decode, mla_schedule
from pallas_attn.ops.mla_decode.config import heuristic

CORES = 132
IMPLEMENTATION = os.environ.get("MLA_IMPLEMENTATION", "pallas")


def lengths(sh):
    return np.array(sh.get("lens") or [sh["s"]] * sh["b"], np.int32)


def call(sh, schedule, config):
    return lambda query, cache, tables, lens: mla_decode(
        query,
        cache[:, :, None, :],
        tables,
        lens,
        schedule=schedule,
        causal=sh["sq"] > 1,
        implementation=IMPLEMENTATION,
        config=config,
    )


class MlaDecode:
    name, op, layout = "mla-decode", "mla_decode", "nphd"

    def variants(self, sh):
        return [dict(cut="schedule"), dict(cut="grid"), dict(cut="no")]

    def fn(self, sh, var):
        lens = lengths(sh)
        config = heuristic(
            num_seqs=len(lens),
            num_kv_heads=1,
            rows=sh["h"] * sh["sq"],
            page_size=sh["page"],
            max_len=-(-int(lens.max()) // sh["page"]) * sh["page"],
            device=Device("gpu", "NVIDIA H100 80GB HBM3", CORES, 90),
        )
        if var["cut"] == "schedule":
            return call(sh, mla_schedule(jnp.asarray(lens), num_heads=sh["h"], q_len=sh["sq"]), config)
        if var["cut"] == "no":
            config = dataclasses.replace(config, num_splits=1)
        return call(sh, None, config)


class MlaSweep(MlaDecode):
    name = "mla-sweep"

    def variants(self, sh):
        return [dict(v=v) for v in os.environ["MLA_VARIANTS"].split()]

    def fn(self, sh, var):
        pattern = r"(\d+)x(\d+)w(\d+)s(\d+)(?:g(\d+)m(\d+)|p(\d+)o(\d+))"
        match = re.fullmatch(pattern, var["v"])
        assert match, var["v"]
        block_q, block_kv, warps, stages, per_core, least, parts, overhead = (
            int(x) if x else 0 for x in match.groups()
        )
        lens = lengths(sh)
        if parts:
            parts //= -(-sh["h"] * sh["sq"] // 64)
            schedule = mla_schedule(
                jnp.asarray(lens),
                num_heads=sh["h"],
                q_len=sh["sq"],
                num_parts=parts,
                overhead_blocks=overhead,
            )
            return call(sh, schedule, MLADecodeConfig(block_q, block_kv, num_warps=warps, num_stages=stages))
        programs, target = len(lens) * -(-sh["h"] * sh["sq"] // block_q), CORES * per_core
        num_splits = max(1, min(-(-2 * target // programs), int(lens.max()) // least, 128))
        return call(sh, None, MLADecodeConfig(block_q, block_kv, num_splits, least, target, warps, stages))


PEERS = {"mla-decode": MlaDecode, "mla-sweep": MlaSweep}
