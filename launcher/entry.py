"""What an agent has found when it has become part of a job."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.leading import Leadership
    from launcher.orders import Report, TakeOver
    from launcher.store.auth import Token
    from launcher.store.client import RemoteStore
    from launcher.store.engine import Engine
    from launcher.store.etcd import EtcdStore
    from launcher.store.link import Place


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What an agent has found."""

    job: str
    """the job's id"""
    host: str
    """the address of this node, for others"""
    token: Token | None = None
    """none for a job of one node"""
    name: str = ""
    """what the job is called in proofs: the same on every node before any of them knows the id"""
    listener: socket.socket | None = None
    """the store is to be served on it, by this agent"""
    store: RemoteStore | EtcdStore | None = None
    """a store elsewhere"""
    restored: Engine | None = None
    """the store, brought back here from a copy"""
    voters: tuple[str, ...] = ()
    """what the agents of the last world are called in the store's proofs, if it was brought back from a copy"""
    taken: TakeOver | None = None
    """what the controller before this one has handed over, of a job that goes on"""
    door: socket.socket | None = None
    """the controller is to be served on it, by this agent"""
    embedded: bool = False
    """that store is carried by an agent of the job"""
    leading: Leadership | None = None
    """the right to be the controller, in a store elsewhere"""
    controller: Place | None = None
    """a controller elsewhere"""
    term: int = 0


@dataclass(frozen=True, kw_only=True)
class Promoted:
    """An agent was handed the controller of a job that goes on."""

    entry: Entry
    node: str
    """its node's id"""
    unconfirmed: list[Report]
    """what it had reported and nobody had heard"""
