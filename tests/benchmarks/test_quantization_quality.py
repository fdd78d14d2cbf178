"""How near to float32 the demo model stays with 8-bit weights and FP8 caches."""

from __future__ import annotations

from draftline.benchmarks.step.quantization import Variant, measure, prompt_ids


def test_quality_on_the_demo_model() -> None:
    prompts = prompt_ids("demo", 3)
    variants = (
        Variant("none"), Variant("int8", quantization="int8"), Variant("fp8", kv_cache_dtype="fp8"),
    )  # fmt: skip
    none, int8, fp8 = measure("demo", variants, prompts)
    assert none.num_rows == sum(map(len, prompts))
    assert (none.mean_error, none.agreement) == (0, 1)
    assert 0 < int8.mean_error < 0.03
    assert int8.mean_error < fp8.mean_error < 0.08
    assert min(int8.agreement, fp8.agreement) > 0.95
    assert none.spread > 2
