"""What `write_latents` works on."""

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS
from pallas_attn._tile.latents import Scales
from pallas_attn._types import Array

POOL = DIMS["NHD"]["key"]


@operands
class Operands:
    latent_cache: Array = dims(POOL)
    latents: Array = dims("tokens latent")
    slot_mapping: Array = dims("tokens")
    scales: Scales
