"""Flax modules over the ops: NNX here, their Linen twins in `pallas_attn.nn.linen`; `attention_fn` is for Flax's own
modules, of both."""

from .alibi import alibi_slopes as alibi_slopes
from .attention_fn import attention_fn as attention_fn
from .indexer import Indexer as Indexer
from .indexer import IndexerConfig as IndexerConfig
from .latent_gqa import LatentGQA as LatentGQA
from .mla import MLAConfig as MLAConfig
from .mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from .paged_attention import PagedAttention as PagedAttention
from .rotary import Yarn as Yarn

__all__ = [
    "Indexer",
    "IndexerConfig",
    "LatentGQA",
    "MLAConfig",
    "MultiHeadLatentAttention",
    "PagedAttention",
    "Yarn",
    "alibi_slopes",
    "attention_fn",
]
