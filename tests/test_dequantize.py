"""Weights of quantised checkpoints, as transformers and torch make them float32."""

import json

import ml_dtypes
import numpy as np
import pytest
from models_support import import_torch, write_tokenizer
from safetensors.numpy import save_file

from pallas_attn.models import load_checkpoint
from pallas_attn.models.dequantize import dequantized

pytestmark = pytest.mark.once  # nothing of it is JAX's
RNG = np.random.default_rng(0)
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}


def fp8_of(shape, block=(16, 8)):
    """(fp8, factors, what they say)."""
    tiles = [-(-size // step) for size, step in zip(shape[-2:], block, strict=True)]
    scales = RNG.uniform(0.5, 2, (*shape[:-2], *tiles)).astype(np.float32)
    array = RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    expected = array.astype(np.float32).copy()
    for row in range(shape[-2]):
        for column in range(shape[-1]):
            expected[..., row, column] *= scales[..., row // block[0], column // block[1]]
    return array, scales, expected


@pytest.mark.parametrize("shape", [(32, 16), (40, 20), (3, 17, 9)])
def test_fp8_has_a_factor_for_each_tile(shape):
    array, scales, expected = fp8_of(shape)
    plain = np.ones(3, np.float32)
    weights = dequantized({"a.weight": array, "a.weight_scale_inv": scales, "norm.weight": plain}, FP8)
    assert sorted(weights) == ["a.weight", "norm.weight"]
    assert len(weights) == 2
    assert "a.weight_scale_inv" not in weights
    np.testing.assert_array_equal(weights["a.weight"], expected)
    assert weights["norm.weight"] is plain
    wrong = dequantized({"a.weight": array, "a.weight_scale_inv": scales[..., :1]}, FP8)
    with pytest.raises(ValueError, match=r"argument 'a.weight_scale_inv': expected shape \["):
        wrong["a.weight"]


def test_mxfp4_is_what_transformers_makes_of_it():
    torch = import_torch()
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = RNG.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = RNG.integers(118, 132, (2, 6, 3), dtype=np.uint8)
    weights = dequantized(
        {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, {"quant_method": "mxfp4"}
    )
    assert list(weights) == ["gate_up_proj"]
    expected = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(weights["gate_up_proj"], expected.numpy())


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "gptq", "bits": 4}, FP8 | {"activation_scheme": "static"}, {"quant_method": "fp8"}],
)
def test_other_kinds_are_refused(config):
    with pytest.raises(ValueError, match="argument 'quantization_config': expected quant_method 'fp8' with"):
        dequantized({}, config)


def test_a_folder_of_fp8_loads(tmp_path):
    sizes = dict(
        model_type="qwen3", vocab_size=97, hidden_size=24, intermediate_size=20, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, quantization_config=FP8,
    )  # fmt: skip
    shapes = {"self_attn.q_proj": (16, 24), "self_attn.k_proj": (8, 24), "self_attn.v_proj": (8, 24)}
    shapes |= {"self_attn.o_proj": (24, 16), "mlp.gate_proj": (20, 24), "mlp.up_proj": (20, 24)}
    tensors, expected = {}, {}
    for name, shape in (shapes | {"mlp.down_proj": (24, 20)}).items():
        name = f"model.layers.0.{name}.weight"
        tensors[name], tensors[f"{name}_scale_inv"], expected[name] = fp8_of(shape)
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        size = 8 if "self_attn" in name else 24
        tensors[f"model.layers.0.{name}.weight"] = np.ones(size, ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = np.ones(24, ml_dtypes.bfloat16)
    tensors["model.embed_tokens.weight"] = RNG.normal(size=(97, 24)).astype(ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    write_tokenizer(tmp_path, 97)
    layers = load_checkpoint(tmp_path).model.layers
    np.testing.assert_array_equal(
        layers.mlp.down_proj.kernel[0], expected["model.layers.0.mlp.down_proj.weight"].T
    )
    value = expected["model.layers.0.self_attn.v_proj.weight"].T
    np.testing.assert_array_equal(layers.attention.qkv_proj.kernel[0][:, -8:], value)


def test_a_folder_of_mxfp4_loads(tmp_path):
    """GPT-OSS as it is published: gate and up of an expert take turns."""
    import_torch()
    import transformers

    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1)
    config = transformers.GptOssConfig(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model = transformers.GptOssForCausalLM(config)
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    prefix, packed = "model.layers.0.mlp.experts.", {}
    for name, shape in (("gate_up_proj", (2, 128, 1)), ("down_proj", (2, 32, 2))):
        del tensors[prefix + name]
        packed[f"{name}_blocks"] = RNG.integers(0, 256, (*shape, 16), dtype=np.uint8)
        packed[f"{name}_scales"] = RNG.integers(120, 130, shape, dtype=np.uint8)
    save_file(
        tensors | {prefix + name: array for name, array in packed.items()}, tmp_path / "model.safetensors"
    )
    settings = json.loads(config.to_json_string()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    write_tokenizer(tmp_path, 97)
    mlp = load_checkpoint(tmp_path).model.layers.mlp
    plain = dequantized(packed, {"quant_method": "mxfp4"})
    np.testing.assert_array_equal(mlp.gate_up[0][..., :64], plain["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(mlp.gate_up[0][..., 64:], plain["gate_up_proj"][..., 1::2])
    np.testing.assert_array_equal(mlp.down[0], plain["down_proj"])
