"""The sizes that fp8 matmuls can have: widths of linear layers, and tokens of a forward pass.

The checks of a run spec, the planner and `argosy.parallel.precision` share these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, lcm

from argosy.config.model import ModelSpec
from argosy.config.origins import Origins
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.families.architecture import architecture_of
from argosy.tasks.task_registry import task_of

# FP8 tensor cores need every dimension of a GEMM to be a multiple of this.
FP8_ALIGNMENT = 16
Widths = tuple[int, int]


def fits_fp8(*widths: int) -> bool:
    """Return whether fp8 matmuls can have dimensions of these sizes."""
    return all(width % FP8_ALIGNMENT == 0 for width in widths)


def block_widths(model: ModelSpec) -> set[Widths]:
    """Return (inputs, outputs) of the linear layers in the transformer blocks.

    Routed experts are not among them: their grouped matmuls stay in 16 bits.
    """
    moe, queries, keys = model.moe, model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    found = {(model.hidden, queries + keys), (queries, model.hidden)}
    if architecture_of(model).two_sequences:
        # The cross-attention of a decoder.
        found |= {(model.hidden, queries), (model.hidden, keys)}
    inner = [model.ffn] if moe is None or moe.dense_layers else []
    inner += [moe.shared_experts * moe.ffn] if moe is not None and moe.shared_experts else []
    for width in inner:
        found |= {(model.hidden, width), (width, model.hidden)}
    return found


def has_fp8_layers(model: ModelSpec) -> bool:
    """Return whether a linear layer of the blocks can use fp8 matmuls."""
    return any(fits_fp8(*widths) for widths in block_widths(model))


def require_fp8_layers(widths: Iterable[Widths], origin: str | None = None) -> None:
    """Raise ArgosyError if no linear layer of the blocks can use fp8 matmuls.

    Args:
        widths: inputs and outputs of the linear layers.
        origin: where the precision was asked for.
    """
    known = set(widths)
    if any(fits_fp8(*one) for one in known):
        return
    sizes = sorted({size for one in known for size in one})
    raise refused_precision(
        f"fp8 matmuls need both sizes of a linear layer to be multiples of {FP8_ALIGNMENT}, and no linear layer in the blocks has "
        f"that: their sizes are {', '.join(map(str, sizes))}",
        f"model.hidden and model.ffn that are multiples of {FP8_ALIGNMENT}, or train.precision=bf16",
        origin,
    )


def fp8_micro_batch(lengths: Iterable[int | None], cp: int = 1) -> int:
    """Return the number of samples of which a micro-batch has to be a multiple, for tokens that fp8 matmuls can have.

    Args:
        lengths: tokens of each sequence of a sample; None for a length that only the data determines.
        cp: the context-parallel ranks, which share each sequence.
    """
    return lcm(*(FP8_ALIGNMENT // gcd(FP8_ALIGNMENT, length // cp if length else 1) for length in lengths))


def sequence_lengths(spec: RunSpec) -> dict[str, int | None]:
    """Return the tokens of each sequence of a sample by the last part of its key, None for a length that only the data determines."""
    others = task_of(spec).other_lengths(spec)
    return {"seq_len": spec.data.seq_len, **{key.rpartition(".")[2]: length for key, length in others.items()}}


def fp8_refusal(
    lengths: Mapping[str, int | None],
    batch: int,
    ranks: int,
    *,
    micro_batch: int | None = None,
    cp: int = 1,
    ramped: bool = False,
) -> tuple[str, str] | None:
    """Return why fp8 matmuls cannot have the tokens of a forward pass, and a fix; None if they can.

    Args:
        lengths: tokens of each sequence of a sample by name; None for a length that only the data determines.
        batch: the samples that divide every batch of the run.
        ranks: the data-parallel ranks.
        micro_batch: its size; None if it can be any that divides the batch.
        cp: the context-parallel ranks, which share each sequence.
        ramped: the batch ramps up.
    """
    unit = fp8_micro_batch(lengths.values(), cp)
    samples = (batch // ranks if batch % ranks == 0 else 1) if micro_batch is None else micro_batch
    if samples % unit == 0:
        return None
    needs = {name: fp8_micro_batch([length], cp) for name, length in lengths.items()}
    name = next(name for name, needed in needs.items() if samples % needed)
    length, over = lengths[name], f" / cp {cp}" if cp > 1 else ""
    if micro_batch is not None:
        why = f"micro_batch {micro_batch} x {name} {length}{over} = {micro_batch * ((length or 1) // cp)}"
        if length is None:
            why = f"T5's targets can have any length, so micro_batch {micro_batch} has to be a multiple itself"
    else:
        why = f"with {name} {length}{over} micro-batches have to be multiples of {needs[name]}"
        if length is None:
            why = f"T5's targets can have any length, so micro-batches have to be multiples of {needs[name]}"
        why += f", and {f'batches that are multiples of {batch}' if ramped else f'a batch of {batch}'} cannot be split into those"
        why += f" on {ranks} data-parallel ranks" if ranks > 1 else ""
    fixes = [_aligned_batch(batch, ranks, unit, is_open=micro_batch is None, ramped=ramped)]
    if name == "seq_len" and unit == needs[name] and batch % ranks == 0:
        fixes.append(f"a data.seq_len that is a multiple of {FP8_ALIGNMENT * cp}")
    return f"fp8 matmuls need a multiple of {FP8_ALIGNMENT} tokens in a forward pass; {why}", ", or ".join(fixes)


def _aligned_batch(batch: int, ranks: int, unit: int, *, is_open: bool, ramped: bool) -> str:
    """Suggest a micro-batch that is a multiple of `unit` samples, or a batch that allows one."""
    if batch % (unit * ranks) == 0:
        return f"parallel.micro_batch={unit}" + (" or a multiple of it" if batch > unit * ranks else "")
    over = f" = {unit} x {ranks} data-parallel ranks" if ranks > 1 else ""
    which = "a train.global_batch that is a multiple"
    if ramped:
        which = "a train.global_batch, batch_rampup.start and batch_rampup.increment that are multiples"
    return f"{which} of {unit * ranks}{over}" + ("" if is_open else f", with parallel.micro_batch={unit}")


def check_fp8_tokens(spec: RunSpec, origins: Origins) -> None:
    """Raise an ArgosyError if a forward pass has a number of tokens that fp8 matmuls cannot have."""
    if spec.train.precision != "fp8":
        return
    parallel = spec.parallel
    refusal = fp8_refusal(
        sequence_lengths(spec), spec.train.batches.divisor, parallel.data_parallel, micro_batch=parallel.micro_batch, cp=parallel.cp,
        ramped=spec.train.batch_rampup is not None,
    )  # fmt: skip
    if refusal is not None:
        raise refused_precision(*refusal, origins.get("train.precision"))


def refused_precision(cause: str, fix: str, origin: str | None) -> ArgosyError:
    """Return the error for fp8 matmuls that a model or a batch rules out. `origin` is where the precision was asked for."""
    return ArgosyError("config.arithmetic", cause, key="train.precision", value="fp8", origin=origin, fix=fix)
