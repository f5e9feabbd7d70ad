"""What `mla_prefill` works on."""

from pallas_attn._call.operands import dims, operands
from pallas_attn._types import Array


@operands
class Operands:
    query: Array = dims("tokens heads dim")
    latent_cache: Array = dims("pages slot kv_heads dim")
    block_tables: Array = dims("rows columns")
    seq_lens: Array = dims("rows")
    cu_q_lens: Array = dims("bounds")
    num_seqs: Array = dims("one")
    key_up: Array = dims("heads nope_dim latent")
    value_up: Array = dims("heads value_dim latent")
    scale: float
    form: str | None
    implementation: str | None
