"""The systemd unit and the Kubernetes manifest in the docs: what they start starts, and is asked where it answers."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from store_bed import HOST

from launcher.store.auth import Token, read_token_file
from launcher.store.client import RemoteStore
from launcher.store.guard import HEALTH_PATH
from launcher.store.link import Place
from launcher.store.service import EXIT_HOPELESS, EXIT_USAGE

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "store.md").read_text()


def block(language: str) -> str:
    """The one block of a language in the docs of the store."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return str(found)


@contextlib.contextmanager
def started(words: list[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run what a document starts: ``liverun`` and its words."""
    assert words[0] == "liverun"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LIVERUN_")}
    process = subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def place_of(process: subprocess.Popen[str]) -> Place:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    said = json.loads(line)
    return Place(said["host"], said["port"])


def ask(place: Place, token: Token, job: str) -> None:
    async def scene() -> None:
        async with asyncio.timeout(20.0), RemoteStore(
            [place], token, job=job, node="n", role="agent", random=secrets.token_bytes
        ) as store:  # fmt: skip
            await store.put("a", "1")

    asyncio.run(scene())


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(block("ini").replace("\\\n", " "))
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    return parser["Service"]


def test_the_units_command_serves_and_tells_systemd(tmp_path: Path) -> None:
    service = unit()
    assert service["Type"] == "notify"
    state = f"/var/lib/{service['StateDirectory'].replace('%i', 'my-job')}"
    line = service["ExecStart"].replace("%i", "my-job")
    assert line.count(f"{state}/") == 2  # journal and token: in the folder that systemd makes
    line = line.replace(state, str(tmp_path)).replace("${STORE_ADDRESS}", HOST).replace("${STORE_PORT}", "0")
    env, *words = shlex.split(line)
    assert env == "/usr/bin/env"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20.0)
        with started(words, NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            assert manager.recv(100) == b"READY=1"
            ask(place_of(process), read_token_file(tmp_path / "token", uid=os.geteuid()), "my-job")
            ended(process)
    assert set(service["RestartPreventExitStatus"].split()) == {str(EXIT_USAGE), str(EXIT_HOPELESS)}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "liverun-store@.service"
    assert path.name in DOCUMENT

    def verified(text: str) -> str:
        path.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
        return "".join(line for line in done.stderr.splitlines() if path.name in line)

    assert verified(block("ini")) == ""
    assert "Unknown key" in verified(block("ini").replace("ProtectHome", "ProtectHomes"))


def manifest() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The service, the stateful set, and its one container."""
    service, store = yaml.safe_load_all(block("yaml"))
    assert (service["kind"], store["kind"]) == ("Service", "StatefulSet")
    (container,) = store["spec"]["template"]["spec"]["containers"]
    return service, store, container


def test_the_parts_of_the_manifest_fit_together() -> None:
    service, store, container = manifest()
    spec = store["spec"]
    pod = spec["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    assert (spec["serviceName"], spec["replicas"]) == (service["metadata"]["name"], 1)
    port = int(container["command"][container["command"].index("--port") + 1])
    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]
    assert [entry["containerPort"] for entry in container["ports"]] == [port]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": HEALTH_PATH, "port": port}
    (mount,), (claim,) = container["volumeMounts"], spec["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]
    assert container["command"][container["command"].index("--journal") + 1].startswith(f"{mount['mountPath']}/")
    security = pod["spec"]["securityContext"]
    assert security["runAsNonRoot"]
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"  # a journal that its group can write to is refused
    (secret,) = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if entry["name"] == "LIVERUN_TOKEN"]
    assert f"secret generic {secret['name']} --from-literal={secret['key']}=$(openssl rand -hex 32)" in block("yaml")


def test_the_manifests_command_serves_and_is_healthy(tmp_path: Path) -> None:
    _, _, container = manifest()
    by_name = {entry["name"]: entry["valueFrom"] for entry in container["env"]}
    assert by_name["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    journal = container["volumeMounts"][0]["mountPath"]
    words = [
        word.replace("$(POD_IP)", HOST).replace(f"{journal}/", f"{tmp_path}/") for word in container["command"]
    ]
    words[words.index("--port") + 1] = "0"
    secret = secrets.token_bytes(32)
    with started(words, LIVERUN_TOKEN=secret.hex()) as process:
        place = place_of(process)
        with urllib.request.urlopen(f"http://{place}{container['readinessProbe']['httpGet']['path']}", timeout=20) as reply:
            assert reply.status == 200
        ask(place, Token(secret), words[words.index("--job") + 1])
        ended(process)
    assert {path.name for path in tmp_path.iterdir()} == {"store.db"}
