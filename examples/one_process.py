"""The algorithm alone: target, drafters and engine in one process, without Ray, gRPC or Redis.

    python examples/one_process.py

Decodes a prompt plainly and with speculation, shows that the texts are equal, and who proposed
what was accepted.
"""

from __future__ import annotations

from draftline.cluster.config import EngineConfig
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.engine.assembly import Assembly, local_pipeline, plan_model
from draftline.cluster.engine.engine_thread import EngineThread
from draftline.core.request.output import OutputCollector
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.drafters.model.drafter import load_model_drafter
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter
from draftline.drafters.spectra.drafter import SpectraDrafter

PROMPT = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
)


def main() -> None:
    """Run the example."""
    plan = plan_model(EngineConfig(model="demo", pipeline_parallel_size=2))

    async def build() -> Assembly:
        drafters = [SpectraDrafter(), PromptLookupDrafter(), load_model_drafter("demo-drafter")]
        return Assembly(plan, local_pipeline, [LocalDrafter(drafter) for drafter in drafters])

    requests = plan.request_factory()
    params = SamplingParams(max_tokens=96, temperature=0.0)
    engine = EngineThread(build)
    engine.start()
    try:
        outputs = []
        for speculative in (False, True):
            answer = OutputCollector("speculative" if speculative else "plain")
            options = RequestOptions(speculative=speculative)
            engine.enqueue(
                *requests.build(answer.request_id, PROMPT, params, answer.on_output, options)
            )
            outputs.append(answer.wait())
    finally:
        engine.close()
    plain, drafted = outputs
    print(PROMPT + drafted.text)
    print(f"\nsame tokens as plain decoding: {plain.token_ids == drafted.token_ids}")
    print(f"tokens a verification step: {drafted.metrics.acceptance_length:.2f}")
    print(f"accepted by source: {dict(drafted.metrics.accepted_by_source)}")
    assert plain.token_ids == drafted.token_ids


if __name__ == "__main__":
    main()
