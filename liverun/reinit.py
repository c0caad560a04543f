"""``init_process_group`` after ``destroy_process_group``: the next default group gets keys of its own in the store.

torch gives the default group's keys the same names every time. In a store that outlives the group, as a launcher's
does, a rank that is early in its second ``init_process_group`` finds there what the others wrote in their first: the
addresses of sockets that are closed. Gloo then fails or hangs (pytorch#55967; under torchrun too). Here the second
group's keys begin with ``init_1``, and so on; the first has torch's own, so what else uses the store meets as ever.

All ranks of a world initialise the default group equally often: it is collective. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

MODULE = "torch.distributed.distributed_c10d"
STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""which store it is: a process that outlives a restart of the job meets the others in another one"""


def give_each_init_its_own_keys() -> None:
    """See to it in this process, whether torch is imported already or will be."""
    if (module := sys.modules.get(MODULE)) is not None:
        _wrap(module)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the module when it is first imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run: Any = spec.loader.exec_module

        def run_and_wrap(module: types.ModuleType) -> None:
            run(module)
            _wrap(module)

        spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    usual = module.rendezvous
    counts: defaultdict[tuple[str | None, ...], Iterator[int]] = defaultdict(itertools.count)

    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        """As ``torch.distributed.rendezvous``, with a prefix from the second time on in the launcher's store."""
        for store, rank, size in usual(url, *args, **kwargs):
            if url.startswith("env://") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                nth = next(counts[tuple(map(os.environ.get, STORE_VARIABLES))])
                yield module.PrefixStore(f"init_{nth}", store) if nth else store, rank, size
            else:
                yield store, rank, size

    module.rendezvous = rendezvous
