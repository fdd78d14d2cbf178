"""All parts in their order: what goals are about comes before what may be cut for time."""

from __future__ import annotations

from collections.abc import Callable

from .findings import Findings, free_memory
from .measure.attention import measure_attention
from .measure.products import measure_products
from .measure.rates import measure_rates
from .measure.sampling import measure_sampling
from .measure.steps import measure_part, measure_whole
from .setting import Setting

Part = Callable[[Setting, Findings], None]


def measure_all(setting: Setting, findings: Findings, after_each: Callable[[str], None]) -> None:
    """Fill `findings`; `after_each` hears the name of every part that has ended.

    Raises what measuring the rates raises: nothing has a floor without them.
    """
    measure_rates(setting, findings)
    free_memory()
    after_each("rates")
    parts: dict[str, Part] = {
        "attention": measure_attention,
        "sampling": measure_sampling,
        "products": measure_products,
        "steps": measure_whole,
        "steps of a stage": measure_part,
        "demo": _demo,
    }
    for name, part in parts.items():
        if setting.budget.is_over():
            findings.skip(name, "the time was used up")
            continue
        findings.attempt(name, lambda part=part: part(setting, findings))
        free_memory()
        after_each(name)


def _demo(setting: Setting, findings: Findings) -> None:
    try:
        # The engine needs packages that kernels do not.
        from .measure.demo import measure_demo  # noqa: PLC0415
    except ModuleNotFoundError as error:
        findings.skip("demo", f"{error}; pip install draftline")
        return
    measure_demo(setting, findings)
