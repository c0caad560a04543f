"""From the words of ``liverun store`` to :class:`launcher.store.service.ServiceOptions`."""

from __future__ import annotations

from pathlib import Path

from launcher.options import UsageError, check_job_id, refuse_if
from launcher.store.service import ServiceOptions


def read(
    *, job: str | None, host: str | None, port: str, journal: str | None, token_file: str | None,
    place_file: str | None, tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None, salvage: bool,
) -> ServiceOptions:  # fmt: skip
    """Return what was asked. Raises ``UsageError`` for what can be seen to be wrong before anything is opened."""
    job = check_job_id(job)
    if not job:
        raise UsageError("--job is missing; give the id of the job that the store is to serve")
    if not host:
        raise UsageError("--host is missing; give the one address to listen at, as the job's nodes know it")
    if not journal:
        raise UsageError("--journal is missing; give the file that is to keep the store")
    refuse_if(not port.isdecimal() or int(port) > 65535, f"--port {port!r} is no port; give a number up to 65535")
    refuse_if(not Path(journal).absolute().parent.is_dir(), f"--journal {journal}: there is no such folder; make it")
    refuse_if(Path(journal).is_dir(), f"--journal {journal} is a folder; give a file in it")
    for option, path in (("--token-file", token_file), ("--place-file", place_file)):
        missing = path is not None and not Path(path).absolute().parent.is_dir()
        refuse_if(missing, f"{option} {path}: there is no such folder; make it")
    return ServiceOptions(
        job=job, host=host, port=int(port), journal=Path(journal), token_file=_path(token_file),
        place_file=_path(place_file), tls_cert=_path(tls_cert), tls_key=_path(tls_key),
        tls_client_ca=_path(tls_client_ca), salvage=salvage,
    )  # fmt: skip


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
