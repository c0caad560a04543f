"""Damage to state on its way, once in each change of world, in the worker that comes to it first.

``flipped``   one byte of a weight is another one on the wire
``moment``    the same of an optimizer's moment, whenever that moves
``missing``   the plan of a joiner has one box of a weight less
``twice``     the plan of a joiner has one box of a weight twice
``swapped``   a sender takes two boxes for each other: SwiGLU's halves, or others of one size

Where the old state is given back, the byte is one of the layer that moves first. What was damaged goes to
``damages.jsonl``.
"""

import contextlib
import itertools
import json
from dataclasses import replace

import torch

from liverun import job
from resharding import stream
from resharding.slots import FIRST_LAYER


class Damages:
    """Damages the stream of generation 2 in the first way of ``order``, that of generation 3 in the second, and so on."""

    def __init__(self, folder, order):
        self._folder = folder
        self._order = dict(enumerate(order, 2))
        self._generation = 1

    def install(self):
        real_switch, real_execute = job.switch, stream.execute

        def switch(prepared, *arguments, **options):
            self._generation = prepared.spec.generation
            return real_switch(prepared, *arguments, **options)

        def execute(plan, source, target, transport, *arguments, **options):
            transport = self._damage(plan, source, target, transport, keep=options.get("keep", True))
            return real_execute(plan, source, target, transport, *arguments, **options)

        job.switch, stream.execute = switch, execute

    def _damage(self, plan, source, target, transport, *, keep):
        what = self._order.get(self._generation)
        if what in ("missing", "twice"):
            for at in _matrices(plan.recvs, target):
                if self._is_first(what, [target.boxes[plan.recvs[at].cut.piece].key]):
                    plan.recvs[at : at + 1] = [plan.recvs[at]] * (2 if what == "twice" else 0)
                return transport
        if what in ("flipped", "moment"):
            if what == "moment":
                found = _matrices(plan.sends, source, "exp_avg/")
            else:
                found = _matrices(plan.sends, source) if keep else _first_weights(plan, source)
            for at in found:
                cut = plan.sends[at].cut
                if self._is_first(what, [source.boxes[cut.piece].key]):
                    return _Flipping(transport, _bytes(stream._slice(source, cut)))
                return transport
        if what == "swapped":
            for one, other in _pairs(plan, source):
                cuts = [plan.sends[at].cut for at in (one, other)]
                if self._is_first(what, [source.boxes[cut.piece].key for cut in cuts]):
                    for at, cut in zip((other, one), cuts, strict=True):
                        plan.sends[at] = replace(plan.sends[at], cut=cut)
                return transport
        return transport

    def _is_first(self, what, keys):
        """Whether nobody else has damaged this change; then it is written down."""
        with contextlib.suppress(FileExistsError), (self._folder / f"damage-{self._generation}").open("x"):
            with (self._folder / "damages.jsonl").open("a") as file:
                file.write(json.dumps({"generation": self._generation, "what": what, "keys": keys}) + "\n")
            return True
        return False


def _matrices(transfers, holding, prefix="weight/"):
    """Return where matrices are, by default of weights."""
    boxes = [holding.boxes[transfer.cut.piece] for transfer in transfers]
    return [at for at, box in enumerate(boxes) if box.key.startswith(prefix) and len(box.shape) == 2]


def _first_weights(plan, source):
    """Return where weights are that move before anything is given back."""
    return [
        at for at, send in enumerate(plan.sends)
        if plan.source_layers[send.cut.piece] == FIRST_LAYER
        and source.boxes[send.cut.piece].key.startswith("weight/")
    ]


def _pairs(plan, source):
    """Yield pairs of weights of one size for one peer: SwiGLU's halves first, then others."""
    weights = _matrices(plan.sends, source)
    halves = [at for at in weights if source.boxes[plan.sends[at].cut.piece].key.endswith("linear_fc1.weight")]
    for one, other in itertools.chain(itertools.combinations(halves, 2), itertools.combinations(weights, 2)):
        first, second = plan.sends[one], plan.sends[other]
        if (first.peer, first.nbytes) == (second.peer, second.nbytes):
            yield one, other


def _bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class _Flipping:
    """A transport that changes one byte of one message: the first in which ``wanted`` is found."""

    def __init__(self, inner, wanted):
        self._inner = inner
        self._wanted = wanted
        self._sent = []

    @property
    def device(self):
        return self._inner.device

    def isend(self, tensor, peer):
        at = _bytes(tensor).find(self._wanted) if not self._sent else -1
        if at >= 0:
            tensor = tensor.clone()  # what is sent may be the state itself
            tensor[at + len(self._wanted) // 2] ^= 64
            self._sent.append(tensor)
        return self._inner.isend(tensor, peer)

    def irecv(self, tensor, peer):
        return self._inner.irecv(tensor, peer)
