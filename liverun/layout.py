"""How a model is split over the ranks of a world, as people and messages write it: ``tp=2,pp=1``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of every model-parallel axis. The data-parallel size follows from the world size.

    Raises ``ValueError`` with one sentence for a size below one.
    """

    tp: int = 1
    """tensor parallel size"""
    pp: int = 1
    """pipeline parallel size"""
    vpp: int = 1
    """virtual pipeline stages per rank; 1 means no interleaving"""
    cp: int = 1
    """context parallel size"""
    ep: int = 1
    """expert parallel size"""
    etp: int = 1
    """tensor parallel size inside experts"""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"layout {field.name}={size} is not a whole number of at least 1")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tp=2,pp=1``; axes that are not named are 1. Raises ``ValueError`` with one sentence."""
        sizes: dict[str, int] = {}
        names = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, equals, size = part.strip().partition("=")
            if not equals or name not in names:
                raise ValueError(
                    f"layout {text!r}: {part.strip()!r} is not one of {', '.join(n + '=N' for n in names)}"
                )
            if name in sizes:
                raise ValueError(f"layout {text!r} names {name} twice")
            try:
                sizes[name] = int(size)
            except ValueError:
                raise ValueError(f"layout {text!r}: {size!r} is not a whole number") from None
        return cls(**sizes)

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the dense model: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside experts as worlds are built: tp, where neither ep nor etp is named."""
        return self.etp if (self.etp, self.ep) != (1, 1) else self.tp

    def misfit(self, world_size: int) -> str | None:
        """Say in one sentence why this layout does not divide ``world_size`` ranks, or ``None`` if it does."""
        if world_size < 1:
            return f"a world of {world_size} workers is none; ask for at least 1"
        if world_size % self.model_size:
            return (
                f"layout {self} needs a multiple of {self.model_size} workers (tp*pp*cp), not {world_size}"
            )
        experts = self.etp * self.ep * self.pp
        if world_size % experts:
            return f"layout {self} needs a multiple of {experts} workers (etp*ep*pp), not {world_size}"
        return None

    def dp(self, world_size: int) -> int:
        """Return the data parallel size in a world of that size. Raises ``ValueError`` if it does not divide."""
        if (reason := self.misfit(world_size)) is not None:
            raise ValueError(reason)
        return world_size // self.model_size

    def shrunk_to(self, world_size: int) -> Layout:
        """Return the nearest layout that divides ``world_size``: each axis falls to a common divisor, pp first."""
        left, sizes = world_size, {}
        for name in ("tp", "cp", "pp"):
            sizes[name] = math.gcd(getattr(self, name), left)
            left //= sizes[name]
        room = world_size // sizes["pp"]
        etp = math.gcd(self.etp, room)
        ep = math.gcd(self.ep, room // etp)
        return Layout(**sizes, etp=etp, ep=ep, vpp=self.vpp if sizes["pp"] == self.pp else 1)

    def as_dict(self) -> dict[str, int]:
        """Every axis by name, in a fixed order: what JSON carries."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        named = [f"{name}={size}" for name, size in self.as_dict().items() if size != 1]
        return ",".join(named) or "tp=1"
