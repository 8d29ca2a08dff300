"""Weights to and from safetensors: names, dtypes, shards, ranks, and everything that can be wrong with a folder."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from k3_cases import random_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k3rewrite.errors import CheckpointError
from k3rewrite.models.kimi_k3 import KimiK3, KimiK3Config, TensorParallel, load_checkpoint, save_checkpoint
from k3rewrite.models.kimi_k3.checkpoint import INDEX, PREFIX, checkpoint_tensors

SMALL = KimiK3Config.minimal().with_layers(4)


def equal(a: KimiK3, b: KimiK3) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def poisoned(config: KimiK3Config, dtype: torch.dtype = torch.bfloat16) -> KimiK3:
    model = KimiK3(config, dtype=dtype)
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(random_model(SMALL, torch.bfloat16), tmp_path / "weights", shard_bytes=60_000)


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_round_trip(tmp_path: Path, experts: str, dtype: torch.dtype) -> None:
    config = KimiK3Config.tiny(experts=experts)
    model = random_model(config, dtype)
    root = save_checkpoint(model, tmp_path / "weights", shard_bytes=300_000)
    assert equal(load_checkpoint(poisoned(config, dtype), root), model)
    index = json.loads((root / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files == sorted(p.name for p in root.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert not list(tmp_path.glob(".*"))  # no scratch folder is left


def test_names_shapes_and_dtypes_are_the_published_ones() -> None:
    """The table of the checkpoint, at full size without its weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = KimiK3(KimiK3Config().with_layers(4))
        found = {t.name: (list(t.shape), t.dtypes[0]) for t in checkpoint_tensors(model)}
    bf16, f32, u8 = "BF16", "F32", "U8"
    expected = {
        "model.embed_tokens.weight": ([163840, 7168], bf16),
        "model.norm.weight": ([7168], bf16),
        "model.output_attn_res_norm.weight": ([7168], bf16),
        "model.output_attn_res_proj.weight": ([1, 7168], bf16),
        "lm_head.weight": ([163840, 7168], bf16),
    }
    for i in range(4):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            expected[f"{layer}{name}.weight"] = ([7168], bf16)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            expected[f"{layer}{name}.weight"] = ([1, 7168], bf16)
    for i in range(3):
        path = f"model.layers.{i}.self_attn."
        for name in "qkvg":
            expected[f"{path}{name}_proj.weight"] = ([12288, 7168], bf16)
        for name in "qkv":
            expected[f"{path}{name}_conv1d.weight"] = ([12288, 1, 4], f32)
        expected |= {
            f"{path}f_a_proj.weight": ([128, 7168], bf16),
            f"{path}f_b_proj.weight": ([12288, 128], bf16),
            f"{path}b_proj.weight": ([96, 7168], bf16),
            f"{path}A_log": ([128], f32),
            f"{path}dt_bias": ([12288], f32),
            f"{path}o_norm.weight": ([128], f32),
            f"{path}o_proj.weight": ([7168, 12288], bf16),
        }
    path = "model.layers.3.self_attn."
    expected |= {
        f"{path}q_a_proj.weight": ([1536, 7168], bf16),
        f"{path}q_a_layernorm.weight": ([1536], bf16),
        f"{path}q_b_proj.weight": ([18432, 1536], bf16),
        f"{path}kv_a_proj_with_mqa.weight": ([576, 7168], bf16),
        f"{path}kv_a_layernorm.weight": ([512], bf16),
        f"{path}kv_b_proj.weight": ([24576, 512], bf16),
        f"{path}g_proj.weight": ([12288, 7168], bf16),
        f"{path}o_proj.weight": ([7168, 12288], bf16),
        "model.layers.0.mlp.gate_proj.weight": ([33792, 7168], bf16),
        "model.layers.0.mlp.up_proj.weight": ([33792, 7168], bf16),
        "model.layers.0.mlp.down_proj.weight": ([7168, 33792], bf16),
    }
    for i in range(1, 4):
        path = f"model.layers.{i}.block_sparse_moe."
        expected |= {
            f"{path}gate.weight": ([896, 7168], bf16),
            f"{path}gate.e_score_correction_bias": ([896], f32),
            f"{path}routed_expert_down_proj.weight": ([3584, 7168], bf16),
            f"{path}routed_expert_norm.weight": ([3584], bf16),
            f"{path}routed_expert_up_proj.weight": ([7168, 3584], bf16),
            f"{path}shared_experts.gate_proj.weight": ([6144, 7168], bf16),
            f"{path}shared_experts.up_proj.weight": ([6144, 7168], bf16),
            f"{path}shared_experts.down_proj.weight": ([7168, 6144], bf16),
        }
        for e in range(896):
            for name in ("w1", "w3"):
                expected[f"{path}experts.{e}.{name}.weight_packed"] = ([3072, 1792], u8)
                expected[f"{path}experts.{e}.{name}.weight_scale"] = ([3072, 112], u8)
            expected[f"{path}experts.{e}.w2.weight_packed"] = ([3584, 1536], u8)
            expected[f"{path}experts.{e}.w2.weight_scale"] = ([3584, 96], u8)
    assert found == expected


def test_gate_rows_come_before_up_rows(folder: Path) -> None:
    """w13 is w1 on top of w3, and the file holds them apart."""
    model = random_model(SMALL, torch.bfloat16)
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    path = f"{PREFIX}model.layers.1.block_sparse_moe.experts.5"
    packed = model.model.layers[1].block_sparse_moe.experts.w13_packed[5]
    assert torch.equal(stored[f"{path}.w1.weight_packed"], packed[:64])
    assert torch.equal(stored[f"{path}.w3.weight_packed"], packed[64:])


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_read_their_parts(tmp_path: Path, size: int) -> None:
    """Parts of all ranks put together are the whole; replicated tensors are whole on every rank."""
    config = KimiK3Config.tiny_tp8().with_layers(4)
    whole = random_model(config, torch.bfloat16)
    root = save_checkpoint(whole, tmp_path / "weights")
    ranks = []
    for rank in range(size):
        part = KimiK3(config, group=TensorParallel(size=size, rank=rank, group_name="unused"))
        ranks.append({t.name: t for t in checkpoint_tensors(load_checkpoint(part, root))})
    for tensor in checkpoint_tensors(whole):
        parts = [rank[tensor.name] for rank in ranks]
        if parts[0].split is None:
            assert all(torch.equal(part.target, tensor.target) for part in parts)
        else:
            together = torch.cat([part.target for part in parts], dim=parts[0].split)
            expected = tensor.target[: config.kda_num_heads] if tensor.name.endswith("A_log") else tensor.target
            assert torch.equal(together, expected), tensor.name
    split = {name for name, tensor in ranks[0].items() if tensor.split is not None}
    assert not [n for n in split if n.endswith(("routed_expert_up_proj.weight", "f_a_proj.weight", "gate.weight"))]
    assert f"model.layers.3.block_sparse_moe.experts.{15}.w2.weight_scale" in split


def test_a_log_shards_are_of_the_heads() -> None:
    """Fault 95: 96 heads of 128 entries at TP8: rank 1 starts at 12, not 16; rank 7 at 84; no rank holds padding."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for rank, start in ((0, 0), (1, 12), (7, 84)):
        with FakeTensorMode():
            model = KimiK3(KimiK3Config().with_layers(1), group=TensorParallel(size=8, rank=rank, group_name="unused"))
            tensor = next(t for t in checkpoint_tensors(model) if t.name.endswith("A_log"))
        stored = torch.cat([torch.arange(96.0), torch.zeros(32)])
        assert tensor.shape == (128,)
        assert tensor.part(stored).tolist() == list(range(start, start + 12))


def test_names_without_the_prefix_and_vision_tensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        content = load_file(file)
        save_file({name.removeprefix(PREFIX): tensor for name, tensor in content.items()}, file)
    (folder / INDEX).unlink()
    assert equal(load_checkpoint(poisoned(SMALL), folder), random_model(SMALL, torch.bfloat16))


def test_vision_tensors_are_left_alone(folder: Path) -> None:
    save_file({"vision_tower.x": torch.zeros(2), "mm_projector.y": torch.zeros(2)}, folder / "vision.safetensors")
    (folder / INDEX).unlink()
    load_checkpoint(poisoned(SMALL), folder)


def test_a_bf16_checkpoint_loads_into_wider_models(folder: Path) -> None:
    narrow = random_model(SMALL, torch.bfloat16)
    for dtype in (torch.float32, torch.float64):
        wide = load_checkpoint(poisoned(SMALL, dtype), folder).state_dict()
        assert all(torch.equal(wide[name], t.to(wide[name].dtype)) for name, t in narrow.state_dict().items())


def edit(folder: Path, name: str, change: torch.Tensor | None) -> None:
    """Replace, add or (None) remove one tensor of the checkpoint."""
    for file in sorted(folder.glob("*.safetensors")):
        content = load_file(file)
        if name in content or change is not None:
            content.pop(name, None)
            if change is not None:
                content[name] = change
            save_file(content, file)
            return


def test_all_that_is_wrong_is_listed_and_nothing_is_loaded(folder: Path) -> None:
    shapes = {t.name: t for t in checkpoint_tensors(random_model(SMALL, torch.bfloat16))}
    first = sorted(folder.glob("*.safetensors"))[0]
    with safe_open(first, framework="pt") as content:
        names = [n for n in content.keys() if "layers.0" in n]  # noqa: SIM118
    missing, misshapen, mistyped = names[:3]
    edit(folder, missing, None)
    edit(folder, misshapen, torch.zeros(3, 5, dtype=torch.bfloat16))
    edit(folder, mistyped, shapes[mistyped.removeprefix(PREFIX)].target.half())
    edit(folder, f"{PREFIX}model.layers.7.bogus", torch.zeros(1))
    model = poisoned(SMALL)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, folder)
    text = str(caught.value)
    assert "4 problems; nothing was loaded" in text and str(folder) in text and "remedy" in text
    for kind, name in (("missing", missing), ("wrong shape", misshapen), ("wrong dtype", mistyped)):
        assert f"{kind}: {name.removeprefix(PREFIX)} " in text
    assert "extra: model.layers.7.bogus [1]" in text and "is [3, 5], must be" in text and "is F16, must be" in text
    assert all(torch.all(t.isnan() if t.is_floating_point() else t == 77) for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [({"experts": "bf16"}, ("missing", "extra")), ({"vocab_size": 256}, ("wrong shape",))],
)
def test_the_wrong_configuration_is_told(folder: Path, changes: dict[str, object], kinds: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(KimiK3(KimiK3Config.minimal(**changes).with_layers(4)), folder)
    assert all(f"{kind}: " in str(caught.value) for kind in kinds)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    model = KimiK3(SMALL)
    with pytest.raises(CheckpointError, match="is no folder"):
        load_checkpoint(model, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds neither"):
        load_checkpoint(model, tmp_path / "empty")
    first = sorted(folder.glob("*.safetensors"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match=f"unreadable: {first.name}"):
        load_checkpoint(model, folder)
    first.unlink()
    with pytest.raises(CheckpointError, match=f"unreadable: {first.name}"):
        load_checkpoint(model, folder)
    first.write_bytes(whole)
    index = folder / INDEX
    good = json.loads(index.read_text())
    name = f"{PREFIX}model.layers.0.self_attn.A_log"
    good["weight_map"][name] = sorted(set(good["weight_map"].values()) - {good["weight_map"][name]})[0]
    index.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=f"index: {name}"):
        load_checkpoint(model, folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load_checkpoint(model, folder)


INDEXES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda index: index.mkdir(),
    "a link to nothing": lambda index: index.symlink_to(index.parent / "nothing"),
    "nested deeply": lambda index: index.write_text("[" * 100_000),
    "a number of thousands of digits": lambda index: index.write_text("9" * 5000),
    "no text": lambda index: index.write_bytes(b"\xff"),
    "a list": lambda index: index.write_text("[]"),
    "a map to numbers": lambda index: index.write_text('{"weight_map": {"a": 3}}'),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_is_none(folder: Path, kind: str) -> None:
    (folder / INDEX).unlink()
    INDEXES[kind](folder / INDEX)
    with pytest.raises(CheckpointError, match="no weight_map can be read") as caught:
        load_checkpoint(KimiK3(SMALL), folder)
    assert str(caught.value).startswith(str(folder / INDEX)) and caught.value.remedy


def test_a_folder_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = KimiK3(SMALL)
    for path, reason in ((folder / ("x" * 300), "File name too long"), (f"{folder}/a\0b", "null byte")):
        with pytest.raises(CheckpointError, match=f"cannot be read: .*{reason}") as caught:
            load_checkpoint(model, path)
        assert caught.value.remedy and len(str(caught.value)) < 600
    with pytest.raises(CheckpointError, match="is no folder"):
        load_checkpoint(model, next(folder.glob("*.safetensors")))

    def closed(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for name in ("iterdir", "is_dir"):
        monkeypatch.setattr(Path, name, closed)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        load_checkpoint(model, folder)


def test_files_that_are_none(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {"a": "a\0b", "b": "x" * 300, "c": "sub"}
    (folder / "sub").mkdir()
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="3 problems; nothing was loaded") as caught:
        load_checkpoint(KimiK3(SMALL), folder)
    assert str(caught.value).count("unreadable: ") == 3


def test_a_file_that_goes_away_after_its_header_was_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def vanishing(file: Path, framework: str) -> object:
        opened.append(file)
        if opened.count(file) > 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return safe_open(file, framework=framework)

    monkeypatch.setattr("k3rewrite.models.kimi_k3.checkpoint.safe_open", vanishing)
    with pytest.raises(CheckpointError, match="changed while it was read") as caught:
        load_checkpoint(KimiK3(SMALL), folder)
    assert str(caught.value).startswith(str(folder)) and caught.value.remedy


def test_one_tensor_under_both_names(folder: Path) -> None:
    """With the prefix and without it is twice: which of the two is meant nobody knows."""
    name = "model.layers.0.self_attn.A_log"
    stored = next(t.target for t in checkpoint_tensors(random_model(SMALL, torch.bfloat16)) if t.name == name)
    save_file({name: torch.zeros_like(stored), "bogus": torch.zeros(1)}, folder / "z.safetensors")
    (folder / INDEX).unlink()
    model = poisoned(SMALL)
    with pytest.raises(CheckpointError, match="2 problems; nothing was loaded") as caught:
        load_checkpoint(model, folder)
    assert f"twice: {PREFIX}{name} is in model-00001-of" in str(caught.value)
    assert f" and {name} is in z.safetensors" in str(caught.value) and "extra: bogus [1]" in str(caught.value)
    assert all(torch.all(t.isnan() if t.is_floating_point() else t == 77) for t in model.state_dict().values())


def test_an_index_that_names_what_no_file_holds(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    file = sorted(index["weight_map"].values())[0]
    index["weight_map"] |= {f"{PREFIX}model.layers.7.bogus": file, "vision_tower.x": file}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="1 problem; nothing was loaded") as caught:
        load_checkpoint(poisoned(SMALL), folder)
    assert f"index: {PREFIX}model.layers.7.bogus is in no file, the index says {file}" in str(caught.value)


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(SMALL, torch.bfloat16)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    before = sorted(tmp_path.rglob("*"))
    for place, reason in (
        (tmp_path / "file" / "weights", "cannot be written: (Not a directory|File exists)"),
        (tmp_path / "link", "exists"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
        (tmp_path / "new" / "er" / ("x" * 300), "cannot be written: File name too long"),
        (f"{tmp_path}/a\0b", "cannot be written: .*null byte"),
        (Path("/proc/k3rewrite/weights"), "cannot be written: No such file"),
    ):
        with pytest.raises(CheckpointError, match=reason) as caught:
            save_checkpoint(model, place)
        assert caught.value.remedy and str(caught.value).startswith(str(place)[:100])
        assert sorted(tmp_path.rglob("*")) == before, "nothing is left"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        save_checkpoint(model, tmp_path / "new" / "weights")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_of_the_longest_length(tmp_path: Path) -> None:
    """The folder that is written first has a name of its own."""
    assert save_checkpoint(random_model(SMALL, torch.bfloat16), tmp_path / ("x" * 255)).is_dir()


@pytest.mark.parametrize("size", ["5GB", 0, -1, True, 1e9, None])
def test_sizes_of_files_that_are_none(size: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shard_bytes is .*\n  remedy: give a whole number of bytes"):
        save_checkpoint(KimiK3(SMALL), tmp_path / "weights", shard_bytes=size)  # type: ignore[arg-type]
    assert not (tmp_path / "weights").exists()


def test_saving_overwrites_nothing(folder: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        save_checkpoint(random_model(SMALL, torch.bfloat16, seed=1), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    rank = KimiK3(SMALL, group=TensorParallel(size=2, rank=1, group_name="unused"))
    with pytest.raises(CheckpointError, match="rank 1 of 2"):
        save_checkpoint(rank, tmp_path / "part")
    assert not (tmp_path / "part").exists()
