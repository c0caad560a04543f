"""Hosts of the tests' own: network namespaces, each with a link to a switch in one more, that can be cut.

Everything is in namespaces of its own, so nothing of this machine's network is touched. Needs root and iproute2;
:func:`why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

MISSING = "not to be had here: "  # as in conftest.py
NETWORK = "10.213.77"


def why_not() -> str:
    """Return why there can be no such hosts here; empty if there can."""
    if shutil.which("ip") is None:
        return f"{MISSING}iproute2 is not installed"
    if os.geteuid() != 0:
        return f"{MISSING}network namespaces need root"
    name = f"lvprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"{MISSING}network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def ip(*words: str, inside: str | None = None) -> None:
    command = ["ip", *(("-n", inside) if inside else ()), *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """One of them; ``address`` is real, and reached from the others only."""

    def __init__(self, name: str, number: int, switch: str) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number + 1}"
        self._port = f"p{number}"
        self._switch = switch

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Take its link down: nothing gets in or out, and nobody is told."""
        ip("link", "set", self._port, "down", inside=self._switch)

    def mend(self) -> None:
        """Bring the link up again."""
        ip("link", "set", self._port, "up", inside=self._switch)

    def mute(self, other: Host) -> None:
        """Drop what it sends to another host; what comes from there still arrives."""
        ip("route", "add", "blackhole", f"{other.address}/32", inside=self.name)

    def unmute(self, other: Host) -> None:
        """Undo :meth:`mute`."""
        ip("route", "del", "blackhole", f"{other.address}/32", inside=self.name)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts that see each other, and remove them."""
    mark = f"lv{os.getpid()}"
    switch, names = f"{mark}s", [f"{mark}h{number}" for number in range(count)]
    made = [Host(name, number, switch) for number, name in enumerate(names)]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            ip("link", "set", "lo", "up", inside=name)
        ip("link", "add", "br0", "type", "bridge", inside=switch)
        ip("link", "set", "br0", "up", inside=switch)
        for number, host in enumerate(made):
            ip("link", "add", "veth0", "type", "veth", "peer", "name", f"p{number}", "netns", switch, inside=host.name)
            ip("addr", "add", f"{host.address}/24", "dev", "veth0", inside=host.name)
            ip("link", "set", "veth0", "up", inside=host.name)
            ip("link", "set", f"p{number}", "master", "br0", inside=switch)
            ip("link", "set", f"p{number}", "up", inside=switch)
        yield made
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
