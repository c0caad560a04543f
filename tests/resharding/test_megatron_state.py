"""What a Megatron stack holds: lazily read, refused by name where it cannot move; and the state that is no tensor."""

from __future__ import annotations

import copy
import io
import json
from types import SimpleNamespace

import bed
import common_state
import pytest
import torch
from bed import Model, Split
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from resharding import megatron
from resharding.megatron import Unsupported

BF16 = Model(layers=2, dtype=torch.bfloat16)
ONE = Split()


@pytest.fixture
def stack():
    with bed.rank_of(ONE, 0):
        yield bed.build(BF16, ONE)


def _train_step(optimizer, chunks) -> None:
    for chunk in chunks:
        for param in chunk.parameters():
            param.main_grad.fill_(0.5)
    optimizer.step()


def test_boxes_are_known_before_the_state_exists_and_reading_it_then_says_so(stack):
    chunks, optimizer = stack
    before = megatron.holding_of(chunks, optimizer)
    late = next(piece for piece in before.pieces if piece.box.key.startswith("exp_avg/"))
    with pytest.raises(RuntimeError, match=r"exp_avg/.* does not exist yet; call materialize_optimizer_state"):
        late.view()
    megatron.materialize_optimizer_state(optimizer)
    assert megatron.holding_of(chunks, optimizer).boxes == before.boxes
    assert late.view().shape == late.box.shape


def test_views_follow_storage_that_is_replaced(stack):
    chunks, optimizer = stack
    holding = megatron.holding_of(chunks, optimizer)
    piece = next(piece for piece in holding.pieces if piece.box.key == "weight/decoder.final_layernorm.weight")
    param = chunks[0].module.decoder.final_layernorm.weight
    param.data = torch.full_like(param, 7)
    assert bool((piece.view() == 7).all())


def test_materialized_state_is_what_the_first_step_would_have_made(stack):
    _, optimizer = stack
    inner = optimizer.chained_optimizers[0].optimizer
    megatron.materialize_optimizer_state(optimizer)
    made = {id(param): copy.deepcopy(state) for param, state in inner.state.items()}
    inner.state.clear()
    for group in inner.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
        group["lr"] = 0.0
    inner.step()
    assert made.keys() == {id(param) for param in inner.state}
    for param, state in inner.state.items():
        mine = made[id(param)]
        assert list(mine) == list(state)
        for name, value in state.items():
            assert (mine[name].dtype, mine[name].shape, mine[name].stride(), mine[name].device) == (
                value.dtype, value.shape, value.stride(), value.device,
            )  # fmt: skip
            if name != "step":
                assert torch.equal(mine[name], value)
        assert (mine["step"].item(), state["step"].item()) == (0, 1)


def test_state_that_exists_is_left_alone(stack):
    chunks, optimizer = stack
    _train_step(optimizer, chunks)
    inner = optimizer.chained_optimizers[0].optimizer
    before = {id(value) for state in inner.state.values() for value in state.values()}
    megatron.materialize_optimizer_state(optimizer, empty=True)
    assert {id(value) for state in inner.state.values() for value in state.values()} == before


def test_a_stack_on_the_meta_device_has_the_same_boxes():
    split = Split(tp=2, pp=2)
    real = bed.world(BF16, split)
    for rank in real:
        with bed.rank_of(split, rank.ranks["rank"]):
            for chunk in rank.chunks:
                chunk.module.to("meta")
            weights = [box for box in rank.holding.boxes if box.key.startswith("weight/")]
            assert megatron.holding_of(rank.chunks, None).boxes == weights


def test_common_state_moves_and_disagreement_is_an_error(stack):
    chunks, optimizer = stack
    for _ in range(3):
        _train_step(optimizer, chunks)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.125, 0.25 * group["wd_mult"]
    said = json.loads(json.dumps(megatron.common_state(optimizer)))
    with_nothing = {"groups": {name: {**fields, "step": None} for name, fields in said["groups"].items()}}
    merged = megatron.merge_common_state([{}, with_nothing, said, copy.deepcopy(said)])
    assert {fields["step"] for fields in merged["groups"].values()} == {3}
    fresh_chunks, fresh = bed.build(BF16, ONE)
    megatron.materialize_optimizer_state(fresh, empty=True)
    megatron.load_common_state(fresh, merged)
    assert megatron.common_state(fresh) == megatron.common_state(optimizer)
    inner = fresh.chained_optimizers[0].optimizer
    assert {state["step"].item() for state in inner.state.values()} == {3}
    _train_step(fresh, fresh_chunks)
    assert {state["step"].item() for state in inner.state.values()} == {4}
    other = copy.deepcopy(said)
    next(iter(other["groups"].values()))["lr"] = 0.5
    with pytest.raises(ValueError, match=r"lr is 0\.125 on one rank and 0\.5 on another"):
        megatron.merge_common_state([said, other])
    with pytest.raises(ValueError, match="no state for parameter group"):
        megatron.load_common_state(fresh, {"groups": {}, "grad_scaler": {}})


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("eps", [(1, 2), (2, 1), (2, 2)])
def test_groups_of_experts_are_found_whichever_ep_they_come_from(eps: tuple[int, int], distributed: bool) -> None:
    """At ep 1 experts are among the dense parameters, in the same groups."""
    model = Model(layers=2, experts=2, distributed=distributed)
    old, new = (bed.world(model, Split(dp=2, ep=ep)) for ep in eps)
    for rank in old:
        common_state.fill(rank.optimizer)
    merged = megatron.merge_common_state([megatron.common_state(rank.optimizer) for rank in old])
    for rank in new:
        common_state.poison(rank.optimizer)
        megatron.load_common_state(rank.optimizer, json.loads(json.dumps(merged)))
        assert common_state.wrong(rank.optimizer) == []


def test_a_group_whose_name_is_no_json_has_no_twin() -> None:
    dense, expert = (json.dumps({"is_expert_parallel": flag, "wd_mult": 1.0}) for flag in (False, True))
    strange = {"group 0": {"step": 1}, "3": {"step": 1}, "[1": {"step": 1}, "": {"step": 1}}
    assert megatron.with_expert_twins({**strange, dense: {"step": 3}}) == {
        **strange, dense: {"step": 3}, expert: {"step": 3},
    }  # fmt: skip
    both = {dense: {"step": 3}, expert: {"step": 4}}
    assert megatron.with_expert_twins(both) == both


def test_parameters_at_different_steps_are_refused(stack):
    chunks, optimizer = stack
    _train_step(optimizer, chunks)
    inner = optimizer.chained_optimizers[0].optimizer
    next(iter(inner.state.values()))["step"] += 1
    with pytest.raises(Unsupported, match=r"different steps \[1\.0, 2\.0\]"):
        megatron.common_state(optimizer)


def test_an_optimizer_whose_state_cannot_move_is_told_by_kind_and_parameter(stack, monkeypatch):
    chunks, optimizer = stack
    assert megatron.misfit_of_optimizer(chunks, optimizer) is None  # it has not stepped
    _train_step(optimizer, chunks)
    inner = optimizer.chained_optimizers[0].optimizer
    next(iter(inner.state.values()))["step"] += 1
    assert megatron.misfit_of_optimizer(chunks, optimizer) is None  # as in the middle of a step
    next(iter(inner.state.values()))["step"] += 1
    said = megatron.misfit_of_optimizer(chunks, optimizer)
    names = [name.removeprefix("module.") for name, _ in chunks[0].named_parameters()]
    assert "is at step 1 of the optimizer and" in said
    assert sum(said.startswith(name) or f"and {name} at step 3" in said for name in names) == 2
    monkeypatch.setattr(inner, "__class__", torch.optim.Adagrad)
    said = megatron.misfit_of_optimizer(chunks, optimizer)
    assert any(said == f"what Adagrad keeps for {name} cannot move; use torch's Adam or AdamW, or SGD without momentum" for name in names)
    assert "optimizer NoneType is not one" in megatron.misfit_of_optimizer(chunks, None)


def test_the_grad_scaler_of_fp16_moves():
    with bed.rank_of(ONE, 0):
        _, optimizer = bed.build(Model(layers=2, dtype=torch.float16), ONE)
        scaler = optimizer.chained_optimizers[0].grad_scaler
        scaler._scale.fill_(4096.0)
        scaler._growth_tracker = 17
        state = json.loads(json.dumps(megatron.common_state(optimizer)))
        _, fresh = bed.build(Model(layers=2, dtype=torch.float16), ONE)
        megatron.load_common_state(fresh, megatron.merge_common_state([state, {}]))
        loaded = fresh.chained_optimizers[0].grad_scaler
        assert (loaded._scale.item(), loaded._growth_tracker) == (4096.0, 17)
        assert fresh.get_loss_scale().shape == scaler.scale.shape


class _Odd(torch.nn.Module):
    """A module whose sharded state is whatever the test says."""

    def __init__(self, make, param=None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4) if param is None else param)
        self._make = make

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        assert metadata["non_homogeneous_layers"]
        return self._make(self)


def _sharded(key, data):
    return ShardedTensor.from_rank_offsets(key, data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: {"w": _sharded("w", m.weight), "x": ShardedObject("x", {"a": 1}, (1,), (0,))}, "x is an object"),
        (lambda m: {"w": _sharded("w", m.weight), "x": ShardedObject("x", io.BytesIO(b"1"), (1,), (0,))}, "x is an obj"),
        (lambda m: {"w": _sharded("w", m.weight), "x": torch.ones(3)}, "x is a Tensor"),
        (lambda m: {"w": _sharded("w", m.weight.detach().clone())}, "w is a copy"),
        (lambda m: {}, "parameter weight is not in"),
        (lambda m: {"w": _factory(m.weight, lambda t: [t.flip(0)])}, r"w\.0 is rearranged"),
        (lambda m: {"w": _factory(m.weight, lambda t: [t.flatten()[[0, 1, 2, 4]]])}, r"w\.0 is rearranged"),
    ],
)  # fmt: skip
def test_what_cannot_move_is_refused_by_name(make, words):
    with pytest.raises(Unsupported, match=words):
        megatron.holding_of([_Odd(make)], None)


def test_a_check_of_megatrons_that_fails_is_refused_with_the_models_name_and_the_check():
    """Some have no words, as that of a tied embedding with multi-token prediction on two stages."""

    def tied_on_two_stages(m):
        assert m.weight.numel() == 1

    def named(m):
        raise AssertionError("only with pp=1")

    with pytest.raises(Unsupported, match=r"_Odd cannot say .* fails at 'assert m.weight.numel\(\) == 1' in tied_on_two"):
        megatron.holding_of([_Odd(tied_on_two_stages)], None)
    with pytest.raises(Unsupported, match=r"_Odd cannot say .* in named \(only with pp=1\)"):
        megatron.holding_of([_Odd(named)], None)


def test_the_scales_of_fp8_are_refused_before_anything_moves():
    def make(m):
        state = ShardedObject("decoder.layers.0.mlp.linear_fc1._extra_state", io.BytesIO(b"scales"), (1,), (0,))
        return {"w": _sharded("w", m.weight), "decoder.layers.0.mlp.linear_fc1._extra_state": state}

    with pytest.raises(Unsupported, match=r"linear_fc1\._extra_state is an object .* one rank of one layout"):
        megatron.holding_of([_Odd(make)], None)


def test_a_type_that_cannot_be_moved_is_refused_by_name():
    module = _Odd(lambda m: {"w": _sharded("w", m.weight)})
    module.weight = torch.nn.Parameter(module.weight.detach().to(torch.complex64), requires_grad=False)
    with pytest.raises(Unsupported, match="weight/w is kept as complex64"):
        megatron.holding_of([module], None)


def test_a_parameter_that_is_no_plain_tensor_is_refused_by_name():
    """As those of FP8 are: what lies in their storage are not the numbers they show."""

    class Quantized(torch.Tensor):
        pass

    weight = torch.nn.Parameter(torch.ones(3, 4).as_subclass(Quantized))
    assert type(weight) is Quantized
    with pytest.raises(Unsupported, match=r"^w is kept as Quantized, not as a plain tensor$"):
        megatron.holding_of([_Odd(lambda m: {"w": _sharded("w", m.weight)}, weight)], None)


def _factory(data, cut):
    def build(key, tensor, _replica, _range):
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{index}", part) for index, part in enumerate(cut(tensor))
        ]

    return ShardedTensorFactory("w", data, build, lambda parts: parts[0])


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: [t[:, :1], t[:, 1:]],
        lambda t: [t.t()],
        lambda t: [t.t().contiguous()],
        lambda t: [t.reshape(3, 2, 2).permute(2, 0, 1).contiguous()],
        lambda t: [t[::2], t[1::2]],
        lambda t: [t[:1].clone(), t[1:].clone()],
    ],
    ids=["columns", "transposed view", "transposed copy", "permuted copy", "strided", "copies"],
)  # fmt: skip
@pytest.mark.parametrize("view_kind", ["empty objects", "plain"])
def test_parts_of_a_factory_are_found_in_the_parameter_and_in_flat_ranges(cut, view_kind):
    module = _Odd(
        lambda m: {
            "w": _factory(m.weight, cut),
            **({"e": ShardedObject("e", None, (1,), (0,)), "b": ShardedObject("b", io.BytesIO(), (1,), (0,))}
               if view_kind == "empty objects" else {}),
        }
    )  # fmt: skip
    wanted = cut(module.weight.detach())
    holding = megatron.holding_of([module], None)
    for piece, part in zip(holding.pieces, wanted, strict=True):
        assert torch.equal(piece.view(), part)
        piece.view().add_(100)  # it is the parameter itself
    assert torch.equal(module.weight, torch.arange(12.0).view(3, 4) + 100)
    numbers = torch.arange(12.0)
    for part, tensor in zip(megatron.placed_parts([module]), cut(numbers.view(3, 4)), strict=True):
        for first in range(12):
            for last in range(first, 13):
                seen = torch.zeros(tensor.shape, dtype=torch.bool)
                for start, shape in megatron.boxes_in_range(part, first, last):
                    view = part.accessor(lambda first=first, last=last: numbers[first:last], first, start, shape)()
                    inner, marks = tensor, seen
                    for axis, (at, size) in enumerate(zip(start, shape, strict=True)):
                        inner, marks = inner.narrow(axis, at, size), marks.narrow(axis, at, size)
                    assert torch.equal(view, inner)
                    assert not marks.any()
                    marks.fill_(True)
                assert torch.equal(seen, (tensor >= first) & (tensor < last))


def test_optimizers_that_keep_state_elsewhere_are_refused_by_name(stack):
    chunks, optimizer = stack
    with pytest.raises(Unsupported, match="optimizer SGD is not one"):
        megatron.holding_of(chunks, torch.optim.SGD(chunks[0].parameters()))
    leaf = optimizer.chained_optimizers[0]
    inner = leaf.optimizer
    leaf.optimizer = torch.optim.RMSprop(inner.param_groups[0]["params"])
    with pytest.raises(Unsupported, match="RMSprop has no state yet"):
        megatron.materialize_optimizer_state(optimizer)


def test_main_parameters_inside_the_optimizer_are_refused_before_a_change_and_while_planning_it(stack):
    chunks, optimizer = stack
    optimizer.chained_optimizers[0].config.use_precision_aware_optimizer = True
    words = "use_precision_aware_optimizer keeps main parameters inside the optimizer"
    assert megatron.misfit_of_optimizer(chunks, optimizer) == words
    with pytest.raises(Unsupported, match=words):
        megatron.holding_of(chunks, optimizer)


def test_settle_does_nothing_where_parameters_are_complete_and_syncs_where_not():
    calls = []
    lazy = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_param_gather=True),
        disable_forward_pre_hook=lambda param_sync: calls.append(("sync", param_sync)),
        enable_forward_pre_hook=lambda: calls.append("enable"),
    )
    megatron.settle([SimpleNamespace(), SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=False)), lazy])
    assert calls == [("sync", True), "enable"]


def test_misfit_of_asks_the_models_own_configuration(stack):
    chunks, _ = stack
    assert megatron.misfit_of(chunks, {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "ep": 1, "etp": 1}) is None
    assert "num_attention_heads=4" in (megatron.misfit_of(chunks, {"tp": 3}) or "")
    assert "num_layers=2" in (megatron.misfit_of(chunks, {"pp": 4}) or "")
