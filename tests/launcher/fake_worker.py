"""A worker without a model: steps by the clock, speaks liverun.messages, and misbehaves as told.

``FAKE_BEHAVE`` is JSON: worker id -> {"check": refusal, "prepare": "die" | "silent" | "fail: why", "late": times,
"vote": "no: why" | "die", "join": "never" | "die", "long_step": file, "fail_at": step, "unwind": "ignore" | "thread" | "patch"}.
A long step ends when its file exists, the loop when the file named by ``FAKE_END`` does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from liverun.again import TOP
from liverun.gate import Unwinding
from liverun.layout import Layout
from liverun.messages import (
    Abort,
    Again,
    Arm,
    Armed,
    Cancel,
    Check,
    Checked,
    Ended,
    Failed,
    Go,
    Hello,
    Leave,
    Message,
    Prepare,
    Prepared,
    Progress,
    Retired,
    Saved,
    Stop,
    Switched,
    Unwind,
    Unwound,
    Where,
)

STEP_S = 0.004
LONG_STEP = 500


class FakeWorker:
    def __init__(self) -> None:
        self.worker = os.environ["LIVERUN_WORKER"]
        self.behave = json.loads(os.environ.get("FAKE_BEHAVE", "{}")).get(self.worker, {})
        self.step = 0
        self.generation = 0
        self.rank: int | None = None
        self.preparing: Prepare | None = None
        self.armed: Arm | None = None
        self.go: Go | None = None
        self.stopped = False
        self.saves = False
        self.unwinds = False
        self.leaves = False
        self.again: Again | None = None
        self.changed = threading.Condition()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(os.environ["LIVERUN_SOCKET"])

    def say(self, message: Message) -> None:
        self.socket.sendall(message.encode())

    def listen(self) -> None:
        with self.socket.makefile("rb") as stream:
            for line in stream:
                with self.changed:
                    self.heard(Message.decode(line))
                    self.changed.notify_all()
                if self.again is not None:
                    return

    # --- what liverun.again asks of a worker that has joined ---

    def give_up(self) -> None:
        pass

    def say_ended(self, code: int) -> bool:
        self.say(Ended(code=code))
        with self.changed:
            self.changed.wait_for(lambda: self.unwinds or self.leaves or self.stopped)
        return self.unwinds

    def forget(self) -> None:
        pass

    def say_unwound(self) -> Again | None:
        self.say(Unwound())
        with self.changed:
            self.changed.wait_for(lambda: self.again is not None or self.leaves or self.stopped)
        return self.again

    def hang_up(self) -> None:
        self.listening.join()
        self.socket.close()

    def follow_unwind(self) -> None:
        how = self.behave.get("unwind", "")
        if how == "ignore":
            print(f"{self.worker} does not come to its end", flush=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.changed.wait_for(lambda: False)
        if how == "thread":
            threading.Thread(target=threading.Event().wait, name="reader", daemon=True).start()
        if how == "patch":
            vars(json)["timed"] = FakeWorker.say
        raise Unwinding

    def heard(self, message: Message) -> None:
        if isinstance(message, Check):
            self.say(Checked(generation=message.generation, refusal=self.behave.get("check")))
        elif isinstance(message, Prepare):
            self.prepare(message)
        elif isinstance(message, Where):
            self.say(Progress(generation=self.generation, step=self.step))
        elif isinstance(message, Arm):
            late = self.behave.get("late", 0) > 0 or self.step >= message.step
            self.behave["late"] = self.behave.get("late", 0) - 1
            if not late:
                self.armed = message
            self.say(Armed(generation=message.generation, step=message.step, late=late, at_step=self.step))
        elif isinstance(message, Cancel):
            self.armed = None
        elif isinstance(message, Abort):
            self.preparing = self.armed = None
        elif isinstance(message, Go):
            self.go = message
        elif isinstance(message, Stop):
            self.stopped = True
            self.saves = message.save
        elif isinstance(message, Unwind):
            self.unwinds = True
        elif isinstance(message, Leave):
            self.leaves = True
        elif isinstance(message, Again):
            self.again = message

    def prepare(self, message: Prepare) -> None:
        how = self.behave.get("prepare", "") if message.generation > 1 else self.behave.get("first", "")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how.startswith("fail: "):
            self.say(Failed(generation=message.generation, reason=how[6:]))
        elif how != "silent":
            self.preparing = message
            self.say(Prepared(generation=message.generation, prepare_s=0.25, bytes_moved=10, bytes_local=20))

    def switch(self) -> None:
        assert self.preparing is not None
        assert self.go is not None
        target, go = self.preparing, self.go
        self.preparing = self.armed = self.go = None
        how = self.behave.get("vote", "") if go.step is not None else ""
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("no: "):
            self.say(Switched(generation=go.generation, ok=False, reason=how[4:]))
            return
        me = next(member for member in target.members if member.worker == self.worker)
        self.rank, self.generation = me.rank, go.generation
        self.step = max(self.step, go.step or 0)
        self.say(
            Switched(
                generation=go.generation, ok=True, step=self.step, arm_s=0.01, transfer_s=0.02, commit_s=0.003,
                pause_s=0.04, bytes_moved=1_000_000, bytes_local=2_000_000, peak_extra_bytes=5,
            )
        )  # fmt: skip
        self.say(Retired(generation=go.generation, leaves=me.rank is None))
        if go.step is None:
            self.say(Progress(generation=self.generation, step=self.step))
        print(f"{self.worker} has rank {self.rank} in generation {self.generation}", flush=True)

    def take_long(self, end: Path) -> None:
        """Stay in one step, while messages are answered as ever."""
        print(f"{self.worker} is in a long step", flush=True)
        while not end.exists():
            self.changed.wait(STEP_S)

    def run(self) -> None:
        if self.behave.get("join") == "die":
            sys.exit(3)
        layout = Layout.parse(os.environ["FAKE_LAYOUT"]) if "FAKE_LAYOUT" in os.environ else None
        self.say(Hello(worker=self.worker, pid=os.getpid(), layout=layout, keeps=TOP.keeps))
        if TOP.keeps:
            TOP.enter(self)
        self.listening = threading.Thread(target=self.listen, name="liverun-link", daemon=True)
        self.listening.start()
        with self.changed:
            while not self.stopped:
                if self.unwinds:
                    self.follow_unwind()
                if self.rank is None:
                    self.changed.wait_for(lambda: self.go is not None or self.stopped or self.unwinds)
                    if self.go is not None:
                        self.switch()
                    continue
                if self.armed is not None and self.armed.step == self.step:
                    self.changed.wait_for(
                        lambda: self.go is not None or self.armed is None or self.stopped or self.unwinds
                    )
                    if self.go is not None:
                        self.switch()
                    continue
                if Path(os.environ["FAKE_END"]).exists():
                    return
                self.changed.wait(STEP_S)
                if "long_step" in self.behave and self.step == LONG_STEP:
                    self.take_long(Path(self.behave["long_step"]))
                if self.behave.get("fail_at") == self.step:
                    raise RuntimeError(f"{self.worker} fails at step {self.step}")
                if self.armed is None or self.armed.step > self.step:
                    self.step += 1
                if self.step % 50 == 0:
                    self.say(Progress(generation=self.generation, step=self.step))
            if self.saves:
                self.say(Saved(request=0, step=self.step, ok=True, path=f"/ckpt/step-{self.step}"))
            print(f"{self.worker} stops before step {self.step}", flush=True)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    import fake_worker  # what goes on when the script has ended must not be of the module that is forgotten then

    fake_worker.FakeWorker().run()
