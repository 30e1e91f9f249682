"""Every known failure matches its own samples, and is not hidden by an earlier entry."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from argosy.record.jsonl import JsonlWriter
from argosy.watch.diagnosis import diagnose
from argosy.watch.knowledge import Failure, failures, matches
from argosy.watch.run_list import Run
from record.run_dirs import log, make_run


def test_there_are_at_least_forty_with_names_of_their_own() -> None:
    names = [failure.name for failure in failures()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
    assert {failure.severity for failure in failures()} == {"fatal", "setback", "consequence", "warning"}


SAMPLES = [(failure, sample) for failure in failures() for sample in failure.samples]


@pytest.mark.parametrize(
    ("failure", "sample"), SAMPLES, ids=[f"{failure.name}-{i}" for i, (failure, _) in enumerate(SAMPLES)]
)
def test_the_cause_is_named_from_a_recorded_line(failure: Failure, sample: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "broken")
    log(run, [10])
    logs = run.root / "logs" / "0"
    logs.mkdir(parents=True)
    lines = ["step 10/1000 | loss 4.1 | grad norm 0.9", "saved runs/a/checkpoints/step-00000010 in 0.1s", sample]
    (logs / "pod.log").write_text("\n".join(lines) + "\n")
    # The run was started after that step.
    with JsonlWriter(run.events) as events:
        events.write({"event": "resume", "step": 10, "time": time.time()})
    verdict = diagnose(Run("broken", run.root))[0]
    assert verdict.name == failure.name
    assert failure.cause.removesuffix("{line}") in verdict.verdict
    assert verdict.fix == failure.fix
    assert any(sample.strip()[:100] in line for line in verdict.evidence)


HEALTHY = """
runs/first: llama, 5,000,000 parameters on cuda:0 in bf16
step 500/1000 | loss 2.1250 | grad norm 0.310 | lr 1.00e-03 | 429K tok/s | MFU 41.0% of H100 989 | data wait 0.0%
NCCL INFO NET/OFI Selected Provider is efa
rank 28 of 122 joined
node1:42:60 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>
node1:42:60 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
node1:42:60 [0] NCCL INFO NET/Plugin : Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory : when loading libnccl-net.so
node1:42:60 [0] NCCL INFO Failed to open libibverbs.so[.1]
node1:42:60 [0] NCCL INFO NET/IB : No device found.
node1:42:60 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>
node1:42:60 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ^lo,docker0
node1:42:60 [0] NCCL INFO NVLS multicast support is available on dev 0
node1:42:60 [0] NCCL INFO comm 0x5617 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 9b000 commId 0x1 - Init COMPLETE
[I1112 ProcessGroupNCCL.cpp:905] [PG 0 Rank 0] ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000, USE_HIGH_PRIORITY_STREAM: 0
[rank0]:[W1112 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.
[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).
/usr/lib/python3/dist-packages/torch/nn/modules/x.py:12: UserWarning: Memory efficient kernel not used because
    HW Thermal Slowdown                  : Not Active
    SW Thermal Slowdown                  : Not Active
    HW Power Brake Slowdown              : Not Active
GPU Current Temp: 61 C   GPU Shutdown Temp: 92 C
ECC Errors: Volatile: SRAM Uncorrectable: 0
cache: Evicted 3 entries of 120
preemption: a SIGTERM saves and ends the run
saved runs/a/checkpoints/step-00000137 in 0.1s
step 28/122 | loss 5.0000 | grad norm 104.0 | 429K tok/s
mce: [Hardware Error]: Machine check events logged
{10}[Hardware Error]: Corrected error, no action required.
EDAC MC0: 1 CE memory read error on CPU_SrcID#0
pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0
systemd[1]: Started Process Core Dump (PID 123/UID 0).
Normal  Scheduled  pod/run1-0  Successfully assigned default/run1-0 to gpu-node-7
Normal  Pulled     Container image "x" already present on machine
Normal  SuccessfulAttachVolume  AttachVolume.Attach succeeded for volume "pvc-1"
run1-0   1/1   Running   0   3h
Exit Code:    0
slurm: PreemptMode=REQUEUE Priority=1 TimeLimit=2-00:00:00
srun: job 123 queued and waiting for resources
srun: job 123 has been allocated resources
loading checkpoint shards: 100%
INFO: HTTP Request: GET https://huggingface.co/x "HTTP/1.1 200 OK"
warning: no NVML; sensors are not read
memory: 71.20 GiB of 79.10 (plan 70.1)
nccl_timeout_minutes: 10, oom_retries: 0
tokenizer: 32000 tokens, unk=<unk>
the run is 401 steps old
fallback: none
loss scale 65536
torch.distributed.elastic: agent started; max_restarts 3
nvidia-fabricmanager.service: active (running)
ib0: Link up
rank 3 joined, 4 of 8
nfs: server 10.0.0.5 OK
read 429 files, 137 shards, exit code 0
sinks: prometheus on 0.0.0.0:9464
all 8 ranks found each other in 2.1s
ulimit -n 65536; ulimit -l unlimited; /dev/shm 64 GiB
"""


@pytest.mark.parametrize("line", HEALTHY.strip().splitlines())
def test_a_healthy_log_shows_nothing(line: str) -> None:
    assert list(matches([line], "log")) == []


def test_a_line_of_any_length_is_looked_at_in_bounded_time() -> None:
    assert list(matches(["a" * 10_000_000, "(" * 100_000], "log")) == []
