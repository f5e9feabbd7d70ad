"""The 656 bytes of an fp8 latent as float64, by torch's own views of the bytes."""

import numpy as np
import torch


def dequantized(tokens: np.ndarray) -> torch.Tensor:
    """[..., 656] uint8 as [..., 576] float64: no rounding anywhere."""
    flat = torch.from_numpy(np.ascontiguousarray(tokens).reshape(-1, 656).copy())
    values = flat[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = flat[:, 512:528].contiguous().view(torch.float32).double()
    rope = flat[:, 528:].contiguous().view(torch.bfloat16).double()
    latents = values * scales.repeat_interleave(128, dim=1)
    return torch.cat([latents, rope], dim=1).reshape(*tokens.shape[:-1], 576)
