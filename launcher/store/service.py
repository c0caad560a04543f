"""The store as a service of its own, on a host that outlives the job's nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.store.auth import Token, TokenError, find_token, new_token, read_token_file
from launcher.store.engine import Engine
from launcher.store.errors import JournalError, StoreError
from launcher.store.link import Place
from launcher.store.server import StoreServer
from launcher.store.tls import server_tls

EXIT_USAGE = 2
EXIT_UNREACHABLE = 69
EXIT_HOPELESS = 93


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What ``liverun store`` was asked."""

    job: str
    host: str
    """the one address to listen at"""
    port: int = 0
    journal: Path
    token_file: Path | None = None
    """``None``: from the environment; one that is not there yet is made"""
    place_file: Path | None = None
    """written once the store listens: ``{"host", "port", "term", "pid"}``"""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """ask clients for a certificate of this authority too"""
    power_safe: bool = True
    salvage: bool = False


def main(
    options: ServiceOptions, *, environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic, random: Callable[[int], bytes] = secrets.token_bytes,
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT; the exit code. One JSON line on stdout says where, once it listens."""
    try:
        token = _token(options, os.environ if environ is None else environ, random)
        context = _tls(options)
        engine = Engine(options.journal, clock=clock, power_safe=options.power_safe, salvage=options.salvage)
    except (TokenError, ssl.SSLError, ValueError) as error:
        return _complain(str(error), EXIT_USAGE)
    except JournalError as error:  # a supervisor that starts it again does not mend it
        return _complain(str(error), EXIT_HOPELESS)
    except (StoreError, OSError) as error:
        return _complain(str(error), EXIT_UNREACHABLE)
    try:
        return asyncio.run(_serve(options, engine, token, context, random))
    except ValueError as error:
        return _complain(str(error), EXIT_USAGE)
    except OSError as error:
        place = Place(options.host, options.port)
        return _complain(f"cannot listen at {place}: {error.strerror or error}", EXIT_UNREACHABLE)
    finally:
        engine.close()


async def _serve(
    options: ServiceOptions, engine: Engine, token: Token, context: ssl.SSLContext | None,
    random: Callable[[int], bytes],
) -> int:  # fmt: skip
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = StoreServer(engine, token, job=options.job, random=random, ssl_context=context)
    host, port = await server.start(options.host, options.port)
    try:
        place = json.dumps({"host": host, "port": port, "term": engine.term, "pid": os.getpid()})
        if options.place_file is not None:
            _publish(options.place_file, place)
        print(place, flush=True)
        _tell_systemd("READY=1")
        await stop.wait()
        _tell_systemd("STOPPING=1")
    finally:
        await server.stop()
        if options.place_file is not None:
            options.place_file.unlink(missing_ok=True)
    return 0


def _token(options: ServiceOptions, environ: Mapping[str, str], random: Callable[[int], bytes]) -> Token:
    if options.token_file is None:
        return find_token(environ, uid=os.geteuid())
    with contextlib.suppress(FileExistsError):
        new_token(random).write(options.token_file)
    return read_token_file(options.token_file, uid=os.geteuid())


def _tls(options: ServiceOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None and options.tls_key is None:
        if options.tls_client_ca is not None:
            raise ValueError("--tls-client-ca without --tls-cert and --tls-key; give all three")
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ValueError("--tls-cert and --tls-key go together; give both")
    return server_tls(options.tls_cert, options.tls_key, options.tls_client_ca)


def _publish(path: Path, text: str) -> None:
    """Write a whole file or none, mode 0644: it holds no secret."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text + "\n")
    draft.replace(path)


def _tell_systemd(word: str) -> None:
    """Say to ``Type=notify`` how far we are; the protocol is one datagram."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, contextlib.suppress(OSError):
            out.sendto(word.encode(), "\0" + address[1:] if address.startswith("@") else address)


def _complain(sentence: str, code: int) -> int:
    sys.stderr.write(f"liverun store: {sentence}\n")
    return code
