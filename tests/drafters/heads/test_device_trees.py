"""Trees that grow on the device are those that the host grows level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.proposals import LogitsParams, Proposal
from draftline.drafters.heads.device_trees import (
    MOST_COPIED,
    MOST_ROWS,
    DeviceTrees,
    TextEnd,
    device_trees,
)
from draftline.drafters.heads.drafter import network_of
from draftline.drafters.heads.last_stage import paged_kv_of
from draftline.drafters.heads.networks.head_network import FeatureNetwork, HeadNetwork
from draftline.drafters.heads.networks.kept_keys import KeptKeys, PagedKeys
from draftline.drafters.heads.options import HeadOptions
from draftline.drafters.heads.tree_growth import TreeGrowth
from draftline.drafters.model.text_distribution import TextDistribution
from draftline.models.attention.step_attention import PagedKv
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.load_head import SharedParts, load_head, load_shared_parts
from draftline.models.heads.mtp import load_mtp_head
from draftline.models.load.model_info import read_model_info
from draftline.models.stage.gpu_path import Capture, CudaCapture, Work
from support.fakes.recorded_graph import RecordedGraphs
from support.inputs import head_checkpoints as published
from support.inputs import mtp_checkpoint
from support.inputs.head_pairs import TEXT, Pair, pair_of
from torch import nn

HIDDEN, VOCAB, NUM_SLOTS, MAX_NODES = 16, 64, 512, 20
OPTIONS = HeadOptions(top_k=3, num_tokens=3)
HEADS = {
    "eagle": {"fusion": "linear", "num_layers": 2},
    "griffin": {"fusion": "guided", "fusion_size": 24, "splits_output": True},
    # Fewer tokens of its own than are looked at with a temperature.
    "eagle3": {
        "fusion": "pair", "num_features": 3, "draft_vocab_size": 10, "has_token_map": True,
    },
}  # fmt: skip
PARALLEL = ["specformer", "medusa"]
# What they draft is behind a text of their own keys and values.
BLOCKS = [
    "p_eagle", "own_p_eagle", "dflash", "mixed_dflash", "own_dflash", "dspark", "gated_dspark",
    "rnn_dspark",
]  # fmt: skip
NO_PARAMS, NO_SLOTS = LogitsParams(), np.empty(0, dtype=np.int32)
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="records the interpreter's kernels")


def way(temperature: float, params: LogitsParams = NO_PARAMS, seed: int = 7) -> TextDistribution:
    return TextDistribution(temperature, seed, params, None, None, 0)


class Texts:
    """Texts that a random head has read, in one paged cache."""

    def __init__(self, kind: str, device: str = "cpu") -> None:
        torch.manual_seed(1)
        config = FeatureHeadConfig(
            **{"feature_size": HIDDEN, "hidden_size": HIDDEN, "intermediate_size": 24,
               "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": VOCAB, **HEADS[kind]}
        )  # fmt: skip
        head, embed = FeatureHead(config), nn.Embedding(VOCAB, HIDDEN)
        output = nn.Linear(HIDDEN, VOCAB, bias=False)
        if config.has_token_map:
            head.d2t.copy_(torch.arange(config.draft_vocab_size) * 5)
        for part in (head, embed, output):
            part.to(device).eval().requires_grad_(requires_grad=False)
            for parameter in part.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
        shared = SharedParts(embed, nn.Identity(), output, None)
        self.network: HeadNetwork = FeatureNetwork(head, shared)
        self.kv = PagedKv(config.num_layers, NUM_SLOTS, 2, 8, device=device)
        self.width = config.num_features * HIDDEN
        self._rng = np.random.default_rng(5)

    @torch.inference_mode()
    def read(self, lengths: Sequence[int], temperature: float = 0.0) -> list[TextEnd]:
        """Texts of so many rows, each in slots of its own, over those that were read before."""
        slots = np.split(self._rng.permutation(NUM_SLOTS)[: sum(lengths)], np.cumsum(lengths)[:-1])
        return [self._end(own.astype(np.int32), temperature) for own in slots]

    def _end(self, slots: np.ndarray, temperature: float) -> TextEnd:
        count, device = len(slots), self.network.device
        kept = PagedKeys(self.kv, torch.from_numpy(slots).long().to(device), 0)
        tokens = torch.from_numpy(self._rng.integers(VOCAB, size=count))
        features = torch.randn(count, self.width).to(device)
        positions = torch.arange(count, device=device)
        projected = self.network.project(features)
        outputs = self.network.read(projected, tokens.to(device), positions, [kept], [count])[-1:]
        end = int(tokens[-1]), count - 1, outputs, kept, slots
        return TextEnd(*end, way(temperature, seed=count), MAX_NODES)

    def on_device(self, capture: Capture) -> DeviceTrees:
        outputs = torch.zeros(1, 2 * HIDDEN, device=self.network.device)
        trees = device_trees("head", self.network, self.kv, outputs, VOCAB, OPTIONS, capture)
        assert trees is not None
        return trees


def on_host(
    network: HeadNetwork, ends: Sequence[TextEnd], vocab_size: int, options: HeadOptions
) -> list[Proposal]:
    growth = TreeGrowth(network, vocab_size, "head", options)
    trees = [
        growth.begin(
            end.kept, end.token, end.output, end.position + 2, end.distribution, end.max_nodes
        )
        for end in ends
    ]
    growth.grow([tree for tree in trees if tree is not None])
    return [growth.proposal(tree, end.max_nodes) for tree, end in zip(trees, ends, strict=True)]


@torch.inference_mode()
def assert_same(
    network: HeadNetwork, trees: DeviceTrees, ends: Sequence[TextEnd], vocab_size: int = VOCAB,
    options: HeadOptions = OPTIONS,
) -> None:  # fmt: skip
    grown = trees.grow(ends)
    assert grown is not None
    num_levels, proposals = grown
    most = network.most_levels or options.num_tokens
    levels = min(most, options.num_tokens, max(end.max_nodes for end in ends))
    assert num_levels == (0 if network.is_parallel else levels)
    for found, expected in zip(proposals, on_host(network, ends, vocab_size, options), strict=True):
        found.check(vocab_size)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-3, atol=1e-4)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    return RecordedGraphs(monkeypatch)


@on_cpus
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", HEADS)
def test_a_device_grows_the_hosts_trees(
    kind: str, temperature: float, graphs: RecordedGraphs
) -> None:
    texts = Texts(kind)
    trees = texts.on_device(graphs)
    # Padded to four requests; what a replay fills differs from what was captured.
    for lengths in ([9, 30, 1], [17, 2, 40, 5]):
        assert_same(texts.network, trees, texts.read(lengths, temperature))
    assert graphs.num_replays == [2]


@on_cpus
def test_a_layer_of_the_target_that_keeps_latents(graphs: RecordedGraphs, tmp_path: Path) -> None:
    target = read_model_info(mtp_checkpoint.write_mtp_checkpoint(tmp_path, "deepseek_v3"))
    texts, width, vocab_size = Texts("eagle"), target.hidden_size, target.vocab_size
    output = nn.Linear(width, vocab_size, bias=False)
    shared = SharedParts(nn.Embedding(vocab_size, width), nn.Identity(), output, None)
    texts.network = network_of(load_mtp_head(target, torch.float32, "cpu"), shared)
    texts.kv, outputs = paged_kv_of(texts.network, NUM_SLOTS, torch.zeros(1, width), torch.float32)
    texts.width = width
    # One side of a rank of 16 and a rotated part of 8.
    assert texts.kv.data.shape == (1, NUM_SLOTS, 1, 1, 24)
    facts = "head", texts.network, texts.kv, outputs, vocab_size
    trees = device_trees(*facts, OPTIONS, graphs)
    assert trees is not None
    for lengths in ([9, 30, 1], [17, 2, 40, 5]):
        assert_same(texts.network, trees, texts.read(lengths, 0.8), vocab_size)
    assert graphs.num_replays == [2]


@torch.inference_mode()
def compare_parallel(pair: Pair, temperature: float, capture: Capture, device: str) -> None:
    """Of a head that drafts all levels by a text's last row: texts are beginnings of one."""
    shared = load_shared_parts(pair.target, "float32", device)
    network = network_of(load_head(pair.folder, device=device), shared)
    features = network.project(torch.from_numpy(pair.features(TEXT)).to(device))
    count, kept = len(features), KeptKeys(network.num_layers)
    places = torch.arange(count, device=device)
    outputs = network.read(features, places, places, [kept], [count]).split(1)
    ends = [
        TextEnd(0, place, outputs[place], kept, NO_SLOTS, way(temperature), 16)
        for place in (3, 6, 9)
    ]
    kv, vocab_size = PagedKv(0, 0, 0, 0, device=device), published.VOCAB
    trees = device_trees("head", network, kv, outputs[0], vocab_size, OPTIONS, capture)
    assert trees is not None
    for some in (ends, ends[:1], ends[1:]):
        assert_same(network, trees, some, vocab_size)


@on_cpus
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", PARALLEL)
def test_levels_that_are_drafted_at_once(
    kind: str, temperature: float, graphs: RecordedGraphs, tmp_path: Path
) -> None:
    compare_parallel(pair_of(kind, tmp_path), temperature, graphs, "cpu")
    assert sum(graphs.num_replays) == 3


@torch.inference_mode()
def compare_blocks(
    pair: Pair, temperature: float, capture: Capture, device: str, options: HeadOptions = OPTIONS
) -> None:
    """Of a head whose drafts attend to the text: texts are beginnings of one, in one cache."""
    shared = load_shared_parts(pair.target, "float32", device)
    network = network_of(load_head(pair.folder, device=device), shared)
    features = network.project(torch.from_numpy(pair.features(TEXT)).to(device))
    kv, outputs = paged_kv_of(network, NUM_SLOTS, features[:1], torch.float32)
    trees = device_trees("head", network, kv, outputs, published.VOCAB, options, capture)
    assert trees is not None
    assert trees.capture_first()
    tokens = torch.tensor([*TEXT[1:], 3], device=device)
    rng = np.random.default_rng(5)
    for counts in ([4, len(features), 1], [7], [2, 3, 3, 9]):
        slots = np.split(rng.permutation(NUM_SLOTS)[: sum(counts)], np.cumsum(counts)[:-1])
        kept = [PagedKeys(kv, torch.from_numpy(own).to(device), 0) for own in slots]
        rows = torch.cat([torch.arange(count, device=device) for count in counts])
        outputs = network.read(features[rows], tokens[rows], rows, kept, counts)
        last_rows = np.cumsum(counts) - 1
        ends = [
            TextEnd(
                int(tokens[count - 1]), count - 1, outputs[last : last + 1], text,
                own.astype(np.int32), way(temperature, seed=count), max_nodes,
            )
            for count, last, text, own, max_nodes in zip(
                counts, last_rows, kept, slots, (MAX_NODES, 1, 2, MAX_NODES), strict=False
            )
        ]  # fmt: skip
        assert_same(network, trees, ends, published.VOCAB, options)


@on_cpus
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_and_masks_behind_texts(
    kind: str, temperature: float, graphs: RecordedGraphs, tmp_path: Path
) -> None:
    compare_blocks(pair_of(kind, tmp_path), temperature, graphs, "cpu")
    assert sum(graphs.num_replays) == 3


@on_cpus
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("kind", ["p_eagle", "dflash", "rnn_dspark"])
def test_fewer_levels_than_a_head_says_and_more(
    kind: str, num_tokens: int, graphs: RecordedGraphs, tmp_path: Path
) -> None:
    options = replace(OPTIONS, num_tokens=num_tokens)
    compare_blocks(pair_of(kind, tmp_path), 0.8, graphs, "cpu", options)


@on_cpus
def test_each_request_has_its_own_size_temperature_and_filters(graphs: RecordedGraphs) -> None:
    texts = Texts("griffin")
    trees = texts.on_device(graphs)
    few = LogitsParams(top_k=4, top_p=0.7, min_p=0.05)
    filtered, greedy = texts.read([12, 8])
    ends = [filtered._replace(distribution=way(0.9, few)), greedy._replace(max_nodes=2)]
    assert_same(texts.network, trees, ends)


@on_cpus
def test_what_no_graph_holds_is_left_to_the_host(graphs: RecordedGraphs) -> None:
    texts = Texts("eagle")
    trees = texts.on_device(graphs)
    [end] = texts.read([5])
    typical = way(1.0, LogitsParams(typical_p=0.5))
    assert trees.grow([end._replace(distribution=typical)]) is None
    assert trees.grow([end] * (MOST_ROWS // OPTIONS.top_k + 1)) is None
    assert trees.grow([end._replace(slots=np.zeros(MOST_COPIED + 1, dtype=np.int32))]) is None
    assert graphs.num_replays == []
    # Of texts that are longer than a head keeps them, there are a few rows more than 8,192.
    longest = end._replace(slots=np.zeros(8200, dtype=np.int32))
    assert trees.grow([longest] * 4) is not None
    assert_same(texts.network, trees, [end])


class Failing:
    """A capture for which memory is short."""

    def __call__(self, work: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def obstacle(self, work: Work) -> None:
        """None."""


def test_other_trees_and_stages_without_graphs_have_none() -> None:
    texts, outputs = Texts("eagle"), torch.zeros(1, 2 * HIDDEN)
    parts = "head", texts.network, texts.kv, outputs, VOCAB
    assert device_trees(*parts, replace(OPTIONS, tree="chain"), Failing()) is None
    assert device_trees(*parts, OPTIONS, None) is None
    # Of heads that estimate no confidence, nothing ends a tree.
    assert device_trees(*parts, replace(OPTIONS, min_confidence=0.5), Failing()) is not None


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_a_host_grows_trees_of_a_target_whose_head_says_float32(kind: str, tmp_path: Path) -> None:
    """As that of a GPU does, whose states have 16 bits."""
    pair, shapes = pair_of("dspark", tmp_path), published.dspark(kind)
    del shapes["lm_head.weight"]
    folder = published.save(tmp_path / kind, shapes, published.DSPARK)
    shared = load_shared_parts(pair.target, "bfloat16", "cpu")
    wide = replace(shared, head=lambda states: shared.head(states).float())
    network = network_of(load_head(folder, torch.bfloat16), wide)
    features = network.project(torch.from_numpy(pair.features(TEXT)))
    rows, kept = torch.arange(len(features)), KeptKeys(network.num_layers)
    outputs = network.read(features, rows, rows, [kept], [len(rows)])[-1:]
    end = TextEnd(5, len(rows) - 1, outputs, kept, NO_SLOTS, way(0.8), MAX_NODES)
    [proposal] = on_host(network, [end], published.VOCAB, OPTIONS)
    assert len(proposal.tokens) > OPTIONS.num_tokens


def test_after_a_capture_that_failed_the_host_grows_all_trees(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = Texts("eagle")
    trees = texts.on_device(Failing())
    assert not trees.capture_first()
    assert trees.grow(texts.read([5])) is None
    assert [record.message.split()[0] for record in caplog.records] == ["event=head_graph_failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="records the interpreter's kernels")
def test_a_head_that_waits_for_the_device_has_no_graphs(
    graphs: RecordedGraphs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts("eagle")
    logits = texts.network.logits
    monkeypatch.setattr(
        texts.network, "logits", lambda outputs: logits(outputs * outputs.max().item())
    )
    assert not texts.on_device(graphs).capture_first()
    assert not graphs.num_replays
    assert caplog.text.count("event=head_graphs_not_captured") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", HEADS)
def test_a_cuda_graph_grows_the_hosts_trees(kind: str, temperature: float) -> None:
    texts = Texts(kind, "cuda")
    trees = texts.on_device(CudaCapture(torch.device("cuda")))
    for lengths in ([9, 30, 1], [17, 2, 40, 5], [300]):
        for _ in range(2):
            assert_same(texts.network, trees, texts.read(lengths, temperature))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", PARALLEL)
def test_a_cuda_graph_drafts_all_levels(kind: str, temperature: float, tmp_path: Path) -> None:
    capture = CudaCapture(torch.device("cuda"))
    compare_parallel(pair_of(kind, tmp_path), temperature, capture, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_cuda_graph_has_blocks_and_masks(kind: str, temperature: float, tmp_path: Path) -> None:
    capture = CudaCapture(torch.device("cuda"))
    compare_blocks(pair_of(kind, tmp_path), temperature, capture, "cuda")


@pytest.mark.gpu
def test_filters_are_part_of_a_cuda_graph() -> None:
    texts = Texts("eagle3", "cuda")
    trees = texts.on_device(CudaCapture(torch.device("cuda")))
    filtered, greedy = texts.read([12, 40])
    few = LogitsParams(top_k=4, top_p=0.7, min_p=0.05)
    assert_same(texts.network, trees, [filtered._replace(distribution=way(0.9, few)), greedy])
