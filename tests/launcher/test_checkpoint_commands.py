"""``liverun checkpoint inspect|verify|diff`` as a person or a script uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resharding"))
import test_checkpoint_damage as files
import torch
from launcher_bed import Bed

from launcher.checkpoint import buffers_of
from resharding.checkpoint.opened import Checkpoint

QUERIES = "layers.0.linear_qkv.q.weight"


def run(bed: Bed, *words: str) -> subprocess.CompletedProcess[str]:
    return bed.cli("checkpoint", *words)


def test_inspect_shows_tensors_sizes_and_where_it_came_from(bed: Bed, tmp_path: Path) -> None:
    path = files.save(tmp_path, 3)
    shown = run(bed, "inspect", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    for words in ("step 3", "linear_qkv", "weight [12, 5]  exp_avg float32, weight float32", "rng"):
        assert words in shown.stdout
    found = json.loads(run(bed, "inspect", str(path), "--json").stdout)
    tensors = {row["key"]: row for row in found["tensors"]}
    assert tensors[f"weight/{QUERIES}"]["shape"] == [12, 5]
    assert found["bytes"] == sum(row["bytes"] for row in found["tensors"])
    assert (found["step"], found["kinds"]["exp_avg"]["tensors"]) == (3, 4)


def test_verify_names_what_is_damaged_and_diff_says_how_far_apart(bed: Bed, tmp_path: Path) -> None:
    one, other = files.save(tmp_path, 1), files.save(tmp_path / "other", 1)
    assert run(bed, "verify", str(one)).returncode == 0
    same = run(bed, "diff", str(one), str(other))
    assert (same.returncode, same.stdout) == (0, "all 10 tensors are the same\n")
    with Checkpoint.open(other) as checkpoint:
        entry = checkpoint.index.by_key[f"weight/{QUERIES}"]
    file = other / entry.file
    whole = bytearray(file.read_bytes())
    whole[entry.begin + 8] ^= 1
    file.write_bytes(whole)
    bad = run(bed, "verify", str(other), "--json")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["first"] == f"weight/{QUERIES}"
    assert f"{entry.key} in {file} is damaged" in bad.stderr
    header = bytearray(whole)
    header[entry.begin + 8] ^= 1
    header[20] ^= 1
    file.write_bytes(header)
    assert "its header is damaged" in run(bed, "verify", str(other)).stderr
    later = files.save(tmp_path / "later", 2)
    differs = run(bed, "diff", str(one), str(later), "--json")
    assert differs.returncode == 1
    found = {row["key"]: row for row in json.loads(differs.stdout)["tensors"]}
    a, b = files.state(1)["weight/scalar"], files.state(2)["weight/scalar"]
    assert found["weight/scalar"]["max_abs"] == abs(float(a - b))
    parts = [files.state(step)["weight/embedding"] for step in (1, 2)]
    assert found["weight/embedding"]["num_different"] == int((parts[0] != parts[1]).sum())
    assert found["weight/embedding"]["max_abs"] == float((parts[0] - parts[1]).abs().max())


def test_diff_names_what_one_has_alone_and_what_has_another_shape_or_type(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = files.save(tmp_path / "one", 1)
    tensors = files.state(1)
    del tensors["weight/scalar"]
    tensors["weight/bias"] = torch.zeros(3)
    tensors["weight/embedding"] = torch.zeros(12, 7)
    tensors["exp_avg/embedding"] = tensors["exp_avg/embedding"].bfloat16()  # the same numbers
    monkeypatch.setattr(files, "state", lambda _value: tensors)
    other = files.save(tmp_path / "other", 2)
    wanted = {
        "weight/scalar": ("only in A", "float32 []"), "weight/bias": ("only in B", "float32 [3]"),
        "weight/embedding": ("shape", "float32 [11, 7] in A, float32 [12, 7] in B"),
        "exp_avg/embedding": ("dtype", "float32 [11, 7] in A, bfloat16 [11, 7] in B"),
    }  # fmt: skip
    shown = run(bed, "diff", str(one), str(other))
    assert (shown.returncode, shown.stderr) == (1, "")
    assert sorted(shown.stdout.splitlines()) == sorted(f"{key}: {': '.join(said)}" for key, said in wanted.items())
    told = run(bed, "diff", str(one), str(other), "--json")
    assert (told.returncode, told.stderr) == (1, "")
    found = json.loads(told.stdout)
    assert (found["same"], found["steps"]) == (False, {"a": 1, "b": 2})
    assert {row["key"]: (row["what"], row["detail"]) for row in found["tensors"]} == wanted
    assert {(row["num_different"], row["max_abs"]) for row in found["tensors"]} == {(0, None)}
    same = run(bed, "diff", str(other), str(other), "--json")
    assert (same.returncode, json.loads(same.stdout)) == (0, {"same": True, "steps": {"a": 2, "b": 2}, "tensors": []})


def test_what_is_no_checkpoint_is_said_with_exit_code_2(bed: Bed, tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        done = run(bed, command, str(tmp_path))
        assert done.returncode == 2
        assert "is no checkpoint, it has no index.json" in done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_looking_at_files_needs_no_torch(command: str, bed: Bed, tmp_path: Path) -> None:
    path = files.save(tmp_path, 1)
    code = (
        "import sys\nfrom launcher.cli import main\n"
        f"sys.argv = ['liverun', 'checkpoint', {command!r}, {str(path)!r}]\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=bed.environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_without_a_folder_for_checkpoints_says_so(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, sentence in {
        ("--checkpoint-every", "5"): "--checkpoint-every needs --checkpoint-dir",
        ("--keep-last", "0", "--checkpoint-dir", "x"): "--keep-last 0 is not at least 1",
        ("--checkpoint-dir", __file__): "is not a folder",
    }.items():
        done = bed.cli("run", *words, os.devnull)
        assert done.returncode == 2
        assert sentence in done.stderr


def test_numbers_of_every_type_are_read_as_torch_reads_them() -> None:
    from resharding.checkpoint.bits import bits_of_tensor
    from resharding.checkpoint.compare import numbers_of

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool):
        values = torch.tensor([0, 1, 3, 100]).to(dtype)
        found = numbers_of(bits_of_tensor(values), str(dtype).removeprefix("torch."))
        assert found.tolist() == values.double().tolist(), dtype


def test_convert_and_export_go_by_what_a_folder_is(bed: Bed, tmp_path: Path) -> None:
    path = files.save(tmp_path / "ours", 1)
    for words, code, sentence in (
        (("convert", str(tmp_path), str(tmp_path / "x")), 2, "is no checkpoint of liverun, Megatron (torch_dist) or"),
        (("convert", str(path), str(tmp_path / "x"), "--to", "liverun"), 2, "is not converted to that"),
        (("export", str(path), str(tmp_path / "x")), 2, "does not name q, k and v apart"),
        (("export", str(tmp_path / "none"), str(tmp_path / "x")), 2, "does not exist"),
    ):
        done = run(bed, *words)
        assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    universal = tmp_path / "universal" / "zero" / "layer.weight"
    universal.mkdir(parents=True)
    torch.save({"param": torch.arange(6.0).view(2, 3)}, universal / "fp32.pt")
    asked = run(bed, "convert", str(tmp_path / "universal"), str(tmp_path / "new"))
    assert (asked.returncode, "does not say what --step is; pass it" in asked.stderr) == (1, True)
    done = run(
        bed, "convert", str(tmp_path / "universal"), str(tmp_path / "new"), "--step", "7", "--consumed-samples", "70"
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(run(bed, "inspect", str(tmp_path / "new"), "--json").stdout)
    assert (shown["step"], [row["key"] for row in shown["tensors"]]) == (7, ["weight/layer.weight"])
    assert run(bed, "verify", str(tmp_path / "new")).returncode == 0


def test_megatron_is_asked_where_a_model_has_its_parameters() -> None:
    said = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 128, "bf16": True,
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "transformer_impl": "local",
    }  # fmt: skip
    found = buffers_of(said)
    places = [f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0" for rank in range(2)]
    assert [(buffer.place, buffer.dtype) for buffer in found] == [(place, "bfloat16") for place in places]
    (embedding,) = found[1].parameters[0].stretches
    assert (embedding.name, embedding.offset, embedding.shape) == ("embedding.word_embeddings.weight", (64, 0), (64, 64))
    with pytest.raises(ValueError, match=r"^layout tp=0 is not a whole number of at least 1$"):
        buffers_of(said | {"tensor_model_parallel_size": 0})
