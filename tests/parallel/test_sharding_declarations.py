"""Every module declares beside its code how it is sharded, and a model with one that does not is refused by the layouts that would
need it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from argosy.compat.absent_peers import fake_ranks
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.families.family_registry import plan_of
from argosy.model.build import build_model
from argosy.model.layers import MLP, Block
from argosy.model.sharding import COLUMN, INSIDE, OUTSIDE, ROW, Sharding
from argosy.parallel import parallelize as seam
from argosy.parallel.mesh import make_mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.tensor.apply import declared_shardings, partial_parameters

SIZES = ["layers=2", "hidden=32", "heads=4", "kv_heads=4", "ffn=64", "vocab_size=64", "max_seq_len=32"]
MOE = "model.moe={experts: 4, top_k: 2, ffn: 32, shared_experts: 1, shared_gate: true, bias_rate: 0.1}"
MODELS = {
    "gpt2": ["model.preset=gpt2"],
    "qwen": ["model.preset=llama3-8b", "model.qk_norm=true", "model.tied=false"],
    "gemma": ["model.preset=gemma3-1b"],
    "moe": ["model.preset=mixtral-8x7b", MOE],
    "bert": ["model.preset=bert-base"],
    "t5": ["model.preset=t5-small", "model.head_dim=8"],
    "ict": ["model.preset=ict-base", "model.retrieval={projection: 12}", "data.ict.query_len=8"],
}


def spec_of(model: str, *layout: str) -> RunSpec:
    keys = [*MODELS[model], *(f"model.{size}" for size in SIZES), "data.train=synthetic", "data.seq_len=32"]
    keys += ["train.global_batch=4", "train.steps=1", "optim.lr=1e-3", "parallel.micro_batch=2", "eval=off"]
    return resolve(None, [*keys, *layout]).spec


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_of_every_model_is_declared(model: str) -> None:
    built = build_model(spec_of(model).model, "meta")
    assert declared_shardings(built).keys() == dict(built.named_parameters()).keys()


def test_what_is_declared_is_what_megatron_style_tensor_parallelism_does() -> None:
    found = declared_shardings(build_model(spec_of("moe").model, "meta"))
    block = "layers.0."
    assert {name: found[f"{block}{name}"] for name in ("attn.qkv.weight", "attn.out.weight", "attn_norm.weight")} == {
        "attn.qkv.weight": COLUMN,
        "attn.out.weight": ROW,
        "attn_norm.weight": OUTSIDE,
    }
    assert found[f"{block}mlp.router.weight"] == INSIDE
    assert found[f"{block}mlp.experts.down"] == Sharding(dim=2)


@pytest.mark.parametrize("sequence", [True, False])
def test_gradients_of_norms_are_summed_only_where_ranks_have_other_tokens_or_heads(sequence: bool) -> None:
    model = build_model(spec_of("qwen").model, "meta")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    summed = {names[id(parameter)] for parameter in partial_parameters(model, sequence=sequence)}
    assert "layers.0.attn.q_norm.weight" in summed
    assert ("layers.0.attn_norm.weight" in summed) == ("norm.weight" in summed) == sequence
    assert "layers.0.attn.qkv.weight" not in summed


class ScaledBlock(Block):
    """A layer somebody adds without a thought of layouts."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, plan_of(spec)[0])
        self.scale = nn.Parameter(torch.ones(1))


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, ModelSpec], None]) -> None:
    """Every model that is parallelized is changed first."""

    def changed(spec: ModelSpec, device: str) -> nn.Module:
        model = build_model(spec, device)
        with torch.device(device):
            change(model, spec)
        return model

    monkeypatch.setattr(seam, "build_model", changed)


def scale_a_block(model: nn.Module, spec: ModelSpec) -> None:
    model.get_submodule("layers")["1"] = ScaledBlock(spec)  # type: ignore[index, operator]


@pytest.mark.parametrize(("layout", "refused"), [("parallel.tp=2", True), ("parallel.dp_shard=2", False)])
def test_a_layer_without_a_declaration_is_refused_under_tensor_parallelism(
    layout: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, scale_a_block)
    spec = spec_of("gpt2", layout)
    with fake_ranks(0, 2):
        mesh = make_mesh(spec.parallel, torch.device("meta"))
        if not refused:
            parallelize(spec, mesh)
            return
        with pytest.raises(ArgosyError, match=r"layers\.1\.scale \(ScaledBlock\)") as refusal:
            parallelize(spec, mesh)
    assert refusal.value.code == "model.undeclared"
    assert "tensor_parallel" in refusal.value.fix


def test_a_parameter_that_its_module_reads_whole_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaledBlock, "tensor_parallel", {**Block.tensor_parallel, "scale": COLUMN})
    plant(monkeypatch, scale_a_block)
    spec = spec_of("gpt2", "parallel.tp=2")
    with fake_ranks(0, 2), pytest.raises(ArgosyError, match=r"ScaledBlock\.scale is declared to be cut"):
        parallelize(spec, make_mesh(spec.parallel, torch.device("meta")))


def test_a_sharded_module_without_collectives_around_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda model, spec: model.add_module("extra", MLP(spec)))
    spec = spec_of("gpt2", "parallel.tp=2")
    with (
        fake_ranks(0, 2),
        pytest.raises(ArgosyError, match=r"extra \(MLP\) declares that up, down\.weight") as refusal,
    ):
        parallelize(spec, make_mesh(spec.parallel, torch.device("meta")))
    assert refusal.value.code == "model.undeclared"


def test_context_parallelism_refuses_a_model_it_would_leave_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("gpt2", "parallel.cp=2")
    monkeypatch.setattr(seam, "build_model", lambda model, device: nn.Linear(4, 4, device=device))
    with fake_ranks(0, 2), pytest.raises(ArgosyError, match="decoders only, and this model is a Linear"):
        parallelize(spec, make_mesh(spec.parallel, torch.device("meta")))


def test_a_module_that_no_stage_would_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda model, spec: model.add_module("extra", nn.Linear(4, 4)))
    spec = spec_of("gpt2", "parallel.pp=2")
    with fake_ranks(0, 2), pytest.raises(ArgosyError, match=r"no pipeline stage holds extra\.weight"):
        parallelize(spec, make_mesh(spec.parallel, torch.device("meta")))
