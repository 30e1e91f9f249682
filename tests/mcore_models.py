"""Small GPT models of Megatron-core's own, run and saved by it on CPUs: `python mcore_models.py DIR RANKS:KIND-FORM,KIND-FORM…`.

DIR/KIND-FORM/ is what `--save` would have written, DIR/KIND-FORM.pt the tokens and logits. Ranks are forked from one process: to
import Megatron-core takes many times as long as to run such a model."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

VOCAB, PADDED, LENGTH = 120, 128, 32
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LLAMA = {
    "num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
    "add_bias_linear": False, "ffn_hidden_size": 96, "bias_activation_fusion": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"bias_activation_fusion": True},
    "gelu": {"bias_activation_fusion": False},
    "llama": LLAMA,
    "qwen": LLAMA | {"qk_layernorm": True, "kv_channels": 24},
    "mixtral": MIXTRAL | {"moe_token_dispatcher_type": "allgather"},
    "deepseek": MIXTRAL
    | {
        "moe_token_dispatcher_type": "allgather", "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 96, "moe_router_load_balancing_type": "none",
    },
}  # fmt: skip
FORMS = {"stacked": {}, "apart": {"non_homogeneous_layers": True}, "single": {"singleton_local_shards": True}}


def arguments(kind: str, **more: Any) -> argparse.Namespace:
    """As pretrain_gpt.py would have had them, among hundreds of others."""
    from megatron.core.transformer.enums import AttnBackend

    config = SIZES | KINDS[kind]
    rope = "gated_linear_unit" in config
    known = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": config.get("ffn_hidden_size", 256),
        "group_query_attention": rope, "num_query_groups": config.get("num_query_groups", 1),
        "kv_channels": config.get("kv_channels", 16), "max_position_embeddings": LENGTH, "padded_vocab_size": PADDED,
        "vocab_size": None, "position_embedding_type": "rope" if rope else "learned_absolute", "rotary_base": 10000,
        "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
        "normalization": config.get("normalization", "LayerNorm"), "norm_epsilon": 1e-5, "swiglu": rope,
        "add_bias_linear": not rope, "bias_gelu_fusion": config["bias_activation_fusion"],
        "untie_embeddings_and_output_weights": rope, "qk_layernorm": config.get("qk_layernorm", False),
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.02, "squared_relu": False,
        "num_experts": config.get("num_moe_experts"), "params_dtype": torch.float32, "attention_backend": AttnBackend.auto,
        "mtp_num_layers": None, "moe_layer_freq": config.get("moe_layer_freq", 1), "spec": None, "data_path": ["1", "corpus"],
    }  # fmt: skip
    moe = {key: value for key, value in config.items() if key.startswith("moe_")}
    return argparse.Namespace(**known | moe | more)


def _without_gpu() -> None:
    """Megatron-core asks for the current GPU in a few places where a CPU would do."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    writer._process_memory = lambda: 0
    writer._results_queue = multiprocessing.get_context("fork").Manager().Queue()  # else a process that imports torch
    moe_utils.te_general_gemm = None
    type(random.get_cuda_rng_tracker()).fork = lambda self, *_: contextlib.nullcontext()


def build(kind: str) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import get_tensor_model_parallel_world_size
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(7)
    config = TransformerConfig(
        **SIZES | KINDS[kind], hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=get_tensor_model_parallel_world_size(), params_dtype=torch.float32,
    )  # fmt: skip
    llama = config.gated_linear_unit
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    model = GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=LENGTH, parallel_output=False,
        share_embeddings_and_output_weights=not llama, position_embedding_type="rope" if llama else "learned_absolute",
    )  # fmt: skip
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.ndim == 1 and "tokens" not in name:
            tensor.data.add_(0.1 * torch.randn(tensor.shape))  # norms, biases and what else would be ones and noughts
    return model.eval()


def run(place: Path, rank: int, ranks: int, names: list[str]) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    _without_gpu()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    where = f"file://{place / f'rendezvous-{ranks}'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    mask = torch.triu(torch.ones(1, 1, 24, 24, dtype=torch.bool), 1)
    for name in names:
        kind, _, form = name.rpartition("-")
        model = build(kind)
        with torch.no_grad():
            logits = model(tokens, torch.arange(24).expand(2, -1), mask)
        if dist.get_rank() == 0:
            torch.save({"tokens": tokens, "logits": logits}, place / f"{name}.pt")
        save = place / name
        (save / "iter_0000100").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = model.sharded_state_dict(metadata={"dp_cp_group": group, **FORMS[form]})
        state |= {"args": arguments(kind), "checkpoint_version": 3.0, "iteration": 100}
        dist_checkpointing.save(state, str(save / "iter_0000100"))
        (save / "latest_checkpointed_iteration.txt").write_text("100")
    dist.destroy_process_group()


def fork_ranks(place: Path, ranks: int, names: list[str]) -> int:
    """Returns 0 if every rank ended well."""
    started = [
        multiprocessing.get_context("fork").Process(target=run, args=(place, r, ranks, names)) for r in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return max(abs(process.exitcode or 0) for process in started)


if __name__ == "__main__":
    # Megatron-core decorates its fused activations with it. To import the compiler takes half of this program's time, and what they
    # compute is the same without.
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt  # noqa: F401

    for ranks, _, names in (job.partition(":") for job in sys.argv[2:]):
        if code := fork_ranks(Path(sys.argv[1]), int(ranks), names.split(",")):
            sys.exit(code)
