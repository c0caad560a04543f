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
MAMBA = ["--is-hybrid-model", "--mamba-state-dim=8", "--mamba-head-dim=8", "--mamba-num-groups=4"]
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
    "Mamba": ([*DISTRIBUTED, *MAMBA, "--hybrid-override-pattern=MMMM"], Model(hybrid="MMMM"), Split(tp=2, dp=2)),
    "Mamba, attention, MLP": (
        [*DISTRIBUTED, *MAMBA, "--hybrid-override-pattern", "M*-M"], Model(hybrid="M*-M"), Split(tp=2, pp=2)
    ),
    "uneven stages": (
        ["--bf16", *DISTRIBUTED, "--decoder-first-pipeline-num-layers=1"], Model(dtype=BF16), Split(pp=2, dp=2, first=1)
    ),
    "experts, shared and dense, biased router": (
        ["--bf16", *DISTRIBUTED, *EXPERTS, "--moe-shared-expert-intermediate-size=16", "--moe-layer-freq", "[0,1,1,1]",
         "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"],
        Model(dtype=BF16, experts=4, shared=16, router_bias=True, dense_first=True), Split(tp=2, dp=2, ep=2, etp=1),
    ),
    "experts in one tensor": (
        [*DISTRIBUTED, *EXPERTS, "--moe-grouped-gemm", "--moe-use-legacy-grouped-gemm"], Model(experts=4, grouped=True),
        Split(tp=2, dp=2, ep=2, etp=1),
    ),
    "tokens further ahead": (
        ["--bf16", *DISTRIBUTED, "--mtp-num-layers=1", "--untie-embeddings-and-output-weights"],
        Model(dtype=BF16, ahead=1, tied=False), Split(tp=2, pp=2),
    ),
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
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--moe-layer-freq", "[1]*few"], "'[1]*few' is no list; write it like"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--fp8-format", "hybrid"], "--fp8-format hybrid cannot be planned: its"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--optimizer", "muon"], "--optimizer muon cannot be planned: live"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--optimizer=sgd"], "sgd with a momentum of 0.9 cannot be planned"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--spec", "mine", "layers"], "--spec mine layers cannot be planned"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--softmax-type=learnable"], "--softmax-type learnable cannot be"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--use-megatron-fsdp"], "--use-megatron-fsdp cannot be planned: it"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--hybrid-override-pattern=M*-E"], "--hybrid-override-pattern with E"),
        (["--from=tp=2", "--to=tp=1", "--", *SIZES, "--mtp-num-layers=1", "--is-hybrid-model"], "--mtp-num-layers cannot be"),
        (["--from=pp=2", "--to=tp=1", "--", *SIZES, "--mtp-num-layers=1"], "give --untie-embeddings-and-output-weights"),
        (
            ["--from=tp=2", "--to=tp=1", "--", *SIZES, *MAMBA, "--mamba-num-groups=1"],
            "mamba_num_groups=1 cannot be split over tp=2",
        ),
        (
            ["--from=tp=2", "--to=tp=1", "--", *SIZES, *EXPERTS, "--moe-ffn-hidden-size=25"],
            "moe_ffn_hidden_size=25 cannot be split over etp=2",
        ),
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


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        (["--swiglu"], ["--swiglu", "--ffn-hidden-size=64"]),  # Megatron makes it two thirds of four times the width
        (["--quick-geglu", "--ffn-hidden-size=40"], ["--swiglu", "--ffn-hidden-size=40"]),
        (["--group-query-attention"], ["--num-query-groups=1"]),
        (["--use-rotary-position-embeddings"], ["--position-embedding-type=rope"]),
        (["--num-experts=2", "--moe-layer-freq", "([0]*1+[1]*1)*1"], ["--num-experts=2", "--moe-layer-freq=[0,1]"]),
        (["--num-experts=2", "--moe-grouped-gemm"], ["--num-experts=2"]),
        (["--ddp-bucket-size=99", "--no-such-flag=1"], ["--ddp-bucket-size=99", "--overlap-grad-reduce"]),
    ],
)
def test_flags_mean_what_megatrons_scripts_make_of_them(words: list[str], same_as: list[str]) -> None:
    shape = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--vocab-size=64", "--use-distributed-optimizer"]
    one, other = (
        listings_of(Description.of(None, [*shape, *more]), PlannedWorld.parse("dp=2"))[1] for more in (words, same_as)
    )
    assert Counter(one.boxes) == Counter(other.boxes)


def test_plain_sgd_has_no_moments() -> None:
    shape = [*SIZES, "--optimizer=sgd", "--sgd-momentum=0", "--bf16"]
    (listing,) = listings_of(Description.of(None, shape), PlannedWorld.parse("tp=1"))
    assert {box.key.split("/")[0] for box in listing.boxes} == {"weight", "main"}


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


def test_the_table_has_the_figures_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's table, and what its process for the model prints: that is handed on as it is with ``--json``."""
    flags = ["--num-layers=2", "--hidden-size=2048", "--num-attention-heads=16", "--vocab-size=64000", "--bf16"]
    flags.append("--use-distributed-optimizer")
    words = ["--from=tp=2,dp=4", "--to=tp=4,pp=2", "--workers-per-node=2"]
    tables = run(*words, "--rate=2GB", "--staging=1MB", "--", *flags)
    assert tables.returncode == 0, tables.stderr
    main([*words, "--bytes-per-s=2000000000", "--staging-bytes=1000000", "--", *flags])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    head, peaks, *lines = tables.stdout.splitlines()
    estimate = found["estimate"]
    assert head == (
        f"8 workers, tp=2, dp=4 -> 8 workers, tp=4, pp=2, dp=1: {amount(found['bytes_moved'])} moved, "
        f"{amount(found['bytes_between_nodes'])} of it between nodes, {amount(found['bytes_local'])} local; "
        f"about {estimate['seconds']:.3g} s at {amount(estimate['bytes_per_s'])} a second"
    )
    assert peaks == (
        f"state and staging of a worker: at most {amount(estimate['peak_bytes_kept'])} if the old state is kept, "
        f"{amount(estimate['peak_bytes_freed'])} if layers are given back"
    )
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    ways = ("before", "after", "sent", "received", "local")
    ranks = [[str(rank["rank"]), rank["node"], *(amount(rank[f"bytes_{way}"]) for way in ways)] for rank in found["ranks"]]
    assert rows[: len(ranks)] == ranks
    assert len({cell for row in ranks for cell in row}) > 20, "figures so alike that a wrong column would not show"
    links = [
        [str(link["from"]), str(link["to"]), amount(link["bytes"]), "two" if link["between_nodes"] else "one"]
        for link in found["links"]
    ]
    shown = rows[len(ranks) :]
    assert len(shown) == 10 < len(links)
    assert all(row in links for row in shown)
    busiest = sorted((link["bytes"] for link in found["links"]), reverse=True)
    assert [row[2] for row in shown] == [amount(nbytes) for nbytes in busiest[:10]]
    assert lines[-1] == f"the 10 busiest of {len(links)} links; --json has all"


def amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "liverun", "plan", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
