"""Runs examples/gpt/train.py as it is, and writes down what happens around every change of world.

    probe.py OUT [train.py's arguments]

Into ``OUT``: ``changes.jsonl`` (evaluation loss, small state and resources of every rank just before and just after
each change), ``state/<generation>/<before|after>/<rank>.pt`` (``--dump-state`` in ``PROBE``: raw state for the
oracle), and ``pids.jsonl``. ``PROBE`` in the environment is a JSON object of options:

``dump_state``    write raw state around every change
``evaluate``      evaluate a fixed batch around every change
``save``          save and reload with Megatron's own checkpoint after every change
``steps_per_change`` while fewer than ``step / steps_per_change`` changes have been seen, a step waits until one is
                  armed, at most ``PATIENCE_S``, so that a run of few steps holds many changes whatever the machine's
                  speed; not any more once the file ``hurry`` is there
``hang_in_build`` a generation in whose build this worker stops for good, if it joins
``forget_scheduler`` builds of survivors return no scheduler
``scarce_memory`` the host has hardly any to spare
``damage``        how the stream of each change is damaged, in turn; see ``damage.py``
``fail_stream``   a rank of the first world whose first stream fails before it has begun
``fail_release``  a rank whose first stream fails when it has given so many pieces of its old state back: [rank, pieces]
``until_armed``   a step that waits until a change is armed, so that this comes two steps later on every run
``late``          with ``--defer optimizer``: let the optimizer's state set out only when the first forward and backward of
                  the new world have run; of workers it names, ``fail`` their part of it then, or ``kill`` them when the
                  first of their messages has gone
``beside``        with ``--defer optimizer``, for one change without leavers: let the first of the optimizer's state arrive
                  only when forward has begun, backward begin only when it has arrived, and the rest set out only
                  when both are over; write the order of all this to ``beside.jsonl``
``no_hooks``      register no hooks
``memory``        write down what the process holds around every change
``announce``      touch this file when a joiner builds
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(ROOT / "tests" / "resharding")]

import checkpoint  # noqa: E402
import oracle  # noqa: E402
import torch  # noqa: E402
import train  # noqa: E402
from damage import Damages  # noqa: E402
from held import resources  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

import liverun  # noqa: E402
from liverun import fence, prepare  # noqa: E402
from resharding import stream  # noqa: E402

NUM_BYTES = 12
"""of a parameter: fp32 and Adam's two moments"""
PATIENCE_S = 5.0
OPTIONS = json.loads(os.environ.get("PROBE", "{}"))
OUT = Path(sys.argv.pop(1))


class Probe:
    """Hooks around the changes of one worker's life."""

    def __init__(self, job, args, valid):
        self.job, self.args, self.valid = job, args, valid
        self.resident = 0
        if not OPTIONS.get("no_hooks"):
            job.before_change(lambda world: self.look("before", world))
            job.after_change(lambda world: self.look("after", world))

    def look(self, when, world):
        self.job.wait_until_whole()
        record = {
            "when": when,
            "generation": world.generation,
            "rank": world.rank,
            "world_size": world.world_size,
            "layout": str(world.layout),
            "pid": os.getpid(),
            "small": self.small_state(),
        }
        if OPTIONS.get("evaluate"):
            record["eval_loss"] = train.evaluate(self.args, self.job.training.model, self.valid, self.as_step(world))
        if OPTIONS.get("memory"):
            record["memory"] = self.memory(when)
        if OPTIONS.get("dump_state"):
            folder = OUT / "state" / f"{world.generation}" / when
            folder.mkdir(parents=True, exist_ok=True)
            oracle.dump_rank(
                self.job.training.model, self.job.training.optimizer, folder / f"{world.rank}.pt",
                {
                    "tp": parallel_state.get_tensor_model_parallel_rank(),
                    "pp": parallel_state.get_pipeline_model_parallel_rank(),
                    "dp": parallel_state.get_data_parallel_rank(),
                },
            )
        if OPTIONS.get("save") and when == "after":
            self.save_and_reload(world)
        train.append_line(OUT / "changes.jsonl", record)

    def small_state(self):
        training = self.job.training
        return {
            "step": self.job.next_step,
            "consumed_samples": self.job.consumed_samples,
            "scheduler": training.scheduler.state_dict(),
            "groups": sorted(
                [group["lr"], group["weight_decay"], group.get("wd_mult"), group.get("lr_mult")]
                for group in training.optimizer.param_groups
            ),
        }

    def as_step(self, world):
        """Enough of a Step for train.evaluate()."""
        probe = type("AsStep", (), {})()
        probe.world, probe.num_microbatches = world, self.job.num_microbatches
        return probe

    def save_and_reload(self, world):
        """Save with Megatron, spoil every weight, load, and see that everything is back."""
        training, folder = self.job.training, OUT / "checkpoints" / f"{world.generation}"
        kept = [param.detach().clone() for chunk in training.model for param in chunk.parameters()]
        moments = [
            {key: value.clone() for key, value in state.items()} for state in self.adam_states()
        ]
        checkpoint.save(self.args, str(folder), self.job.next_step, training)
        with torch.no_grad():
            for chunk in training.model:
                for param in chunk.parameters():
                    param.fill_(0.5)
            for state in self.adam_states():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].fill_(0.25)
        assert checkpoint.load(self.args, str(folder), training) == self.job.next_step
        params = [param for chunk in training.model for param in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(kept, params, strict=True)), "weights differ after a reload"
        for before, after in zip(moments, self.adam_states(), strict=True):
            assert all(torch.equal(before[key], after[key]) for key in before), "optimizer differs after a reload"
        train.append_line(OUT / "reloads.jsonl", {"generation": world.generation, "rank": world.rank})

    def memory(self, when):
        """Bytes: state and gradients by their tensors, and what the system says of the process."""
        if when == "before":
            self.resident = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
        params = [param for chunk in self.job.training.model for param in chunk.parameters()]
        moments = [state[name] for state in self.adam_states() for name in ("exp_avg", "exp_avg_sq")]
        buffers = [buffer.grad_data for chunk in self.job.training.model for buffer in chunk.buffers]
        layers = [
            sum(param.numel() for param in layer.parameters()) * NUM_BYTES
            for chunk in self.job.training.model for layer in chunk.module.decoder.layers
        ]
        return {
            "state": sum(tensor.nbytes for tensor in (*params, *moments)),
            "gradients": sum(buffer.nbytes for buffer in buffers),
            "layer": max(layers),
            "resident_before": self.resident,
            "most_resident": resident("VmHWM"),
        }

    def adam_states(self):
        optimizer = self.job.training.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            yield from part.optimizer.state.values()


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def fail_once(real_execute):
    """Make the first stream of the rank that ``PROBE`` names fail, while its peers wait: before it, or in the middle."""
    rank, num_pieces = OPTIONS.get("fail_release", [OPTIONS.get("fail_stream"), 0])
    failures = iter(["the network card fell out"] if os.environ.get("RANK") == str(rank) else [])

    def execute(*arguments, **options):
        if num_pieces:
            release, released = options["release"], []

            def released_or_failed(piece):
                release(piece)
                released.append(piece)
                if len(released) == num_pieces:
                    for failure in failures:
                        raise OSError(failure)

            return real_execute(*arguments, **options | {"release": released_or_failed})
        for failure in failures:
            raise OSError(failure)
        return real_execute(*arguments, **options)

    return execute


class Held:
    """Holds the optimizer's state back until a step of the new world has run forward and backward."""

    def __init__(self):
        self.computed = threading.Event()
        self.has_set_out = False

    def execute(self, real_execute, *arguments, **options):
        if not threading.current_thread().name.startswith("liverun-late-"):
            self.computed.clear()
            self.has_set_out = False
            return real_execute(*arguments, **options)
        if arguments[2].pieces:  # a leaver computes nothing, and sends into the void until somebody receives
            assert self.computed.wait(60), "the first step waited for the optimizer's state"
        self.has_set_out = True
        how = OPTIONS["late"].get(os.environ["LIVERUN_WORKER"])
        if how == "fail":
            raise OSError("the network card fell out")
        if how == "kill":
            deadline = time.monotonic() + 60
            while not (OUT / "late.jsonl").exists() or '"generation": 2' not in (OUT / "late.jsonl").read_text():
                assert time.monotonic() < deadline, "the new world computed nothing"
                time.sleep(0.01)
            plan, source, target, transport, *rest = arguments
            return real_execute(plan, source, target, Dying(transport), *rest, **options)
        return real_execute(*arguments, **options)

    def forward_backward(self, real, *arguments, **options):
        result = real(*arguments, **options)
        step = arguments[4]
        train.append_line(
            OUT / "late.jsonl",
            {"step": step.index, "generation": step.world.generation, "rank": step.world.rank, "set_out": self.has_set_out},
        )
        self.computed.set()
        return result


class Done:
    """A send or receive that is over; gloo's own would wait for another one if asked twice."""

    def wait(self):
        pass


class Dying:
    """A transport whose process is killed when its first message has gone and the second would follow."""

    def __init__(self, inner):
        self._inner = inner
        self.device = inner.device
        self.irecv = inner.irecv
        self._has_sent = False

    def isend(self, tensor, peer):
        if self._has_sent:
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.isend(tensor, peer).wait()
        self._has_sent = True
        return Done()


class Beside:
    """Lets the optimizer's state and the first step of a new world wait for each other, and notes who came when.

    Each rank's share of the state waits for forward to begin. Forward is let run then, and what comes after it waits
    until the first message is there; all others wait until backward is over too. A stream that is over before the
    first forward, or begins after it, so ends in a time-out.
    """

    def __init__(self):
        self.began, self.arrived, self.computed = (threading.Event() for _ in range(3))
        self.has_stepped = True
        for event in (self.began, self.arrived, self.computed):
            event.set()  # nothing waits in the first world

    def install(self):
        real_execute, real_forward, real_compute = stream.execute, train.forward_step, train.forward_backward
        stream.execute = lambda *arguments, **options: self.execute(real_execute, *arguments, **options)
        train.forward_step = lambda *arguments: self.forward_step(real_forward, *arguments)
        train.forward_backward = lambda *arguments, **options: self.forward_backward(real_compute, *arguments, **options)
        register_optimizer_step_pre_hook(lambda *_: self.note_first_step())

    def note(self, what, **more):
        train.append_line(OUT / "beside.jsonl", {"rank": int(os.environ["RANK"]), "what": what, **more})

    def execute(self, real, plan, source, target, transport, *arguments, **options):
        if not threading.current_thread().name.startswith("liverun-late-"):
            for event in (self.began, self.arrived, self.computed):
                event.clear()
            return real(plan, source, target, transport, *arguments, **options)
        report = real(plan, source, target, InTurn(transport, self), *arguments, **options)
        self.note("whole", keys=sorted({piece.box.key.split("/")[0] for piece in target.pieces}))
        return report

    def forward_step(self, real, *arguments):
        is_first = not self.began.is_set()
        if is_first:
            self.note("forward")
            self.began.set()
        result = real(*arguments)
        if is_first:
            assert self.arrived.wait(60), "nothing of the optimizer's state came beside the first forward"
        return result

    def forward_backward(self, real, *arguments, **options):
        result = real(*arguments, **options)
        if not self.computed.is_set():
            self.note("computed")
            self.computed.set()
            self.has_stepped = False
        return result

    def note_first_step(self):
        if not self.has_stepped:
            self.has_stepped = True
            self.note("step")


class InTurn:
    """A transport that receives one message after the other, when it is their turn."""

    def __init__(self, inner, beside):
        self._inner = inner
        self.device = inner.device
        self.isend = inner.isend
        self._beside = beside

    def irecv(self, tensor, peer):
        beside = self._beside
        awaited = beside.computed if beside.arrived.is_set() else beside.began
        assert awaited.wait(60), "the first step computed nothing while the optimizer's state was on its way"
        self._inner.irecv(tensor, peer).wait()
        beside.note("arrived", num_bytes=tensor.numel())
        beside.arrived.set()
        return Done()


def write_last_resources():
    """Registered before ``join``, so it runs after everything that ``join`` registers."""
    record = {
        "pid": os.getpid(), "groups": len(fence.registered_groups()),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }
    train.append_line(OUT / "exits.jsonl", record)


def wait_for_change(job, limit_s):
    """Wait until a change is armed; whether one is, when the time or the run's patience is over."""
    deadline, hurry = time.monotonic() + limit_s, Path(OPTIONS.get("hurry", "-"))
    while job._worker.gate._armed is None and not hurry.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return job._worker.gate._armed is not None


def main():
    atexit.register(write_last_resources)
    probes = []
    opened = []
    real_join, real_open = liverun.join, train.open_datasets

    def open_datasets(*args):
        opened[:] = real_open(*args)
        return opened

    def join(build, **options):
        def watched_build(world):
            if world.generation == OPTIONS.get("hang_in_build") and not probes:
                Path(OPTIONS["announce"]).write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            training = build(world)
            if probes and OPTIONS.get("forget_scheduler"):
                training.scheduler = None
            return training

        if "damage" in OPTIONS:
            Damages(OUT, OPTIONS["damage"]).install()
        if OPTIONS.get("scarce_memory"):
            prepare.available_bytes = lambda: 1
        if {"fail_stream", "fail_release"} & OPTIONS.keys():
            stream.execute = fail_once(stream.execute)
        job = real_join(watched_build, **options)
        probes.append(Probe(job, train.parse_arguments(), opened[1]))
        train.append_line(OUT / "pids.jsonl", {"pid": os.getpid(), "rank": job.world.rank})
        if job.world.generation > 1 and not OPTIONS.get("no_hooks"):
            probes[0].look("after", job.world)  # it joined before there was a hook to call
        return job

    if "late" in OPTIONS:
        held, real_execute, real_compute = Held(), stream.execute, train.forward_backward
        stream.execute = lambda *arguments, **options: held.execute(real_execute, *arguments, **options)
        train.forward_backward = lambda *arguments, **options: held.forward_backward(real_compute, *arguments, **options)
    if OPTIONS.get("beside"):
        Beside().install()
    real_train_step = train.train_step

    def train_step(*arguments):
        step = arguments[-1]
        if step.index == OPTIONS.get("until_armed"):
            assert wait_for_change(probes[0].job, 120.0), "no change was asked for"
        pace = OPTIONS.get("steps_per_change")
        if pace and step.world.generation - 1 < step.index / pace:
            wait_for_change(probes[0].job, PATIENCE_S)
        if OPTIONS.get("resources"):
            train.append_line(
                OUT / "resources.jsonl",
                {"step": step.index, "generation": step.world.generation, "pid": os.getpid(), **resources()},
            )
        return real_train_step(*arguments)

    liverun.join, train.open_datasets, train.train_step = join, open_datasets, train_step
    train.main()


if __name__ == "__main__":
    main()
