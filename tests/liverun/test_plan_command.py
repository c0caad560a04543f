"""``liverun plan``: what it says of a world that is not there is what such a world holds and moves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resharding"))
import bed
from bed import Model, Split

from liverun.description import Description
from liverun.layout import Layout
from liverun.plan import PlannedWorld, listings_of, main, report

ROOT = Path(__file__).resolve().parents[2]
SIZES = [
    "--num-layers=4", "--hidden-size=32", "--num-attention-heads=4", "--ffn-hidden-size=40", "--swiglu",
    "--padded-vocab-size=64", "--seq-length=8", "--position-embedding-type=rope", "--normalization=RMSNorm",
    "--disable-bias-linear",
]  # fmt: skip
DISTRIBUTED = ["--use-distributed-optimizer", "--ddp-bucket-size=3000"]
EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=24", "--moe-router-topk=2", "--moe-router-load-balancing-type=none"]
MLA = [
    "--multi-latent-attention", "--q-lora-rank=16", "--kv-lora-rank=16", "--qk-head-dim=8", "--qk-pos-emb-head-dim=8",
    "--v-head-dim=8",
]  # fmt: skip
BF16 = torch.bfloat16
CASES = {
    "bf16, several buckets": (["--bf16", *DISTRIBUTED], Model(dtype=BF16), Split(tp=2, pp=2, dp=3)),
    "grouped queries, untied, cp": (
        ["--bf16", *DISTRIBUTED, "--group-query-attention", "--num-query-groups=2", "--untie-embeddings-and-output-weights"],
        Model(dtype=BF16, groups=2, tied=False), Split(tp=2, dp=2, cp=2),
    ),
    "fp32, interleaved": (DISTRIBUTED, Model(), Split(pp=2, vpp=2, dp=2)),
    "optimizer not distributed": (["--fp16"], Model(dtype=torch.float16, distributed=False), Split(tp=2, dp=2)),
    "experts": (["--bf16", *DISTRIBUTED, *EXPERTS], Model(dtype=BF16, experts=4), Split(tp=2, dp=2, ep=2, etp=1)),
    "latent attention": (["--bf16", *DISTRIBUTED, *MLA], Model(dtype=BF16, mla=True), Split(tp=2, dp=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_rank_of_a_planned_world_holds_what_a_real_one_does(name: str) -> None:
    flags, model, split = CASES[name]
    layout = Layout(tp=split.tp, pp=split.pp, vpp=split.vpp, cp=split.cp, ep=split.ep, etp=split.etp or 1)
    planned = listings_of(Description.of(None, [*SIZES, *flags]), PlannedWorld(layout=layout, size=split.size))
    real = bed.world(model, split)
    assert len(planned) == len(real)
    for listing, rank in zip(planned, real, strict=True):
        assert Counter(listing.boxes) == Counter(rank.holding.boxes)


def test_links_ranks_and_totals_add_up_and_nodes_are_told_apart() -> None:
    description = Description.of(None, [*SIZES, "--bf16", *DISTRIBUTED])
    found = report(
        description, PlannedWorld.parse("tp=2,dp=2"), PlannedWorld.parse("pp=2"), workers_per_node=2, bytes_per_s=1e6,
        staging_bytes=100,
    )  # fmt: skip
    assert [rank["node"] for rank in found["ranks"]] == ["n0", "n0", "n1", "n1"]
    for way, end in (("sent", "from"), ("received", "to")):
        for rank in found["ranks"]:
            links = [link["bytes"] for link in found["links"] if link[end] == rank["rank"]]
            assert rank[f"bytes_{way}"] == sum(links)
    assert sum(rank["bytes_sent"] for rank in found["ranks"]) == found["bytes_moved"]
    between = [link["bytes"] for link in found["links"] if link["between_nodes"]]
    assert found["bytes_between_nodes"] == sum(between) > 0
    assert [rank["bytes_after"] > 0 for rank in found["ranks"]] == [True, True, False, False]
    slowest = max(max(rank["bytes_sent"], rank["bytes_received"]) for rank in found["ranks"])
    assert found["estimate"]["seconds"] >= slowest / 1e6
    assert found["estimate"]["peak_bytes_freed"] < found["estimate"]["peak_bytes_kept"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--from=tp=2,dp=0", "--to=tp=1", "--", *SIZES], "layout 'tp=2,dp=0': write dp once, as a whole number"),
        (["--from=tp=3", "--to=tp=1", "--", *SIZES], "num_attention_heads=4 cannot be split over tp=3"),
        (["--from=tp=2", "--to=ep=2", "--", *SIZES], "needs a multiple of 2 workers (etp*ep*pp), not 1"),
        (["--from=tp=2", "--to=tp=1", "--model=/nowhere.json", "--", *SIZES], "--model /nowhere.json: [Errno 2]"),
        (["--from=tp=2", "--to=tp=1", "--", "--num-layers=4"], "the model has no --hidden-size; give it with --model"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--num-layers=few"], "--num-layers 'few' is not what Megatron takes"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--qk-layernorm", "maybe"], "--qk-layernorm 'maybe' is not what"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--workers-per-node=8", "--bytes-per-s=1", "--staging-bytes=1", *words])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("liverun: ")
    assert said.err.count("\n") == 1
    assert sentence in said.err
    assert said.out == ""


def test_a_plan_needs_nothing_running_and_reads_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"num-layers": 2, "hidden_size": 32, "num-attention-heads": 4, "vocab-size": 100, "lr": 1}))
    done = run("--from", "dp=2", "--to", "tp=2", "--model", str(file), "--json", "--", "--num-layers", "4", "--bf16")
    assert done.returncode == 0, done.stderr
    assert "ignored, since it is the layouts' or says nothing of the state: lr" in done.stderr
    found = json.loads(done.stdout)
    assert (found["from"]["size"], found["to"]["layout"]["tp"]) == (2, 2)
    assert found["bytes_moved"] == 0, "every rank holds everything already"
    assert found["ranks"][0]["bytes_local"] == found["ranks"][0]["bytes_after"] > 0


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "liverun", "plan", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
