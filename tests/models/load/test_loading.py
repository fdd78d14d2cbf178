"""What is loaded, and the error for everything that can be wrong with a model folder."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.core.errors import CheckpointError, ConfigError
from draftline.models.layers.model_slice import load_slice
from draftline.models.layers.weight_memory import read_weight_memory
from draftline.models.load import checkpoint
from draftline.models.load.checkpoint import one_ahead
from draftline.models.load.model_info import read_model_info
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.load_stage import load_stage
from draftline.models.text.fingerprint import model_hash
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model

WHOLE = LayerSpan(0, 4, 4)
NORM = "model.layers.2.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("qwen2", tmp_path / "model")


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_and_a_single_file_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    shards = save_tiny_model("qwen2", tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    x = torch.randn(3, 32)
    one, other = (load_slice(path, WHOLE) for path in (folder, shards))
    assert one.head is not None
    assert other.head is not None
    assert torch.equal(one.head(x), other.head(x))
    assert torch.equal(one.layers[3].mlp(x), other.layers[3].mlp(x))


def test_the_host_holds_one_tensor_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they go elsewhere, that is: to a GPU, or rounded."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most_alive = []
    read = checkpoint.TensorFiles.read

    def watched(files: checkpoint.TensorFiles, names: Iterable[str]) -> Iterator[Any]:
        for name, tensor in read(files, names):
            alive.append(weakref.ref(tensor))
            most_alive.append(sum(one() is not None for one in alive))
            yield name, tensor

    monkeypatch.setattr(checkpoint.TensorFiles, "read", watched)
    load_slice(folder, WHOLE, "bfloat16")
    assert len(most_alive) > 40
    # The next is read while the names of the last still hold it.
    assert max(most_alive) <= 3


def test_a_stage_reads_its_own_tensors_only(folder: Path) -> None:
    """The tensors of the other stages may even be absent."""

    def keep(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if ".layers.1." not in name and ".layers.2." not in name:
                del tensors[name]

    edit_tensors(folder, keep)
    part = load_slice(folder, LayerSpan(1, 3, 4))
    assert (part.embed, part.norm, part.head) == (None, None, None)
    assert len(part.layers) == 2


def test_weights_are_converted_to_the_dtype_asked_for(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    part = load_slice(folder, WHOLE)
    assert part.embed is not None
    assert part.embed.weight.dtype == torch.float32


def test_old_exports_carry_rotary_frequencies_that_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    before = load_slice(folder, WHOLE)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    part = load_slice(folder, WHOLE)
    torch.testing.assert_close(part.rotary.state_dict(), before.rotary.state_dict())
    for layer, same in zip(part.layers, before.layers, strict=True):
        torch.testing.assert_close(layer.state_dict(), same.state_dict(), rtol=0, atol=0)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "gone.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lose_the_index(folder: Path) -> None:
    lose_a_shard(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), NORM),
    "unexpected tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.extra": torch.ones(2)})),
        "tensor model.extra unexpected",
    ),
    "shape": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(5)})),
        rf"{NORM} has shape \(5,\)",
    ),
    "integers": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
        "no quantization_config",
    ),
    "truncated": (truncate, "model.safetensors is missing or corrupt"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 9), "corrupt"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "lost shard": (lose_a_shard, "gone.safetensors is missing"),
    "bad index": (
        lambda f: (
            (f / "model.safetensors").rename(f / "model.safetensors.index.json").write_text("{}")
        ),
        "has no weight_map",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "config of nothing": (lambda f: (f / "config.json").write_text("{}"), "config.json"),
    "unknown type": (lambda f: edit_config(f, model_type="gpt2"), "unexpected in a gpt2 model"),
    "batch-dependent rope": (
        lambda f: edit_config(
            f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "'dynamic' is not supported",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_refused_with_its_fault(folder: Path, fault: str) -> None:
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load_slice(folder, WHOLE)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3n"])
def test_a_composite_model_of_another_text_part_is_refused_by_its_kind(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert read_model_info(tmp_path).model_type == f"{kind}_text"
    message = f"text part of model_type '{kind}', model_type '{kind}_text' is not supported: "
    with pytest.raises(CheckpointError, match=message):
        load_stage(tmp_path, LayerSpan(0, 1, 1), 8, 4)


@pytest.mark.parametrize("kind", ["vit", "resnet", "vision-encoder-decoder"])
def test_what_generates_no_text_is_refused_by_its_kind(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind}
    if kind == "vision-encoder-decoder":
        config |= {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=kind):
        read_model_info(tmp_path)


def test_a_composite_model_whose_parts_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ("a.embed_tokens.weight", "b.embed_tokens.weight")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="2 embeddings of tokens"):
        load_slice(tmp_path, LayerSpan(0, 1, 1))


def test_equal_weights_of_a_tied_pair_are_kept_once(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, num_layers=4)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t[name].clone()}))
    part = load_slice(folder, WHOLE, "bfloat16")
    assert part.embed is not None
    assert isinstance(part.head, torch.nn.Linear)
    assert part.head.weight is part.embed.weight


def test_memory_counts_a_stored_head(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, num_layers=4)
    tied = read_weight_memory(folder, dtype="bfloat16")
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": torch.ones(VOCAB_SIZE, 32)}))
    stored = read_weight_memory(folder, dtype="bfloat16")
    assert stored.num_bytes() == tied.num_bytes() + VOCAB_SIZE * 32 * 2


def test_a_folder_that_does_not_exist() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_slice("./nowhere", WHOLE)


def test_a_hub_id_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_args: object, **_kwargs: object) -> None:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(checkpoint, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="some-org/some-model is not a local folder"):
        load_slice("some-org/some-model", WHOLE)


def test_a_hub_id_is_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda *_args, **_kwargs: str(folder))
    assert read_model_info("some-org/some-model").path == folder


def test_wrong_settings_name_their_field(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: must be one of float32"):
        load_slice(folder, WHOLE, "int4")
    with pytest.raises(ConfigError, match="the model has 4"):
        load_slice(folder, LayerSpan(0, 5, 5))


def test_model_info_tells_sizes_and_special_tokens(folder: Path) -> None:
    info = read_model_info(folder)
    assert (info.vocab_size, info.num_layers, info.max_context_len) == (VOCAB_SIZE, 4, 256)
    assert (info.bos_token_id, info.eos_token_ids) == (0, (1,))


def test_the_generation_config_decides_which_tokens_end_an_answer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_model_info(folder).eos_token_ids == (5, 7)


def test_a_model_hash_follows_weights_and_config_only(folder: Path, tmp_path: Path) -> None:
    same = save_tiny_model("qwen2", tmp_path / "same")
    edit_config(same, transformers_version="0.0", _name_or_path="elsewhere")
    assert model_hash(same) == model_hash(folder)
    edit_tensors(same, lambda tensors: tensors[NORM].add_(1e-3))
    assert model_hash(same) != model_hash(folder)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert model_hash(folder) != model_hash(save_tiny_model("qwen2", tmp_path / "again"))


def test_one_tensor_is_read_ahead() -> None:
    """While the first is worked on, the second is read, and no other."""
    read: list[int] = []
    second = threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(4):
            read.append(index)
            if index == 1:
                second.set()
            yield f"tensor {index}", torch.full((3, 5000), index, dtype=torch.bfloat16)

    ahead = one_ahead(tensors())
    name, tensor = next(ahead)
    assert second.wait(20)
    assert (name, float(tensor[0, 0])) == ("tensor 0", 0.0)
    assert read == [0, 1]
    assert [(name, float(tensor[0, 0])) for name, tensor in ahead] == [
        ("tensor 1", 1.0), ("tensor 2", 2.0), ("tensor 3", 3.0),
    ]  # fmt: skip


def test_what_a_file_lacks_is_told_where_it_is_wanted() -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.zeros(())
        raise CheckpointError("the file is cut off")

    ahead = one_ahead(tensors())
    assert next(ahead)[0] == "first"
    with pytest.raises(CheckpointError, match="cut off"):
        next(ahead)
