"""Folders and GGUF files that are broken, incomplete or something else: one line each, which says what."""

import json
import struct

import gguf
import numpy as np
import pytest
from models_support import TINY, write_tiny, write_tokenizer
from safetensors.numpy import save_file

from pallas_attn.models import load_checkpoint, load_gguf
from pallas_attn.models.hub import found

pytestmark = pytest.mark.once  # nothing of it is JAX's
SIZES = dict(
    model_type="llama", vocab_size=97, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
)  # fmt: skip
SHAPES = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
SHAPES |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (8, 16), "mlp.up_proj": (8, 16)}
SHAPES |= {"mlp.down_proj": (16, 8), "input_layernorm": (16,), "post_attention_layernorm": (16,)}


def tensors() -> dict[str, np.ndarray]:
    found = {f"model.layers.0.{name}.weight": np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    return found | {
        "model.embed_tokens.weight": np.ones((97, 16), np.float32),
        "model.norm.weight": np.ones(16, np.float32),
    }


@pytest.fixture
def folder(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    write_tokenizer(tmp_path, 97)
    load_checkpoint(tmp_path)
    return tmp_path


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def hostile_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def without_a_shard(folder):
    names = dict.fromkeys(tensors(), "model-00001-of-00002.safetensors")
    names["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def outside(folder):
    index = {"weight_map": {"model.norm.weight": "../../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def of_integers(folder):
    wrong = {"model.layers.0.mlp.up_proj.weight": np.ones((8, 16), np.int32)}
    save_file({**tensors(), **wrong}, folder / "model.safetensors")


def changed(**settings):
    return lambda folder: (folder / "config.json").write_text(json.dumps(SIZES | settings))


def no_json(folder):
    (folder / "config.json").write_text("{")


def no_object(folder):
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (truncated, "argument 'path': expected complete safetensors files, got 'model.safetensors'"),
        (hostile_header, "argument 'path': expected complete safetensors files, got 'model.safetensors'"),
        (without_a_shard, "argument 'path': expected a folder with model-00002-of-00002.safetensors, got"),
        (
            outside,
            "argument 'path': expected weights in the folder itself, got '../../elsewhere.safetensors'",
        ),
        (of_integers, "'model.layers.0.mlp.up_proj.weight': expected floating-point numbers, got int32"),
        (changed(hidden_size=2**40), "'model.embed_tokens.weight': expected shape [97, 1099511627776]"),
        (changed(hidden_size=-1), "load_checkpoint: argument 'hidden_size': expected at least 1, got -1"),
        (changed(num_hidden_layers=10**9), "argument 'num_hidden_layers': expected at most 100000, got"),
        (changed(num_attention_heads=0), "argument 'num_attention_heads': expected at least 1, got 0"),
        (changed(hidden_size="wide"), "argument 'hidden_size': expected an int, got 'wide' of type str"),
        (
            changed(quantization_config={"quant_method": "awq"}),
            "'quantization_config': expected quant_method",
        ),
        (no_json, "argument 'path': expected a config.json that is JSON, got"),
        (no_object, "argument 'path': expected a config.json that holds an object, got list"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_is_broken_says_so_in_a_line(folder, spoil, line):
    spoil(folder)
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as error:
        load_checkpoint(folder)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def shard(path, count: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", 3)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_shard_of_a_split_file_is_named_as_that(tmp_path):
    path = tmp_path / "model-00002-of-00003.gguf"
    shard(path, 3)
    with pytest.raises(
        ValueError, match=r"expected a whole model, got .*, which is part 2 of 3: merge them first"
    ):
        load_gguf(path)
    shard(path, 1)
    with pytest.raises(ValueError, match="expected metadata llama"):
        load_gguf(path)


@pytest.mark.parametrize("kept", [0, 3, 40, 2000, -64])
def test_a_gguf_file_that_is_cut_off_says_so_in_a_line(tmp_path, kept):
    whole = write_tiny(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:kept])
    with pytest.raises(
        ValueError, match=r"^load_gguf: argument 'path': expected a complete GGUF file, got"
    ) as error:
        load_gguf(path)
    assert "\n" not in str(error.value)


def test_hostile_counts_in_a_gguf_file(tmp_path):
    whole = bytearray(write_tiny(tmp_path / "whole.gguf").read_bytes())
    whole[8:16] = struct.pack("<Q", 2**61)  # tensors
    path = tmp_path / "hostile.gguf"
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"expected a complete GGUF file, got"):
        load_gguf(path)
    assert TINY.vocab_size == 97


def test_names_of_the_hub_are_looked_for_in_its_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    asked = []

    def snapshot(name, **options):
        asked.append((name, options))
        if name != "org/here":
            raise hub.errors.LocalEntryNotFoundError("not there")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert found("org/here") == tmp_path
    assert asked == [("org/here", {"local_files_only": True})]
    with pytest.raises(
        FileNotFoundError, match=r"in the hub's cache: run `hf download org/name` first, got 'org/name'"
    ):
        found("org/name")
    for name in ("models/tiny.gguf", "nothing", "a/b/c", "/no/such"):
        with pytest.raises(
            FileNotFoundError, match="expected an existing GGUF file, an existing folder or ORG/NAME"
        ):
            found(name)
    assert found(tmp_path) == tmp_path
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(
        FileNotFoundError, match="pip install huggingface-hub, then run `hf download org/name`"
    ):
        found("org/name")
