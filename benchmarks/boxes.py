"""A training by role on paper: which role or link saturates first with 8 GPUs in one box and 64 on 8 hosts, and how long it takes.

    python -m benchmarks.boxes

Arithmetic on the constants below, each marked measured or assumed; it runs nothing. The tables it prints stand in
docs/many-gpus.md, and a test holds the page to them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Measured on H200s (139 GiB, NVLink, torch 2.11.0+cu130), 2026-11-30 and 2026-12-01; see docs/benchmarks.md.
TARGET_S = (
    0.087 * 24.35 / 2.6
)  # a row of 8,000 tokens: 87 ms in 8 layers of 2.6 billion parameters, scaled to all 24.35
DRAFTER_S = {"ddtree": 0.864, "v6": 0.248}  # a row, on one card alone
NVLINK = 383e9  # bytes a second from rank to rank
# Counted.
ROW_TOKENS = 8000
ROW_BYTES = ROW_TOKENS * (5 + 1) * 5120 * 2  # hidden states in bfloat16
GRADIENT_BYTES = 1_730_213_120 * 2
# Assumed: nothing of these was measured.
BACKWARD_SHARE = 0.5  # of a drafter's step, behind which gradients of its last row can travel
ETHERNET = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}  # by specification, between hosts
PCIE = 64e9  # by specification, of version 5 with 16 lanes: cards without NVLink
# The first user's runs as they were to go: days at context tokens a second.
RUNS = {"ddtree": 14 * 86_400 * 6_500, "v6": 5 * 86_400 * 26_000}


@dataclass(frozen=True)
class Boxes:
    """Some hosts with as many ranks of each role on each, and the links within and between them."""

    branch: str
    num_targets: int
    num_drafters: int
    num_hosts: int = 1
    rows_each: int = 1  # of a drafter in a step
    inside: float = NVLINK  # bytes a second, of each GPU
    between: float = ETHERNET["100 Gbit/s"]  # of each host, in each direction

    @property
    def gradient_bytes(self) -> float:
        """Through each link a step, sent as well as received: added up within a host first, then round the hosts."""
        among = self.num_hosts if self.num_hosts > 1 else self.num_drafters
        return 2 * (among - 1) / among * GRADIENT_BYTES

    @property
    def gradient_s(self) -> float:
        return self.gradient_bytes / (self.between if self.num_hosts > 1 else self.inside)

    @property
    def step_s(self) -> float:
        """Of the drafters: their rows, and what of the gradients outlasts the last backward pass."""
        row_s = DRAFTER_S[self.branch]
        return self.rows_each * row_s + max(0.0, self.gradient_s - BACKWARD_SHARE * row_s)

    @property
    def given(self) -> float:
        """Rows a second of all targets."""
        return self.num_targets / TARGET_S

    @property
    def taken(self) -> float:
        """Rows a second of all drafters."""
        return self.num_drafters * self.rows_each / self.step_s

    @property
    def rows_per_s(self) -> float:
        return min(self.given, self.taken)

    @property
    def tokens_per_s(self) -> float:
        return self.rows_per_s * ROW_TOKENS

    @property
    def days(self) -> float:
        """Of the first user's run of that branch."""
        return RUNS[self.branch] / self.tokens_per_s / 86_400

    @property
    def loads(self) -> dict[str, float]:
        """How much of each role and of the links within a host is used; 1 is all of it. Drafters' own work, without waiting."""
        steps_per_s = self.rows_per_s / (self.num_drafters * self.rows_each)
        within = self.rows_per_s / self.num_drafters * ROW_BYTES / self.inside
        return {
            "targets": self.rows_per_s / self.given,
            "drafters": steps_per_s * self.rows_each * DRAFTER_S[self.branch],
            "links within": within + (0.0 if self.num_hosts > 1 else steps_per_s * self.gradient_s),
        }

    @property
    def first(self) -> str:
        """What saturates first; a link does where waiting for it costs drafters more than a hundredth of a step."""
        if self.given < self.taken:
            return "targets"
        waited = 1 - self.rows_each * DRAFTER_S[self.branch] / self.step_s
        if waited <= 0.01:
            return "drafters"
        return "links between" if self.num_hosts > 1 else "links within"

    @property
    def crossing(self) -> float:
        """Bytes a second out of each host, were targets and drafters paired without regard to hosts."""
        return self.rows_per_s * ROW_BYTES * (1 - 1 / self.num_hosts) / self.num_hosts


def one_box() -> list[list[str]]:
    head = [
        "branch",
        "target + drafter",
        "targets give",
        "drafters take",
        "context Ktok/s",
        "days",
        "saturated first",
        "links within",
    ]
    rows = [
        [
            box.branch,
            f"{box.num_targets} + {box.num_drafters}",
            f"{box.given:.1f}",
            f"{box.taken:.1f}",
            f"{box.tokens_per_s / 1000:.1f}",
            f"{box.days:.1f}",
            box.first,
            f"{box.loads['links within']:.1%}",
        ]
        for branch in DRAFTER_S
        for box in (Boxes(branch, targets, 8 - targets) for targets in (5, 4, 3))
    ]
    return [head, *rows]


def eight_hosts() -> list[list[str]]:
    head = [
        "branch",
        "target + drafter",
        "between hosts",
        "rows a drafter and step",
        "gradients take",
        "step",
        "context Ktok/s",
        "days",
        "saturated first",
    ]
    rows = [
        [
            box.branch,
            f"{box.num_targets} + {box.num_drafters}",
            name,
            str(box.rows_each),
            f"{box.gradient_s:.2f} s",
            f"{box.step_s:.2f} s",
            f"{box.tokens_per_s / 1000:.0f}",
            f"{box.days:.2f}",
            box.first,
        ]
        for branch, targets in (("ddtree", 32), ("ddtree", 24), ("v6", 40))
        for name, each in (("100 Gbit/s", 1), ("100 Gbit/s", 2), ("400 Gbit/s", 1))
        for box in (Boxes(branch, targets, 64 - targets, num_hosts=8, rows_each=each, between=ETHERNET[name]),)
    ]
    return [head, *rows]


def links() -> list[list[str]]:
    """What the links carry, against what they could."""
    box = Boxes("ddtree", 4, 4)
    slow = replace(box, inside=PCIE)
    far = Boxes("ddtree", 32, 32, num_hosts=8)
    return [
        ["link", "carries", "of", "which is"],
        _link("hidden states into a drafter, NVLink", box.rows_per_s / 4 * ROW_BYTES, NVLINK),
        _link("the same, PCIe 5 x 16", slow.rows_per_s / 4 * ROW_BYTES, PCIE),
        _link(
            "gradients behind a backward pass, NVLink",
            box.gradient_bytes / (BACKWARD_SHARE * DRAFTER_S["ddtree"]),
            NVLINK,
        ),
        _link("the same, PCIe 5 x 16", slow.gradient_bytes / (BACKWARD_SHARE * DRAFTER_S["ddtree"]), PCIE),
        _link(
            "gradients between 8 hosts, 100 Gbit/s",
            far.gradient_bytes / (BACKWARD_SHARE * DRAFTER_S["ddtree"]),
            ETHERNET["100 Gbit/s"],
        ),
        _link("hidden states too, were roles not paired by host", far.crossing, ETHERNET["100 Gbit/s"]),
    ]


def _link(name: str, carried: float, capacity: float) -> list[str]:
    return [name, f"{carried / 1e9:.2f} GB/s", f"{capacity / 1e9:.1f} GB/s", f"{carried / capacity:.1%}"]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """As Markdown, the first row its head."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def page() -> list[str]:
    return [*table(one_box()), "", *table(links()), "", *table(eight_hosts())]


def main() -> int:
    sys.stdout.write("\n".join(page()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
