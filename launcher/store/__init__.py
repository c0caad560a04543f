"""The rendezvous store: where a job keeps what must survive its controller."""

from launcher.store.contract import Change, Entry, Store
from launcher.store.embedded import EmbeddedStore

__all__ = ["Change", "EmbeddedStore", "Entry", "Store"]
