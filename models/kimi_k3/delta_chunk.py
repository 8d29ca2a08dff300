"""The gated delta rule over a prompt, in chunks of 64 tokens: the same result as `delta_rule.py`, by matrix products.

In a chunk with cumulative gates G_i = Σ_{m<=i} g_m and E_ij = exp(G_i - G_j) for i >= j:

    A_ij = β_i Σ_c k_i[c] k_j[c] E_ij[c]   (i > j)          Q_ij = Σ_c q_i[c] k_j[c] E_ij[c]   (i >= j)
    T = (I + A)⁻¹      U = T (β ⊙ V)      W = T (β ⊙ K ⊙ exp G)
    V' = U - W S₀ᵀ     O = (q ⊙ exp G) S₀ᵀ + Q V'     S = S₀ diag(exp G_last) + V'ᵀ (k ⊙ exp(G_last - G))

Two things decide whether that works on real weights. E_ij is never split into exp(G_i) · exp(-G_j) over a chunk: the
gates of 32 tokens reach -160, and exp(160) is no fp32 number. It is split at the first row r of i's block of 16, as
exp(G_i - G_r) · exp(G_r - G_j); with gates above -5 the second factor stays below exp(75), and no factor depends on
a token later than i. And T is computed by substitution in blocks of 16, never by repeated squaring, which cancels for
keys that are nearly parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, chunk: int, block: int
) -> tuple[Tensor, Tensor]:
    """(o `[B, L, H, V]`, final state `[B, H, V, K]`).

    q, k, g `[B, L, H, K]`, v `[B, L, H, V]`, beta `[B, L, H]`, state `[B, H, V, K]`, one floating-point dtype. q is
    normalised and scaled. Tokens with g = 0 and beta = 0 leave the state as it is. `chunk` is a multiple of `block`.
    """
    length = q.shape[1]
    missing = -length % chunk
    q, k, v, g = (_chunks(F.pad(x, (0, 0, 0, 0, 0, missing)), chunk) for x in (q, k, v, g))
    beta = _chunks(F.pad(beta, (0, 0, 0, missing)).unsqueeze(3), chunk)  # [B, H, n, C, 1], as the others [..., C, K]

    total = g.cumsum(3)
    decayed = torch.exp(total)
    keys, queries = _scores(q, k, total, block)
    inverse = unit_lower_inverse((beta * keys).tril(-1), block)
    queries = queries.tril()
    u, w = inverse @ (beta * v), inverse @ (beta * k * decayed)
    q_decayed = q * decayed
    last = total[:, :, :, -1:]
    k_to_end, decay = k * torch.exp(last - total), torch.exp(last)

    outputs = []
    for n in range(q.shape[2]):
        old = state.transpose(2, 3)
        fresh = u[:, :, n] - w[:, :, n] @ old
        outputs.append(q_decayed[:, :, n] @ old + queries[:, :, n] @ fresh)
        state = state * decay[:, :, n] + fresh.transpose(2, 3) @ k_to_end[:, :, n]
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """`[B, n * C, H, X]` -> `[B, H, n, C, X]`."""
    return x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)


def _scores(q: Tensor, k: Tensor, total: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Σ_c k_i k_j E_ij and Σ_c q_i k_j E_ij, both `[..., C, C]`, valid for j <= i and finite everywhere."""
    size = total.shape[-2]
    by_block = total.unflatten(-2, (-1, block))  # [..., C / block, block, K]
    first = by_block[..., :1, :]
    columns = torch.arange(size, device=total.device)
    ends = torch.arange(block, size + 1, block, device=total.device)
    later = (columns >= ends.unsqueeze(1)).unsqueeze(-1)  # [C / block, C, 1]: behind the block, never used
    right = k.unsqueeze(-3) * torch.exp((first - total.unsqueeze(-3)).masked_fill(later, float("-inf")))
    left = torch.exp(by_block - first)
    right = right.transpose(-1, -2)
    keys = (k.unflatten(-2, (-1, block)) * left) @ right
    queries = (q.unflatten(-2, (-1, block)) * left) @ right
    return keys.flatten(-3, -2), queries.flatten(-3, -2)


def unit_lower_inverse(lower: Tensor, block: int) -> Tensor:
    """(I + lower)⁻¹ for strictly lower triangular matrices `[..., C, C]`, in blocks:

    T_ii = (I + A_ii)⁻¹ by forward substitution,    T_ij = -T_ii Σ_{m=j..i-1} A_im T_mj.
    """
    size = lower.shape[-1]
    count = size // block
    identity = torch.eye(block, dtype=lower.dtype, device=lower.device)
    diagonal = lower.unflatten(-1, (count, block)).unflatten(-3, (count, block)).diagonal(dim1=-4, dim2=-2)
    diagonal = diagonal.movedim(-1, -3) + identity  # [..., count, block, block]
    inverses = torch.linalg.solve_triangular(diagonal, identity.expand_as(diagonal), upper=False, unitriangular=True)
    rows = [F.pad(inverses[..., 0, :, :], (0, size - block))]
    for i in range(1, count):
        before, own = i * block, inverses[..., i, :, :]
        known = torch.cat(rows, dim=-2)[..., :before]
        left = -own @ (lower[..., before : before + block, :before] @ known)
        rows.append(F.pad(torch.cat([left, own], dim=-1), (0, size - before - block)))
    return torch.cat(rows, dim=-2)
