"""Trees that grow on the device are those that the host grows level by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from draftline.core.proposals import LogitsParams, Proposal
from draftline.drafters.heads.device_trees import MOST_CONTEXTS, MOST_ROWS, DeviceTrees, TextEnd
from draftline.drafters.heads.networks.head_network import FeatureNetwork
from draftline.drafters.heads.networks.kept_keys import PagedKeys
from draftline.drafters.heads.options import HeadOptions
from draftline.drafters.heads.tree_growth import TreeGrowth
from draftline.drafters.model.text_distribution import TextDistribution
from draftline.models.attention.step_attention import PagedKv
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.load_head import SharedParts
from draftline.models.stage.gpu_path import Capture, CudaCapture, Work
from support.fakes.recorded_graph import RecordedGraphs
from torch import nn

HIDDEN, VOCAB, NUM_SLOTS, MAX_NODES = 16, 64, 512, 20
OPTIONS = HeadOptions(tree="dynamic", top_k=3, num_tokens=3)
HEADS = {
    "eagle": {"fusion": "linear", "num_layers": 2},
    "griffin": {"fusion": "guided", "fusion_size": 24, "splits_output": True},
    # Fewer tokens of its own than are looked at with a temperature.
    "eagle3": {
        "fusion": "pair", "num_features": 3, "draft_vocab_size": 10, "has_token_map": True,
    },
}  # fmt: skip
NO_PARAMS = LogitsParams()
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
        self.network = FeatureNetwork(head, SharedParts(embed, nn.Identity(), output, None))
        self.kv = PagedKv(config.num_layers, NUM_SLOTS, 2, 8, device=device)
        self._width = config.num_features * HIDDEN
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
        features = torch.randn(count, self._width).to(device)
        positions = torch.arange(count, device=device)
        projected = self.network.project(features)
        said = self.network.read(projected, tokens.to(device), positions, [kept], [count])[-1:]
        end = int(tokens[-1]), count - 1, said, kept, slots
        return TextEnd(*end, way(temperature, seed=count), MAX_NODES)

    @torch.inference_mode()
    def on_host(self, ends: Sequence[TextEnd]) -> list[Proposal]:
        growth = TreeGrowth(self.network, VOCAB, "head", OPTIONS)
        trees = [
            growth.begin(
                end.kept, end.token, end.said, end.position + 2, end.distribution, end.max_nodes
            )
            for end in ends
        ]
        growth.grow([tree for tree in trees if tree is not None])
        return [growth.proposal(tree, end.max_nodes) for tree, end in zip(trees, ends, strict=True)]

    def on_device(self, capture: Capture) -> DeviceTrees:
        return DeviceTrees("head", self.network, self.kv, VOCAB, OPTIONS, capture)


@torch.inference_mode()
def assert_same(texts: Texts, trees: DeviceTrees, ends: Sequence[TextEnd]) -> None:
    grown = trees.grow(ends)
    assert grown is not None
    num_levels, proposals = grown
    assert num_levels == min(OPTIONS.num_tokens, max(end.max_nodes for end in ends))
    for found, expected in zip(proposals, texts.on_host(ends), strict=True):
        found.check(VOCAB)
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
        assert_same(texts, trees, texts.read(lengths, temperature))
    assert graphs.num_replays == [2]


@on_cpus
def test_each_request_has_its_own_size_temperature_and_filters(graphs: RecordedGraphs) -> None:
    texts = Texts("griffin")
    trees = texts.on_device(graphs)
    few = LogitsParams(top_k=4, top_p=0.7, min_p=0.05)
    filtered, greedy = texts.read([12, 8])
    ends = [filtered._replace(distribution=way(0.9, few)), greedy._replace(max_nodes=2)]
    assert_same(texts, trees, ends)


@on_cpus
def test_what_no_graph_holds_is_left_to_the_host(graphs: RecordedGraphs) -> None:
    texts = Texts("eagle")
    trees = texts.on_device(graphs)
    [end] = texts.read([5])
    typical = way(1.0, LogitsParams(typical_p=0.5))
    assert trees.grow([end._replace(distribution=typical)]) is None
    assert trees.grow([end] * (MOST_ROWS // OPTIONS.top_k + 1)) is None
    assert trees.grow([end._replace(slots=np.zeros(MOST_CONTEXTS + 1, dtype=np.int32))]) is None
    assert graphs.num_replays == []
    assert_same(texts, trees, [end])


def test_after_a_capture_that_failed_the_host_grows_all_trees(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(work: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory")

    texts = Texts("eagle")
    trees = texts.on_device(fail)
    for _ in range(2):
        assert trees.grow(texts.read([5])) is None
    assert [record.message.split()[0] for record in caplog.records] == ["event=head_graph_failed"]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", HEADS)
def test_a_cuda_graph_grows_the_hosts_trees(kind: str, temperature: float) -> None:
    texts = Texts(kind, "cuda")
    trees = texts.on_device(CudaCapture(torch.device("cuda")))
    for lengths in ([9, 30, 1], [17, 2, 40, 5], [300]):
        for _ in range(2):
            assert_same(texts, trees, texts.read(lengths, temperature))


@pytest.mark.gpu
def test_filters_are_part_of_a_cuda_graph() -> None:
    texts = Texts("eagle3", "cuda")
    trees = texts.on_device(CudaCapture(torch.device("cuda")))
    filtered, greedy = texts.read([12, 40])
    few = LogitsParams(top_k=4, top_p=0.7, min_p=0.05)
    assert_same(texts, trees, [filtered._replace(distribution=way(0.9, few)), greedy])
