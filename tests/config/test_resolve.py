"""A run spec resolves to typed values with known origins, or is refused with the key, the arithmetic and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.other_names import OTHER_NAMES
from argosy.config.refusals import is_key
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError

SPEC = """\
name: test
model: gpt2
data:
  train: corpus/a
  split: 98,2,0
train: {global_batch: 8, tokens: 20B}
optim:
  lr: 1e-4
  warmup: 200ba
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SPEC)
    return path


def refusal(path: Path, *overrides: str) -> ArgosyError:
    with pytest.raises(ArgosyError) as caught:
        resolve(path, overrides)
    return caught.value


def test_each_value_knows_where_it_came_from(spec: Path) -> None:
    origins = resolve(spec, ["optim.eps=1e-7", "model.dropout=0.1"]).origins
    assert origins["optim.lr"] == "run.yaml:8"
    assert origins["model.preset"] == "run.yaml:2"
    assert origins["data.train.0.path"] == "run.yaml:4"
    assert origins["optim.eps"] == origins["model.dropout"] == "command line"
    assert origins["model.layers"] == "preset gpt2"
    assert origins["model.norm"] == "family gpt"
    assert origins["optim.betas"] == "default"
    assert origins["model.head_dim"] == "derived"
    assert origins["data.seq_len"].startswith("derived")


def test_every_leaf_has_an_origin(spec: Path) -> None:
    assert all(origin for _, _, origin in resolve(spec).rows())


def test_values_have_their_types(spec: Path) -> None:
    found = resolve(spec).spec
    assert found.optim.lr == 1e-4
    assert found.data.split == (98.0, 2.0, 0.0)
    assert found.train.tokens == 20 * 10**9
    assert (found.data.seq_len, found.model.head_dim, found.model.ffn) == (1024, 64, 3072)


def test_a_length_on_the_command_line_replaces_the_files(spec: Path) -> None:
    found = resolve(spec, ["train.steps=300"])
    assert (found.spec.train.steps, found.spec.train.tokens) == (300, None)
    assert "train.steps" in found.origins["train.tokens"]


def test_parts_of_a_preset_and_of_lists_can_be_overridden(spec: Path) -> None:
    found = resolve(
        spec, ["model.layers=3", "data.train=[a, {path: b}]", "data.train.1.path=c", "parallel.micro_batch=2"]
    ).spec
    assert (found.model.layers, found.model.preset) == (3, "gpt2")
    assert [source.path for source in found.data.train] == ["a", "c"]
    assert found.parallel.micro_batch == 2


def test_the_model_can_be_swapped_whole(spec: Path) -> None:
    found = resolve(spec, ["model=llama3-1b", "data.seq_len=512"])
    assert (found.spec.model.family, found.spec.model.kv_heads, found.spec.model.tied) == ("llama", 8, True)
    assert found.origins["model.preset"] == "command line"


def test_a_model_can_be_described_without_a_preset(spec: Path) -> None:
    found = resolve(
        spec, ["model={family: llama, layers: 2, hidden: 64, heads: 4, vocab_size: 1K}", "data.seq_len=128"]
    )
    assert (found.spec.model.max_seq_len, found.spec.model.vocab_size) == (128, 1000)
    assert found.origins["model.max_seq_len"] == "derived: data.seq_len"


def test_auto_micro_batch_divides_the_batch_and_stays_within_its_tokens(spec: Path) -> None:
    for batch in (1, 7, 12, 96):
        micro = resolve(spec, [f"train.global_batch={batch}", "parallel=auto"]).spec.parallel.micro_batch
        assert batch % micro == 0
        assert micro * 1024 <= 16_384


@pytest.mark.parametrize(
    ("override", "code", "key", "hint"),
    [
        ("model.vocab_multiple=65537", "config.bad-value", "model.vocab_multiple", "the output head's matmul"),
        ("optim.lrr=1", "config.unknown-key", "optim.lrr", "optim.lr"),
        ("optm={lr: 1}", "config.unknown-key", "optm", "optim"),
        ("lr=1", "config.unknown-key", "lr", "optim.lr"),
        ("optim.learning_rate=1", "config.unknown-key", "optim.learning_rate", "here it is set by optim.lr:"),
        (
            "model.num_attention_heads=1",
            "config.unknown-key",
            "model.num_attention_heads",
            "here it is set by model.heads:",
        ),
        ("batch-size=1", "config.unknown-key", "batch-size", "here it is set by train.global_batch:"),
        ("data.train.0.wieght=1", "config.unknown-key", "data.train.0.wieght", "weight"),
        ("model.moe={experts: 2, topk: 1}", "config.unknown-key", "model.moe.topk", "top_k"),
        ("model.moe={experts: 2, top_k: 3, ffn: 16}", "config.arithmetic", "model.moe.top_k", "at most 2"),
        ("model=gpt5", "config.unknown-preset", "model.preset", "gpt"),
        ("train.global_batch=yes", "config.bad-value", "train.global_batch", ""),
        ("train.global_batch=true", "config.bad-value", "train.global_batch", ""),
        ("train.global_batch=2.5", "config.bad-value", "train.global_batch", ""),
        ("train.seed=-1", "config.bad-value", "train.seed", ""),
        ("optim.betas=[0.9, 1.5]", "config.bad-value", "optim.betas.1", ""),
        ("optim.lr=fast", "config.bad-value", "optim.lr", ""),
        ("checkpoint.every=often", "config.bad-value", "checkpoint.every", "500ba"),
        ("name=../escape", "config.bad-value", "name", ""),
        ("model=7", "config.bad-value", "model", ""),
        ("data.train=[]", "config.bad-value", "data.train", ""),
        ("model={family: gpt, layers: 2}", "config.missing-key", "model.hidden", "model.hidden"),
        ("optim={}", "config.missing-key", "optim.lr", "optim.lr"),
        ("train={global_batch: 4}", "config.missing-key", "train.steps", "train.tokens"),
        ("train={global_batch: 4, steps: 5, samples: 9}", "config.conflict", "train.samples", "keep one"),
        ("data.train=[{path: a, weight: 1}, {path: b}]", "config.conflict", "data.train.1.weight", "every corpus"),
        ("parallel.micro_batch=3", "config.arithmetic", "train.global_batch", "6 or 9"),
        ("parallel.dp_shard=3", "config.arithmetic", "train.global_batch", "multiple"),
        ("model.heads=7", "config.arithmetic", "model.heads", "6 or 8"),
        ("model.kv_heads=5", "config.arithmetic", "model.kv_heads", ""),
        ("data.seq_len=2048", "config.arithmetic", "data.seq_len", "1024"),
        ("optim.min_lr=1", "config.arithmetic", "optim.min_lr", "1e-05"),
        ("data.split=[0, 1, 1]", "config.bad-value", "data.split", "98"),
        ("data.split=[100, 0, 0]", "eval.half-off", "data.split", "eval: off"),
        ("data.split='100,0,0'", "eval.half-off", "data.split", "eval: off"),
        ("eval.batches=0", "eval.half-off", "eval.batches", "eval: off"),
        ("optim.warmup=1h", "config.bad-value", "optim.warmup", "200ba"),
        ("model.positions=relative", "config.arithmetic", "model.positions", "rope"),
        ("model.norm=rmsnorm", "config.arithmetic", "model.norm", "norm_bias"),
        ("model.decoder_layers=5", "config.arithmetic", "model.decoder_layers", "leave it out"),
        ("model={preset: bert-base, window: 8}", "config.arithmetic", "model.window", "leave it out"),
        ("model={preset: t5-small, window: 8}", "config.arithmetic", "model.window", "leave it out"),
        ("model.rope_scaling={kind: linear, factor: 2}", "config.arithmetic", "model.rope_scaling", "null"),
        ("model.family=lama", "config.bad-value", "model.family", "llama"),
        ("model.family=mistral", "config.bad-value", "model.family", "model.preset=mistral-7b"),
        ("train.precision=float16", "config.bad-value", "train.precision", "fp16"),
        ("optim.name=sgd", "config.bad-value", "optim.name", "choose one of them"),
        ("model.kv_heads=5", "config.arithmetic", "model.kv_heads", "model.kv_heads to"),
        ("optim.betas=[0.9]", "config.bad-value", "optim.betas.1", "betas"),
        ("data.split=[1,2]", "config.bad-value", "data.split.2", "training, validation and test"),
        ("data.split=[nan, 1, 0]", "config.bad-value", "data.split.0", ""),
        ("data.split=[1e308, 1e308, 1]", "config.bad-value", "data.split.0", ""),
        ("optim.lr=1e400", "config.bad-value", "optim.lr", ""),
        ("train.steps=1e30", "config.bad-value", "train.steps", ""),
        ("train.global_batch=99999999999999999999", "config.bad-value", "train.global_batch", ""),
        ("model.heads=99999999999999999999", "config.arithmetic", "model.heads", ""),
        ("eval.every=0", "config.bad-value", "eval.every", "eval: off"),
        ("optim.betas.0.x=1", "config.bad-value", "optim.betas", ""),
        ("nonsense", "config.bad-override", None, "key.path=value"),
        ("optim.lr.x=3", "config.bad-override", "optim.lr.x", "optim.lr"),
        ("data.train.4.path=x", "config.bad-override", "data.train.4.path", "0"),
    ],
)
def test_bad_input_is_refused_with_key_cause_and_fix(
    spec: Path, override: str, code: str, key: str | None, hint: str
) -> None:
    error = refusal(spec, override)
    assert (error.code, error.key) == (code, key)
    assert hint in error.fix + error.cause
    assert error.fix


def test_the_targets_of_a_t5_in_8_bits_are_told_without_a_number_that_is_not_known(spec: Path) -> None:
    error = refusal(spec, "model=t5-small", "train.precision=fp8", "train.global_batch=4")
    assert "targets can have any length, so micro_batch 4" in error.cause
    assert "parallel.micro_batch=16" in error.fix


def test_positions_that_alibi_does_not_have_are_not_reset(spec: Path) -> None:
    error = refusal(spec, "model=mpt-125m-alibi", "data.reset_positions=true")
    assert (error.code, error.key) == ("config.conflict", "data.reset_positions")
    resolve(spec, ["model=mpt-125m-alibi", "data.reset_positions=true", "data.document_mask=true"])
    resolve(spec, ["data.reset_positions=true"])


def test_a_warm_up_longer_than_the_run_is_refused(spec: Path) -> None:
    error = refusal(spec, "train.steps=100")
    assert (error.code, error.key) == ("config.arithmetic", "optim.warmup")
    assert "200" in error.cause
    assert "100" in error.cause


def test_a_refusal_is_about_what_was_written_not_what_was_derived_from_it(spec: Path) -> None:
    error = refusal(spec, "model={family: llama, layers: 2, hidden: 64, heads: 4, vocab_size: 99}", "data.seq_len=0")
    assert (error.key, error.origin) == ("data.seq_len", "command line")
    assert "'10x' is not a duration" in refusal(spec, "optim.warmup=10x").cause


def test_a_refusal_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SPEC.replace("lr: 1e-4", "learning_rate: 1e-4"))
    error = refusal(path)
    assert (error.code, error.origin) == ("config.unknown-key", "run.yaml:8")
    # The consequence comes after the cause.
    assert "lr is required" in error.cause


@pytest.mark.parametrize("written", ["off", "Off", "OFF", "no", "No", "false", "False"])
def test_one_switch_turns_evaluation_off(spec: Path, written: str) -> None:
    assert resolve(spec, [f"eval={written}", "data.split=[100,0,0]"]).spec.eval is None


def test_yaml_switches_mean_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SPEC.replace("name: test", "name: no") + "eval: no\n")
    found = resolve(path).spec
    assert (found.name, found.eval) == ("no", None)


def test_an_empty_section_is_one_that_was_not_given(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SPEC + "eval:\ncheckpoint:\nparallel:\n")
    found = resolve(path).spec
    assert found.eval is not None
    assert found.checkpoint.keep == 3


def test_numbers_may_be_quoted_or_written_with_an_exponent(spec: Path) -> None:
    found = resolve(
        spec, ["train.global_batch='8'", "model.hidden='96'", "model.heads=6e0", "optim.lr='1e-3'", "data.seq_len=1e3"]
    ).spec
    assert (found.train.global_batch, found.model.head_dim, found.optim.min_lr) == (8, 16, 1e-4)
    assert found.parallel.micro_batch == 8


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert "is empty" in refusal(tmp_path / "run.yaml").cause


def test_a_value_of_the_wrong_type_is_answered_with_what_the_key_is_for(spec: Path) -> None:
    refused = refusal(spec, "optim.lr=fast")
    assert refused.key == "optim.lr"
    assert "it should be a valid number, not the text 'fast'" in str(refused)
    assert "peak learning rate" in str(refused)


def test_names_of_other_programs_lead_to_keys_that_exist_and_hide_none_of_ours() -> None:
    for theirs, ours in OTHER_NAMES.items():
        section = ours.rpartition(".")[0]
        assert is_key(ours)
        assert not is_key(f"{section}.{theirs}")
