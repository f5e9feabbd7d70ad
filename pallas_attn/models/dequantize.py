"""Dequantises checkpoints to float32 as they are read: block-scaled fp8 (DeepSeek-V3, Qwen) and MXFP4 (GPT-OSS)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pallas_attn._call.checks import fail

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
# Of OCP's Microscaling formats (2023): e2m1 by its four bits, and e8m0's bias.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BIAS = 127


def dequantized(weights: Mapping[str, Any], config: Any) -> Mapping[str, Any]:
    """The dequantised tensors.

    config: `quantization_config` of config.json; None for tensors that are not. ValueError for another kind.
    """
    if config is None:
        return weights
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    block = config.get("weight_block_size") if method == "fp8" else None
    dynamic = method == "fp8" and config.get("activation_scheme", "dynamic") == "dynamic"
    if method == "fp8" and dynamic and isinstance(block, list) and len(block) == 2:
        return _Fp8(weights, tuple(block))
    if method == "mxfp4":
        return _Mxfp4(weights)
    expected = "quant_method 'fp8' with weight_block_size and dynamic activations, or 'mxfp4'"
    fail("load_checkpoint", "quantization_config", expected, f"{config!r:.80}")


class _Fp8(Mapping[str, np.ndarray]):
    """Each tile of block[0] x block[1] of a matrix has a factor."""

    def __init__(self, weights: Mapping[str, Any], block: tuple[int, int]):
        self._weights, self._block = weights, block

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._weights[name]
        if (scale_name := name + _SCALE) not in self._weights:
            return array
        scale, array = self._weights[scale_name].astype(np.float32), array.astype(np.float32)
        wanted = tuple(-(-size // block) for size, block in zip(array.shape[-2:], self._block, strict=True))
        if scale.shape != (*array.shape[:-2], *wanted):
            expected = f"shape {[*array.shape[:-2], *wanted]}"
            fail("load_checkpoint", scale_name, expected, str(list(scale.shape)))
        for axis, block in ((-2, self._block[0]), (-1, self._block[1])):
            scale = np.repeat(scale, block, axis=axis)
        return array * scale[..., : array.shape[-2], : array.shape[-1]]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if not self._is_scale(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._weights and not self._is_scale(name)

    def _is_scale(self, name: Any) -> bool:
        return name.endswith(_SCALE) and name.removesuffix(_SCALE) in self._weights


class _Mxfp4(Mapping[str, np.ndarray]):
    """Experts [experts, out, in] in blocks of 32 along `in`, two elements a byte, the lower four bits first; here they
    are [experts, in, out], as GPT-OSS has them."""

    def __init__(self, weights: Mapping[str, Any]):
        self._weights = weights

    def __getitem__(self, name: str) -> np.ndarray:
        if name + _BLOCKS not in self._weights:
            return self._weights[name]
        blocks, scales = self._weights[name + _BLOCKS], self._weights[name + _SCALES]
        if blocks.dtype != np.uint8 or blocks.shape != (*scales.shape, 16):
            expected = f"uint8 of shape {[*scales.shape, 16]}"
            fail("load_checkpoint", name + _BLOCKS, expected, f"{blocks.dtype} of shape {list(blocks.shape)}")
        elements = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1)
        exponents = scales.astype(np.int32) - _BIAS
        elements = np.ldexp(elements.reshape(*scales.shape, 32), exponents[..., None])
        return elements.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)

    def __iter__(self) -> Iterator[str]:
        for name in self._weights:
            if name.endswith(_BLOCKS):
                yield name.removesuffix(_BLOCKS)
            elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in self._weights):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._weights or f"{name}{_BLOCKS}" in self._weights
