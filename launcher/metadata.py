"""The clouds' notices, from the metadata services that every machine of theirs can ask.

======  =====================================================================  ============================
cloud   asked                                                                  time left when it is said
======  =====================================================================  ============================
AWS     ``/latest/meta-data/spot/instance-action``, every 5 s; IMDSv2 token    2 minutes
AWS     ``/latest/meta-data/events/recommendations/rebalance``, the same       not given; advice only
GCP     ``/computeMetadata/v1/instance/preempted``, as a long poll             30 s
Azure   ``/metadata/scheduledevents``, every second: Preempt, Terminate        at least 30 s
======  =====================================================================  ============================

Azure's events are never acknowledged: that would bring the end forward for every machine they name.
No proxy of the environment is used, no redirect followed, and no answer read beyond 64 KiB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from launcher.notices import URL_VARIABLES, Notice, Source, UnheardError, bounded_s

BASE_URLS = {
    "aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal", "azure": "http://169.254.169.254",
}  # fmt: skip
MAX_BYTES = 64 * 1024
CONNECT_S = 2.0
ANSWER_S = 5.0
TOKEN_TTL_S = 21600
AWS_SPOT_S = 120.0
GCP_S = 30.0
GCP_HOLD_S = 60
"""how long the service holds a question that has no new answer"""
AZURE_S = 30.0
AZURE_BEGUN_S = 5.0
"""what is left, at most, of an event that has begun"""
AZURE_FIRST_S = 120.0
"""the first question of a machine switches the service on"""
AZURE_ENDS = ("Preempt", "Terminate")


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a metadata service answered."""

    status: int
    text: str
    headers: Mapping[str, str]


class Service:
    """One metadata service."""

    def __init__(self, base: str) -> None:
        self._base = base.rstrip("/")
        self._http: aiohttp.ClientSession | None = None

    async def fetch(
        self, path: str, *, headers: Mapping[str, str], method: str = "GET", answer_s: float = ANSWER_S
    ) -> Page:
        """Ask for one page, of any status. Raises ``UnheardError``."""
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        url = self._base + path
        timeout = aiohttp.ClientTimeout(total=answer_s, connect=CONNECT_S)
        try:
            async with self._http.request(
                method, url, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                body = b""
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > MAX_BYTES:
                        raise UnheardError(f"{url} answers with more than {MAX_BYTES} bytes")
                return Page(status=answer.status, text=body.decode(errors="replace"), headers=answer.headers)
        except TimeoutError:
            raise UnheardError(f"{url} does not answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: what is no address
            raise UnheardError(f"{url} cannot be asked ({str(error)[:120] or type(error).__name__})") from None

    def unexpected(self, path: str, page: Page) -> UnheardError:
        """Return what to raise for an answer that means nothing here."""
        return UnheardError(f"{self._base}{path} answers {page.status}: {page.text[:80]!r}")

    async def aclose(self) -> None:
        """Close what is open."""
        if self._http is not None:
            await self._http.close()


class Aws:
    """Spot interruptions and rebalance recommendations of EC2, with session tokens (IMDSv2)."""

    name = "aws"

    def __init__(
        self, service: Service, *, say: Callable[[str], None], on_advice: bool, poll_s: float = 5.0
    ) -> None:
        """``on_advice``: a rebalance recommendation counts as a notice; else it is only said."""
        self.poll_s = poll_s
        self._service = service
        self._say = say
        self._on_advice = on_advice
        self._advised = False
        self._token: str | None = None

    async def ask(self) -> Notice | None:
        """Ask for both. Raises ``UnheardError``."""
        page = await self._get("/latest/meta-data/spot/instance-action")
        if page is not None:
            said = _object(page.text, "the spot instance-action")
            action, when = _text(said, "action"), said.get("time")
            reason = f"AWS is going to {action} this spot instance at {when}"
            left_s = _left_s(when, _from_iso, page, usual_s=AWS_SPOT_S)
            return Notice(source=self.name, reason=reason, deadline_s=left_s)
        page = await self._get("/latest/meta-data/events/recommendations/rebalance")
        if page is None:
            return None
        since = _text(_object(page.text, "the rebalance recommendation"), "noticeTime")
        reason = f"AWS has recommended since {since} to leave this spot instance"
        if self._on_advice:
            return Notice(source=self.name, reason=reason, deadline_s=AWS_SPOT_S)
        if not self._advised:
            self._say(f"{reason}; nothing is done about it without --notices aws-rebalance")
        self._advised = True
        return None

    async def _get(self, path: str) -> Page | None:
        """Get a page, with a token that is made when there is none or it is refused; none for 404."""
        for _ in range(2):
            if self._token is None:
                self._token = await self._new_token()
            page = await self._service.fetch(path, headers={"X-aws-ec2-metadata-token": self._token})
            if page.status != 401:
                break
            self._token = None
        if page.status == 404:
            return None
        if page.status != 200:
            raise self._service.unexpected(path, page)
        return page

    async def _new_token(self) -> str:
        path, headers = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        page = await self._service.fetch(path, method="PUT", headers=headers)
        token = page.text.strip()
        if page.status != 200 or not token or not token.isascii() or not token.isprintable():
            raise self._service.unexpected(path, page)
        return token

    async def aclose(self) -> None:
        """Close what is open."""
        await self._service.aclose()


class Gcp:
    """Preemption of a Compute Engine instance."""

    name = "gcp"

    def __init__(self, service: Service, *, poll_s: float = 1.0) -> None:
        self.poll_s = poll_s
        self._service = service
        self._seen = "0"  # no answer's tag: the first one comes at once

    async def ask(self) -> Notice | None:
        """Wait until the answer is another one than the last, or for a minute. Raises ``UnheardError``."""
        path = "/computeMetadata/v1/instance/preempted?wait_for_change=true"
        path += f"&timeout_sec={GCP_HOLD_S}" + (f"&last_etag={self._seen}" if self._seen else "")
        page = await self._service.fetch(path, headers={"Metadata-Flavor": "Google"}, answer_s=GCP_HOLD_S + 15)
        word = page.text.strip()
        if page.status != 200 or word not in ("TRUE", "FALSE"):
            self._seen = "0"
            raise self._service.unexpected(path, page)
        if word == "TRUE":
            return Notice(source=self.name, reason="GCP is preempting this instance", deadline_s=GCP_S)
        tag = page.headers.get("ETag", "")
        self._seen = tag if tag.isascii() and tag.isalnum() and len(tag) <= 64 else ""
        return None

    async def aclose(self) -> None:
        """Close what is open."""
        await self._service.aclose()


class Azure:
    """Scheduled events of an Azure machine that end it. A scale set's machines all see the events of each."""

    name = "azure"

    def __init__(self, service: Service, *, poll_s: float = 1.0) -> None:
        self.poll_s = poll_s
        self._service = service
        self._machine = ""
        self._answer_s = AZURE_FIRST_S

    async def ask(self) -> Notice | None:
        """Ask for this machine's name, once, and for the events. Raises ``UnheardError``."""
        if not self._machine:
            page = await self._get("/metadata/instance/compute?api-version=2021-02-01", ANSWER_S)
            self._machine = _text(_object(page.text, "the description of this machine"), "name")
        page = await self._get("/metadata/scheduledevents?api-version=2020-07-01", self._answer_s)
        self._answer_s = ANSWER_S
        events = _object(page.text, "the scheduled events").get("Events")
        if not isinstance(events, list):
            raise UnheardError("the scheduled events are malformed: Events is no list")
        for event in events:
            if isinstance(event, dict) and event.get("EventType") in AZURE_ENDS and self._is_meant(event):
                return self._notice(event, page)
        return None

    def _is_meant(self, event: Mapping[str, Any]) -> bool:
        names = event.get("Resources")
        return isinstance(names, list) and self._machine in names

    def _notice(self, event: Mapping[str, Any], page: Page) -> Notice:
        when = event.get("NotBefore")
        kind = f"{event['EventType']} of {self._machine}"
        if not when or event.get("EventStatus") == "Started":
            return Notice(source=self.name, reason=f"Azure has begun the {kind}", deadline_s=AZURE_BEGUN_S)
        left_s = _left_s(when, parsedate_to_datetime, page, usual_s=AZURE_S)
        return Notice(source=self.name, reason=f"Azure has scheduled the {kind} for {when}", deadline_s=left_s)

    async def _get(self, path: str, answer_s: float) -> Page:
        page = await self._service.fetch(path, headers={"Metadata": "true"}, answer_s=answer_s)
        if page.status != 200:
            raise self._service.unexpected(path, page)
        return page

    async def aclose(self) -> None:
        """Close what is open."""
        await self._service.aclose()


def cloud_sources(names: tuple[str, ...], environ: Mapping[str, str], say: Callable[[str], None]) -> list[Source]:
    """Make the sources that ``--notices`` names."""

    def service(cloud: str) -> Service:
        return Service(environ.get(URL_VARIABLES[cloud]) or BASE_URLS[cloud])

    found: list[Source] = []
    if "aws" in names or "aws-rebalance" in names:
        found.append(Aws(service("aws"), say=say, on_advice="aws-rebalance" in names))
    if "gcp" in names:
        found.append(Gcp(service("gcp")))
    if "azure" in names:
        found.append(Azure(service("azure")))
    return found


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UnheardError(f"{what} is no JSON object: {text[:80]!r}")
    return value


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str) or not value or len(value) > 256:
        raise UnheardError(f"{name} is no text in {json.dumps(said)[:80]}")
    return value


def _from_iso(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _left_s(when: Any, parse: Callable[[str], datetime], page: Page, *, usual_s: float) -> float:
    """Return the seconds until a time, by the clock of the service that named it; ``usual_s`` if it is none.

    A time that cannot be read must not make a notice unheard.
    """
    try:
        end = _utc(parse(when))
    except (TypeError, ValueError):
        return usual_s
    try:
        now = _utc(parsedate_to_datetime(page.headers["Date"])).timestamp()
    except (KeyError, ValueError):
        now = time.time()
    return bounded_s(end.timestamp() - now)


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
