"""Faults of other people's routers, and of what lies around their experts, each through the whole pipeline.

The right answer is that of the model's formula. Where torch leaves a choice open (which of equal scores is taken, what
a score that is no number is worth), it is eager's.

    row   where its tests are; without a file: here. Rows 20 and 31 to 43 of kernels: kernels/test_faults_experts.py
    21    test_scores_without_numbers_choose_experts_that_exist
    22    ROUTERS; models/test_k3_moe.py::test_biased_scores_below_minus_one_are_selected
    23    test_equal_scores_...; models/test_k3_moe.py::test_ties_give_a_valid_selection
    24    ROUTERS, test_one_expert_of_896; models/test_k3_moe.py::test_high_expert_ids_are_reached
    25    ROUTERS, with 2304 experts; what a kernel does with shared memory is no concern of a router without a kernel
    26    ROUTERS
    27    ROUTERS, test_nothing_is_added_to_a_sum_...; models/test_k3_moe.py::test_tiny_scores_follow_the_formula
    28    ROUTERS, test_nothing_is_added_to_a_sum_...; the same
    29    ROUTERS, test_biased_scores_as_weights_...; models/test_k3_moe.py::test_bias_selects_and_scores_weigh
    30    ROUTERS; models/test_k3_moe.py::test_the_scale_is_applied_once_in_both_branches
    31    test_top_one_with_a_factor
    32    test_a_rank_without_a_token_...; models/test_k3_moe.py::test_no_token_at_all
    34    test_a_call_knows_nothing_of_the_one_before
    40    test_launches_go_to_the_current_stream
    42    test_situ_is_not_silu
    43    test_sixteen_and_seventeen_tokens
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from k3rewrite.backend import Backend
from k3rewrite.capture import capture
from k3rewrite.emit.launch import DeviceFunction
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3.experts import Bf16Experts
from k3rewrite.models.kimi_k3.moe import LatentMoE
from k3rewrite.models.kimi_k3.parallel import TensorParallel
from k3rewrite.models.kimi_k3.router import Router
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.targets import load_target

BF16, NAN = torch.bfloat16, float("nan")
