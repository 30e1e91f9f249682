"""The only place that checks torch's version or touches its private names. From here down, torch is imported."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from argosy.errors import ArgosyError

OLDEST_TORCH = (2, 11)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise ArgosyError(
        "device.old-torch",
        f"torch {torch.__version__} is installed; Argosy needs {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer",
        fix=f"pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}'",
    )

# MKL's vector functions (exp, log, sin, erf, ..) make themselves ready at the first call. Where two threads make it together, one of them
# may get 11 bits of accuracy instead of 24, and a run other bits than its twin. So one thread calls first, before anything else is computed.
torch.ones(1).log()


# Elements of a CPU tensor whose squares are added in 32 bits. One sum over all of them is 0.7% off for 38 M elements; blocks are as fast.
_BLOCK = 256


def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements of tensors on one device, in 64 bits, without a host sync.

    Squares are added in 32 bits inside blocks and in 64 bits from there on. On a GPU the blocks are those of torch's kernel, one of
    65,536 elements for each thread block; on a CPU torch has none."""
    if tensors[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))
    else:
        norms = torch.cat([norm for tensor in tensors for norm in _block_norms(tensor.reshape(-1))])
    return norms.double().square().sum()


def _block_norms(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The norm of each whole block, and that of the rest."""
    count = len(flat) // _BLOCK
    blocks, rest = flat[: count * _BLOCK].view(count, _BLOCK), flat[count * _BLOCK :]
    yield torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32)
    yield torch.linalg.vector_norm(rest, dtype=torch.float32).reshape(1)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """All axes of a mesh as one."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def divided(mesh: DeviceMesh, axes: Mapping[str, int]) -> DeviceMesh:
    """The one axis of a mesh as several, the last of which has neighbours."""
    return mesh._unflatten(0, tuple(axes.values()), tuple(axes))


def combined(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the axes of several, which are parts of the same."""
    mesh: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return mesh


def gather_into(parts: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill parts [ranks x n, ..] with the x [n, ..] of every rank; torch 2.13 gave it another name."""
    (dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor)(parts, x, group)


def scatter_sum_into(x: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill x [n, ..] with the sum over ranks of their parts [ranks x n, ..] for this one."""
    renamed = hasattr(dist, "reduce_scatter_single")
    (dist.reduce_scatter_single if renamed else dist.reduce_scatter_tensor)(x, parts, group=group)


def torch_schedule(name: str, ranks: int, pieces: int, micros: int) -> list[list[tuple[Any, int, int]]]:
    """Each rank's work in the order of one of torch's pipeline schedules, as (F, B, I or W; stage; micro-batch)."""
    from torch.distributed.pipelining import schedules

    kinds = {
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    stages: list[Any] = [  # of a stage it only looks at where it is
        SimpleNamespace(
            stage_index=piece, num_stages=ranks * pieces, group_size=ranks, group_rank=0, submod=torch.nn.Module()
        )
        for piece in range(pieces)
    ]
    made = kinds[name](stages, micros, loss_fn=lambda *arguments: arguments[0])
    orders: list[list[tuple[Any, int, int]]] = []
    for rank in range(ranks):
        actions = [action for action in made.pipeline_order[rank] if action is not None]
        single = [part for action in actions for part in (action.sub_actions or (action,))]
        orders.append([(part.computation_type.value, part.stage_index, part.microbatch_index or 0) for part in single])
    return orders


def finish_backward(model: Any) -> None:
    """What FSDP does at the end of a backward pass, for all parts of a model, whichever were in the last pass."""
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        # torch 2.11 has one group of parameters a module, later ones several
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                group.post_backward()
    root._root_post_backward_final_callback()


def copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Write every source into its target, in the target's precision, in few passes."""
    torch._foreach_copy_(list(targets), list(sources))


def set_deterministic(on: bool) -> None:
    """As `torch.use_deterministic_algorithms`, which also tells the compiler and for that loads it: more than a second."""
    torch._C._set_deterministic_algorithms(on, warn_only=False)


def tell_compiler() -> None:
    """What `set_deterministic` kept from it."""
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


def accumulate_in(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Let gradients add up in `dtype`, which may be wider than the parameter's."""
    parameter.grad_dtype = dtype


def fused_adamw_(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    step: torch.Tensor,
    divisor: torch.Tensor,
    skip: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """torch's one-pass AdamW on 32-bit tensors. The gradients, which it overwrites, are divided by `divisor`; where `skip`
    is 1, nothing changes."""
    torch._fused_adamw_(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), [], [step] * len(parameters),
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        grad_scale=divisor, found_inf=skip,
    )  # fmt: skip


def add_each_(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add to every tensor in place another of its shape, in one pass."""
    torch._foreach_add_(list(tensors), list(others))


def sdpa_priority(device: torch.device) -> AbstractContextManager[None]:
    """Which of torch's attention kernels to try, in order. On Hopper cuDNN's is 1.6 times as fast as torch's flash; which one
    torch would take by itself changes between versions."""
    if device.type != "cuda":
        return nullcontext()
    manager: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        set_priority=True,
    )
    return manager


def compiled_flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """FlexAttention, which is a kernel only once compiled."""
    result: torch.Tensor = _compiled_flex()(q, k, v, **options)
    return result


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def flex_block_mask(
    visible: Callable[..., torch.Tensor],
    by_sample: torch.Tensor | None,
    queries: int,
    keys: int,
    device: torch.device,
) -> Any:
    """Which blocks of keys each block of queries needs: the same for all heads, and for the whole batch unless samples differ in
    what `by_sample` [batch, ..] says."""
    batch = None if by_sample is None else by_sample.shape[0]
    return create_block_mask(visible, batch, None, queries, keys, device=device)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """scale_a a x scale_b b + bias, for 8-bit a [m, k] and b [k, n], which is contiguous along k; on a CPU as an ordinary
    product of the same numbers."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    product = (a.float() @ b.float()) * (scale_a * scale_b)
    return (product if bias is None else product + bias.float()).to(dtype)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a b, in place once there is a total, which has at least 32 bits whatever a and b have; on a GPU the product
    itself adds."""
    if a.element_size() >= 4:
        return a @ b if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        return (a @ b).float() if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A product for each group, of bf16 on a GPU: rows of a [rows, k] with b [groups, k, n], or, if b [rows, n] has no
    groups, columns of a [m, rows] with rows of b. Group g ends at offsets[g], a 32-bit integer on the device."""
    return torch._grouped_mm(a, b, offs=offsets)


def mm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in 32-bit floats; on a GPU without 32-bit copies of 16-bit factors, whose products are exact in 32 bits."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def cpu_matmul_support(dtype: torch.dtype) -> Literal["native", "emulated", "missing"]:
    """How this CPU multiplies matrices of a 16-bit `dtype`, from its instruction set and not from a timing, which another
    process on the same cores would change.

    `native` has instructions for it. `emulated` is oneDNN converting to fp32 and back, at about 5 times the time of fp32.
    `missing` is torch's own scalar loops, at 40 to 400 times.
    """
    bf16 = dtype == torch.bfloat16
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported if bf16 else torch.ops.mkldnn._is_mkldnn_fp16_supported
    if not torch.backends.mkldnn.is_available() or not supported():
        return "missing"
    # On ARM, and for fp16 on x86, oneDNN asks for the instructions themselves; for bf16 on x86 it asks for AVX-512 alone.
    x86 = platform.machine() in ("x86_64", "AMD64")
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "emulated" if bf16 and x86 and not has_bf16 else "native"


def _operations(*names: str) -> frozenset[Any]:
    """Those of aten's operations that this torch has, in every form."""
    found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, form) for packet in found for form in packet.overloads())


# Matrix products and attention: what is kept for the backward pass where all else is made again; and the choice of
# experts, which is small, and must not come out differently.
COSTLY_OPERATIONS = _operations(
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "topk", "sort",
) | {torch.ops.higher_order.flex_attention}  # fmt: skip


FLIGHT_RECORD = {"TORCH_FR_BUFFER_SIZE": "2000"}  # in a rank's environment


def flight_record() -> str:
    """The collectives this process began last, as JSON with `entries`, oldest first."""
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, name):
            found = getattr(c10d, name)()
            return found.decode() if isinstance(found, bytes) else str(found)
    return '{"entries": []}'


class AgentHooks(Protocol):
    """What a supervisor adds to torch's elastic agent. `ranks` are process ids by rank."""

    def look(self, ranks: dict[int, int]) -> None:
        """Before torch looks at its ranks, many times a second: where one is in trouble, all may be ended here."""

    def failed(self, exit_codes: dict[int, int]) -> bool:
        """Ranks have ended as they should not, and all others were ended; whether to start them again."""
        ...

    def restarting(self, ranks: dict[int, int]) -> None:
        """All ranks are about to be ended, as far as they have not been, and started again, here and on all nodes."""


def elastic_agent(spec: Any, logs: Any, hooks: AgentHooks) -> Any:
    """torch's elastic agent for this node, with a supervisor's hooks."""
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    def ranks(group: Any) -> dict[int, int]:
        return {worker.global_rank: worker.id for worker in group.workers}

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            hooks.look(ranks(worker_group))
            result = super()._monitor_workers(worker_group)
            if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
                self._remaining_restarts = int(hooks.failed(exit_codes))
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            hooks.restarting(ranks(worker_group))
            super()._restart_workers(worker_group)

    return Agent(spec, logs)


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Inside, this process is one of `size` ranks whose others do not exist: groups can be made, and nothing is exchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def record_memory_history(on: bool) -> None:
    """Have the GPU's allocator remember what it gives out and takes back, with the calls that asked for it."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def memory_history(device: torch.device) -> bytes:
    """What it remembers, as JSON: torch's own dump is a pickle."""
    return json.dumps(torch.cuda.memory._snapshot(device), default=str).encode()


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """x itself, as the result of a function that changes nothing but the gradient: not as a view in what is compiled, for where
    one leaves its graph, the compiler makes it anew and forgets the function."""
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
