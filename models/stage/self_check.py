"""Whether stages compute a kind of models as transformers does, tried on a small copy of it.

The copy has the settings of the model's config, few and narrow layers, and random weights. What
transformers gives for a text must come from a stage and from two stages: for the text in two
chunks, for every path of a tree, and behind a path that was moved to its place. So no list of kinds
has to be kept.
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ...core.arrays import ROOT, Bool, Int32
from ...core.errors import UnsupportedModel
from ...core.kv_cache import NO_MOVES
from ...core.steps import SamplingRows, StepInput, TreeRows
from ...core.tree.tree import pack
from ..layers.model_slice import cut_slice
from ..load.partition import LayerSpan
from ..load.supported import FAULTS, empty_model, keeps_states
from .plain_path import PlainPath, make_kv, make_states
from .stage import Stage

LEAST_LAYERS = 4
# Sizes of the copy; settings that a config does not have are not added.
SIZES = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 16,
    "intermediate_size": 96, "intermediate_size_mlp": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "ffn_dim": 96, "n_inner": 96,
    "word_embed_proj_dim": 64, "rotary_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "sliding_window": 6, "attention_chunk_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "mamba_expand": 2,
}  # fmt: skip
TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
# Rounding of sums in another order, relative to the largest logit.
TOLERANCE = 1e-4
BLOCK_SIZE, NUM_BLOCKS = 4, 8
LENGTH, CHUNK = 20, 13
# A root with two children, the first of which has two, one of them with one.
NODES = np.array([3, 4, 5, 6, 7], dtype=np.int32)
PARENTS = (ROOT, ROOT, 0, 0, 2)
PATH = (0, 2, 4)


def check_kind(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` that says what differs, unless stages compute the kind."""
    fields = config.to_dict()
    fields.pop("quantization_config", None)
    # Some kinds say it by a list of their layers alone.
    fields["num_hidden_layers"] = config.num_hidden_layers
    types = tuple(getattr(config, "layer_types", None) or ())
    _check(config.model_type, json.dumps(fields, sort_keys=True, default=str), types)


@cache
def _check(kind: str, fields: str, layer_types: tuple[str, ...]) -> None:
    try:
        config = small_copy(kind, json.loads(fields), layer_types)
        peer = _filled(config)
    except FAULTS as error:
        why = f"a small copy cannot be made ({str(error).splitlines()[0]})"
        raise UnsupportedModel(kind, why) from error
    for bounds in ((0, config.num_hidden_layers), (0, 1, config.num_hidden_layers)):
        try:
            difference = _difference(peer, config, bounds)
        except FAULTS as error:
            why = f"its layers cannot run as stages ({str(error).splitlines()[0]})"
            raise UnsupportedModel(kind, why) from error
        if difference is not None:
            where = "two stages" if len(bounds) > 2 else "one stage"
            raise UnsupportedModel(kind, f"over {where}, {difference} gets other logits")


def small_copy(kind: str, fields: dict[str, Any], layer_types: tuple[str, ...]) -> PretrainedConfig:
    """The config of the copy, by the fields of the model's, and types of its layers."""
    for name, own in CONFIG_MAPPING[kind].attribute_map.items():
        if own in fields:
            fields[name] = fields.pop(own)
    count = fields["num_hidden_layers"]
    by_layer = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == count
    }
    # The first layers that have one of every kind.
    firsts = [value.index(one) for value in (*by_layer.values(), layer_types) for one in value]
    num_layers = min(count, max([LEAST_LAYERS - 1, *firsts]) + 1)
    small = fields | {name: value[:num_layers] for name, value in by_layer.items()}
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    small |= {name: size for name, size in SIZES.items() if fields.get(name)}
    small |= TOKENS
    if "qk_rope_head_dim" in fields:
        # Latent attention has head sizes of its own.
        small.pop("head_dim", None)
    small["num_hidden_layers"] = num_layers
    if groups is not None:
        small["num_key_value_heads"] = {heads: SIZES["num_attention_heads"], 1: 1}.get(groups, 2)
    small.pop("dtype", None)
    # Kimi Linear's sizes and kinds of layers as checkpoints say them, which the fields have, too.
    small.pop("linear_attn_config", None)
    return AutoConfig.for_model(kind, **{k: v for k, v in small.items() if k != "model_type"})


def _filled(config: PretrainedConfig) -> Any:
    """The copy in transformers' plainest attention, with weights that leave no term out."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                is_near = "norm" in name or "bias" in name
                noise = torch.randn_like(parameter) * (0.1 if is_near else 0.2)
                parameter.copy_(parameter + noise if is_near else noise)
    return whole.eval()


@torch.inference_mode()
def _difference(peer: Any, config: PretrainedConfig, bounds: tuple[int, ...]) -> str | None:
    """What gets other logits from stages of these bounds than from `peer`; None: nothing."""
    stages = [
        _stage(peer, config, LayerSpan(first, last, bounds[-1])) for first, last in pairwise(bounds)
    ]
    text = (7 * np.arange(1, LENGTH + 1, dtype=np.int32)) % np.int32(config.vocab_size)

    def logits(step: StepInput) -> Tensor:
        hidden = None
        for stage in stages[:-1]:
            hidden = stage.run(step, hidden)
            assert isinstance(hidden, Tensor)
        return stages[-1].logits(step, hidden, np.arange(len(step.token_ids), dtype=np.int32))

    def expected(*tokens: int) -> Tensor:
        return peer(torch.tensor([[*text.tolist(), *tokens]])).logits[0]

    def differ(found: Tensor, wanted: Tensor) -> bool:
        # Not `>`, which NaN would pass.
        return not bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())

    chunks = [logits(_chunk(text[:CHUNK], 0)), logits(_chunk(text[CHUNK:], CHUNK))]
    if differ(torch.cat(chunks), expected()):
        return "a text in two chunks"
    paths = [_path(node) for node in range(len(NODES))]
    wanted = torch.stack([expected(*NODES[path].tolist())[-1] for path in paths])
    if differ(logits(_tree()), wanted):
        return "a tree"
    moves = [[LENGTH + node, LENGTH + place] for place, node in enumerate(PATH)]
    moves = _slots(np.array(moves))
    after = _chunk(np.array([9, 8], dtype=np.int32), LENGTH + len(PATH), moves)
    if differ(logits(after), expected(*NODES[list(PATH)].tolist(), 9, 8)[-2:]):
        return "a text behind a path of a tree"
    return None


def _stage(peer: Any, config: PretrainedConfig, span: LayerSpan) -> Stage:
    """One stage of the copy."""
    whole = empty_model(deepcopy(config))
    # Its modules are taken apart, and the weights stay.
    whole.load_state_dict(peer.state_dict(), assign=True)
    part = cut_slice(whole, span, torch.float32, torch.device("cpu"), fused=False)
    states = make_states(part, 1, LENGTH, BLOCK_SIZE)
    if states is not None and not keeps_states(config):
        raise UnsupportedModel(config.model_type, "layer_types do not say that it keeps states")
    kv = make_kv(part, NUM_BLOCKS, BLOCK_SIZE)
    return Stage(PlainPath(part, kv, BLOCK_SIZE, states=states))


def _path(node: int) -> list[int]:
    return [] if node == ROOT else [*_path(PARENTS[node]), node]


def _tree() -> StepInput:
    paths = [_path(node) for node in range(len(NODES))]
    sees = np.zeros((len(NODES), len(NODES)), dtype=np.bool_)
    for node, path in enumerate(paths):
        sees[node, path] = True
    positions = np.array([LENGTH + len(path) - 1 for path in paths], dtype=np.int32)
    return _step(NODES, LENGTH, positions, sees)


def _slots(places: np.ndarray) -> Int32:
    """Slots of the request's places: its blocks stand in falling order."""
    blocks = NUM_BLOCKS - 1 - places // BLOCK_SIZE
    return (blocks * BLOCK_SIZE + places % BLOCK_SIZE).astype(np.int32)


def _chunk(tokens: Int32, first: int, moves: Int32 = NO_MOVES) -> StepInput:
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    return _step(tokens, first, positions, moves=moves)


def _step(
    tokens: Int32, first: int, positions: Int32, sees: Bool | None = None,
    moves: Int32 = NO_MOVES,
) -> StepInput:  # fmt: skip
    """Rows of the only request, at its places from `first` on."""
    slots = _slots(np.arange(first, first + len(tokens)))
    none = np.empty(0, dtype=np.int32)
    return StepInput(
        step_id=0,
        moves=moves,
        token_ids=tokens,
        positions=positions,
        slots=slots,
        request_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([first], dtype=np.int32),
        block_tables=np.arange(NUM_BLOCKS, dtype=np.int32)[None, ::-1].copy(),
        trees=(None if sees is None else TreeRows(pack(sees), slots, positions),),
        logits_rows=none,
        sampling=SamplingRows.greedy(np.empty(0, dtype=np.int64)),
        state_slots=np.zeros(1, dtype=np.int32),
    )
