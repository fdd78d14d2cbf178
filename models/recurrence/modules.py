"""Transformers' layers that keep states, made to keep them in a stage's pool.

Their forward calls a few functions for a short convolution and for a recurrence, each for one text
from its beginning. A module of a stage calls the functions of this file in their place, as its
attention calls `models/attention/backend.py`: what a layer computes around them stays its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .state_pool import StateShape, current_states

# Called for their names.
Function = Callable[..., Any]


def convolved(
    layer: int, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: object,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn`: [1, channels, rows] of the same; `weight` [channels, width]."""
    states = current_states()
    result = states.convolve(layer, hidden_states[0].t(), weight, bias)
    if activation is not None:
        result = ACT2FN[activation](result)
    return result.t()[None]


def delta_rule(
    layer: int, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    *, use_qk_l2norm_in_kernel: bool = False, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """`torch_chunk_gated_delta_rule`, and Kimi's with a decay of each channel.

    query, key  [1, rows, key_heads, key_dim]; value [1, rows, heads, value_dim]
    g           [1, rows, heads] or [1, rows, heads, key_dim]; beta [1, rows, heads]
    """
    queries, keys = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        queries, keys = _normed(queries), _normed(keys)
    decays = g[0] if g.ndim == 4 else g[0, ..., None]
    outputs = current_states().scan(
        layer, queries * queries.shape[-1] ** -0.5, keys, value[0], decays, beta[0]
    )
    return outputs[None].to(query.dtype), None


def _normed(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + 1e-6)


def selective_scan(
    layer: int, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,  # noqa: N803
    *, D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,  # noqa: N803
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: object,
) -> Tensor:  # fmt: skip
    """`mamba2_chunk_scan`: [1, rows, heads, head_dim] of the same.

    dt [1, rows, heads]; A, D, dt_bias [heads]; B, C [1, rows, groups, state_size]
    """
    steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    if dt_softplus:
        steps = nn.functional.softplus(steps)
    steps = steps.clamp(*dt_limit).float()
    values = hidden_states[0].float()
    decays = (A.float() * steps)[..., None]
    outputs = current_states().scan(layer, C[0], B[0], values * steps[..., None], decays, None)
    if D is not None:
        outputs += D[:, None] * values
    return outputs[None]


# By the names by which transformers' layers call them.
FUNCTIONS: dict[str, Function] = {
    "causal_conv1d_fn": convolved,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": selective_scan,
}


def stateful_modules(whole: nn.Module) -> Iterator[nn.Module]:
    """Those within a layer, or a model, that keep states in a way that `FUNCTIONS` know."""
    for module in whole.modules():
        if _names(module):
            yield module


def keep_in_pool(module: nn.Module, layer: int) -> None:
    """Have a module of `stateful_modules` keep its states in layer `layer` of the pool."""
    own = {name: partial(FUNCTIONS[name], layer) for name in _names(module)}
    module.forward = MethodType(_calling(own, module), module)


def _names(module: nn.Module) -> set[str]:
    code = getattr(_own_forward(module), "__code__", None)
    return set() if code is None else FUNCTIONS.keys() & set(code.co_names)


def _own_forward(module: nn.Module) -> Any:
    """As its class has it, without what decorates it."""
    return inspect.unwrap(type(module).forward)


def _calling(functions: dict[str, Function], module: nn.Module) -> FunctionType:
    """The module's forward, with other functions of these global names."""
    forward = _own_forward(module)
    found = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__,
        forward.__defaults__, forward.__closure__,
    )  # fmt: skip
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def state_shape(module: nn.Module, hidden_size: int) -> StateShape:
    """Of what a module of `stateful_modules` keeps; found by one row through it."""
    found = StateShape(0, 1)

    def convolve(hidden_states: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
        nonlocal found
        found = replace(found, num_channels=len(weight), width=weight.shape[-1])
        return hidden_states

    def rule(
        _query: Tensor, key: Tensor, value: Tensor, g: Tensor, *_: object, **__: object
    ) -> Any:
        nonlocal found
        num_decays = key.shape[-1] if g.ndim == 4 else 1
        found = replace(
            found, num_heads=value.shape[2], num_key_heads=key.shape[2], key_dim=key.shape[3],
            value_dim=value.shape[3], num_decays=num_decays,
        )  # fmt: skip
        return value, None

    def scan(
        hidden_states: Tensor, _dt: Tensor, _a: Tensor, b: Tensor, *_: object, **__: object
    ) -> Tensor:
        rule(b, b, hidden_states, _dt)
        return hidden_states

    recorders: dict[Function, Function] = {
        convolved: convolve,
        delta_rule: rule,
        selective_scan: scan,
    }
    own = {name: recorders[FUNCTIONS[name]] for name in _names(module)}
    like = next(module.parameters())
    with torch.inference_mode():
        _calling(own, module)(module, like.new_zeros(1, 1, hidden_size))
    return found
