"""One training step side by side: time, throughput, peak memory and the share of what the card can do.

    python -m benchmarks.step [--out FOLDER] [--budget SECONDS] [--cap 95GiB] [--only TEXT] [--small]

Needs `remote/`, `benchmarks/`, torch and, for the kernels, Triton. Every variant is first checked on a small
shape against the plain path in float64; then each case is timed by each variant: forward, backward and the update of fp32
masters with fp32 moments, anchors drawn anew every step. After every row `step.json`, `step.md` and `step.svg` are
written anew, so that a run that is cut keeps what it has. Exit status 1 when a variant computes something else.
The fused variant's step is listed kernel by kernel, and every
step says within which of its parts its memory peaks. Without a card, or with --small, tiny shapes show that the benchmark works; their numbers claim nothing.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.first_user import GatheredAttention, checkpointed_loss
from benchmarks.least_work import Work, least_work
from benchmarks.step_page import Row, detail_lines, write
from benchmarks.step_parts import Profile, ceiling, clock, header_of, in_a_line, profiled
from remote.drafter.attention import Backend
from remote.drafter.blocks import Blocks, build_blocks, sample_anchors
from remote.drafter.blocks import Row as PackedRow
from remote.drafter.coarse_head import CoarseHead
from remote.drafter.head_plan import HeadPlan, plan_head
from remote.drafter.loss import drafter_loss
from remote.drafter.model import DFlashDrafter
from remote.drafter.optim import DrafterOptimizer
from remote.drafter.teacher import Teacher, expect
from remote.spec import DrafterSpec, LossSpec, OptimSpec, TargetSpec

GIB = 1024**3
NO_PROFILE = Profile((), (), None)
PARTS = ("forward", "head and loss", "backward", "optimizer")
KL, GAMMA = 0.15, 10.0
CHUNK_TOKENS = 1054  # 34 blocks of 31: as many as leave ddtree under 48 GiB, with the head in fp8 beside
CHECK_TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of the worst tensor's gradient
PLAIN_TIMES = 3  # or so many times what the plain path itself is off in this dtype: small tensors round badly
WARM_UP, MOST_TIMED, TIMED_MS = 2, 5, 8000  # steps; a slow step is timed less often, but twice


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]  # of the documents of one packed row, tokens
    num_anchors: int
    block_size: int


@dataclass(frozen=True)
class Variant:
    name: str
    attention: str  # a backend's name, or gathered
    is_fused: bool = False  # norms, rotary embedding, SwiGLU
    loss: str = "chunked"  # fused: row kernels; checkpointed: the first user's
    chunk_tokens: int = 2048
    is_checkpointed: bool = False  # layers
    is_coarse: bool = False  # the gradient of the hidden states with the head in fp8
    is_taught_ahead: bool = False  # the target's expectation is an input, as cached hidden states bring it
    cases: tuple[str, ...] = ()  # where it says something new; empty: everywhere

    def obstacle(self, device: torch.device) -> str | None:
        return "flex needs CUDA for gradients" if self.attention == "flex" and device.type != "cuda" else None


@dataclass(frozen=True)
class Shape:
    target: TargetSpec
    drafter: DrafterSpec
    dtype: torch.dtype


LARGE = Shape(
    TargetSpec("none", 5120, 64, 248_320, False, 0, 248_044, 248_044),
    DrafterSpec(5, 17_408, 32, 8, 128, [1, 16, 31, 46, 61], 32, 248_070, 1e7, 262_144),
    torch.bfloat16,
)
SMALL = Shape(TargetSpec("none", 32, 6, 96, False, 0, 2, 2), DrafterSpec(2, 48, 4, 2, 16, [0, 2, 4], 4, 3, 1e4, 512), torch.float32)  # fmt: skip

CASES = (
    Case("ddtree", (8000,), 1024, 32),
    Case("v6", (8000,), 512, 16),
    Case("multi", (3000, 4000, 5000), 1024, 32),
    Case("12x4096", (4096,) * 12, 1024, 32),
    Case("2048x32", (8000,), 2048, 32),
    Case("4096x32", (8000,), 4096, 32),
)
SMALLER = ("ddtree", "v6", "multi", "12x4096")  # than what only the kernels reach
FUSED = Variant("triton, all fused", "triton", is_fused=True, loss="fused", chunk_tokens=2048, is_taught_ahead=True)
COARSE = replace(FUSED, name="triton, all fused, fp8", chunk_tokens=CHUNK_TOKENS, is_coarse=True, cases=SMALLER)
BESIDE = replace(FUSED, name="triton, all fused, target's logits in the step", chunk_tokens=1664, is_taught_ahead=False, cases=SMALLER)  # fmt: skip
COARSE_BESIDE = replace(BESIDE, name="triton, all fused, fp8, target's logits in the step", chunk_tokens=CHUNK_TOKENS, is_coarse=True)  # fmt: skip
CHECKPOINTED = replace(
    FUSED, name="triton, all fused, layers checkpointed", is_checkpointed=True, cases=("ddtree", "2048x32", "4096x32")
)
FIRST_USER = Variant("the first user's way", "gathered", loss="checkpointed", is_checkpointed=True, cases=SMALLER)
PLAIN = Variant("the plain path", "eager")
VARIANTS = (
    FUSED,
    COARSE,
    BESIDE,
    COARSE_BESIDE,
    Variant("flex, chunked loss", "flex", cases=SMALLER),
    FIRST_USER,
    CHECKPOINTED,
    Variant("triton, chunked loss", "triton", cases=("ddtree",)),
    Variant("triton, fused loss", "triton", loss="fused", chunk_tokens=1664, cases=("ddtree",)),
    replace(COARSE, name="triton, all fused, fp8, chunks of 2048", chunk_tokens=2048, cases=("ddtree",)),
    replace(FUSED, name="flex, all else fused", attention="flex", cases=("ddtree", "12x4096")),
    Variant("sdpa, chunked loss", "sdpa", cases=("ddtree", "v6")),
)
FIRST_ROWS = (
    ("ddtree", FUSED),
    ("ddtree", FIRST_USER),
    ("v6", FUSED),
    ("v6", FIRST_USER),
    ("multi", FUSED),
    ("multi", FIRST_USER),
    ("ddtree", COARSE),
    ("v6", COARSE),
    ("multi", COARSE),
    ("ddtree", BESIDE),
    ("v6", BESIDE),
    ("multi", BESIDE),
    ("12x4096", FUSED),
    ("2048x32", FUSED),
    ("4096x32", FUSED),
    ("4096x32", CHECKPOINTED),
)  # what a budget is for; the others follow case by case


class Bench:
    """A drafter, its optimizer and the target's tables for one case and one variant."""

    def __init__(self, case: Case, variant: Variant, shape: Shape, device: torch.device) -> None:
        self.case, self.variant, self.device = case, variant, device
        self.target, self.drafter = shape.target, replace(shape.drafter, block_size=case.block_size)
        backend = GatheredAttention() if variant.attention == "gathered" else Backend(variant.attention, "benchmark")
        with torch.device("meta"):
            model = DFlashDrafter(
                self.target, self.drafter, backend=backend, is_fused=variant.is_fused,
                activation_checkpointing="non_reentrant" if variant.is_checkpointed else "none",
            )  # fmt: skip
        self.model = model.to(shape.dtype).to_empty(device=device)
        generator = torch.Generator(device).manual_seed(0)
        self.model.init_weights(generator)
        self.optimizer = DrafterOptimizer(
            self.model.named_parameters(), OptimSpec(), num_steps=1000, is_fused=variant.is_fused
        )
        hidden, vocab, num_context = self.target.hidden_size, self.target.vocab_size, sum(case.lengths)

        def draw(*size: int, scale: float) -> Tensor:
            return torch.empty(size, device=device, dtype=shape.dtype).normal_(0, scale, generator=generator)

        self.table_VH, self.head_VH = draw(vocab, hidden, scale=0.02), draw(vocab, hidden, scale=0.03)
        self.features_SC = draw(num_context, len(self.drafter.captured_layers) * hidden, scale=1.0)
        self.teacher_SH = draw(num_context, hidden, scale=1.0)
        self.teacher: Teacher = expect(self.teacher_SH, self.head_VH) if variant.is_taught_ahead else self.teacher_SH
        self.coarse_head = CoarseHead.of(self.head_VH) if variant.is_coarse else None
        self.loss_spec = LossSpec(terms={"ce": 1.0, "kl": KL}, gamma=GAMMA, chunk_tokens=variant.chunk_tokens)
        self.row = packed_row(case.lengths, vocab)

    def blocks(self, seed: int) -> tuple[Blocks, HeadPlan]:
        """Anchors of one step, made on the host as the trainer makes them."""
        anchors = self.case.num_anchors
        drawn = sample_anchors(
            self.row, num_slots=anchors, max_anchors=anchors, per="row", generator=torch.Generator().manual_seed(seed)
        )
        made = build_blocks(self.row, *drawn, block_size=self.case.block_size, mask_token_id=self.drafter.mask_token_id)
        return made, plan_head(made, chunk_tokens=self.variant.chunk_tokens)

    def step(self, seed: int, mark: object = None) -> Tensor:
        """One step; `mark(part)` is called where a part ends. The host waits for nothing."""
        mark = mark or (lambda part: None)
        made, plan = (held.to(self.device) for held in self.blocks(seed))
        hidden = self.hidden(made, plan)
        mark("forward")
        loss = self.loss(hidden, made, plan)
        mark("head and loss")
        loss.backward()
        mark("backward")
        self.optimizer.update(seed)
        mark("optimizer")
        return loss.detach()

    def hidden(self, made: Blocks, plan: HeadPlan) -> Tensor:
        """Of the slots that carry loss; the first user's way computes every slot, each for itself."""
        is_first_user = self.variant.loss == "checkpointed"
        rows_M = None if is_first_user else plan.index_M
        embeddings = F.embedding(made.ids_T if is_first_user else made.distinct_ids, self.table_VH)
        hidden: Tensor = self.model(self.features_SC, embeddings, self.row.to(self.device), made, rows_M)
        return hidden

    def loss(self, hidden: Tensor, made: Blocks, plan: HeadPlan) -> Tensor:
        if self.variant.loss == "checkpointed":
            return checkpointed_loss(
                hidden, made, head_VH=self.head_VH, teacher_hidden_SH=self.teacher_SH, kl=KL, gamma=GAMMA
            )
        return drafter_loss(
            hidden, made, head_VH=self.head_VH, teacher=self.teacher, spec=self.loss_spec, plan=plan,
            is_fused=self.variant.loss == "fused", coarse_head=self.coarse_head,
        ).objective()  # fmt: skip

    def work(self) -> Work:
        made, plan = self.blocks(0)
        num_context, is_taught_ahead = sum(self.case.lengths), self.variant.is_taught_ahead
        return least_work(
            self.target, self.drafter, made, plan, num_context=num_context, is_taught_ahead=is_taught_ahead,
            is_coarse=self.variant.is_coarse,
        )  # fmt: skip


def packed_row(lengths: Sequence[int], vocab: int) -> PackedRow:
    size = sum(lengths)
    ids = torch.randint(4, vocab, (size,), generator=torch.Generator().manual_seed(1))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    return PackedRow(ids, document, position, torch.ones(size, dtype=torch.bool))


def check(variant: Variant, shape: Shape, device: torch.device) -> float:
    """The worst relative gradient error of any trained tensor against the plain path in float64, on a small shape."""
    case = Case("check", (70, 45), 12, shape.drafter.block_size)
    target = replace(
        shape.target, vocab_size=min(shape.target.vocab_size, 3008), hidden_size=min(shape.target.hidden_size, 256)
    )
    drafter = replace(
        shape.drafter, num_layers=2, intermediate_size=min(shape.drafter.intermediate_size, 512), mask_token_id=3
    )
    small = Shape(target, drafter, shape.dtype)
    ours = Bench(case, variant, small, device)
    exact = Bench(case, PLAIN, small, device)
    exact.model.load_state_dict(ours.model.state_dict())
    exact.model.double()
    for name in ("table_VH", "head_VH", "features_SC", "teacher_SH"):
        setattr(exact, name, getattr(ours, name).double())
    exact.teacher = exact.teacher_SH
    for bench in (ours, exact):
        made, plan = (held.to(device) for held in bench.blocks(0))
        bench.loss(bench.hidden(made, plan), made, plan).backward()
    pairs = zip(ours.model.parameters(), exact.model.parameters(), strict=True)
    return max(float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in pairs)


def measure(case: Case, variant: Variant, shape: Shape, device: torch.device, rate: float) -> Row:
    """Warms up, times some steps without a wait between them, then times the parts of one more."""
    empty(device)
    bench = Bench(case, variant, shape, device)
    started_s = time.monotonic()
    float(bench.step(1))
    first_step_s = time.monotonic() - started_s
    marks = clock(device)
    for seed in range(2, 1 + WARM_UP):
        marks("start")
        bench.step(seed)
        marks("step")
    num_timed = max(2, min(MOST_TIMED, int(TIMED_MS / marks.milliseconds("step")[-1])))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    marks = clock(device)
    marks("start")
    for seed in range(num_timed):
        bench.step(10 + seed)
        marks("step")
    step_ms = statistics.median(marks.milliseconds("step"))
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    marks = clock(device, with_peaks=True)
    marks("start")
    bench.step(30, marks)
    parts = {part: marks.milliseconds(part)[0] for part in PARTS}
    # Without a card no time of attention is told, and the profiler takes ten times what a tiny step does.
    is_listed = variant is FUSED
    profile = profiled(lambda: bench.step(40), device) if is_listed or device.type == "cuda" else NO_PROFILE
    num_tokens = case.num_anchors * case.block_size
    return Row(
        case.name, variant.name, step_ms, first_step_s, num_tokens / step_ms, sum(case.lengths) / step_ms, peak_gib,
        bench.work(), rate, parts, profile.attention_ms, {part: marks.peaks[part] for part in PARTS if part in marks.peaks},
        *((profile.kernels, profile.products) if is_listed else ()),
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.small else torch.device("cpu")
    shape, cases = (LARGE, CASES) if device.type == "cuda" else (SMALL, [_shrunk(case) for case in CASES])
    if device.type == "cuda" and options.cap is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap / total_bytes), device)
    if device.type == "cuda":  # flex alone is compiled, and only there
        torch._dynamo.config.recompile_limit = 64  # every case has shapes of its own; a training has one
    started_s, rows, rate = time.monotonic(), list[Row](), ceiling(device, shape.dtype)
    header = header_of(device, rate)
    print(header, flush=True)
    wanted = _chosen(cases, options.only)
    right, num_wrong = _checked(
        [each for each in VARIANTS if any(each is variant for _, variant in wanted)], shape, device
    )
    for case, variant in (pair for pair in wanted if pair[1] in right):
        if time.monotonic() - started_s > options.budget:
            print(f"passed over, the budget of {options.budget:g} s is spent: {case.name}, {variant.name}", flush=True)
            continue
        try:
            rows.append(measure(case, variant, shape, device, rate))
        except Exception as error:  # noqa: BLE001 - one variant that breaks must not cost the rows of the others
            rows.append(Row(case.name, variant.name, failure=in_a_line(error)))
        print(rows[-1].line(), flush=True)
        if case is cases[0] and rows[-1].kernels:
            print("\n".join(detail_lines(rows[-1])), flush=True)
        write(options.out, header, rows, baseline=FIRST_USER.name)
    return 1 if num_wrong else 0


def _chosen(cases: Sequence[Case], text: str) -> list[tuple[Case, Variant]]:
    """Each case by the variants that say something new there, `FIRST_ROWS` first. The text begins with a word of theirs."""
    named = re.compile(rf"(?<!\w){re.escape(text)}")
    pairs = [
        (case, variant)
        for case in cases
        for variant in VARIANTS
        if named.search(f"{case.name} {variant.name}") and case.name in (variant.cases or (case.name,))
    ]
    return sorted(pairs, key=lambda pair: _place(*pair))


def _place(case: Case, variant: Variant) -> int:
    return next((at for at, row in enumerate(FIRST_ROWS) if row == (case.name, variant)), len(FIRST_ROWS))


def _checked(variants: Sequence[Variant], shape: Shape, device: torch.device) -> tuple[list[Variant], int]:
    """The variants that can run here and compute what the plain path computes; how many do something else."""
    right, num_wrong = [], 0
    plain = check(PLAIN, shape, device)
    tolerance = max(CHECK_TOLERANCE[shape.dtype], PLAIN_TIMES * plain)
    print(f"  {PLAIN.name}: worst gradient error {plain:.1e}; {tolerance:.1e} is allowed", flush=True)
    for variant in variants:
        obstacle = variant.obstacle(device)
        allowed = max(tolerance, CHECK_TOLERANCE[torch.bfloat16]) if variant.is_coarse else tolerance  # in any dtype
        verdict, is_right = (obstacle, False) if obstacle else _verdict(variant, shape, device, allowed)
        print(f"  {variant.name}: {verdict}", flush=True)
        num_wrong += not obstacle and not is_right
        right += [variant] if is_right else []
    return right, num_wrong


def _verdict(variant: Variant, shape: Shape, device: torch.device, tolerance: float) -> tuple[str, bool]:
    try:
        error = check(variant, shape, device)
    except Exception as failure:  # noqa: BLE001 - as for the rows
        return f"{in_a_line(failure)}: not timed", False
    is_right = error < tolerance
    return f"worst gradient error {error:.1e}{'' if is_right else ': WRONG, not timed'}", is_right


def _shrunk(case: Case) -> Case:
    return replace(case, lengths=tuple(length // 100 for length in case.lengths), num_anchors=case.num_anchors // 128, block_size=case.block_size // 8)  # fmt: skip


def empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bytes(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+) ?GiB", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 95GiB")
    return float(found[1]) * GIB


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of step.json, step.md and step.svg"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further row begins")
    parser.add_argument("--cap", type=_bytes, help="what this process may take of the card, such as 95GiB")
    parser.add_argument("--only", default="", help="rows whose case or variant has a word that begins so")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
