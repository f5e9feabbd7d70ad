"""`mla_decode`: the tables' 58 cells. Sequence i of a cell made from the command line has 2 i tokens more than the
first, as in FlashMLA's own benchmark."""

import inspect
from typing import Any, ClassVar

import costs
import jax

from workloads.base import Target
from workloads.decode import Call
from workloads.latents import LatentWorkload

# The loop's calls as nodes of a CUDA graph, which is how the peers' torch calls are timed.
IN_A_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}


# (batch, tokens, heads) that are measured over fp8 latents too.
FP8_CELLS = ((128, 4096, 16), (128, 4096, 64), (128, 4096, 128), (1, 32768, 16))
SKEWED = (4641, 45118, 1730, 1696)  # of ThunderMLA's published figures


class MLADecode(LatentWorkload):
    op = "mla_decode"
    targets: ClassVar[dict[str, Target]] = {
        "auto": Target("ours", None, scheduled=True),
        "cuda": Target("ours, CUDA", "cuda", scheduled=True),
        "cuda-graph": Target("ours, CUDA in a graph", "cuda", True, IN_A_GRAPH),
        "cuda-unscheduled": Target("ours, CUDA without a schedule", "cuda"),
        "pallas": Target("ours, Pallas", "pallas", scheduled=True),
        "pallas-unscheduled": Target("ours, Pallas without a schedule", "pallas"),
        "triton": Target("ours, by Triton itself", "triton", scheduled=True),
        "triton-unscheduled": Target("ours, by Triton itself without a schedule", "triton"),
        "xla": Target("ours, plain jnp", "xla"),
    }
    error_limit = 5e-3

    def cells(self) -> list[Any]:
        from pallas_attn.testing import cases

        return cases.cells(self.op)

    def options(self) -> list[Any]:
        from pallas_attn.testing import cases

        skewed = cases.MLADecodeCase(SKEWED, 16, q_len=4, causal=True, lengths="skewed", spare_pages=0)
        fp8 = [
            cases.MLADecodeCase(
                (tokens,) * batch, heads, lengths=f"s{tokens}", spare_pages=0, cache_dtype=dtype
            )
            for batch, tokens, heads in FP8_CELLS
            for dtype in (None, "float8_e4m3fn")
        ]
        return [skewed, *fp8]

    def tiny(self) -> list[Any]:
        from pallas_attn.testing import cases

        return [
            cases.MLADecodeCase((100, 64, 37), 3, page_size=16, lengths="uneven", spare_pages=0),
            cases.MLADecodeCase(
                (40, 42), 4, page_size=16, q_len=2, causal=True, lengths="s40", spare_pages=0
            ),
            cases.MLADecodeCase((70, 5), 2, lengths="short", spare_pages=0, cache_dtype="float8_e4m3fn"),
        ]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        from pallas_attn.testing import cases

        lengths = tuple(seqlen + 2 * i for i in range(batch))
        return cases.MLADecodeCase(
            lengths,
            heads,
            kv_heads or 1,
            q_len=q_len,
            causal=q_len > 1,
            lengths=f"from{seqlen}",
            spare_pages=0,
        )

    def cost(self, case: Any) -> costs.Cost:
        return costs.mla_decode(case)

    def beforehand(self, case: Any, target: str, lengths: jax.Array) -> Any:
        if not self.targets[target].scheduled:
            return None
        schedule = self.library.mla_schedule
        # Up to commit 10b77b7 the argument had FlashMLA's name.
        q_len = "q_len" if "q_len" in inspect.signature(schedule).parameters else "s_q"
        return schedule(
            lengths, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, **{q_len: case.q_len}
        )

    def call(self, case: Any, target: str) -> Call:
        def call(query, caches, table, lengths, schedule):
            return self.library.mla_decode(
                query,
                *caches,
                table,
                lengths,
                schedule=schedule,
                causal=case.causal,
                return_lse=True,
                implementation=self.targets[target].implementation,
            )

        return call
