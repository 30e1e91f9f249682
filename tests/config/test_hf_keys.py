"""Every key of every config class of transformers that we read: taken over, refused by name, or ignored for a reason that
transformers' own model proves."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor

from argosy.errors import ArgosyError
from argosy.families.hf_config import export_gap, from_config, key_fates, to_config
from argosy.families.hf_keys import HELD, READ
from hf_models import MODELS

Config = dict[str, Any]
KINDS = ("gpt2", "llama", "mistral", "qwen3", "gemma3_text", "mpt", "mixtral", "qwen3_moe", "bert", "t5")
TOKENS = torch.randint(3, 257, (2, 12), generator=torch.Generator().manual_seed(1))
# Part of the file's frame: it says which reader is used, or is transformers' own.
FRAME = {"model_type", "transformers_version"}
# Ignored although training in transformers depends on them, with how; `docs/guides/hugging-face.md` says so too.
TRAINS_OTHERWISE = {
    "output_router_logits": "the balance loss is added only where it is true",
    "pad_token_id": "the row of that token gets no gradient",
}
WORDS = {
    "problem_type": "regression",
    "dtype": "bfloat16",
    "summary_type": "last",
    "architectures": ["BertForPreTraining"],
}
# Keys that count only beside others, with those.
BESIDE: dict[tuple[str, str], Config] = {
    ("qwen3", "max_window_layers"): {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 0},
    ("qwen3", "sliding_window"): {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None},
    ("qwen3", "use_sliding_window"): {"sliding_window": 8, "max_window_layers": 0, "layer_types": None},
    ("qwen3_moe", "sliding_window"): {"use_sliding_window": True},
    ("qwen3", "num_hidden_layers"): {"layer_types": None},
    ("gemma3_text", "num_hidden_layers"): {"layer_types": None},
    ("gemma3_text", "_sliding_window_pattern"): {"layer_types": None},
    ("qwen3_moe", "use_sliding_window"): {"sliding_window": 8},
}  # fmt: skip
# A value that another key allows; all else is changed by its type.
VALID = {"num_key_value_heads": 6, "num_attention_heads": 3, "n_head": 2, "n_heads": 2, "chunk_size_feed_forward": 2}


def make(kind: str) -> Any:
    model = MODELS["bert-masked" if kind == "bert" else kind]()
    if kind == "t5":
        model.config.decoder_start_token_id = 0
    return model


def config_of(kind: str) -> Config:
    model = make(kind)
    config: Config = json.loads(model.config.to_json_string(use_diff=False))
    return config | {"architectures": [type(model).__name__]}


def others(key: str, value: Any) -> list[Any]:
    """Values of the same type, of which a key that matters does not take all for the same."""
    if key in WORDS:
        return [WORDS[key]]
    if key in VALID:
        return [VALID[key]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [2 * value + 0.1]
    if isinstance(value, str):
        return ["relu", "gelu", "other"]
    if isinstance(value, list):
        return [["other"] * (len(value) or 1), [1]]
    return [7, 0.5, True, "other"] if value is None else [{"other": 1}, {}]


def fate(config: Config, key: str, value: Any) -> str:
    """What our reader makes of one changed key."""
    try:
        changed = from_config(config | {key: value})
    except ArgosyError as error:
        # Another key may be the one that no longer fits; the refusal names both.
        return "refused" if key in str(error) or error.code == "hf.bad-files" else f"refused without its name: {error}"
    return "same" if changed == from_config(config) else "taken over"


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_taken_over_or_refused_or_ignored_for_a_reason(kind: str) -> None:
    config, fates = config_of(kind), key_fates(kind)
    for key in config:
        if key in FRAME:
            continue
        assert key in fates, f"{kind}: transformers {T.__version__} has {key}, and the reader does not declare it"
        # transformers adds what follows from feed_forward_proj, and files with only that are common.
        follows = ("dense_act_fn", "is_gated_act") if key == "feed_forward_proj" else ()
        base = {k: v for k, v in config.items() if k not in follows} | BESIDE.get((kind, key), {})
        found = {fate(base, key, other) for other in others(key, base[key])}
        if fates[key] in (READ, HELD):
            assert found <= {"taken over", "refused", "same"}, f"{kind}: {key}: {found}"
            assert found - {"same"}, f"{kind}: {key} is said to be {fates[key]}, and nothing follows from it"
        else:
            assert found == {"same"}, f"{kind}: {key} is said to be ignored, and is {found}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [True, False, 0, 1, 0.5, "word", [], {}, [1], {"a": 1}])
def test_a_key_nobody_declared_is_refused_whatever_it_holds(kind: str, value: Any) -> None:
    with pytest.raises(ArgosyError) as refused:
        from_config(config_of(kind) | {"a_key_of_tomorrow": value})
    assert (refused.value.code, refused.value.key) == ("hf.unsupported", "a_key_of_tomorrow")


def numbers(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Their logits, training loss and gradients on tokens that are no special ones.

    Without the dropout of modules, which is drawn in as many pieces as `chunk_size_feed_forward` makes.
    """
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(3)
    output = model(input_ids=TOKENS, labels=TOKENS, return_dict=True)
    output.loss.backward()
    return (
        output.logits.detach(),
        output.loss.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_ignored_key_changes_neither_logits_nor_loss_nor_gradients_in_transformers(kind: str) -> None:
    torch.manual_seed(0)
    model = make(kind)
    state, config, fates = copy.deepcopy(model.state_dict()), config_of(kind), key_fates(kind)
    expected = numbers(model)
    proven: set[str] = set()
    for key, value in config.items():
        if fates.get(key) in (READ, HELD, None) or key in FRAME | TRAINS_OTHERWISE.keys():
            continue
        for other in others(key, value):
            try:
                changed = type(model)(type(model).config_class.from_dict(copy.deepcopy(config) | {key: other}))
                changed.load_state_dict(state)
                logits, loss, gradients = numbers(changed)
            except Exception:  # noqa: BLE001  a value their own classes do not take proves nothing
                continue
            proven.add(key)
            # Products of fewer rows may be rounded otherwise.
            for what, one, two in (("logits", logits, expected[0]), ("loss", loss, expected[1])):
                torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, msg=f"{kind}: {key} = {other!r}: {what}")
            assert gradients.keys() == expected[2].keys()
            for name, one in gradients.items():
                what = f"{kind}: {key} = {other!r}: gradient of {name}"
                torch.testing.assert_close(one, expected[2][name], rtol=1e-4, atol=1e-5, msg=what)
            break
    # Their own classes take no other value of the rest; `is_decoder` and the like are held, not ignored.
    assert len(proven) >= 8, proven


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_weight_of_the_balance_loss_comes_in_and_goes_out(kind: str) -> None:
    config = config_of(kind)
    routed = 1 if kind == "qwen3_moe" else 2  # of two layers; the first of Qwen's is dense
    for coef in (0.001, 0.02, 0.0, 0.3):
        spec = from_config(config | {"router_aux_loss_coef": coef})
        assert spec.moe is not None
        assert spec.moe.balance_loss == pytest.approx(coef * 2 / routed, rel=1e-9)
        document = to_config(spec)
        assert document["router_aux_loss_coef"] == coef
        assert "moe.balance_loss" not in export_gap(spec, document)
        theirs = type(make(kind).config).from_dict(document)
        assert theirs.router_aux_loss_coef == coef
    deeper = from_config(config | {"num_hidden_layers": 32, "mlp_only_layers": []} if routed == 1 else config | {"num_hidden_layers": 32})  # fmt: skip
    assert deeper.moe is not None
    assert deeper.moe.balance_loss == pytest.approx(0.001 * 2 / 32, rel=1e-9)
    assert to_config(deeper)["router_aux_loss_coef"] == 0.001
