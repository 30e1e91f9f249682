"""Both images built for real by buildah on a Debian base from debootstrap, and started as a pod would start them.

No daemon and no registry is needed; root is. The build takes minutes, so the tests are slow: `pytest -m slow tests/launch/test_image_build.py`.
The CPU wheel of the same torch takes the place of CUDA's, and a stand-in of the same shape that of Amazon's installer.

Measured on two busy cores: the image 12 minutes (3.7 of CPU time) and 3.0 GB with Triton and the CPU wheel, the demo in it 36 s, the kernels 12 s, the
EFA image 19 s.
"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
BASE, IMAGE, EFA = "localhost/base:1", "localhost/argosy:1", "localhost/argosy-efa:1"
PACKAGES = "python3,python3-venv,python3-dev,python-is-python3,ca-certificates"
# Where pip finds packages on this machine: the build sees the same places.
SHARED = ("/etc/ssl/certs", "/opt/wheels", "/opt/pypi", "/opt/pypi-more")
# As in a pod: an ordinary user, a root file system that cannot be written, memory for /tmp and for the volume at /mnt.
START = """
set -e
root=$1; shift
mount --bind "$root" "$root"; mount -o remount,ro,bind "$root"
for place in tmp mnt; do mount -t tmpfs -o mode=1777 tmpfs "$root/$place"; done
mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"
exec chroot --userspec=1000:1000 "$root" /usr/bin/env -i PATH=/opt/argosy/bin:/usr/bin:/bin HOME=/tmp sh -c 'cd /mnt && exec "$@"' - "$@"
"""
# The stub that Triton compiles at its first use on a GPU, and a kernel of ours as a Hopper binary. libcuda belongs to the driver: an empty
# library stands in for it, and lazy binding lets the stub load.
KERNELS = """
import os, subprocess, sys
os.makedirs("/tmp/driver")
subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", "/tmp/driver/libcuda.so.1"], check=True)
os.environ["TRITON_LIBCUDA_PATH"] = "/tmp/driver"
import ctypes
ctypes.CDLL("/tmp/driver/libcuda.so.1", ctypes.RTLD_GLOBAL)
sys.setdlopenflags(os.RTLD_LAZY)
from triton.backends.nvidia.driver import CudaUtils
CudaUtils()
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from argosy.train.adamw_kernel import adamw_kernel as kernel
fixed = {"parameter_type": tl.bfloat16, "gradient_type": tl.float32, "ALIGNED": True, "B": 4096, "MEASURED": False}
pointers = {"table": "*i64", "row_of": "*i32", "scale": "*fp32", "skip": "*fp32", "corrections": "*fp32"}
names = kernel.arg_names
signature = {name: "constexpr" if name in fixed else pointers.get(name, "fp32") for name in names}
source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
print(len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]), "bytes")
"""


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command[:4])}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


class Store:
    """Images of their own, apart from those of the machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._command = ("buildah", "--root", str(directory / "storage"), "--runroot", str(directory / "run"))

    def __call__(self, *words: str) -> str:
        return run(*self._command, *words)

    def build(self, name: str, dockerfile: str, *volumes: str, **arguments: str) -> None:
        mounts = [f"--volume={place}:{place}:ro" for place in SHARED if Path(place).exists()]
        mounts += [f"--volume={volume}" for volume in volumes]
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        how = ("--isolation=chroot", "--network=host", "--layers=false")
        self("build", *how, *mounts, *given, "--file", f"docker/{dockerfile}", "--tag", name, ".")

    def start(self, image: str, *command: str) -> str:
        """What a command says in a container of the image, as user 1000 on a read-only root."""
        container = self("from", "--pull-never", image)
        try:
            root = self("mount", container)
            return run("unshare", "--mount", "--propagation", "private", "bash", "-c", START, "-", root, *command)
        finally:
            self("rm", container)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    directory = tmp_path_factory.mktemp("images")
    made = Store(directory)
    root = directory / "debian"
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root))
    container = made("from", "scratch")
    made("add", "--quiet", container, str(root), "/")
    made("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    made("commit", "--quiet", "--rm", container, BASE)
    settings = directory / "pip.conf"
    settings.write_text(
        "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = /opt/wheels\n"
        "extra-index-url = file:///opt/pypi/simple file:///opt/pypi-more/simple\n"
    )
    wanted = ".[data,remote,k8s,dash,tensorboard] triton"
    made.build(IMAGE, "Dockerfile", f"{settings}:/etc/pip.conf:ro", BASE=BASE, INSTALL=wanted)
    yield made
    made("rmi", "--all", "--force")


def test_the_image_trains_as_an_ordinary_user_on_a_read_only_root(store: Store) -> None:
    assert store.start(IMAGE, "id", "-u") == "1000"
    assert "1" in store.start(IMAGE, "sh", "-c", "touch /etc/x 2>/dev/null; echo $?")
    said = store.start(IMAGE, "argosy", "demo", "--seconds", "30")
    assert "runs/" in said, said[-500:]


def test_the_image_compiles_kernels_as_an_ordinary_user_on_a_read_only_root(store: Store) -> None:
    assert store.start(IMAGE, "python", "-c", KERNELS).endswith("bytes")


def test_the_efa_image_is_built_on_it_with_the_installer_checked(store: Store) -> None:
    work = store.directory / "efa"
    (work / "aws-efa-installer").mkdir(parents=True)
    script = work / "aws-efa-installer" / "efa_installer.sh"
    script.write_text('#!/bin/sh\nmkdir -p /opt/amazon/efa/bin && echo "$@" > /opt/amazon/efa/flags\n')
    script.chmod(0o755)
    archive = work / "installer.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(script.parent, arcname=script.parent.name)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    place = {"BASE": IMAGE, "EFA_INSTALLER_URL": "file:///installer.tar.gz"}
    volume = f"{archive}:/installer.tar.gz:ro"
    with pytest.raises(AssertionError, match="did NOT match"):
        store.build(EFA, "Dockerfile.efa", volume, **place)
    store.build(EFA, "Dockerfile.efa", volume, **place, EFA_INSTALLER_SHA256=digest)
    assert "--skip-kmod" in store.start(EFA, "cat", "/opt/amazon/efa/flags")
    assert "Usage" in store.start(EFA, "argosy", "--help")
