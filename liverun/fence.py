"""The one place that touches torch's and Megatron's process-wide globals, so that several worlds fit in one process.

torch keeps its default process group, and Megatron its parallel groups, in module globals: one world at a time.
Here each *generation* has a ``Globals`` of its own. The thread that prepares the next generation sees that one
(``seen_by_this_thread``), every other thread sees the active one, and ``activate`` moves the prepared values into
the real globals at commit. Nothing is copied but references; it takes microseconds.

How: ``distributed_c10d._world`` is torch's documented extension point and becomes a subclass whose default group
depends on the thread. Megatron's ``parallel_state`` has no such point, and other modules have imported its functions
by name; so the *code* of these functions is replaced by one that looks up which generation the calling thread sees.
Each generation's parallel state is the module's own source, executed once more in a namespace of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

_GROUP_NAMES_PER_GENERATION = 100_000
"""Groups are named by a counter; each generation counts in a range of its own, so that no two names collide."""

_PARALLEL_STATE = "megatron.core.parallel_state"

_SINGLETONS = {
    "megatron.core.num_microbatches_calculator": "unset_num_microbatches_calculator",
    "megatron.core.rerun_state_machine": "destroy_rerun_state_machine",
    "megatron.training.global_vars": "destroy_global_vars",
}
"""what Megatron refuses to make twice in a process, and the functions that take it away"""

_TORCH_SEED = 67280421310721
"""what torch's generators start from in every process (``default_rng_seed_val`` in c10/core/GeneratorImpl.h)"""


@dataclass(kw_only=True)
class Globals:
    """What torch and Megatron keep in module globals, for one generation."""

    generation: int
    default_pg: Any = None
    group_count: int = 0
    parallel_state: types.ModuleType | None = None
    """a second execution of ``megatron.core.parallel_state``; none where Megatron is not installed"""
    seed: tuple[int, dict[str, Any]] | None = None
    """what the script asked ``model_parallel_cuda_manual_seed`` for while building beside the training"""
    groups: list[Any] = field(default_factory=list)
    """every process group made while this generation was seen, to be destroyed with it"""


class _Seen(threading.local):
    globals: Globals | None = None


_seen = _Seen()


class _FencedWorld(c10d._World):  # type: ignore[misc]
    """torch's process-group registry whose default group and name counter follow the calling thread."""

    @property
    def default_pg(self) -> Any:
        here = _seen.globals
        return self._default_pg if here is None else here.default_pg

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        here = _seen.globals
        if here is None:
            self._default_pg = value
        else:
            here.default_pg = value

    @property
    def group_count(self) -> int:
        here = _seen.globals
        return c10d._group_count if here is None else here.group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        here = _seen.globals
        if here is None:
            c10d._group_count = value
        else:
            here.group_count = value


class _Registered(dict[Any, Any]):
    """torch's groups. One that is made in a thread that sees a generation is noted there, and in no other.

    Several may be prepared at once: one that is given up ends its groups while the next one makes its own.
    """

    def __setitem__(self, group: Any, value: Any) -> None:
        super().__setitem__(group, value)
        if _seen.globals is not None:
            _seen.globals.groups.append(group)


class _QuietTracker:
    """Stands in for Megatron's RNG tracker while a model is built hollow: nothing is drawn, nothing is disturbed."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, _name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}


_quiet_tracker = _QuietTracker()


def _record_seed(seed: int, *_args: Any, **kwargs: Any) -> None:
    here = _seen.globals
    assert here is not None
    here.seed = (seed, kwargs)


_WHILE_PREPARING: dict[str, Callable[..., Any]] = {
    "get_cuda_rng_tracker": lambda *_args, **_kwargs: _quiet_tracker,
    "initialize_rng_tracker": lambda *_args, **_kwargs: None,
    "model_parallel_cuda_manual_seed": _record_seed,
}
"""Functions of ``megatron.core.tensor_parallel.random`` that would reach into the running world's RNG streams."""


def _route(function: types.FunctionType, elsewhere: Callable[[Globals], Callable[..., Any]]) -> None:
    """Make ``function`` call ``elsewhere(globals)`` in a preparing thread, and itself in any other.

    The function object stays the same one, so every module that imported it by name is reached.
    """
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    name = function.__name__
    routes = function.__globals__.setdefault("__liverun_routes__", {})
    routes[name] = (original, elsewhere)
    function.__globals__["__liverun_seen__"] = _seen
    namespace: dict[str, Any] = {}
    exec(  # noqa: S102 - a code object with this name and no free variables can be had in no other way
        f"def {name}(*args, **kwargs):\n"
        f"    here = __liverun_seen__.globals\n"
        f"    original, elsewhere = __liverun_routes__[{name!r}]\n"
        f"    return (original if here is None else elsewhere(here))(*args, **kwargs)\n",
        namespace,
    )
    function.__code__ = namespace[name].__code__
    function.__defaults__ = None
    function.__kwdefaults__ = None
    function.__wrapped__ = original  # type: ignore[attr-defined]  # keeps inspect.signature right


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for value in list(vars(module).values()):
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield value


def has_megatron() -> bool:
    """Whether megatron-core can be imported here."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec(_PARALLEL_STATE) is not None


@functools.cache
def install() -> None:
    """Put the fence up; later calls do nothing. Must come before the first process group of the process."""
    registry = _FencedWorld()
    registry._default_pg = c10d._world.default_pg
    registry._pg_coalesce_state = c10d._world.pg_coalesce_state
    registry._comms = c10d._world.comms
    c10d._world = registry
    c10d._pg_map = _Registered(c10d._pg_map)
    if not has_megatron():
        return
    parallel_state = importlib.import_module(_PARALLEL_STATE)
    for function in _functions(parallel_state):
        name = function.__name__
        _route(function, lambda here, name=name: getattr(here.parallel_state, name))  # type: ignore[misc]
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    for name, stand_in in _WHILE_PREPARING.items():
        _route(getattr(random, name), lambda _here, stand_in=stand_in: stand_in)  # type: ignore[misc]


def new_globals(generation: int) -> Globals:
    """Return empty globals for ``generation``: no default group, parallel state uninitialised."""
    made = Globals(generation=generation, group_count=generation * _GROUP_NAMES_PER_GENERATION)
    if has_megatron():
        real = importlib.import_module(_PARALLEL_STATE)
        assert real.__spec__ is not None
        copy = types.ModuleType(_PARALLEL_STATE, real.__doc__)
        copy.__file__, copy.__package__, copy.__spec__ = real.__file__, real.__package__, real.__spec__
        exec(_parallel_state_code(), vars(copy))  # noqa: S102 - the module's own source, once more
        made.parallel_state = copy
    return made


@functools.cache
def _parallel_state_code() -> types.CodeType:
    spec = importlib.util.find_spec(_PARALLEL_STATE)
    assert spec is not None
    code = spec.loader.get_code(_PARALLEL_STATE)  # type: ignore[union-attr]
    assert isinstance(code, types.CodeType)
    return code


@contextlib.contextmanager
def seen_by_this_thread(there: Globals) -> Iterator[None]:
    """Within the block, torch and Megatron in *this thread* act on ``there``; other threads notice nothing."""
    before, hook = _seen.globals, sys.excepthook
    _seen.globals = there
    try:
        yield
    finally:
        _seen.globals = before
        # init_process_group wraps the hook once more each time; a job has no use for a chain of them
        sys.excepthook = hook


def activate(there: Globals) -> None:
    """Make ``there`` what every thread sees. The values it replaces are dropped, their groups are not destroyed."""
    c10d._world._default_pg = there.default_pg
    c10d._group_count = there.group_count
    rank = there.default_pg.rank() if there.default_pg is not None else -1
    torch._C._distributed_c10d._set_global_rank(rank)
    if there.parallel_state is not None:
        real = vars(importlib.import_module(_PARALLEL_STATE))
        for name, value in vars(there.parallel_state).items():
            if name in real and not name.startswith("__") and not _is_code(value):
                real[name] = value


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.ModuleType | type | types.BuiltinFunctionType)


def registered_groups() -> list[Any]:
    """Return every process group torch knows in this process, whatever its generation."""
    return list(c10d._world.pg_map)


def forget() -> None:
    """Be as a process is that has built no world: for a script that is to run again from its top.

    Whatever groups are left are destroyed, the script's own among them.
    """
    generation = 1 + c10d._group_count // _GROUP_NAMES_PER_GENERATION
    activate(new_globals(generation))
    destroy(registered_groups())
    torch.manual_seed(_TORCH_SEED)
    if not has_megatron():
        return
    random: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    if random is not None:
        random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = None, False
    for module, function in _SINGLETONS.items():
        getattr(sys.modules.get(module), function, lambda: None)()


def destroy(groups: list[Any]) -> None:
    """Destroy process groups of a generation that is not active; those already gone are passed over."""
    for group in groups:
        if group in c10d._world.pg_map:
            c10d.destroy_process_group(group)
    groups.clear()
    # new_group() leaves a note about groups that this rank is no member of
    c10d._world.pg_group_ranks.pop(c10d.GroupMember.NON_GROUP_MEMBER, None)
    # and destroy_process_group() an empty list for every group there was
    for tag in [tag for tag, tagged in c10d._world.tags_to_pg.items() if not tagged]:
        del c10d._world.tags_to_pg[tag]
