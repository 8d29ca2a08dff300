"""The shipped pipelines against the passes, targets and names of this package."""

from __future__ import annotations

import pytest

from k3rewrite.driver.names import names_of_command
from k3rewrite.passes import ALL_PASSES
from k3rewrite.pipeline.config import load_pipeline, shipped_pipelines
from k3rewrite.pipeline.runner import build_passes
from k3rewrite.targets import known_targets

KNOWN = {cls.name: cls for cls in ALL_PASSES}


@pytest.mark.parametrize("name", shipped_pipelines())
def test_every_pass_of_the_package_is_in_it_in_a_legal_order(name: str) -> None:
    names = names_of_command("kimi-k3")
    config = load_pipeline(name, known_passes=KNOWN, known_targets=known_targets(), known_names=names)
    moving = ("merge_projections", "stack_weights") if name == "default" else ()  # weights
    wanted = [each for each in KNOWN if each not in moving]
    assert [entry.name for entry in config.passes] == wanted
    assert len(build_passes(config, KNOWN)) == len(wanted)


def test_kimi_k3_says_how_many_fusions_it_expects() -> None:
    for name in shipped_pipelines():
        passes = {p.name: p for p in load_pipeline(name, known_passes=KNOWN).passes}
        for fuse in (passes["fuse_attn_res_norm"], passes["fuse_kda_decode"], passes["fuse_kda_verify"]):
            assert fuse.options == {"roundings": "fewest", "allow_changes_rounding": True}
        assert passes["fuse_attn_res_norm"].expect == ("== 2 * n_layers" if name.startswith("kimi-k3") else None)
        steps = {"kimi-k3-decode": "== n_kda_layers", "kimi-k3-verify": "== 0", "kimi-k3-prefill": "== 0"}
        assert passes["fuse_kda_decode"].expect == steps.get(name)
        windows = {"kimi-k3-decode": "== 0", "kimi-k3-verify": "== n_kda_layers", "kimi-k3-prefill": "== 0"}
        assert passes["fuse_kda_verify"].expect == windows.get(name)
        prompts = "== n_kda_layers" if name == "kimi-k3-prefill" else None
        assert passes["fuse_kda_chunk"].expect == prompts
