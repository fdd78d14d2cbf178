"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), over the latents themselves.

A token has one latent c, of which the keys and values of all heads are products, and one rotated
part r that the heads' keys share. With a head's matrices K and V and its query [q, p]

    [q, p] . [K c, r] = [K' q, p] . [c, r]        sum_t w_t V c_t = V sum_t w_t c_t

so attention runs over one key/value head of rows [c, r], and only these are kept: 576 numbers a
token of DeepSeek-V3, where keys and values of 128 heads have 40,960. A row is key and value at
once; what the rotated part adds to the weighted sum is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What a module's keys and values are made by, which `keep_latents` takes out.
EXPANSION = "kv_b_proj"


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """What a layer's heads make of latents.

    keys    [heads, key_dim, rank]  without the rotated part
    values  [heads, rank, value_dim]
    """

    keys: Tensor
    values: Tensor

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries of rows [c, r], [1, heads, rows, rank + rotated], of the heads' own."""
        key_dim = self.keys.shape[1]
        return torch.cat((query[..., :key_dim] @ self.keys, query[..., key_dim:]), dim=-1)

    def expanded(self, attended: Tensor) -> Tensor:
        """[rows, heads, value_dim] of weighted sums [rows, heads, rank + rotated]."""
        rank = self.values.shape[1]
        return (attended[..., :rank].transpose(0, 1) @ self.values).transpose(0, 1)


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """Those that `keep_latents` found; None: the module keeps keys and values."""
    return getattr(module, "draftline_latent_heads", None)


def has_latents(module: nn.Module) -> bool:
    """Whether transformers computes a module's keys and values from latents."""
    return hasattr(module, "expand_kv")


@torch.no_grad()
def keep_latents(module: Any) -> None:
    """Have a module of `has_latents`, whose weights are loaded, attend to latents."""
    rank, rotated = module.kv_lora_rank, module.qk_rope_head_dim
    like = module.kv_a_layernorm.weight
    basis = torch.eye(rank, dtype=like.dtype, device=like.device)[None, None]
    # Also of a weight that is kept quantised.
    keys, values = module.expand_kv(basis, basis.new_zeros(1, 1, rank, rotated))
    own = keys[0, ..., : keys.shape[-1] - rotated].transpose(1, 2).contiguous()
    # Attributes of modules that their types do not know.
    object.__setattr__(module, "draftline_latent_heads", LatentHeads(own, values[0].contiguous()))
    object.__setattr__(module, "expand_kv", _latents)
    setattr(module, EXPANSION, None)


def _latents(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the only head, [1, 1, rows, ...], which `paged_attention` keeps."""
    rows = torch.cat((latents, rotated), dim=-1)
    return rows, rows
