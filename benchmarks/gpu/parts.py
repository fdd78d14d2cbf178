"""All parts in their order: what goals are about comes before what may be cut for time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from .findings import Findings, free_memory
from .instruments.clock import TimeBudget
from .measure.attention import measure_attention
from .measure.products import measure_products
from .measure.rates import measure_rates
from .measure.sampling import measure_sampling
from .measure.steps import measure_part, measure_whole
from .setting import Setting

Part = Callable[[Setting, Findings], None]
# Measures one part, somewhere, and adds what it finds.
RunPart = Callable[[str, Part, Findings], None]
RATES = "rates"


def measure_all(
    wanted: Sequence[str], budget: TimeBudget, findings: Findings, run: RunPart,
    after_each: Callable[[str], None],
) -> None:  # fmt: skip
    """Fill `findings` by the parts that are wanted; `after_each` hears every part that has ended.

    The rates come first, wanted or not: nothing has a floor without them.
    """
    for name, part in PARTS.items():
        if name != RATES and name not in wanted:
            continue
        if name != RATES and findings.rates is None:
            findings.skip(name, "the rates of the device are not known")
        elif name != RATES and budget.is_over():
            findings.skip(name, "the time was used up")
        else:
            run(name, part, findings)
            after_each(name)


def run_here(setting: Setting) -> RunPart:
    """Measures parts in this process."""

    def run(name: str, part: Part, findings: Findings) -> None:
        findings.attempt(name, lambda: part(setting, findings))
        free_memory()

    return run


def measure_demo(setting: Setting, findings: Findings) -> None:
    """The bundled model end to end, where the packages that the engine needs are installed."""
    _measure_if_possible("demo", setting, findings)


def measure_heads(setting: Setting, findings: Findings) -> None:
    """Drafts of heads, where the packages that drafters need are installed."""
    _measure_if_possible("heads", setting, findings)


def _measure_if_possible(name: str, setting: Setting, findings: Findings) -> None:
    try:
        module = import_module(f".measure.{name}", __package__)
    except ModuleNotFoundError as error:
        findings.skip(name, f"{error}; pip install draftline")
        return
    getattr(module, f"measure_{name}")(setting, findings)


PARTS: dict[str, Part] = {
    RATES: measure_rates,
    "attention": measure_attention,
    "sampling": measure_sampling,
    "products": measure_products,
    "heads": measure_heads,
    "steps": measure_whole,
    "stage": measure_part,
    "demo": measure_demo,
}
