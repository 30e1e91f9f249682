"""The only place that checks torch's version or uses its private names. Modules above this one in the import order may import
torch."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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

# MKL's vector functions (exp, log, sin, erf, ...) initialise themselves at the first call. If two threads make that call at
# the same time, one of them may get 11 bits of accuracy instead of 24, and the run is no longer reproducible. So one thread
# calls first, before anything else is computed.
torch.ones(1).log()

# The fallback of a 16-bit matmul on a CPU without instructions for it. The message has a C++ stack trace of 24 lines, and a run says
# itself that its precision is slow here (`slow_precision`).
warnings.filterwarnings("ignore", r"mkldnn_matmul failed, switching to BLAS gemm", UserWarning)


def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of all elements of tensors on one device, in fp64, without a host sync.

    On a GPU squares are summed in fp32 inside the blocks of torch's kernel, 65,536 elements each, and in fp64 across them. torch's CPU
    kernel has no blocks, and how many elements it sums one after the other depends on the processor.
    """
    if tensors[0].is_cuda:
        # Torch refuses to sum 64-bit elements in 32 bits.
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        dtype = torch.float64 if wide else torch.float32
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).double()
    else:
        norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    return norms.square().sum()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with all axes flattened into one."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def divided(mesh: DeviceMesh, axes: Mapping[str, int]) -> DeviceMesh:
    """Split the one axis of a mesh into several. Neighbouring ranks are along the last."""
    return mesh._unflatten(0, tuple(axes.values()), tuple(axes))


def combined(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the axes of several meshes that are parts of the same one."""
    mesh: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return mesh


def gather_into(parts: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """All-gather x [n, ..] of every rank into parts [ranks x n, ..]. With `async_op`, return its handle. torch 2.13 renamed the
    collective."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return gather(parts, x, group, async_op=async_op)


def scatter_sum_into(x: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Reduce-scatter (sum) the parts [ranks x n, ..] of all ranks into x [n, ..]. With `async_op`, return its handle."""
    renamed = hasattr(dist, "reduce_scatter_single")
    reduce = dist.reduce_scatter_single if renamed else dist.reduce_scatter_tensor
    return reduce(x, parts, group=group, async_op=async_op)


def torch_schedule(name: str, ranks: int, pieces: int, micros: int) -> list[list[tuple[Any, int, int]]]:
    """Return each rank's order of work in one of torch's pipeline schedules, as (F, B, I or W; stage; micro-batch)."""
    from torch.distributed.pipelining import schedules

    kinds = {
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    # The schedule reads only the position of a stage.
    stages: list[Any] = [
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
    """Run FSDP's end-of-backward work for all parts of a model, including those that were not in the last pass."""
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in _fsdp_groups(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def gathered_parameters(unit: Any) -> list[torch.nn.Parameter]:
    """Return the trained parameters of an FSDP unit as it gathers them. It makes them when it first gathers."""
    held = [parameter for group in _fsdp_groups(unit._get_fsdp_state()) for parameter in group.fsdp_params]
    return [parameter._unsharded_param for parameter in held if parameter.sharded_param.requires_grad]


def _fsdp_groups(state: Any) -> list[Any]:
    # torch 2.11 has one parameter group for each module, later versions several.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def allow_fsdp_views() -> None:
    """Silence FSDP's warning that a module returned a view, which torch gives from 2.13 on. Call it where no view is modified in place.

    The filter is of that one message of that one module. A filter for the time of a step would make Python repeat every other warning
    in each step.
    """
    warnings.filterwarnings(
        "ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning, module=r"torch\.distributed\.fsdp\."
    )


def copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source into its target, in the target's precision, with a foreach kernel."""
    torch._foreach_copy_(list(targets), list(sources))


def set_deterministic(on: bool) -> None:
    """Set deterministic algorithms as torch does, without importing its compiler, which takes over a second."""
    torch._C._set_deterministic_algorithms(on, warn_only=False)


def tell_compiler() -> None:
    """Propagate the deterministic flag to torch.compile, which `set_deterministic` skips."""
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


def accumulate_in(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Accumulate the parameter's gradient in `dtype`, which may be wider than the parameter's."""
    parameter.grad_dtype = dtype


def is_summed_wide(parameter: torch.Tensor) -> bool:
    """True if the gradients of a parameter accumulate in more bits than it has."""
    return parameter.is_leaf and parameter.dtype != parameter.grad_dtype == torch.float32


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which the gradients of a parameter accumulate. A gradient that has it already is not converted."""
    # torch.compile cannot read a parameter's `grad_dtype`. A compiled pass leaves the conversion to autograd.
    wide = not torch.compiler.is_compiling() and is_summed_wide(parameter)
    return torch.float32 if wide else parameter.dtype


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
    """Run torch's fused AdamW on fp32 tensors. Gradients are divided by `divisor` and overwritten; if `skip` is 1, nothing
    changes."""
    torch._fused_adamw_(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), [], [step] * len(parameters),
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        grad_scale=divisor, found_inf=skip,
    )  # fmt: skip


def add_each_(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add another tensor of the same shape to each tensor in place, with a foreach kernel."""
    torch._foreach_add_(list(tensors), list(others))


def sdpa_priority(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that sets the order of SDPA backends. On Hopper, cuDNN's is 1.6 times as fast as torch's flash; torch's
    own choice changes between versions."""
    if device.type != "cuda":
        return nullcontext()
    manager: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        set_priority=True,
    )
    return manager


def compiled_flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Run FlexAttention compiled: without compilation it is no fused kernel."""
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
    """Return the block mask: the same for all heads, and for the whole batch unless samples differ in `by_sample` [batch, ..]."""
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
    """Return scale_a a x scale_b b + bias for fp8 a [m, k] and b [k, n], which is contiguous along k. On a CPU, an ordinary
    matmul of the same numbers."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    product = (a.float() @ b.float()) * (scale_a * scale_b)
    return (product if bias is None else product + bias.float()).to(dtype)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a b, in place if there is a total. The total has at least 32 bits; on a GPU the GEMM accumulates into it."""
    if a.element_size() >= 4:
        return a @ b if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        return (a @ b).float() if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply group by group, in bf16 on a GPU: rows of a [rows, k] with b [groups, k, n], or, if b [rows, n] has no groups,
    columns of a [m, rows] with rows of b. Group g ends at offsets[g], an int32 on the device."""
    return torch._grouped_mm(a, b, offs=offsets)


def mm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b in fp32. On a GPU, 16-bit factors are not copied to fp32: their products are exact in fp32."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def cpu_matmul_support(dtype: torch.dtype) -> Literal["native", "emulated", "missing"]:
    """Return how this CPU multiplies matrices of a 16-bit `dtype`, from its instruction set. A timing would depend on other
    processes on the same cores.

    `native`: the CPU has instructions for it. `emulated`: oneDNN converts to fp32 and back, at about 5 times the time of
    fp32. `missing`: torch's own scalar loops, at 40 to 400 times.
    """
    bf16 = dtype == torch.bfloat16
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported if bf16 else torch.ops.mkldnn._is_mkldnn_fp16_supported
    if not torch.backends.mkldnn.is_available() or not supported():
        return "missing"
    # On ARM, and for fp16 on x86, oneDNN checks for the instructions themselves; for bf16 on x86 it checks for AVX-512 only.
    x86 = platform.machine() in ("x86_64", "AMD64")
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "emulated" if bf16 and x86 and not has_bf16 else "native"


def _operations(*names: str) -> frozenset[Any]:
    """Return the aten operations of these names that this torch has, in every overload."""
    found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, form) for packet in found for form in packet.overloads())


# Operations whose results selective recompute keeps: matmuls and attention, and the choice of experts, which is small and
# must not differ when repeated.
COSTLY_OPERATIONS = _operations(
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_efficient_attention_forward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "topk", "sort",
) | {torch.ops.higher_order.flex_attention}  # fmt: skip


# Set in a rank's environment. NCCL's own dump after a timeout is a pickle, and ends the other ranks before they can be asked.
FLIGHT_RECORD = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def flight_record() -> str:
    """Return the last collectives of this process as JSON with `entries`, oldest first (torch's flight recorder).

    NCCL has a recorder of its own, beside that of the other back ends.
    """
    import torch._C._distributed_c10d as c10d

    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    # In some versions of torch both are the same.
    dumps = dict.fromkeys(getattr(c10d, name)() for name in names if hasattr(c10d, name))
    entries = [entry for dump in dumps for entry in json.loads(dump).get("entries") or []]
    entries.sort(key=lambda entry: int(entry.get("time_created_ns", 0)))
    return json.dumps({"entries": entries})


class AgentHooks(Protocol):
    """The hooks that a supervisor adds to torch's elastic agent. `ranks` are process ids by rank."""

    def look(self, ranks: dict[int, int]) -> None:
        """Called before torch checks its ranks, many times a second. May kill all ranks."""

    def failed(self, exit_codes: dict[int, int]) -> bool:
        """Called when ranks have failed and all others were killed. Returns whether to restart them."""
        ...

    def restarting(self, ranks: dict[int, int]) -> None:
        """Called when all ranks are about to be killed and restarted, here and on all nodes."""


def elastic_agent(spec: Any, logs: Any, hooks: AgentHooks) -> Any:
    """Return torch's elastic agent for this node, with a supervisor's hooks."""
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


def record_memory_history(on: bool) -> None:
    """Turn the recording of GPU memory allocations, with their call stacks, on or off."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def memory_history(device: torch.device) -> bytes:
    """Return the recorded allocations as JSON. torch's own dump is a pickle."""
    return json.dumps(torch.cuda.memory._snapshot(device), default=str).encode()


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """Return x itself, as the output of an autograd function that changes only the gradient.

    Under torch.compile it is a clone: the compiler recreates a view that leaves the graph, and drops the function.
    """
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)


def filled(x: torch.Tensor) -> torch.Tensor:
    """Return x, which was written in place, as the output of an autograd function.

    Under torch.compile it is a view: torch 2.11 loses the gradient of an output that was written in place.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x


def require_all(conditions: torch.Tensor, otherwise: str) -> None:
    """Raise RuntimeError if not all conditions hold. On a GPU the host does not wait: it learns of the failure with a later call."""
    torch._assert_async(conditions.all(), otherwise)
