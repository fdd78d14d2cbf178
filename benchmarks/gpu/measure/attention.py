"""One layer's attention alone: over pages, and torch's over the same keys lying in a row."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ....core.steps import StepInput
from ....models.attention.backend import choose_backend
from ....models.attention.step_attention import PagedKv
from ..findings import Figure, Findings, free_memory
from ..floors import HeadShape, attention_work
from ..instruments.stages import TILES, decode_step, random_kv, tree_mask
from ..plan import StepCase
from ..setting import DTYPE, GpuSetting

GROUP = "attention of a layer"
TORCH_GROUP = "torch SDPA, keys in a row"
# Largest difference relative to the largest result; bfloat16 has 8 bits.
TOLERANCE = 0.02


def measure_attention(setting: GpuSetting, findings: Findings) -> None:
    """Every case of the plan by the stage's backend and by torch."""
    heads = setting.plan.whole.shape().heads
    for case in setting.plan.attention:
        # The pages, and torch's copy of them.
        if 2 * case.num_slots(setting.block_size) * heads.kv_bytes > setting.free_bytes():
            findings.skip(f"{GROUP}, {case.name}", "the memory is too small")
        elif setting.budget.is_over(0.5):
            findings.skip(f"{GROUP}, {case.name}", "half of the time was used up")
        else:
            measure = _Measurement(setting, findings, case)
            findings.attempt(f"{GROUP}, {case.name}", measure.run)
            free_memory()


class _Measurement:
    """One case; its tensors are freed with it."""

    def __init__(self, setting: GpuSetting, findings: Findings, case: StepCase) -> None:
        self._setting, self._findings, self._case = setting, findings, case
        self._heads = setting.plan.whole.shape().heads
        self._work = attention_work(self._heads, case.batch, case.rows_each, case.context_len)

    def run(self) -> None:
        setting, case, heads = self._setting, self._case, self._heads
        config = setting.plan.whole.config()
        num_blocks = case.num_slots(setting.block_size) // setting.block_size
        slots = num_blocks * setting.block_size
        kv = random_kv(config, 1, slots, DTYPE, setting.device)
        backend, choice = choose_backend(
            kv, DTYPE, setting.block_size, heads.num_heads, setting.attention, tiles=TILES
        )
        step = decode_step(case, num_blocks, setting.block_size, config.vocab_size)
        shape = (case.batch * case.rows_each, heads.num_heads, heads.head_dim)
        query = torch.randn(shape, dtype=DTYPE, device=setting.device)
        scaling = heads.head_dim**-0.5
        attention = backend.begin(step)
        run = partial(attention.attend, 0, query, scaling)
        run_torch = _torch_attention(step, kv, query, case, setting)
        error = relative_error(run(), run_torch())
        ours = self._note(GROUP, run, lambda _: f"{choice.name}, differs by {error:.1e}")
        self._note(TORCH_GROUP, run_torch, lambda median: f"{median / ours.seconds:.2f} x ours")
        if not error < TOLERANCE:
            self._findings.fail(f"{GROUP}, {case.name}", f"differs from torch's by {error:.1e}")

    def _note(self, group: str, run: Callable[[], Tensor], note: Callable[[float], str]) -> Figure:
        times = self._setting.clock.on_device(run)
        return self._findings.add(
            group, self._case.name, times, self._work,
            note=note(statistics.median(times)), order=self._case.order,
        )  # fmt: skip


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value; NaN where either has one."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def _torch_attention(
    step: StepInput, kv: PagedKv, query: Tensor, case: StepCase, setting: GpuSetting
) -> Callable[[], Tensor]:
    """Reads keys [batch, kv_heads, columns, head_dim]; gives rows as `attend` does."""
    heads, rows = setting.plan.whole.shape().heads, case.rows_each
    share = heads.num_heads // heads.num_kv_heads
    blocks = torch.from_numpy(step.block_tables).long().to(setting.device)
    in_pages = kv.layers[0].view(-1, setting.block_size, 2, heads.num_kv_heads, heads.head_dim)
    columns = case.context_len + rows
    pairs = in_pages[blocks].flatten(1, 2)[:, :columns]
    keys, values = pairs.permute(2, 0, 3, 1, 4).contiguous().unbind(0)
    folded = query.view(case.batch, rows, heads.num_kv_heads, share, heads.head_dim)
    folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()
    mask = _mask(case, share, setting.device)

    def run() -> Tensor:
        out = scaled_dot_product_attention(folded, keys, values, mask)
        return _unfolded(out, heads, case)

    return run


def _unfolded(out: Tensor, heads: HeadShape, case: StepCase) -> Tensor:
    parts = out.unflatten(2, (-1, case.rows_each)).permute(0, 3, 1, 2, 4)
    return parts.reshape(-1, heads.num_heads, heads.head_dim)


def _mask(case: StepCase, share: int, device: torch.device) -> Tensor | None:
    """Who sees whom, bool [share * rows, columns]; None for a single row, which sees all."""
    if not case.nodes:
        return None
    own = torch.from_numpy(tree_mask(case.nodes)).to(device)
    context = torch.ones(case.rows_each, case.context_len, dtype=torch.bool, device=device)
    return torch.cat((context, own), dim=1).repeat(share, 1)
