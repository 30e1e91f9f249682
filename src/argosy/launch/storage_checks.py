"""Checks of the shared volume before training: who may write there, its space, its speed, its clock."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from pathlib import Path

from argosy.console.formats import clock
from argosy.files import RIGHTS_FIX
from argosy.launch.node_checks import Check, Wanted

_MIB, _GIB = 2**20, 2**30
_PROBE_BYTES = 128 * _MIB
_CLOCK_S = 5.0


def check_writable(wanted: Wanted) -> Check:
    """Check that this user may write where runs are kept."""
    nearest = _nearest(wanted)
    if os.access(nearest, os.W_OK | os.X_OK):
        return Check("rights", True, f"user {os.getuid()} may write {nearest}")
    facts = nearest.stat()
    found = (
        f"user {os.getuid()} may not write {nearest}: it is user {facts.st_uid}'s, mode {stat.filemode(facts.st_mode)}"
    )
    return Check("rights", False, found, RIGHTS_FIX)


def check_space(wanted: Wanted) -> Check:
    nearest = _nearest(wanted)
    free = shutil.disk_usage(nearest).free
    ok = free >= wanted.needed_bytes
    text = f"{_size(free)} free in {nearest}"
    fix = f"checkpoints need {_size(wanted.needed_bytes)}: more storage, or a smaller checkpoint.keep"
    return Check("space", ok, text, "" if ok else fix)


def _size(count: int) -> str:
    return f"{count / _GIB:,.0f} GiB" if count >= 10 * _GIB else f"{count / 1e6:,.0f} MB"


def check_speed(wanted: Wanted) -> Check:
    """Measure a write and a read back from storage, bypassing the page cache as far as possible."""
    if not os.access(_nearest(wanted), os.W_OK | os.X_OK):
        return Check("storage", None, "not measured: it cannot be written")
    wanted.storage.mkdir(parents=True, exist_ok=True)
    probe = wanted.storage / f".preflight-{socket.gethostname()}-{os.getpid()}"
    block = os.urandom(8 * _MIB)
    try:
        start = time.perf_counter()
        with probe.open("wb", buffering=0) as file:
            for _ in range(_PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        written = time.perf_counter() - start
        with probe.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            whole = all(file.read(len(block)) == block for _ in range(_PROBE_BYTES // len(block)))
            read = time.perf_counter() - start
    finally:
        probe.unlink(missing_ok=True)
    rate = lambda seconds: f"{_PROBE_BYTES / max(seconds, 1e-9) / 1e9:.2f} GB/s"  # noqa: E731
    text = f"writes {rate(written)}, reads {rate(read)}{_save_time(wanted, _PROBE_BYTES / max(written, 1e-9))}"
    return Check(
        "storage", whole, text, "" if whole else "what was written came back changed: do not train on this volume"
    )


def _save_time(wanted: Wanted, bytes_per_s: float) -> str:
    """Say how long a checkpoint takes if every node writes its part as fast as this one wrote the probe."""
    if not wanted.saved_bytes:
        return ""
    seconds = wanted.saved_bytes / (wanted.nodes * bytes_per_s)
    return f"; a save of {wanted.saved_bytes / 1e9:,.1f} GB from {wanted.nodes} node{'s' if wanted.nodes > 1 else ''} takes about {clock(seconds)}"


def check_clock(wanted: Wanted) -> Check:
    """Compare the node's clock with the clock of the storage, which all nodes see."""
    if not os.access(_nearest(wanted), os.W_OK | os.X_OK):
        return Check("clock", None, "not compared: the storage cannot be written")
    probe = wanted.storage / f".clock-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        skew = abs(probe.stat().st_mtime - time.time())
    finally:
        probe.unlink(missing_ok=True)
    ok = skew <= _CLOCK_S
    return Check("clock", ok, f"{skew:.2f} s from the storage's", "" if ok else "start chrony or ntpd on the node")


def _nearest(wanted: Wanted) -> Path:
    """Return the storage's directory, or the nearest one above it that exists."""
    return next(p for p in (wanted.storage.absolute(), *wanted.storage.absolute().parents) if p.exists())


STORAGE_CHECKS = (check_writable, check_space, check_speed, check_clock)
