"""Settings of other trainers become run specs that resolve, and whatever has no counterpart is listed, never dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from argosy.config.foreign.foundry import from_foundry
from argosy.config.foreign.megatron import from_megatron
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError

GPT3 = """torchrun --nproc_per_node 8 --nnodes 2 /workspace/pretrain_gpt.py \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --sequence-parallel \\
  --num-layers 36 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 \\
  --micro-batch-size 1 --global-batch-size 288 --train-samples 146484375 --lr-decay-samples 126953125 \\
  --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 40 \\
  --eval-interval 1000 --data-path /fsx/gpt2/my-gpt2_text_document --vocab-file /fsx/gpt2/gpt2-vocab.json \\
  --merge-file /fsx/gpt2/gpt2-merges.txt --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 \\
  --adam-beta2 0.95 --init-method-std 0.006 --fp16 --recompute-activations --no-such-option 7"""

MPT = {
    "variables": {"max_seq_len": 2048, "data_remote": "s3://bucket/c4", "data_local": "/tmp/c4", "global_seed": 17},
    "max_seq_len": "${variables.max_seq_len}",
    "run_name": "mpt-125m",
    "model": {
        "name": "mpt_causal_lm", "init_device": "meta", "d_model": 768, "n_heads": 12, "n_layers": 12, "expansion_ratio": 4,
        "max_seq_len": "${max_seq_len}", "vocab_size": 50368, "no_bias": True, "attn_config": {"alibi": True, "attn_impl": "flash"},
    },
    "tokenizer": {"name": "EleutherAI/gpt-neox-20b", "kwargs": {"model_max_length": "${max_seq_len}"}},
    "train_loader": {
        "name": "text",
        "dataset": {"local": "${variables.data_local}", "remote": "${variables.data_remote}", "split": "train",
                    "shuffle": True, "max_seq_len": "${max_seq_len}", "shuffle_seed": 17},
        "drop_last": True, "num_workers": 8,
    },
    "scheduler": {"name": "cosine_with_warmup", "t_warmup": "100ba", "alpha_f": 0.1},
    "optimizer": {"name": "decoupled_adamw", "lr": 6.0e-4, "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 0.0},
    "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
    "max_duration": "4800ba", "eval_interval": "500ba", "eval_first": False, "global_train_batch_size": 256,
    "seed": "${variables.global_seed}", "device_train_microbatch_size": 16, "precision": "amp_bf16",
    "fsdp_config": {"sharding_strategy": "FULL_SHARD"}, "save_interval": "1000ba", "save_num_checkpoints_to_keep": 1,
    "save_folder": "/data/runs/mpt", "python_log_level": "debug",
}  # fmt: skip


def test_the_arguments_of_a_well_known_job_become_a_run_spec(tmp_path: Path) -> None:
    draft = from_megatron(GPT3)
    spec = resolve_text(draft.text("x"), tmp_path)
    assert (spec.model.layers, spec.model.hidden, spec.model.heads, spec.data.seq_len) == (36, 4096, 32, 2048)
    assert (spec.train.samples, spec.train.global_batch, spec.train.precision) == (146484375, 288, "fp16")
    assert (spec.parallel.tp, spec.parallel.recompute, spec.parallel.micro_batch) == (8, "selective", 1)
    assert str(spec.optim.warmup) == "183105sp"
    assert spec.optim.betas == (0.9, 0.95)
    assert spec.data.tokenizer == "/fsx/gpt2"
    assert spec.model.positions == "learned"
    assert spec.model.dropout == 0.1  # Megatron's own default
    assert draft.left == ["--no-such-option 7"]


def test_every_argument_is_translated_explained_or_listed() -> None:
    draft = from_megatron(GPT3)
    text = draft.text("x")
    for name in re.findall(r"--([a-z0-9-]+)", GPT3.partition("pretrain_gpt.py")[2]):
        from argosy.config.foreign import megatron

        known = name in megatron._PLAIN or name in megatron._SWITCHES or name in megatron._NEEDLESS
        assert known or f"--{name}" in text, name


def test_benchmark_mode_is_one_switch(tmp_path: Path) -> None:
    words = GPT3.replace("--eval-iters 40", "--eval-iters 0").replace("98,2,0", "100,0,0")
    assert resolve_text(from_megatron(words).text("x"), tmp_path).eval is None


def test_a_llama_is_known_by_its_parts(tmp_path: Path) -> None:
    words = (
        "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --num-query-groups 2 --group-query-attention --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
        "--seq-length 64 --max-position-embeddings 64 --vocab-size 1000 --hidden-dropout 0 --attention-dropout 0 --lr 1e-4 "
        "--train-iters 100 --lr-warmup-fraction .1 --global-batch-size 8 --rampup-batch-size 4 4 40 --data-path 0.7 a 0.3 b"
    )
    spec = resolve_text(from_megatron(words).text("x"), tmp_path)
    assert (spec.model.family, spec.model.kv_heads, spec.model.tied, spec.model.ffn) == ("llama", 2, False, 2688)
    assert [(source.path, source.weight) for source in spec.data.train] == [("a", 0.7), ("b", 0.3)]
    assert str(spec.optim.warmup) == "10ba"
    assert spec.train.batch_rampup is not None


@pytest.mark.parametrize("words", ["", "--lr 1", "--num-layers $LAYERS --hidden-size 4", "--num-layers '3"])
def test_what_is_no_command_is_refused(words: str) -> None:
    with pytest.raises(ArgosyError):
        from_megatron(words)


def test_a_foundry_file_becomes_a_run_spec(tmp_path: Path) -> None:
    source = tmp_path / "train.yaml"
    source.write_text(yaml.safe_dump(MPT))
    draft = from_foundry(source)
    spec = resolve_text(draft.text("x"), tmp_path)
    assert (spec.name, spec.model.family, spec.model.hidden, spec.data.seq_len) == ("mpt-125m", "mpt", 768, 2048)
    assert (spec.train.steps, spec.train.global_batch, spec.train.seed, spec.train.precision) == (4800, 256, 17, "bf16")
    assert (spec.data.train[0].path, spec.data.train[0].cache) == ("s3://bucket/c4", "/tmp/c4")
    assert spec.optim.min_lr == pytest.approx(6.0e-5)
    assert (str(spec.checkpoint.every), spec.checkpoint.keep, spec.optim.clip) == ("1000ba", 1, 1.0)
    assert draft.left == ["python_log_level: debug"]


def resolve_text(text: str, tmp_path: Path):  # type: ignore[no-untyped-def]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return resolve(path, elsewhere=True).spec
