"""Folders as transformers saves them: the same logits from the same weights, and what is refused."""

import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from models_support import import_torch, write_tokenizer

from pallas_attn.models import generate, load_checkpoint
from pallas_attn.models.families import llama_config
from pallas_attn.nn.rotary import Llama3Scaling, rotary_frequencies

pytestmark = pytest.mark.once  # files, and a model that test_llama.py has on both jax

SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    initializer_range=0.4,  # fresh weights would give nearly the same logits whatever attention did
)
# Others: test_families.py.
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
}
ANSWER = dict(max_new_tokens=17, return_logits=True, page_size=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that saves a small random model of a family once, and gives (folder, the model)."""
    torch = import_torch()
    import transformers

    done = {}

    def save(family: str):
        if family not in done:
            name, options = FAMILIES[family]
            config = getattr(transformers, f"{name}Config")(**SIZES, **options)
            config._attn_implementation = "eager"
            torch.manual_seed(0)
            model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith("bias") or "norm" in parameter_name:  # else 0 and 1
                        parameter += 0.3 * torch.randn_like(parameter)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            write_tokenizer(folder, SIZES["vocab_size"])
            done[family] = folder, model
        return done[family]

    return save


@pytest.fixture(scope="module")
def answered(saved):
    """A function that gives (prompt, our answer with its logits) of a family, whose prompt is read at once."""
    prompt = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 21).tolist()

    @functools.cache
    def answer(family: str):
        folder, _ = saved(family)
        return prompt, generate(load_checkpoint(folder).model, [prompt], **ANSWER)

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2-windows", "mistral"])
def test_logits_are_those_of_transformers(saved, answered, family):
    """After a prompt read whole, and in chunks, where windows make a difference of it, and in 16 steps behind it."""
    import torch

    folder, reference = saved(family)
    prompt, whole = answered(family)
    for got in (whole, generate(load_checkpoint(folder).model, [prompt], **ANSWER, prefill_chunk=8)):
        assert got.logits is not None
        tokens = torch.tensor([[*prompt, *got.row(0)[:-1]]])
        with torch.no_grad():
            expected = reference(tokens).logits[0, len(prompt) - 1 :].numpy()
        assert np.abs(got.logits[0] - expected).max() < 2e-3
        assert np.abs(expected).max() > 1, "logits that differ"


@pytest.mark.control
def test_a_setting_that_were_ignored_would_show(saved, answered, tmp_path):
    family, without = "qwen2-windows", {"use_sliding_window": False, "layer_types": None}
    folder, _ = saved(family)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text()) | without
    (tmp_path / "config.json").write_text(json.dumps(settings))
    prompt, right = answered(family)
    options = ANSWER | {"max_new_tokens": 1}
    ignored = generate(load_checkpoint(tmp_path).model, [prompt], **options)
    assert np.abs(right.logits[:, :1] - ignored.logits).max() > 0.05


def test_tokenizer_weights_and_progress(saved):
    folder, reference = saved("qwen2")
    reports = []
    options = dict(dtype="bfloat16", batch_invariant=True)
    loaded = load_checkpoint(folder, **options, progress=lambda *report: reports.append(report))
    assert loaded.model.layers.attention.attend.batch_invariant
    count = len(reference.state_dict())
    assert sorted(set(reports)) == [(i, count) for i in range(1, count + 1)]
    assert reports == sorted(reports)
    assert loaded.model.embedding[...].dtype == jnp.bfloat16
    assert loaded.tokenizer.encode("abcab") == [0, 3, 2]
    assert loaded.tokenizer.encode("<s>abc") == [0, 3]
    assert loaded.tokenizer.stop_token_ids[:1] == (1,)
    assert loaded.tokenizer.decode([3, 2]) == "abcab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "expected a config.json with a model_type of llama, mistral"),
        ({"attention_bias": True}, "expected a tensor model.layers.0.self_attn.q_proj.bias, got none"),
        ({"hidden_act": "gelu"}, "argument 'hidden_act': expected 'silu' or 'gelu_pytorch_tanh', got 'gelu'"),
        ({"use_mrope": True}, "argument 'use_mrope': expected False, got True"),
        ({"sliding_window": 4}, "argument 'sliding_window': expected no setting that this decoder"),
        ({"partial_rotary_factor": 0.5}, "argument 'partial_rotary_factor': expected 1.0, got 0.5"),
        (
            {"new_trick": 3},
            "argument 'new_trick': expected no setting that this decoder does not know, got 3",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "argument 'rope_type': expected 'default' or"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "argument 'short_factor': expected a value with"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "argument 'factor': expected a value with rope type"),
        ({"rope_parameters": {"mscale": 2.0}}, "argument 'mscale': expected no setting that rope type"),
        ({"hidden_size": None}, "argument 'hidden_size': expected a value, got none"),
        ({"num_hidden_layers": 2}, "expected only tensors that the model uses, got 'model.layers.2."),
        ({"num_hidden_layers": 4}, "expected a tensor model.layers.3."),
        ({"intermediate_size": 81}, r"mlp.gate_proj.weight': expected shape \[81, 48\], got \[80, 48\]"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused_by_name(saved, tmp_path, changes, message):
    folder, _ = saved("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(saved, tmp_path, missing):
    folder, _ = saved("llama")
    for file in folder.iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(
        FileNotFoundError, match=f"load_checkpoint: argument 'path': expected a folder with {missing}"
    ):
        load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected an existing folder"):
        load_checkpoint(tmp_path / "absent")


def test_a_truncated_file_is_refused(saved, tmp_path):
    folder, _ = saved("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=r"expected complete safetensors files, got 'model\.safetensors'"):
        load_checkpoint(tmp_path)


def test_frequencies_of_llama_3():
    stretch = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain, got = rotary_frequencies(128, 500000.0), rotary_frequencies(128, 500000.0, stretch)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(got[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(got[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((got < plain) & (got > plain / 8))[between].all()
    with pytest.raises(ValueError, match=r"Llama3Scaling: argument 'high_freq_factor': expected more than"):
        Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0, original_context=8192)


def test_a_mapping_of_another_family_is_no_llama():
    with pytest.raises(ValueError, match="argument 'model_type': expected 'llama' or 'mistral'"):
        llama_config({"model_type": "deepseek_v3"})


@pytest.mark.parametrize(("before", "window", "full"), [(2, 5, (0, 1)), (3, None, ()), (28, None, ())])
def test_windows_that_begin_behind_the_last_layer_are_none(before, window, full):
    windows = dict(use_sliding_window=True, sliding_window=5, max_window_layers=before)
    config = llama_config({"model_type": "qwen2", **SIZES, **windows})
    assert (config.sliding_window, config.full_layers) == (window, full)


def test_deepseek_and_kimi_load_from_their_folders(tmp_path):
    """Their maths are test_deepseek.py's; here the folder, which both write alike."""
    torch = import_torch()
    from test_deepseek import theirs

    reference = theirs("v3")
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, SIZES["vocab_size"])
    for kind in ("deepseek_v3", "kimi_k2"):
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": kind}))
        got = generate(load_checkpoint(tmp_path).model, [[5, 6, 7]], max_new_tokens=1, return_logits=True)
        assert got.logits is not None
        with torch.no_grad():
            expected = reference(torch.tensor([[5, 6, 7]])).logits[0, -1].numpy()
        assert np.abs(got.logits[0, 0] - expected).max() < 2e-3


@pytest.mark.slow
def test_the_command_line_takes_a_folder(saved):
    from pallas_attn.cli import main

    folder, _ = saved("llama")
    arguments = [
        "generate",
        "--model",
        str(folder),
        "--raw",
        "--prompt",
        "abcab!",
        "--max-new-tokens",
        "3",
        "--check",
    ]
    assert main(arguments) == 0
