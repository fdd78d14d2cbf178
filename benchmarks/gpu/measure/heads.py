"""Trees of trained heads in the shapes of the target, of random weights: what a draft takes.

Simulations count what a head's passes read. What comes on top of that is the difference to the
floor here: launches, and looks at candidates on the host. Trees are grown level by level on the
host and, on a GPU, by a captured graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ....core.proposals import LogitsParams, Proposal
from ....drafters.heads.device_trees import TextEnd, device_trees
from ....drafters.heads.drafter import network_of
from ....drafters.heads.last_stage import paged_kv_of
from ....drafters.heads.networks.head_network import HeadNetwork
from ....drafters.heads.networks.kept_keys import PagedKeys
from ....drafters.heads.options import HeadOptions
from ....drafters.heads.tree_growth import TreeGrowth
from ....drafters.model.text_distribution import TextDistribution
from ....models.heads.dflash import DFlash
from ....models.heads.dflash_config import BLOCK_SIZE, DFlashConfig
from ....models.heads.feature_head import FeatureHead
from ....models.heads.feature_head_config import FeatureHeadConfig
from ....models.heads.load_head import SharedParts
from ....models.heads.spec_former import SpecFormer, SpecFormerConfig
from ....models.load.partition import LayerSpan
from ....models.stage.gpu_path import CudaCapture, uses_fused_modules
from ..findings import Findings
from ..floors import StepTraffic
from ..instruments.stages import SPREAD, random_slice
from ..plan import GpuModelPlan
from ..setting import DTYPE, GpuSetting

M = TypeVar("M", bound=nn.Module)
GROUP = "drafts of heads"
# As the bundled heads draft by default.
MAX_NODES, TOP_K, GRIFFIN_LEVELS, SPECFORMER_DRAFTS = 60, 10, 6, 8
# As published for models of 8B.
DFLASH_LAYERS = 5
# Committed rows that are read before a draft: a step's accepted tokens.
NEW_ROWS = 4
GREEDY = TextDistribution(0.0, 0, LogitsParams(), None, None, 0)


@dataclass(frozen=True, slots=True)
class HeadCase:
    """A head, and what a draft of it takes.

    num_features  states of the target that it reads of each token
    weight_bytes  that a pass reads, the output head's included
    num_rows      of all passes: the text's new ones, and those of the tree
    """

    name: str
    network: HeadNetwork
    options: HeadOptions
    num_features: int
    weight_bytes: int
    passes: int
    num_rows: int


def measure_heads(setting: GpuSetting, findings: Findings) -> None:
    """A draft of one request, behind the context of the plan's step of one token: reading the new
    rows, and growing the tree."""
    plan = setting.plan.whole
    shared = _shared_parts(plan, setting)
    heads: dict[str, Callable[[], HeadCase]] = {
        "griffin": lambda: _griffin(plan, shared, setting.device),
        "specformer": lambda: _specformer(plan, shared, setting.device),
        "dflash": lambda: _dflash(plan, shared, setting.device),
    }
    for name, make in heads.items():
        findings.attempt(f"{GROUP}, {name}", partial(_measure, make, plan, setting, findings))


def _measure(
    make: Callable[[], HeadCase], plan: GpuModelPlan, setting: GpuSetting, findings: Findings
) -> None:
    case, vocab_size = make(), plan.options["vocab_size"]
    network, hidden = case.network, plan.options["hidden_size"]
    context, device = setting.plan.one_token.context_len, setting.device
    width = hidden * case.num_features
    growth = TreeGrowth(network, vocab_size, case.name, case.options)
    tokens = torch.randint(vocab_size, (context,), device=device)
    slots = torch.arange(context, device=device)
    with torch.inference_mode():
        projected = network.project(torch.zeros(1, width, dtype=DTYPE, device=device))
        kv, output = paged_kv_of(network, context, projected, DTYPE)

    def read(first: int) -> TextEnd:
        """Read the rows from `first` on; those before them are in the cache."""
        kept = PagedKeys(kv, slots, first)
        features = torch.randn(context - first, width, dtype=DTYPE, device=device)
        projected, count = network.project(features), context - first
        output = network.read(projected, tokens[first:], slots[first:], [kept], [count])[-1:]
        own = np.arange(context, dtype=np.int32)
        return TextEnd(int(tokens[-1]), context - 1, output, kept, own, GREEDY, MAX_NODES)

    def on_host() -> Proposal:
        end = read(context - NEW_ROWS)
        tree = growth.begin(end.kept, end.token, end.output, context + 1, GREEDY, MAX_NODES)
        assert tree is not None
        growth.grow([tree])
        return growth.proposal(tree, MAX_NODES)

    capture = CudaCapture(device) if device.type == "cuda" else None
    trees = device_trees(case.name, network, kv, output, vocab_size, case.options, capture)

    def in_a_graph() -> Proposal:
        assert trees is not None
        grown = trees.grow([read(context - NEW_ROWS)])
        if grown is None:
            raise RuntimeError("its graph was not captured")
        return grown[1][0]

    work = StepTraffic(
        case.passes * case.weight_bytes, 2 * case.num_rows * case.weight_bytes // DTYPE.itemsize
    )
    with torch.inference_mode():
        read(0)
        ways = {"": on_host} if trees is None else {"": on_host, ", captured": in_a_graph}
        for how, draft in ways.items():
            num_nodes, times = len(draft().tokens), setting.clock.waited(draft)
            a_pass = 1e3 * statistics.median(times) / case.passes
            what = f"{case.name}, {case.passes} passes, context {context}{how}"
            findings.add(
                GROUP, what, times, work, note=f"{num_nodes} nodes, {a_pass:.2f} ms a pass"
            )


def _shared_parts(plan: GpuModelPlan, setting: GpuSetting) -> SharedParts:
    """Embeddings, norm and output head of the plan's model."""
    count = plan.config().num_hidden_layers
    fused = uses_fused_modules(setting.device, setting.attention)
    config = plan.config()
    last = random_slice(
        config, LayerSpan(count - 1, count, count), DTYPE, setting.device, fused=fused
    )
    first = random_slice(config, LayerSpan(0, 1, count), DTYPE, setting.device, fused=fused)
    assert first.embed is not None
    assert last.norm is not None
    assert last.head is not None
    return SharedParts(first.embed, last.norm, last.head, None)


def _griffin(plan: GpuModelPlan, shared: SharedParts, device: torch.device) -> HeadCase:
    sizes = plan.options
    config = FeatureHeadConfig(
        fusion="guided", fusion_size=2 * sizes["hidden_size"], splits_output=True,
        feature_size=sizes["hidden_size"], vocab_size=sizes["vocab_size"], **_layer(sizes),
    )  # fmt: skip
    head = _random(lambda: FeatureHead(config), device)
    options = HeadOptions(tree="dynamic", top_k=TOP_K, num_tokens=GRIFFIN_LEVELS)
    weights = _weight_bytes(head) + _output_bytes(sizes)
    # The pass over the text's rows gives the first level, each other one is a pass of its own.
    num_rows = NEW_ROWS + (GRIFFIN_LEVELS - 1) * TOP_K
    return HeadCase(
        "griffin", network_of(head, shared), options, 1, weights, GRIFFIN_LEVELS, num_rows
    )


def _specformer(plan: GpuModelPlan, shared: SharedParts, device: torch.device) -> HeadCase:
    sizes = plan.options
    config = SpecFormerConfig(draft_length=SPECFORMER_DRAFTS, **_layer(sizes))
    head = _random(lambda: SpecFormer(config), device)
    head.make_fast()
    options = HeadOptions(tree="best_first", top_k=TOP_K, num_tokens=SPECFORMER_DRAFTS)
    weights = _weight_bytes(head) + _output_bytes(sizes)
    num_rows = NEW_ROWS + SPECFORMER_DRAFTS
    return HeadCase(
        "specformer", network_of(head, shared), options, config.num_features, weights, 1, num_rows
    )


def _dflash(plan: GpuModelPlan, shared: SharedParts, device: torch.device) -> HeadCase:
    sizes = plan.options
    config = DFlashConfig(
        block_size=BLOCK_SIZE, mask_token=0, num_layers=DFLASH_LAYERS, num_features=DFLASH_LAYERS,
        feature_size=sizes["hidden_size"], vocab_size=sizes["vocab_size"], **_layer(sizes),
    )  # fmt: skip
    head = _random(lambda: DFlash(config), device)
    options = HeadOptions(tree="best_first", top_k=TOP_K, num_tokens=config.draft_length)
    weights = _weight_bytes(head) + _output_bytes(sizes)
    num_rows = NEW_ROWS + config.block_size
    return HeadCase(
        "dflash", network_of(head, shared), options, config.num_features, weights, 1, num_rows
    )


def _layer(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_heads": sizes["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
    }


def _random(make: Callable[[], M], device: torch.device) -> M:
    """A module of noise; vectors are ones."""
    head = make().to(device, DTYPE).requires_grad_(False).eval()
    for parameter in head.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=SPREAD)
    return head


def _weight_bytes(head: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in head.parameters())


def _output_bytes(sizes: dict[str, Any]) -> int:
    """Of the target's output head."""
    return sizes["vocab_size"] * sizes["hidden_size"] * DTYPE.itemsize
