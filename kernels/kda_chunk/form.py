"""The gated delta rule in chunks of 64 tokens: the form in which `k3::kda_chunk` is computed, in plain PyTorch.

In a chunk with cumulative gates G_i = Σ_{m<=i} g_m and E_ij = exp(G_i - G_j) for i >= j:

    A_ij = β_i Σ_c k_i[c] k_j[c] E_ij[c]   (i > j)          Q_ij = Σ_c q_i[c] k_j[c] E_ij[c]   (i >= j)
    T = (I + A)⁻¹      U = T (β ⊙ V)      W = T (β ⊙ K ⊙ exp G)
    V' = U - W S₀ᵀ     O = (q ⊙ exp G) S₀ᵀ + Q V'     S = S₀ diag(exp G_last) + V'ᵀ (k ⊙ exp(G_last - G))

E_ij is split at the first row r of i's block of 16, as exp(G_i - G_r) · exp(G_r - G_j): with gates of at least -5 the
second factor stays below exp(75), the first below 1, and neither depends on a token later than i. T is never built by
repeated squaring, which cancels for keys that are nearly parallel; here a triangular system is solved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK, BLOCK = 64, 16


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """q, k, g [B, L, H, K], v [B, L, H, V], beta [B, L, H], state [B, H, V, K], one dtype -> o [B, at least L, H, V],
    the state after each chunk (the one given, if there is none). A token with g = 0 and beta = 0 leaves it as it is."""
    missing = -q.shape[1] % CHUNK
    q, k, v, g = (_chunks(F.pad(x, (0, 0, 0, 0, 0, missing))) for x in (q, k, v, g))
    beta = _chunks(F.pad(beta, (0, 0, 0, missing)).unsqueeze(3))  # [B, H, n, C, 1], the others [B, H, n, C, K]
    if not q.shape[2]:
        return v.flatten(2, 3).transpose(1, 2), [state]
    total = g.cumsum(3)
    decayed = torch.exp(total)
    keys, queries = score_parts(q, k, total)
    system = (beta * keys).tril(-1) + torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    right = torch.cat([beta * v, beta * k * decayed], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    queries, q_decayed = queries.tril(), q * decayed
    last = total[..., -1:, :]
    k_to_end, decay = k * torch.exp(last - total), torch.exp(last)
    outputs, states = [], []
    for n in range(q.shape[2]):
        old = state.transpose(2, 3)
        new = u[:, :, n] - w[:, :, n] @ old
        outputs.append(q_decayed[:, :, n] @ old + queries[:, :, n] @ new)
        state = state * decay[:, :, n] + new.transpose(2, 3) @ k_to_end[:, :, n]
        states.append(state)
    return torch.cat(outputs, 2).transpose(1, 2), states


def _chunks(x: Tensor) -> Tensor:
    """[B, n C, H, X] -> [B, H, n, C, X]."""
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def score_parts(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c k_i k_j E_ij and Σ_c q_i k_j E_ij, both [..., C, C], for j up to the end of i's block; zero behind it."""
    keys, queries = [], []
    for first in range(0, CHUNK, BLOCK):
        end = first + BLOCK
        reference = total[..., first : first + 1, :]
        left = torch.exp(total[..., first:end, :] - reference)
        right = (k[..., :end, :] * torch.exp(reference - total[..., :end, :])).transpose(-1, -2)
        keys.append(F.pad((k[..., first:end, :] * left) @ right, (0, CHUNK - end)))
        queries.append(F.pad((q[..., first:end, :] * left) @ right, (0, CHUNK - end)))
    return torch.cat(keys, -2), torch.cat(queries, -2)


def padded_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """[1, T, ...] -> [N, T, ...]: each row's tokens at the left, anything behind them."""
    tokens = x.shape[1]
    at = offsets[:-1].unsqueeze(1) + torch.arange(tokens, device=x.device)
    return x[0][at.clamp(max=max(0, tokens - 1))]


def packed_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """The way back: [N, T, ...] -> [1, T, ...], zero for tokens of nobody."""
    if x.shape[0] == 0:
        return x.new_zeros(1, *x.shape[1:])
    tokens = torch.arange(x.shape[1], device=x.device)
    row = torch.searchsorted(offsets[1:].contiguous(), tokens.to(offsets.dtype), right=True)
    owned = row < x.shape[0]
    row = row.clamp(max=x.shape[0] - 1)
    line = x[row, tokens - offsets[row]]
    return line.masked_fill(~owned.view(-1, *[1] * (x.dim() - 2)), 0).unsqueeze(0)
