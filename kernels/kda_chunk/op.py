"""`k3::kda_chunk`: the gated delta rule over a prompt, with the states that it starts from and leaves behind.

    q, k = q / |q| · q_scale, k / |k|                  |x| = sqrt(Σ x² + l2_eps); l2_eps None: k comes normalised
    g    = bound · σ(exp(a_log) · (f + dt_bias))       a_log None: f is g, and no g is below `bound`
    beta = σ(b)                                        a_log None: b is beta
    token after token, what `k3::kda_step` says of one   ->   o, and the state after the last

It is computed in chunks of 64 tokens (`form.py`), which is the same function. q, k and v come out of the convolution.
All of it is computed in the state's dtype, and o is rounded once, to `out_dtype`.

lengths     Row n of a batch [B, L] has lengths[n] tokens, at the left; None: L. What stands behind them has no effect,
            whatever it is, and their o is zero. Below 0 is 0, above L is L.
offsets     [N + 1], with B = 1: row n has the tokens offsets[n] .. offsets[n + 1] of one long line. Tokens behind the
            last offset belong to nobody. Below 0 is 0, above the line's end is its end. Not together with `lengths`.
slots       None: row n of the state belongs to row n. Else row n has the state in slot slots[n]; no two rows share one.
null_slot   True: slots at or below zero are nobody's: o is zero, and no state is touched. A row without tokens touches
            none either.
fresh       Rows that start from a state of zeros, whatever is in their slot.
checkpoints [N, M]: the state after 64 · (j + 1) tokens of row n also goes to slot checkpoints[n, j]; zero and below:
            nowhere. A slot takes one state, and is no row's own. `checkpoint.py` makes this table from requests.

Sources: Kimi Linear (arXiv 2510.26692), section 3; the bounded decay from Kimi K3's model code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.kernels.kda_chunk.form import CHUNK, delta_chunks, packed_rows, padded_rows
from k3rewrite.kernels.kda_step.op import rows_of_state, with_rows
from k3rewrite.kernels.l2_norm.op import l2_norm
from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes

LOWEST_BOUND = -5.75
"""of the log of a decay: what fp32 holds, 15 steps further, in both directions"""


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, state: Tensor,
    slots: Tensor | None, fresh: Tensor | None, lengths: Tensor | None, offsets: Tensor | None,
    checkpoints: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k, f [B, L, H, K], v [B, L, H, V], b [B, L, H], a_log [H], dt_bias [H K], state [S, H, V, K], slots, fresh,
    lengths [B] -> o [B, L, H, V], the new state."""
    check(q, lengths, offsets, checkpoints, bound)
    tokens, wide = q.shape[1], state.dtype
    if offsets is not None:
        offsets = offsets.clamp(0, tokens)
        lengths = offsets[1:] - offsets[:-1]
        q, k, v, f, b = (padded_rows(x, offsets) for x in (q, k, v, f, b))
    dead = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    if lengths is not None:
        dead = torch.arange(tokens, device=q.device) >= lengths.unsqueeze(1)
    if null_slot and slots is not None:
        dead = dead | (slots <= 0).unsqueeze(1)
    q, k, v, f = (x.to(wide).masked_fill(dead[:, :, None, None], 0) for x in (q, k, v, f))
    if l2_eps is not None:
        q, k = (l2_norm(x, l2_eps, True, wide, wide) for x in (q, k))
    beta, g = b.to(wide), f
    if a_log is not None and dt_bias is not None:
        g = torch.sigmoid(torch.exp(a_log.to(wide)).unsqueeze(1) * (f + dt_bias.to(wide).view(f.shape[2:]))) * bound
        beta = torch.sigmoid(beta)
    g, beta = g.masked_fill(dead[:, :, None, None], 0), beta.masked_fill(dead.unsqueeze(2), 0)

    start, _ = rows_of_state(state, slots, null_slot)
    if fresh is not None:
        start = start.masked_fill(fresh.view(-1, 1, 1, 1), 0)
    outputs, states = delta_chunks(q * q_scale, k, v, g, beta, start)
    count = (~dead).sum(1)
    result = _kept(state, states[-1], slots, count > 0, null_slot)
    if checkpoints is not None:
        for j in range(min(checkpoints.shape[1], len(states))):
            result = _kept(result, states[j], checkpoints[:, j], count >= CHUNK * (j + 1), True)
    o = outputs[:, :tokens].masked_fill(dead[:, :, None, None], 0).to(out_dtype)
    return (o if offsets is None else packed_rows(o, offsets)).contiguous(), result


def check(q: Tensor, lengths: Tensor | None, offsets: Tensor | None, checkpoints: Tensor | None, bound: float) -> None:
    """Raises ValueError for what is wrong before anything is computed or written."""
    if not LOWEST_BOUND <= bound <= 0:
        raise ValueError(f"kda_chunk: bound {bound} is not within [{LOWEST_BOUND}, 0]; use kda_step token by token")
    if offsets is not None and (lengths is not None or q.shape[0] != 1):
        raise ValueError("kda_chunk: offsets are for one line [1, T, ...] and exclude lengths; give one of the two")
    if checkpoints is not None and checkpoints.dim() != 2:
        raise ValueError("kda_chunk: checkpoints are [rows, chunks]; see kernels/kda_chunk/checkpoint.py")


def _kept(state: Tensor, rows: Tensor, slots: Tensor | None, wanted: Tensor, null_slot: bool) -> Tensor:
    """The state with those rows in place that are wanted and have a slot."""
    wanted = wanted.view(-1, 1, 1, 1)
    if slots is None:
        return torch.where(wanted, rows, state)
    if not null_slot:
        return state.index_put((slots,), torch.where(wanted, rows, state[slots]))
    return with_rows(state, rows, *_nobody(slots, wanted), True)


def _nobody(slots: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, where they lie), with rows that are not wanted in slot 0."""
    slots = slots.masked_fill(~wanted.view(-1) | (slots <= 0), 0)
    return slots, slots


def kda_chunk_fake(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, state: Tensor,
    slots: Tensor | None, fresh: Tensor | None, lengths: Tensor | None, offsets: Tensor | None,
    checkpoints: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return v.new_empty(v.shape, dtype=out_dtype), torch.empty_like(state)


def _cost(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, state: Tensor,
    slots: Tensor | None, fresh: Tensor | None, lengths: Tensor | None, offsets: Tensor | None,
    checkpoints: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float | None,
    out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    """Two launches. Between them go 4.5 tiles of every chunk. Of the states only the rows' own are touched."""
    count = q.shape[0] if offsets is None else offsets.shape[0] - 1
    rows = tensor_bytes(state[:1]) * int(count)
    saved = tensor_bytes(checkpoints) // max(1, checkpoints.element_size()) * tensor_bytes(state[:1]) if (
        checkpoints is not None
    ) else 0  # fmt: skip
    elements = tensor_bytes(v) // max(1, v.element_size())
    between = elements * 9  # bytes: 4.5 tiles of bf16
    read = tensor_bytes(q, k, v, f, b, a_log, dt_bias, slots, fresh, lengths, offsets, checkpoints)
    flops = elements * (6 * state.shape[3] + 8 * CHUNK)
    return Cost(2, read + between + rows, elements * out_dtype.itemsize + between + rows + saved, int(flops))


OP = Op(
    name="kda_chunk",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor? a_log, Tensor? dt_bias, Tensor state, "
        "Tensor? slots, Tensor? fresh, Tensor? lengths, Tensor? offsets, Tensor? checkpoints, bool null_slot, "
        "float bound, float q_scale, float? l2_eps, ScalarType out_dtype) -> (Tensor, Tensor)"
    ),
    reference=kda_chunk,
    fake=kda_chunk_fake,
    cost=_cost,
    inplace={"state": 1},
)
OPS = (OP,)
