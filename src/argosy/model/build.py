"""Build a model from its spec, and draw its initial weights.

Initial weights are the same for every layout: each block of a parameter is drawn from a seed derived from (run seed, its name, its number).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from argosy.config.model import ModelSpec
from argosy.config.seeds import derive_seed
from argosy.families.adapter_sizes import adapted_layers, weight_of_magnitude
from argosy.families.architecture import DECODER, ENCODER, ENCODER_DECODER, RETRIEVER, Architecture, architecture_of
from argosy.model.decoder import Decoder
from argosy.model.encoder import MaskedLM
from argosy.model.encoder_decoder import EncoderDecoder
from argosy.model.ops.low_rank import row_norms
from argosy.model.retriever import Retriever

_MODELS: dict[Architecture, Callable[[ModelSpec], nn.Module]] = {
    DECODER: Decoder,
    ENCODER: MaskedLM,
    RETRIEVER: Retriever,
    ENCODER_DECODER: EncoderDecoder,
}


def build_model(spec: ModelSpec, device: torch.device | str = "cpu") -> nn.Module:
    """Return the model with uninitialised weights. `initialise` or a checkpoint fills them."""
    with torch.device(device):
        model = _MODELS[architecture_of(spec)](spec)
        if spec.lora is not None:
            from argosy.model.adapters import add_adapters

            add_adapters(model, spec.lora, adapted_layers(spec))
    return model


# About how many numbers are drawn with one seed. A larger parameter has a seed for each block of rows, so that threads can share it.
_BLOCK = 2**20
# Numbers drawn ahead, at most: 512 MB.
_MOST_AHEAD = 2**27
# The projections that write into the residual stream start smaller, so that the stream's variance does not grow with depth.
_INTO_RESIDUAL = ("attn.out.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill the model's weights, in the model's precision. An optimiser with master weights uses `initial_weights` itself."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_weights(model, spec, seed):
            parameters[name].copy_(value)


def _all_of(parameter: Tensor) -> range:
    return range(parameter.numel())


def initial_weights(
    model: nn.Module, spec: ModelSpec, seed: int, span_of: Callable[[Tensor], range] = _all_of
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter's name and initial value, the largest first.

    A core draws about 50 million numbers a second, so threads draw ahead. The values do not depend on how many threads there are. A value
    lasts until the next is asked for: later ones are drawn into its memory, as the first write to new memory can take longer than the draw.

    Args:
        span_of: returns which numbers of a parameter this rank needs. The others need not be drawn, and their memory not written.
    """
    parameters = dict(model.named_parameters())
    # What is drawn for each, and which rows of it.
    drawn = {name: _drawn(name, spec) for name in parameters}
    rows = {}
    for name, parameter in parameters.items():
        whole = parameters[drawn[name]]
        rows[name] = _rows_of(span_of(parameter) if whole is parameter else _all_of(whole), whole.shape)
    size = {name: (rows[name].stop - rows[name].start) * _columns(parameters[drawn[name]].shape) for name in parameters}
    waiting = sorted(parameters, key=size.__getitem__)
    begun: deque[tuple[str, Tensor, Future[Tensor]]] = deque()
    spare: list[Tensor] = []
    threads, ranks, ahead = min(16, torch.get_num_threads()), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 0
    with ThreadPoolExecutor(threads) as pool:
        while waiting or begun:
            while waiting and (not begun or ahead + size[waiting[-1]] <= _MOST_AHEAD // ranks):
                name = waiting.pop()
                ahead += size[name]
                shape = parameters[drawn[name]].shape
                memory = _memory(spare, shape.numel(), whole=size[name] == shape.numel())
                value = memory[: shape.numel()].view(shape)
                blocks = [pool.submit(draw) for draw in _draws(value, rows[name], drawn[name], spec, seed)]
                begun.append((name, memory, pool.submit(_finished, value, blocks, norms=drawn[name] != name)))
            name, memory, finished = begun.popleft()
            yield name, finished.result()
            spare.append(memory)
            ahead -= size[name]


def _memory(spare: list[Tensor], numbers: int, *, whole: bool) -> Tensor:
    """Return memory of an earlier value, at least as large, or new memory.

    A value that is not drawn as a whole gets that of one of its size: in another, its rows may lie where nothing has been written yet.
    """
    for place, memory in enumerate(spare):
        if len(memory) == numbers or (whole and len(memory) > numbers):
            return spare.pop(place)
    return torch.empty(numbers)


def _finished(value: Tensor, blocks: list[Future[Any]], *, norms: bool) -> Tensor:
    """Wait for the blocks, all of which threads have begun: a pool begins its work in order. Return the value, or the norms of its rows."""
    for block in blocks:
        block.result()
    return row_norms(value) if norms else value


def _drawn(name: str, spec: ModelSpec) -> str:
    """Return the parameter that is drawn for a parameter's initial value: for a magnitude, the weight whose norms it is."""
    return name if spec.lora is None else weight_of_magnitude(name) or name


def _constant(name: str, spec: ModelSpec) -> float | None:
    """Return the one number that a parameter starts with, None if its numbers are drawn. A parameter of the model itself has no module."""
    module, _, last = name.rpartition(".")
    if last in ("bias", "lora_b"):
        return 0.0
    return spec.norm_start if module.endswith("norm") else None


def fill_like_initial(name: str, part: Tensor, spec: ModelSpec) -> None:
    """Fill a part of a parameter with numbers like its initial ones, drawn on its own device.

    Unlike `initial_value` they depend on the layout: for measurements, where drawing whole matrices on the host takes minutes.
    """
    if (constant := _constant(name, spec)) is not None:
        part.fill_(constant)
    elif weight_of_magnitude(name) is not None:
        part.fill_(1.0)
    else:
        part.normal_(0.0, part.shape[-1] ** -0.5 if architecture_of(spec).fan_in_init else spec.init_std)


def initial_value(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> Tensor:
    """Return the initial value of a whole parameter in 32-bit floats on the CPU, for any device and layout.

    The magnitudes of DoRA are no draw: they are the norms of a weight's rows.
    """
    value = torch.empty(shape)
    for draw in _draws(value, _rows_of(_all_of(value), shape), name, spec, seed):
        draw()
    return value


def _columns(shape: torch.Size) -> int:
    return shape[-1] if shape else 1


def _rows_of(span: range, shape: torch.Size) -> range:
    """Return the first row of each block that has a part of a span. The end is that of the last block."""
    columns, rows = _columns(shape), math.prod(shape[:-1])
    step = max(1, _BLOCK // columns)
    first, last = span.start // columns, -(-span.stop // columns)
    return range(first // step * step, min(-(-last // step) * step, rows), step)


def _draws(value: Tensor, rows: range, name: str, spec: ModelSpec, seed: int) -> Iterator[Callable[[], Any]]:
    """Yield the work of filling blocks of rows of a value, in parts that may run at the same time."""
    matrix = value.view(-1, _columns(value.shape))
    if (constant := _constant(name, spec)) is not None:
        yield partial(matrix[rows.start : rows.stop].fill_, constant)
        return
    std = _std(name, value.shape, spec)
    for first in rows:
        place, number = slice(first, min(first + rows.step, rows.stop)), first // rows.step
        names = ("init", name, number) if number else ("init", name)
        yield partial(_draw, matrix[place], derive_seed(seed, *names), std[place] if isinstance(std, Tensor) else std)


def _draw(rows: Tensor, seed: int, std: Tensor | float) -> None:
    rows.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(seed)).mul_(std)


def _std(name: str, shape: torch.Size, spec: ModelSpec) -> Tensor | float:
    """Return the standard deviation of a parameter's initial numbers, or that of each of its rows."""
    if name.endswith(".lora_a"):
        return float((3 * shape[-1]) ** -0.5)
    if architecture_of(spec).fan_in_init:
        return _t5_std(name, shape, spec)
    return spec.init_std / math.sqrt(2 * spec.layers) if name.endswith(_INTO_RESIDUAL) else spec.init_std


def _t5_std(name: str, shape: torch.Size, spec: ModelSpec) -> Tensor | float:
    """Return T5's standard deviation, as a multiple of init_std: 1 / sqrt(inputs) for a matrix, 1 for the embedding.

    Query projections are smaller by sqrt(head_dim), because T5 does not divide the scores by it. An untied output head is
    drawn like any matrix, as T5 1.1 was trained. Drawn like the embedding, as in transformers, its logits would start with
    a standard deviation of sqrt(hidden).
    """
    if name.endswith("embed.tokens.weight"):
        return spec.init_std
    inputs = spec.hidden if name.endswith("relative.weight") else shape[-1]
    std = spec.init_std / math.sqrt(inputs)
    if name.endswith("cross.q.weight"):
        return std / math.sqrt(spec.head_dim)
    if name.endswith("qkv.weight"):
        group = torch.ones(spec.heads // spec.kv_heads + 2)
        group[:-2] /= math.sqrt(spec.head_dim)
        return std * group.repeat_interleave(spec.head_dim).repeat(spec.kv_heads)[:, None]
    return std
