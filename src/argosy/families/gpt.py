"""GPT-2 and GPT-3: learned positions and biases in every layer.

Hugging Face's `gpt2` stores matrices transposed, with query, key and value side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.config.model import ModelSpec
from argosy.families.family import Family, HfFormat, Row, StoredNames, Tree
from argosy.families.hf_keys import ACTIVATIONS, Keys, activation_name
from argosy.families.weight_table import SAME, TRANSPOSED, Entry, Layout, QueryKeyValue

DEFAULTS: Row = {
    "architecture": "decoder", "positions": "learned", "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-5,
    "activation": "gelu_tanh", "attention_bias": True, "mlp_bias": True, "tied": True,
}  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, *, seq: int = 2048, vocab: int = 50257) -> Row:
    return {
        "family": "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab_size": vocab,
        "max_seq_len": seq,
    }


PRESETS: dict[str, Row] = {
    # GPT-3: the paper's table, with head counts that divide the width.
    "gpt3-125m": _gpt(12, 768, 12),
    "gpt3-345m": _gpt(24, 1024, 16, seq=1024),
    "gpt3-357m": _gpt(24, 1024, 16),
    "gpt3-760m": _gpt(24, 1536, 16),
    "gpt3-1.3b": _gpt(24, 2048, 16),
    "gpt3-2.7b": _gpt(32, 2560, 32),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-30b": _gpt(48, 7168, 56),
    "gpt3-175b": _gpt(96, 12288, 96),
    # Presets of the Azure Megatron-LM example, whose labels are not their parameter counts.
    "gpt3-375m": _gpt(12, 512, 8),
    "gpt3-857m": _gpt(24, 1024, 16),
    # Table 1 of the Megatron-LM scaling paper (arXiv 2104.04473), as the HyperPod example lists it; vocabulary padded to 51,200.
    "gpt3-1.7b": _gpt(24, 2304, 24, vocab=51200),
    "gpt3-3.6b": _gpt(30, 3072, 32, vocab=51200),
    "gpt3-7.5b": _gpt(36, 4096, 32, vocab=51200),
    "gpt3-18.4b": _gpt(40, 6144, 48, vocab=51200),
    "gpt3-39.1b": _gpt(48, 8192, 64, vocab=51200),
    "gpt3-76.1b": _gpt(60, 10240, 80, vocab=51200),
    "gpt3-145.6b": _gpt(80, 12288, 96, vocab=51200),
    "gpt3-310.1b": _gpt(96, 16384, 128, vocab=51200),
    "gpt2": _gpt(12, 768, 12, seq=1024),
    "gpt2-medium": _gpt(24, 1024, 16, seq=1024),
    "gpt2-large": _gpt(36, 1280, 20, seq=1024),
    "gpt2-xl": _gpt(48, 1600, 25, seq=1024),
}


def _read(keys: Keys) -> Tree:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.ignore("it changes the rounding of attention scores only", "reorder_and_upcast_attn")
    keys.ignore("an older name of n_positions, which transformers does not read", "n_ctx")
    keys.ignore(
        "it is of GPT2DoubleHeadsModel's second head",
        *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
    )
    return {
        "family": "gpt",
        "layers": keys.take("n_layer", 12),
        "hidden": keys.take("n_embd", 768),
        "heads": keys.take("n_head", 12),
        "ffn": keys.take("n_inner", None),
        "vocab_size": keys.take("vocab_size", 50257),
        "max_seq_len": keys.take("n_positions", 1024),
        "activation": keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_eps": keys.take("layer_norm_epsilon", 1e-5),
        "tied": keys.take("tie_word_embeddings", True),
        "dropout": keys.same("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
        "init_std": keys.take("initializer_range", 0.02),
    }


def _write(spec: ModelSpec) -> Tree:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": spec.layers,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_seq_len,
        "activation_function": activation_name(spec),
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), spec.dropout),
        "initializer_range": spec.init_std,
    }


def _table(spec: ModelSpec) -> Iterator[Entry]:
    yield Entry("embed.tokens.weight", ("transformer.wte.weight",))
    yield Entry("embed.positions.weight", ("transformer.wpe.weight",))
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        yield from _linear(
            f"{ours}.attn.qkv",
            f"{theirs}.attn.c_attn",
            QueryKeyValue.of(spec, fused=True, transposed=True),
            QueryKeyValue.of(spec, fused=True),
        )
        yield from _linear(f"{ours}.attn.out", f"{theirs}.attn.c_proj")
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc")
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj")
        yield from _linear(f"{ours}.attn_norm", f"{theirs}.ln_1", SAME)
        yield from _linear(f"{ours}.mlp_norm", f"{theirs}.ln_2", SAME)
    yield from _linear("norm", "transformer.ln_f", SAME)
    if not spec.tied:
        yield Entry("head.weight", ("lm_head.weight",))


def _linear(ours: str, theirs: str, weight: Layout = TRANSPOSED, bias: Layout = SAME) -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (f"{theirs}.weight",), weight)
    yield Entry(f"{ours}.bias", (f"{theirs}.bias",), bias)


GPT = Family(
    "gpt",
    DEFAULTS,
    PRESETS,
    formats={"gpt2": HfFormat(_read, _write)},
    model_type=lambda spec: "gpt2",
    table=_table,
    stored=StoredNames(
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        # The causal mask.
        unused=r"h\.\d+\.attn\.(bias|masked_bias)$",
    ),
)
