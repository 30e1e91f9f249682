"""Configurations of other trainers become run specs that resolve; settings without a counterpart are listed, never dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from argosy.config.foreign import megatron
from argosy.config.foreign.draft import Draft
from argosy.config.foreign.foundry import from_foundry
from argosy.config.foreign.megatron import from_megatron
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import RunSpec
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


@pytest.mark.parametrize(
    ("words", "shape", "decay", "left"),
    [
        ("--lr-wsd-decay-iters 100 --lr-wsd-decay-style minus_sqrt", "sqrt", "100ba", None),
        ("--lr-wsd-decay-iters 100 --lr-wsd-decay-style cosine", "cosine", "100ba", None),
        # Megatron's default.
        ("--lr-wsd-decay-iters 100", "exponential", "100ba", None),
        ("--lr-wsd-decay-iters 100 --lr-wsd-decay-style other", "linear", "100ba", "--lr-wsd-decay-style other"),
    ],
)
def test_the_shape_of_a_wsd_schedule_is_megatrons_or_said_not_to_be(
    words: str, shape: str, decay: str, left: str | None, tmp_path: Path
) -> None:
    plain = GPT3.replace("--train-samples 146484375 --lr-decay-samples 126953125", "--train-iters 1000")
    draft = from_megatron(plain.replace("--lr-decay-style cosine", f"--lr-decay-style WSD {words}"))
    spec = resolve_text(draft.text("x"), tmp_path)
    assert (spec.optim.schedule, spec.optim.decay_shape, str(spec.optim.decay)) == ("wsd", shape, decay)
    assert [one for one in draft.left if "wsd" in one] == ([] if left is None else [f"{left}: replaced by linear"])


def test_a_norm_of_nought_is_no_clipping_as_it_is_to_megatron(tmp_path: Path) -> None:
    draft = from_megatron(GPT3.replace("--clip-grad 1.0", "--clip-grad 0.0"))
    assert resolve_text(draft.text("x"), tmp_path).optim.clip is None


def test_the_arguments_of_a_well_known_job_become_a_run_spec(tmp_path: Path) -> None:
    draft = from_megatron(GPT3)
    spec = resolve_text(draft.text("x"), tmp_path)
    assert (spec.model.layers, spec.model.hidden, spec.model.heads, spec.data.seq_len) == (36, 4096, 32, 2048)
    assert (spec.train.samples, spec.train.global_batch, spec.train.precision) == (146484375 // 288 * 288, 288, "fp16")
    assert (spec.parallel.tp, spec.parallel.recompute, spec.parallel.micro_batch) == (8, "selective", 1)
    assert str(spec.optim.warmup) == "183105sp"
    assert spec.optim.betas == (0.9, 0.95)
    assert spec.data.tokenizer == "/fsx/gpt2"
    assert spec.model.positions == "learned"
    # GPT-2's tokenizer has 50,257 entries, and Megatron pads to 128 x tp unless it is told otherwise.
    assert (spec.model.vocab_size, spec.model.padded_vocab(spec.parallel.tp)) == (50257, 51200)
    assert from_megatron(f"{GPT3} --make-vocab-size-divisible-by 64").get("model.vocab_multiple") == 64
    # Megatron's default.
    assert spec.model.dropout == 0.1
    assert (str(spec.optim.decay_end), spec.optim.warmup_init) == ("126953125sp", 0.0)
    assert draft.left == ["--no-such-option 7"]


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("--vocab-size 50257", "--padded-vocab-size 51200", "model.vocab_size"),
        ("--seq-length 512", "--encoder-seq-length 256", "data.seq_len"),
        ("--num-layers 4", "--encoder-num-layers 2", "model.layers"),
    ],
)
def test_the_first_name_of_a_key_wins_wherever_it_stands(first: str, second: str, key: str) -> None:
    plain = "pretrain_bert.py --hidden-size 64 --num-attention-heads 2 --num-layers 4"
    for words in (f"{first} {second}", f"{second} {first}"):
        draft = from_megatron(f"{plain} {words}")
        assert draft.get(key) == int(first.split()[1])
        assert f"{second.split()[0]}: not used, because {first.split()[0]} sets {key}" in draft.notes
    if first != "--num-layers 4":
        assert from_megatron(f"{plain} {second}").get(key) == int(second.split()[1])


@pytest.mark.parametrize("words", ["--make-vocab-size-divisible-by 0", "--vocab-size -1", "--micro-batch-size=0"])
def test_a_number_below_one_of_what_there_must_be_is_refused_by_its_megatron_name(words: str) -> None:
    with pytest.raises(ArgosyError) as caught:
        from_megatron(f"{GPT3} {words}")
    name = words.replace("=", " ").split()[0]
    assert (caught.value.code, caught.value.key) == ("config.bad-value", name)
    assert caught.value.cause == f"{words.replace('=', ' ')} is below 1"


LLAMA3 = """pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 --position-embedding-type rope
  --rotary-base 500000 --rotary-percent 1.0 --use-rope-scaling --rope-scaling-factor 8.0 --attention-dropout 0.0
  --hidden-dropout 0.0 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear
  --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-warmup-fraction 0.002 --lr 0.00015
  --decoupled-lr 5.0e-4 --bf16 --grad-reduce-in-bf16 --manual-gc --fp8-format hybrid --context-parallel-size 2 --mock-data
  --vocab-size 128256""".replace("\n", " ")
MIXTRAL = """pretrain_gpt.py --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
  --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --normalization RMSNorm --position-embedding-type rope
  --swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --rotary-base 1000000
  --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
  --moe-token-dispatcher-type alltoall --tokenizer-type Llama2Tokenizer --tokenizer-model /t/tokenizer.model --data-path /d
  --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 500000
  --lr-decay-style cosine --bf16 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2
  --expert-model-parallel-size 8 --optimizer sgd""".replace("\n", " ")
T5 = """pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 10 --hidden-size 768 --num-attention-heads 12
  --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
  --micro-batch-size 64 --global-batch-size 512 --lr 0.0001 --train-iters 1000000 --lr-decay-iters 1000000
  --lr-warmup-fraction .01 --vocab-extra-ids 100 --init-method-std 0.015 --data-path /d --vocab-file vocab.txt""".replace(
    "\n", " "
)
BERT = """pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
  --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --lr 0.0001
  --lr-decay-iters 990000 --lr-warmup-fraction .01 --mask-prob 0.2 --bert-no-binary-head --data-path /d""".replace(
    "\n", " "
)
ICT = """pretrain_ict.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 256
  --max-position-embeddings 256 --micro-batch-size 32 --global-batch-size 128 --train-iters 100000 --lr 0.0001
  --lr-decay-style cosine --weight-decay 1e-1 --clip-grad 1.0 --lr-warmup-fraction .01 --data-path /d/blocks_sentence
  --titles-data-path /d/titles --query-in-block-prob 0.2 --biencoder-projection-dim 128 --retriever-score-scaling
  --biencoder-shared-query-context-model --ict-head-size 64 --bert-load /b""".replace("\n", " ")
COMMANDS = {"gpt3": GPT3, "llama3": LLAMA3, "mixtral": MIXTRAL, "t5": T5, "bert": BERT, "ict": ICT}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_argument_is_translated_explained_or_listed(words: str, tmp_path: Path) -> None:
    draft = from_megatron(words)
    resolve_text(draft.text("x"), tmp_path)
    said = " ".join([*draft.notes, *draft.left])
    for name in re.findall(r"--([a-z0-9-]+)", words.partition(".py")[2]):
        quiet = name in megatron._PLAIN or name in megatron._SWITCHES or megatron._NEEDLESS.get(name) == ""
        assert quiet or f"--{name}" in said, name


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_argument_that_is_said_to_be_read_changes_something(words: str) -> None:
    """An argument with an empty reason in `_NEEDLESS` must be read by code: removing it changes the draft."""
    whole = from_megatron(words)
    quiet = [name for name, why in megatron._NEEDLESS.items() if why == ""]
    pairs = {"vocab-file", "merge-file", "num-layers-per-virtual-pipeline-stage"}
    defaults = {
        "rotary-percent",
        "rope-scaling-factor",
        "moe-router-load-balancing-type",
        "adam-beta1",
        "eval-interval",
        "bf16",
        "lr-decay-iters",
    }
    for name in re.findall(r"--([a-z0-9-]+)", words.partition(".py")[2]):
        if name in quiet and name not in pairs | defaults:
            less = from_megatron(re.sub(rf"--{name}(?![a-z-])((?: (?!--)\S+)*)", "", words))
            assert (less.tree, less.notes, less.left) != (whole.tree, whole.notes, whole.left), name


def test_llama_3_is_read_number_by_number(tmp_path: Path) -> None:
    spec = resolve_text(from_megatron(LLAMA3).text("x"), tmp_path)
    model = spec.model
    assert (model.family, model.kv_heads, model.ffn, model.rope_theta, model.tied) == ("llama", 8, 14336, 500000, False)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.kind, model.rope_scaling.factor, model.rope_scaling.original_seq_len) == (
        "llama3",
        8,
        8192,
    )
    assert (spec.train.precision, spec.parallel.reduce, spec.parallel.cp) == ("fp8", "bf16", 2)
    assert str(spec.optim.warmup) == "3906250sp"
    # Megatron's defaults.
    assert (spec.optim.min_lr, spec.optim.weight_decay, spec.data.split) == (0.0, 0.01, (969, 30, 1))


def test_mixtral_is_read_number_by_number(tmp_path: Path) -> None:
    draft = from_megatron(MIXTRAL)
    spec = resolve_text(draft.text("x"), tmp_path)
    moe = spec.model.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn, moe.balance_loss) == (8, 2, 14336, 0.01)
    assert (spec.parallel.pp, spec.parallel.vpp, spec.parallel.schedule) == (4, 4, "interleaved-1f1b")
    assert (spec.parallel.ep, spec.parallel.dp_shard, spec.model.vocab_size) == (8, 8, 32000)
    assert draft.left == ["--optimizer sgd: replaced by AdamW"]
    silent = from_megatron(MIXTRAL.replace("--moe-aux-loss-coeff 1e-2", "").replace("--moe-router-topk 2", ""))
    # Megatron's defaults.
    assert (silent.get("model.moe.balance_loss"), silent.get("model.moe.top_k")) == (0.0, 2)


def test_foundrys_lion_keeps_its_betas_and_its_decay_for_each_learning_rate(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    lion = {"name": "decoupled_lionw", "lr": 1.0e-4, "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 1.0e-5}
    path.write_text(yaml.safe_dump(MPT | {"optimizer": lion}))
    draft = from_foundry(path)
    optim = resolve_text(draft.text("x"), tmp_path).optim
    assert (optim.name, optim.lion.betas, optim.weight_decay) == ("lion", (0.9, 0.95), pytest.approx(0.1))
    assert "optimizer.eps: 1e-08: Lion does not read it" in draft.left


def test_bert_and_t5_are_not_taken_for_decoders(tmp_path: Path) -> None:
    bert, t5 = from_megatron(BERT), from_megatron(T5)
    spec = resolve_text(bert.text("x"), tmp_path)
    assert (spec.model.family, spec.model.pair, spec.model.layers) == ("bert", "none", 24)
    assert spec.data.bert is not None
    assert (spec.data.bert.mask_rate, spec.data.order) == (0.2, "argosy")
    # A fraction of the schedule's 990000 iterations, not of the run's.
    assert str(spec.optim.warmup) == "9900ba"
    spec = resolve_text(t5.text("x"), tmp_path)
    assert (spec.model.family, spec.model.layers, spec.model.decoder_layers, spec.data.seq_len) == ("t5", 12, 10, 512)
    assert "relative positions" in " ".join(t5.left)
    with pytest.raises(ArgosyError, match=r"pretrain_mamba\.py trains a model"):
        from_megatron(BERT.replace("pretrain_bert", "pretrain_mamba"))


def test_the_inverse_cloze_task_is_two_towers_of_bert(tmp_path: Path) -> None:
    draft = from_megatron(ICT)
    spec = resolve_text(draft.text("x"), tmp_path)
    assert (spec.model.family, spec.model.pair, spec.parallel.micro_batch) == ("bert", "none", 32)
    assert spec.model.retrieval is not None
    assert (spec.model.retrieval.shared, spec.model.retrieval.projection) == (True, 128)
    assert spec.data.ict is not None
    assert (spec.data.ict.query_len, spec.data.ict.query_in_block) == (256, 0.2)
    for listed in ("--titles-data-path /d/titles", "--bert-load /b", "a query's wrong answers"):
        assert any(item.startswith(listed) for item in draft.left), listed
    plain = from_megatron(ICT.replace("--retriever-score-scaling", "").replace("--biencoder-projection-dim 128", ""))
    assert any(item.startswith("no --retriever-score-scaling") for item in plain.left)
    assert plain.get("model.retrieval.projection") == 64


@pytest.mark.parametrize(("words", "sharded"), [("", False), ("--sequence-parallel", True)])
def test_tensor_parallelism_has_sequence_parallelism_only_where_megatron_has_it(
    words: str, sharded: bool, tmp_path: Path
) -> None:
    plain = GPT3.replace("--sequence-parallel", words)
    assert resolve_text(from_megatron(plain).text("x"), tmp_path).parallel.sp is sharded
    alone = from_megatron(plain.replace("--tensor-model-parallel-size 8", "--tensor-model-parallel-size 1"))
    assert alone.get("parallel.sp") is None


def test_curves_go_where_they_went(tmp_path: Path) -> None:
    words = f"{GPT3} --tensorboard-dir /tb --wandb-project gpt --wandb-entity us"
    sinks = resolve_text(from_megatron(words).text("x"), tmp_path).log.sinks
    assert (sinks.tensorboard, sinks.wandb) == (True, "us/gpt")
    loggers = {"wandb": {"project": "mpt", "entity": "us"}, "tensorboard": {"log_dir": "/tb"}}
    sinks = changed(tmp_path, loggers=loggers)[1].log.sinks
    assert (sinks.tensorboard, sinks.wandb) == (True, "us/mpt")


@pytest.mark.parametrize(
    ("words", "activation"),
    [("", "gelu_tanh"), ("--no-bias-gelu-fusion", "gelu"), ("--disable-bias-linear", "gelu"), ("--swiglu", "swiglu")],
)
def test_the_activation_is_what_megatron_computes(words: str, activation: str) -> None:
    draft = from_megatron(f"--num-layers 2 --hidden-size 64 {words}")
    assert draft.get("model.activation") == activation


@pytest.mark.parametrize(
    ("words", "corpora"),
    [
        ("a", [{"path": "a"}]),
        ("a b c", [{"path": "a"}, {"path": "b"}, {"path": "c"}]),
        ("0.3 a 1e-1 b", [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 0.1}]),
        ("'1.0 a'", [{"path": "a", "weight": 1.0}]),
    ],
)
def test_corpora_come_with_weights_or_without(words: str, corpora: list[dict[str, object]]) -> None:
    assert from_megatron(f"--num-layers 2 --data-path {words}").get("data.train") == corpora


def test_a_warm_up_of_an_unknown_number_of_samples_is_said() -> None:
    draft = from_megatron("--num-layers 2 --train-iters 100 --lr-warmup-fraction .01")
    assert draft.get("optim.warmup") is None
    assert any(item.startswith("--lr-warmup-fraction 0.01: the length of the schedule") for item in draft.left)


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


@pytest.mark.parametrize(
    "words",
    [
        "--num-layers 2 --data-path 0.1 a b",
        "--num-layers 2 --eval-iters $N",
        "",
        "--lr 1",
        "--num-layers $LAYERS --hidden-size 4",
        "--num-layers '3",
    ],
)
def test_what_is_no_command_is_refused(words: str) -> None:
    with pytest.raises(ArgosyError):
        from_megatron(words)


def test_a_file_of_another_program_is_not_taken_for_foundrys(tmp_path: Path) -> None:
    for text in ("model: {family: llama, layers: 2}", "model: gpt2", "- model"):
        (tmp_path / "train.yaml").write_text(text)
        with pytest.raises(ArgosyError, match="no `model` section with a `name`"):
            from_foundry(tmp_path / "train.yaml")


def test_a_foundry_file_becomes_a_run_spec(tmp_path: Path) -> None:
    source = tmp_path / "train.yaml"
    source.write_text(yaml.safe_dump(MPT))
    draft = from_foundry(source)
    spec = resolve_text(draft.text("x"), tmp_path)
    assert (spec.name, spec.model.family, spec.model.hidden, spec.data.seq_len) == ("mpt-125m", "mpt", 768, 2048)
    assert (spec.train.steps, spec.train.global_batch, spec.train.seed, spec.train.precision) == (4800, 256, 17, "bf16")
    assert (spec.data.train[0].path, spec.data.train[0].cache) == ("s3://bucket/c4/train", "/tmp/c4/train")
    assert spec.optim.min_lr == pytest.approx(6.0e-5)
    assert (str(spec.checkpoint.every), spec.checkpoint.keep, spec.optim.clip) == ("1000ba", 1, 1.0)
    assert draft.left == ["python_log_level: debug"]


def changed(tmp_path: Path, **parts: object) -> tuple[Draft, RunSpec]:
    source = tmp_path / "train.yaml"
    source.write_text(yaml.safe_dump(MPT | parts))
    draft = from_foundry(source)
    return draft, resolve_text(draft.text("x"), tmp_path)


def test_variables_left_for_the_command_line_are_left_out(tmp_path: Path) -> None:
    """Every configuration that comes with LLM-Foundry has such variables."""
    variables = {"max_seq_len": 2048, "data_remote": None, "data_local": None, "global_seed": 17, "run_name": None}
    _, spec = changed(tmp_path, variables=variables, run_name="${variables.run_name}")
    assert (spec.name, spec.data.train[0].path, spec.data.seq_len) == ("from-foundry", "corpus", 2048)


def test_local_is_the_cache_of_a_mounted_remote_and_the_data_itself_without_one(tmp_path: Path) -> None:
    """The AKS example of LLM-Foundry streams from a mounted volume to a node's own disk."""
    mounted = {**MPT["variables"], "data_remote": "/data/my-copy-c4", "data_local": "/tmp/my-copy-c4"}  # type: ignore[dict-item]
    [source] = changed(tmp_path, variables=mounted)[1].data.train
    assert (source.path, source.cache) == ("file:///data/my-copy-c4/train", "/tmp/my-copy-c4/train")
    [source] = changed(tmp_path, variables=mounted | {"data_remote": None})[1].data.train
    assert (source.path, source.cache) == ("/tmp/my-copy-c4/train", None)


@pytest.mark.parametrize("size", ["125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b"])
def test_presets_named_as_foundrys_recipes_are_their_models(size: str, tmp_path: Path) -> None:
    """The recipes give a shape and nothing else, and Foundry's defaults are learned positions and biases."""
    preset = resolve_model(f"mpt-{size}")
    shape = {"d_model": preset.hidden, "n_heads": preset.heads, "n_layers": preset.layers, "expansion_ratio": 4}
    recipe = {"name": "mpt_causal_lm", "max_seq_len": 2048, "vocab_size": 50368, "attn_config": {"attn_impl": "flash"}}
    converted = changed(tmp_path, model=recipe | shape)[1].model
    assert converted == preset.model_copy(update={"preset": None})
    assert (preset.positions, preset.attention_bias, preset.mlp_bias, preset.norm_bias) == ("learned", True, True, True)
    ours = resolve_model(f"mpt-{size}-alibi")
    assert (ours.family, ours.positions, ours.attention_bias) == ("mpt", "alibi", False)
    assert (ours.layers, ours.hidden, ours.heads) == (preset.layers, preset.hidden, preset.heads)


def test_what_foundry_does_by_default_is_written_down(tmp_path: Path) -> None:
    draft, spec = changed(tmp_path, algorithms={}, scheduler={"name": "cosine_with_warmup", "t_warmup": "0.02dur"})
    assert (spec.optim.clip, spec.optim.min_lr, str(spec.optim.warmup)) == (None, 0.0, "96ba")
    assert spec.eval is None, "there is no eval_loader"
    model = MPT["model"] | {"norm_type": "rmsnorm", "tie_word_embeddings": False}  # type: ignore[operator]
    model["attn_config"] = {
        "rope": True,
        "rope_theta": 500000,
        "rope_impl": "dail",
        "attn_type": "multiquery_attention",
    }
    draft, spec = changed(tmp_path, model=model, fsdp_config={"activation_checkpointing": True}, max_duration="1e9tok")
    assert (spec.model.norm, spec.model.tied, spec.model.kv_heads, spec.model.rope_theta) == (
        "rmsnorm",
        False,
        1,
        500000,
    )
    assert (spec.parallel.recompute, spec.train.tokens) == ("full", 1_000_000_000)
    assert "model.attn_config.rope_impl: dail" in draft.left


def test_a_validation_corpus_is_taken_over(tmp_path: Path) -> None:
    words = GPT3.replace(
        "--data-path /fsx/gpt2/my-gpt2_text_document", "--train-data-path 0.3 a 0.7 b --valid-data-path 1 v"
    )
    spec = resolve_text(from_megatron(words.replace("--split 98,2,0", "")).text("x"), tmp_path)
    assert [source.path for source in spec.data.validation] == ["v"]
    assert (spec.data.split, spec.eval is not None) == ((1.0, 0.0, 0.0), True)
    _, spec = changed(tmp_path, eval_loader=[{"dataset": {"local": "/b"}}, {"dataset": {"local": "/c"}}])
    assert [source.path for source in spec.data.validation] == ["/b", "/c"]
    _, spec = changed(tmp_path, eval_loader={"dataset": {"remote": "s3://b/c", "local": "/tmp/v", "split": "val"}})
    assert (spec.data.validation[0].path, spec.data.validation[0].cache) == ("s3://b/c/val", "/tmp/v/val")
    loaders = [{"dataset": {"local": "/b/", "split": "val"}}, {"dataset": {"local": "/c"}}]
    assert [source.path for source in changed(tmp_path, eval_loader=loaders)[1].data.validation] == ["/b/val", "/c"]


def test_a_second_training_corpus_of_megatrons_is_listed() -> None:
    draft = from_megatron(f"{GPT3} --train-data-path 0.3 a 0.7 b")
    assert "--train-data-path 0.3 a 0.7 b: data.train is --data-path" in draft.left
    assert draft.get("data.train") == [{"path": "/fsx/gpt2/my-gpt2_text_document"}]


@pytest.mark.parametrize(
    ("parts", "listed"),
    [
        ({"load_path": "/a/b"}, "load_path: /a/b"),
        ({"precision": "amp_fp4"}, "precision: amp_fp4"),
        ({"callbacks": {"speed_monitor": {}, "early_stopper": {"monitor": "loss"}}}, "callbacks.early_stopper"),
        ({"optimizer": {"name": "adalr_lion", "lr": 1e-4}}, "optimizer.name: adalr_lion"),
        (
            {"eval_loader": {"dataset": {"remote": "s3://b/c", "split": "val"}}},
            "eval_loader (s3://b/c/val): set data.validation",
        ),
        (
            {"variables": MPT["variables"] | {"data_remote": "mine"}},
            "train_loader.dataset.local: /tmp/c4: a cache needs",
        ),  # type: ignore[operator]
        ({"fsdp_config": {"activation_cpu_offload": True}}, "fsdp_config.activation_cpu_offload"),
    ],
)
def test_what_has_no_counterpart_in_a_foundry_file_is_listed(
    parts: dict[str, object], listed: str, tmp_path: Path
) -> None:
    draft, _ = changed(tmp_path, **parts)
    assert any(item.startswith(listed) for item in draft.left)


def test_a_model_of_the_hub_is_where_the_run_starts(tmp_path: Path) -> None:
    source = tmp_path / "train.yaml"
    source.write_text(yaml.safe_dump(MPT | {"model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "m/l"}}))
    draft = from_foundry(source)
    assert draft.get("init_from") == "hf:m/l"
    assert "model" not in draft.tree


def resolve_text(text: str, tmp_path: Path) -> RunSpec:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return resolve(path, elsewhere=True).spec


@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
def test_a_number_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ArgosyError, match="cannot be parsed"):
        from_megatron(GPT3.replace("--clip-grad 1.0", f"--clip-grad {value}"))
