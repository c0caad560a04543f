"""``--numa-binding``: torch's own binding in every mode, on hardware that a fake sysfs describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

# Two sockets of one node each; GPU 0 is near node 1, GPU 1 near node 0. torch reads files below /sys through open(),
# and asks the driver for PCI addresses; both are answered from what a test has laid out.
PROGRAM = """
import builtins, json, os, shutil, sys, types
import torch
root, modes = sys.argv[1], sys.argv[2].split(",")
real_open, real_exists, real_listdir = builtins.open, os.path.exists, os.listdir
inside = lambda path: root + path if isinstance(path, str) and path.startswith("/sys/") else path
builtins.open = lambda path, *a, **k: real_open(inside(path), *a, **k)
os.path.exists = lambda path: real_exists(inside(path))
os.listdir = lambda path=".": real_listdir(inside(path))
which = shutil.which
shutil.which = lambda name, *a, **k: "/usr/bin/numactl" if name == "numactl" else which(name, *a, **k)
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(
    pci_domain_id=0, pci_bus_id=0x10 + index, pci_device_id=0)
from liverun.template import bind_to_cpus_near_gpu
found = {}
for mode in modes:
    for index in (0, 1):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                bind_to_cpus_near_gpu({"mode": mode, "gpu_index": index})
            except SystemExit as error:
                code = error.code
            os.write(writing, json.dumps([code, sorted(os.sched_getaffinity(0))]).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            found[f"{mode} {index}"] = json.loads(pipe.read())
        os.waitpid(pid, 0)
print(json.dumps(found))
"""


def lay_out(root: Path, *, gpu_nodes: tuple[int, int], node_cpus: dict[int, list[int]], sockets: dict[int, int]) -> None:
    """``sockets`` is the package of each CPU."""

    def write(path: str, text: str) -> None:
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for index, node in enumerate(gpu_nodes):
        write(f"/sys/bus/pci/devices/0000:{0x10 + index:02x}:00.0/numa_node", str(node))
    for node, cpus in node_cpus.items():
        write(f"/sys/devices/system/node/node{node}/cpulist", ",".join(map(str, cpus)))
        for cpu in cpus:
            base = f"/sys/devices/system/cpu/cpu{cpu}"
            write(f"{base}/topology/physical_package_id", str(sockets[cpu]))
            write(f"{base}/topology/thread_siblings_list", str(cpu))
            write(f"{base}/cache/index3/level", "3")
            write(f"{base}/cache/index3/type", "Unified")
            write(f"{base}/cache/index3/shared_cpu_list", str(cpu))
    write("/sys/devices/system/node/possible", f"0-{max(node_cpus)}")
    write("/sys/devices/system/node/online", f"0-{max(node_cpus)}")


def bound(root: Path, *modes: str) -> dict[str, list[object]]:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), ",".join(modes)], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPUs are needed to bind to one of them")
def test_every_mode_binds_a_worker_to_the_cpus_torch_finds_near_its_gpu(tmp_path: Path) -> None:
    low, high = sorted(os.sched_getaffinity(0))[:2]
    apart, together = tmp_path / "apart", tmp_path / "together"
    lay_out(apart, gpu_nodes=(1, 0), node_cpus={0: [low], 1: [high]}, sockets={low: 0, high: 0})
    assert bound(apart, "node", "socket") == {
        "node 0": [0, [high]], "node 1": [0, [low]], "socket 0": [0, [low, high]], "socket 1": [0, [low, high]],
    }  # fmt: skip
    lay_out(together, gpu_nodes=(0, 0), node_cpus={0: [low, high]}, sockets={low: 0, high: 0})
    assert bound(together, "node", "exclusive", "core-complex") == {
        "node 0": [0, [low, high]], "node 1": [0, [low, high]], "exclusive 0": [0, [low]], "exclusive 1": [0, [high]],
        "core-complex 0": [0, [low]], "core-complex 1": [0, [high]],
    }  # fmt: skip
