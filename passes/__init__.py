"""The passes, one file each. A pass's fields are its YAML options, its docstring the help text.

`ALL_PASSES` is what a pipeline may name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from k3rewrite.passes.canonicalise import CanonicalisePass
from k3rewrite.passes.fuse_attn_res_norm import FuseAttnResNormPass
from k3rewrite.passes.fuse_block_write import FuseBlockWritePass
from k3rewrite.passes.fuse_kda_chunk import FuseKdaChunkPass
from k3rewrite.passes.fuse_kda_decode import FuseKdaDecodePass
from k3rewrite.passes.fuse_kda_verify import FuseKdaVerifyPass
from k3rewrite.passes.lift_attn_res import LiftAttnResPass
from k3rewrite.passes.lift_conv_verify import LiftConvVerifyPass
from k3rewrite.passes.lift_gated_rms_norm import LiftGatedRmsNormPass
from k3rewrite.passes.lift_kda_chunk import LiftKdaChunkPass
from k3rewrite.passes.lift_kda_step import LiftKdaStepPass
from k3rewrite.passes.lift_kda_window import LiftKdaWindowPass
from k3rewrite.passes.lift_l2_norm import LiftL2NormPass
from k3rewrite.passes.lift_mlp import LiftMlpPass
from k3rewrite.passes.lift_moe import LiftMoePass
from k3rewrite.passes.lift_rms_norm import LiftRmsNormPass
from k3rewrite.passes.lift_route import LiftRoutePass
from k3rewrite.passes.lift_short_conv import LiftShortConvPass
from k3rewrite.passes.lift_state_slots import LiftStateSlotsPass
from k3rewrite.passes.merge_projections import MergeProjectionsPass
from k3rewrite.passes.reuse_storage import ReuseStoragePass
from k3rewrite.passes.select import SelectPass
from k3rewrite.passes.stack_weights import StackWeightsPass
from k3rewrite.passes.warp_decode_moe import WarpDecodeMoePass
from k3rewrite.pipeline.pass_base import Pass

ALL_PASSES: tuple[type[Pass], ...] = (
    CanonicalisePass,
    LiftRmsNormPass,
    LiftGatedRmsNormPass,
    LiftL2NormPass,
    LiftConvVerifyPass,
    LiftShortConvPass,
    LiftKdaStepPass,
    LiftKdaWindowPass,
    LiftStateSlotsPass,
    LiftKdaChunkPass,
    LiftRoutePass,
    LiftMoePass,
    LiftMlpPass,
    LiftAttnResPass,
    FuseAttnResNormPass,
    FuseBlockWritePass,
    WarpDecodeMoePass,
    FuseKdaDecodePass,
    FuseKdaVerifyPass,
    FuseKdaChunkPass,
    MergeProjectionsPass,
    StackWeightsPass,
    SelectPass,
    ReuseStoragePass,
)
PASSES: Mapping[str, type[Pass]] = MappingProxyType({p.name: p for p in ALL_PASSES})
