"""The store as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_bed import HOST, JOB

from launcher.cli import main as command_line
from launcher.store.auth import read_token_file
from launcher.store.client import RemoteStore
from launcher.store.link import Place
from launcher.store.tls import client_tls

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, json
from pathlib import Path
from launcher.store.service import ServiceOptions, main
values = json.loads(sys.argv[1])
for name in ("journal", "token_file", "place_file", "tls_cert", "tls_key", "tls_client_ca"):
    if values.get(name):
        values[name] = Path(values[name])
sys.exit(main(ServiceOptions(**values)))
"""


class Service:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = {
            "job": JOB, "host": HOST, "journal": str(folder / "store.db"), "token_file": str(folder / "token"),
            "place_file": str(folder / "place.json"), "power_safe": False, **options,
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.place = Place(HOST, 0)

    def start(self, **environ: str) -> dict[str, Any]:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(self.options)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {}
        if said:
            self.place = Place(said["host"], said["port"])
            self.options["port"] = said["port"]
        return said

    def end(self, number: signal.Signals) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        assert self.process is not None
        _, errors = self.process.communicate(timeout=20)
        code = self.process.returncode
        self.process = None
        return code, errors

    def client(self, **more: Any) -> RemoteStore:
        token = read_token_file(Path(self.options["token_file"]), uid=os.geteuid())
        return RemoteStore([self.place], token, job=JOB, node="n", role="agent", random=secrets.token_bytes, **more)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    if service.process is not None:
        service.end(signal.SIGKILL)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(30.0):
            await scene()

    asyncio.run(whole())


def test_it_makes_its_token_says_where_it_listens_and_leaves_nothing_behind(
    service: Service, tmp_path: Path
) -> None:
    said = service.start()
    assert json.loads((tmp_path / "place.json").read_text()) == said
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "store.db").stat().st_mode & 0o777 == 0o600

    async def scene() -> None:
        async with service.client() as store:
            await store.put("a", "1")

    play(scene)
    assert service.end(signal.SIGTERM) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"store.db", "token"}


def test_killed_it_comes_back_from_its_journal_with_nothing_forgotten(service: Service) -> None:
    """Complaint 1: the store killed with -9; clients reconnect, what they asked meanwhile happens."""
    service.start()

    async def scene() -> None:
        async with service.client() as store:
            before = await store.put("a", "0")
            watch = store.watch("", before)
            acknowledged = 0

            async def write() -> None:
                nonlocal acknowledged
                for number in range(1, 200):
                    await store.put("a", str(number))
                    acknowledged = number

            writing = asyncio.create_task(write())
            seen = [(await anext(watch)).value for _ in range(20)]
            await asyncio.to_thread(service.end, signal.SIGKILL)
            assert acknowledged < 199
            await asyncio.to_thread(service.start)
            await writing
            seen += [(await anext(watch)).value for _ in range(179)]
            assert seen == [str(number) for number in range(1, 200)]
            await watch.aclose()  # type: ignore[attr-defined]

    play(scene)


def test_a_second_one_on_the_same_journal_or_port_is_told_so(service: Service, tmp_path: Path) -> None:
    service.start()
    second = Service(tmp_path, port=0)
    second.start()
    code, errors = second.wait()
    assert (code, errors) == (69, f"liverun store: {tmp_path / 'store.db'} is in use by another process\n")
    third = Service(tmp_path, journal=str(tmp_path / "third.db"), port=service.place.port)
    third.start()
    code, errors = third.wait()
    assert (code, errors) == (69, f"liverun store: cannot listen at {service.place}: Address already in use\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"host": "0.0.0.0"}, "every address of this machine"),
        ({"token_file": None}, "no token: set LIVERUN_TOKEN_FILE"),
        ({"tls_cert": "cert.pem"}, "--tls-cert and --tls-key go together"),
        ({"tls_cert": "nowhere.pem", "tls_key": "nowhere.pem"}, "certificate nowhere.pem"),
    ],
)
def test_what_was_asked_wrongly_is_said_in_one_sentence(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    service = Service(tmp_path, **options)
    service.start(LIVERUN_TOKEN="", LIVERUN_TOKEN_FILE="")
    code, errors = service.wait()
    assert code == 2
    assert sentence in errors
    assert errors.count("\n") == 1


# --- as a command ---------------------------------------------------------------------------------------------


def liverun_store(*words: str, **environ: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LIVERUN_")}
    return subprocess.Popen(
        [sys.executable, "-m", "liverun", "store", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
    )  # fmt: skip


def test_the_command_serves_with_every_option_it_documents(tmp_path: Path, certificates: Path) -> None:
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    journal, token, place_file = (tmp_path / name for name in ("store.db", "token", "place.json"))
    process = liverun_store(
        "--host", HOST, "--port=0", "--journal", str(journal), "--token-file", str(token), "--place-file", str(place_file),
        "--tls-cert", str(cert), "--tls_key", str(key), LIVERUN_JOB=JOB,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert json.loads(place_file.read_text()) == said
        client = RemoteStore(
            [Place(said["host"], said["port"])], read_token_file(token, uid=os.geteuid()), job=JOB, node="n",
            role="agent", random=secrets.token_bytes, ssl_context=client_tls(cert),
        )  # fmt: skip

        async def scene() -> None:
            async with client as store:
                await store.put("a", "1")

        play(scene)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0
        assert journal.exists()
        assert not place_file.exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"job": None}, "--job is missing; give the id"),
        ({"job": "a/b"}, "--job 'a/b': use up to 64 letters"),
        ({"host": None}, "--host is missing; give the one address"),
        ({"host": "0.0.0.0"}, "every address of this machine"),
        ({"host": "203.0.113.7"}, "cannot listen at 203.0.113.7:0"),
        ({"port": "http"}, "--port 'http' is no port; give a number up to 65535"),
        ({"port": "65536"}, "--port '65536' is no port"),
        ({"journal": None}, "--journal is missing; give the file"),
        ({"journal": "/nowhere/db"}, "--journal /nowhere/db: there is no such folder"),
        ({"journal": "/"}, "--journal / is a folder"),
        ({"token-file": "/nowhere/token"}, "--token-file /nowhere/token: there is no such folder"),
        ({"token-file": None}, "no token: set LIVERUN_TOKEN_FILE"),
        ({"tls-cert": "cert.pem"}, "--tls-cert and --tls-key go together"),
        ({"tls-client-ca": "ca.pem"}, "--tls-client-ca without --tls-cert"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_the_command_is_one_sentence(
    tmp_path: Path, words: dict[str, str | None], sentence: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In this process: what starts an interpreter for each is above."""
    for name in [name for name in os.environ if name.startswith("LIVERUN_")]:
        monkeypatch.delenv(name)
    usual = {"job": JOB, "host": HOST, "journal": str(tmp_path / "db"), "token-file": str(tmp_path / "token")}
    given = {name: value for name, value in (usual | words).items() if value is not None}
    monkeypatch.setattr(sys, "argv", ["liverun", "store", *(f"--{name}={value}" for name, value in given.items())])
    with pytest.raises(SystemExit) as ended:
        command_line()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("liverun store: ")
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert ended.value.code == (69 if "cannot listen" in sentence else 2)


def test_a_damaged_journal_is_refused_with_its_offset(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.start()
    service.end(signal.SIGTERM)
    path = tmp_path / "store.db"
    data = bytearray(path.read_bytes())
    data[data.find(b'"t":"term"')] ^= 1
    path.write_bytes(data)
    service.start()
    code, errors = service.wait()
    assert code == 93
    assert "damaged at byte" in errors


def test_tls_with_client_certificates_lets_in_who_has_one(tmp_path: Path, certificates: Path) -> None:
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    service = Service(tmp_path, tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(cert))
    service.start()

    async def scene() -> None:
        async with service.client(ssl_context=client_tls(cert, cert, key)) as store:
            await store.put("a", "1")
        async with service.client(ssl_context=client_tls(cert), timeout_s=0.3) as store:
            with pytest.raises(Exception, match="did not answer"):
                await store.get("a")

    try:
        play(scene)
    finally:
        service.end(signal.SIGKILL)


def test_systemd_is_told_when_it_is_ready(tmp_path: Path) -> None:
    service = Service(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20.0)
        service.start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(100) == b"READY=1"
        service.end(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
