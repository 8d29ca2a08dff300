"""Kimi K3's text decoder in plain PyTorch: what the rewriter captures, and the oracle it is compared with.

| file                          | what is in it                                                     | spec section |
|-------------------------------|-------------------------------------------------------------------|--------------|
| config.py, config_json.py     | sizes and switches, small twins; reading a published config.json  | 1, 8         |
| numerics.py, norms.py         | what "fp32 math" means; RMSNorm, gated RMSNorm, L2 norm           | 1, 2, 3.5    |
| linear.py, activation.py      | bias-free linear layer; SiTU                                      | 1.2          |
| attn_res.py                   | depth mixing over stored blocks and the running prefix            | 2            |
| kda.py                        | a KDA layer: projections, gate, beta, output                      | 3.1-3.5      |
| short_conv.py                 | short convolution with its window, in three phases                | 3.2, 3.8     |
| delta_rule.py, delta_chunk.py | the recurrence one token at a time; in chunks, with its inverse   | 3.4, 3.6     |
| mla.py                        | latent attention, absorbed and expanded                           | 4            |
| router.py, experts.py, moe.py | routing; stacked experts in two spellings; the latent MoE         | 5            |
| grouped_mm.py, mxfp4.py       | grouped product; the 4-bit weight format                          | 1.1, 5       |
| mlp.py                        | dense layer and shared expert                                     | 1.2, 5       |
| inputs.py, state.py           | what a step takes: phases, padding, slots, pools                  | 3.7, 3.8     |
| model.py                      | layers, stack, embedding, head                                    | 2            |
| parallel.py                   | tensor parallelism, form A                                        | 5.1, 6.1     |
| checkpoint.py                 | weights from and to safetensors, under the checkpoint's names     | 1.1          |
| random_init.py, factory.py    | random weights and state; a ready model with inputs               | 8            |

The spec is the description of the published model: its configuration, its checkpoint and its equations. No custom op,
no kernel and no fusion is used here; every rounding is where the vendor's code has it.
"""

from k3rewrite.models.kimi_k3.checkpoint import load_checkpoint, save_checkpoint
from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.factory import build_kimi_k3
from k3rewrite.models.kimi_k3.inputs import DecodeInputs, PrefillInputs, VerifyInputs
from k3rewrite.models.kimi_k3.model import KimiK3
from k3rewrite.models.kimi_k3.parallel import TensorParallel
from k3rewrite.models.kimi_k3.random_init import initialise, initialise_state
from k3rewrite.models.kimi_k3.state import KimiK3State, leave_speculation

__all__ = [
    "DecodeInputs",
    "KimiK3",
    "KimiK3Config",
    "KimiK3State",
    "PrefillInputs",
    "TensorParallel",
    "VerifyInputs",
    "build_kimi_k3",
    "initialise",
    "initialise_state",
    "leave_speculation",
    "load_checkpoint",
    "save_checkpoint",
]
