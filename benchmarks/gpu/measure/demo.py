"""The bundled model end to end on the device, plain and with drafts: same tokens, how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ....cluster.config import EngineConfig
from ....cluster.drafting.local_drafter import LocalDrafter
from ....cluster.engine.assembly import Assembly, ModelPlan, local_pipeline, plan_model
from ....cluster.engine.engine_thread import EngineThread
from ....core.request.output import OutputCollector, RequestOutput
from ....core.request.sampling_params import RequestOptions, SamplingParams
from ....deploy.cli.demo.prompts import held_out_prompts
from ....drafters.model.drafter import load_model_drafter
from ....drafters.ngram.prompt_lookup import PromptLookupDrafter
from ....drafters.spectra.drafter import SpectraDrafter
from ..findings import Findings
from ..setting import GpuSetting

WARM_TOKENS = 16
KV_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class DemoTimes:
    """All prompts one after another."""

    seconds: float
    outputs: tuple[RequestOutput, ...]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(len(output.token_ids) for output in self.outputs) / self.seconds

    @property
    def tau(self) -> float:
        """Tokens a verification step."""
        steps = sum(output.metrics.num_steps for output in self.outputs)
        return sum(len(output.token_ids) - 1 for output in self.outputs) / max(steps, 1)


def measure_demo(setting: GpuSetting, findings: Findings) -> None:
    """Greedy, in float32: a text that differs is a fault, not rounding."""
    plan = plan_model(
        EngineConfig(
            model="demo", device="cuda" if setting.device.type == "cuda" else "cpu",
            dtype="float32", block_size=setting.block_size, kv_cache_tokens=KV_TOKENS,
        )
    )  # fmt: skip

    async def build() -> Assembly:
        drafters = [SpectraDrafter(), PromptLookupDrafter(), load_model_drafter("demo-drafter")]
        return Assembly(plan, local_pipeline, [LocalDrafter(drafter) for drafter in drafters])

    prompts = [prompt.text for prompt in held_out_prompts(setting.plan.demo_prompts)]
    engine = EngineThread(build)
    engine.start()
    try:
        for speculative in (False, True):
            _decode(engine, plan, prompts[:1], WARM_TOKENS, speculative=speculative)
        plain, drafted = (
            _decode(engine, plan, prompts, setting.plan.demo_tokens, speculative=speculative)
            for speculative in (False, True)
        )
    finally:
        engine.close()
    _note(findings, plain, drafted)


def _decode(
    engine: EngineThread, plan: ModelPlan, prompts: list[str], tokens: int, *, speculative: bool
) -> DemoTimes:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    options = RequestOptions(speculative=speculative)
    requests = plan.request_factory()
    outputs = []
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        answer = OutputCollector(f"{'drafted' if speculative else 'plain'}-{number}-{tokens}")
        parts = requests.build(answer.request_id, prompt, params, answer.on_output, options)
        engine.enqueue(*parts)
        outputs.append(answer.wait())
    return DemoTimes(time.perf_counter() - start, tuple(outputs))


def _note(findings: Findings, plain: DemoTimes, drafted: DemoTimes) -> None:
    pairs = list(zip(plain.outputs, drafted.outputs, strict=True))
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    found = {
        "plain_tokens_per_s": plain.rate,
        "drafted_tokens_per_s": drafted.rate,
        "tau": drafted.tau,
        "same_tokens": same,
        "prompts": len(pairs),
    }
    findings.note("demo", found)
    if same < len(pairs):
        findings.fail(
            "demo", f"{len(pairs) - same} of {len(pairs)} texts differ between plain and drafted"
        )
