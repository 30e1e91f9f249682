"""Checkpoints as Megatron-LM saves them in its format torch_dist, made of a model of ours: the names, the layouts and the
files are written down here once more, apart from those the import knows."""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from argosy.config.model import ModelSpec

Cut = Callable[[str, Tensor], list[tuple[tuple[int, ...], Tensor]]]  # name, tensor -> offset and part of each box


def whole(name: str, tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    return [((0,) * tensor.ndim, tensor)]


def halves(name: str, tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Along the last dimension, and each of these along the first."""
    found = []
    for a, rows in zip((0, tensor.shape[0] // 2), tensor.tensor_split([tensor.shape[0] // 2]), strict=True):
        for b, part in zip((0, rows.shape[-1] // 3), rows.tensor_split([rows.shape[-1] // 3], dim=-1), strict=True):
            if part.numel():
                found.append(((a, *[0] * (tensor.ndim - 2), b) if tensor.ndim > 1 else (a + b,), part))
    return found


def megatron_state(
    spec: ModelSpec, weights: dict[str, Tensor], *, stacked: bool, padded: int, single: bool = False
) -> dict[str, Tensor]:
    """Weights of ours under their names."""

    def pad(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.full((padded - len(rows), rows.shape[1]), 7.0, dtype=rows.dtype)])

    state = {"embedding.word_embeddings.weight": pad(weights["embed.tokens.weight"])}
    if not spec.tied:
        state["output_layer.weight"] = pad(weights["head.weight"])
    if spec.positions == "learned":
        state["embedding.position_embeddings.weight"] = weights["embed.positions.weight"]
    for kind in ("weight", "bias") if spec.norm_bias else ("weight",):
        state[f"decoder.final_layernorm.{kind}"] = weights[f"norm.{kind}"]
    layers = [
        _layer(spec, {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"layers.{i}.")}, single)
        for i in range(spec.layers)
    ]
    if stacked:
        return state | {f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    return state | {
        f"decoder.layers.{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()
    }


def _layer(spec: ModelSpec, ours: dict[str, Tensor], single: bool) -> dict[str, Tensor]:
    theirs: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        for name, to in (
            ("attn_norm", "self_attention.linear_qkv.layer_norm_{}"),
            ("mlp_norm", "pre_mlp_layernorm.{}" if spec.moe else "mlp.linear_fc1.layer_norm_{}"),
            ("attn.qkv", "self_attention.linear_qkv.{}"),
            ("attn.out", "self_attention.linear_proj.{}"),
            ("mlp.router", "mlp.router.{}"),
            ("mlp.down", "mlp.linear_fc2.{}"),
        ):
            if f"{name}.{kind}" in ours:
                theirs[to.format(kind)] = ours[f"{name}.{kind}"]
        if f"mlp.up.{kind}" in ours:
            pair = [ours[f"mlp.{part}.{kind}"] for part in ("gate", "up") if f"mlp.{part}.{kind}" in ours]
            if single and len(pair) == 2:
                theirs |= {f"mlp.linear_fc1.{kind}_w": pair[0], f"mlp.linear_fc1.{kind}_v": pair[1]}
            else:
                theirs[f"mlp.linear_fc1.{kind}"] = torch.cat(pair)
    if spec.moe is not None:
        gate, up, down = (ours[f"mlp.experts.{part}"] for part in ("gate", "up", "down"))
        if single:
            for e in range(spec.moe.experts):
                base = f"mlp.experts.experts.{e}."
                theirs |= {
                    f"{base}linear_fc1.weight_w": gate[e],
                    f"{base}linear_fc1.weight_v": up[e],
                    f"{base}linear_fc2.weight": down[e],
                }
        else:
            theirs["mlp.experts.experts.linear_fc1.weight"] = torch.cat([gate, up], dim=1)
            theirs["mlp.experts.experts.linear_fc2.weight"] = down
    return theirs


def write_checkpoint(
    directory: Path,
    state: dict[str, Tensor],
    *,
    cut: Cut = halves,
    files: int = 3,
    arguments: dict[str, Any] | None = None,
) -> Path:
    """As several ranks would have written it: box after box into one of the files in turn. Returns the iteration's directory."""
    place = directory / "iter_0000100"
    place.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("100")
    contents = [io.BytesIO() for _ in range(files)]
    described: dict[str, Any] = {"rng_state/shard_0_1": dcp.BytesStorageMetadata()}
    stored, turn = {}, 0
    for name, tensor in state.items():
        chunks = []
        for offset, part in cut(name, tensor):
            file, start = contents[turn % files], contents[turn % files].tell()
            torch.save(part.clone(), file)
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), part.shape))
            stored[dcp.MetadataIndex(name, offset)] = _StorageInfo(
                f"__{turn % files}_0.distcp", start, file.tell() - start
            )
            turn += 1
        described[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for number, content in enumerate(contents):
        (place / f"__{number}_0.distcp").write_bytes(content.getvalue())
    (place / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(described, storage_data=stored)))
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if arguments is not None:
        torch.save({"args": argparse.Namespace(**arguments), "iteration": 100}, place / "common.pt")
    return place


def arguments_of(spec: ModelSpec, padded: int) -> dict[str, Any]:
    """What the run's arguments would have been."""
    moe = spec.moe
    return {
        "num_layers": spec.layers, "hidden_size": spec.hidden, "num_attention_heads": spec.heads, "kv_channels": spec.head_dim,
        "group_query_attention": True, "num_query_groups": spec.kv_heads, "ffn_hidden_size": spec.ffn,
        "padded_vocab_size": padded, "vocab_size": spec.vocab_size, "max_position_embeddings": spec.max_seq_len,
        "position_embedding_type": "rope" if spec.positions == "rope" else "learned_absolute", "rotary_base": 10000,
        "normalization": "RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm", "norm_epsilon": spec.norm_eps,
        "swiglu": spec.gated, "bias_gelu_fusion": spec.activation == "gelu_tanh", "add_bias_linear": spec.mlp_bias,
        "untie_embeddings_and_output_weights": not spec.tied, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16, "num_experts": moe.experts if moe else None,
        **({"moe_router_topk": moe.top_k, "moe_ffn_hidden_size": moe.ffn, "moe_aux_loss_coeff": moe.balance_loss} if moe else {}),
    }  # fmt: skip
