"""The rendezvous store: where a job keeps what must survive its controller."""

from launcher.store.contract import Change, Entry, Listing, Store
from launcher.store.embedded import EmbeddedStore
from launcher.store.errors import StoreError

__all__ = ["Change", "EmbeddedStore", "Entry", "Listing", "Store", "StoreError"]
