"""The resolved job: the one schema that a recipe, the memory plan and the trainer share.

Frozen dataclasses, standard library only. A recipe is YAML whose keys are these field names;
`orchestrator.recipe` fills and validates them, `RunDir.spec_json` carries them to the host and
`load` reads them back there. A field's unit stands at the end of its name: a recipe may write a
duration (`2h30m`) into `*_s` and a size (`95GiB`) into `*_bytes`; here they are plain numbers.

It does not read YAML, it does not know branches, and it does not look at the host.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from remote.typed import build

SPEC_VERSION = 1

BUNDLED_RUNGS: tuple[str, ...] = ("fwd", "fwd_bwd", "multi_doc", "leak", "checkpoint")
REAL_RUNG, RANKS_RUNG = "real", "ranks"  # on real rows, where named; of two processes, where roles want it


@dataclass(frozen=True)
class TargetSpec:
    """The big frozen model whose decoding is made faster. Its shape is written down so that a laptop without torch can plan."""

    source: str
    """Its weights: a Hugging Face folder on the host, or `package:<distribution>/<file>.gguf` of an installed package."""
    hidden_size: int
    """Width of its hidden states, and so of the drafter's."""
    num_layers: int
    """Its decoder layers."""
    vocab_size: int
    """Rows of its embedding and of its output head; the drafter uses both, frozen."""
    tied_embeddings: bool
    """Whether embedding and output head are one matrix, which is then held in memory once."""
    num_parameters: int
    """All its weights; the plan reckons its size in memory from them."""
    eos_token_id: int
    """The token that ends a text; decoding stops there."""
    pad_token_id: int
    """The token its tokenizer pads with; the export names it, and the mask token must be another."""
    keep_layers: int | None = None
    """Cuts the target to its first layers, for tests and small hosts; null keeps all. What it then says is no text."""


@dataclass(frozen=True)
class DrafterSpec:
    """The small model that is trained, DFlash: it reads captured hidden states of the target and drafts a block at once."""

    num_layers: int
    """Its decoder layers; each more costs time in every draft, 5 is usual."""
    intermediate_size: int
    """Inner width of each layer's MLP; the target's own is usual."""
    num_heads: int
    """Query heads of attention, a multiple of num_kv_heads."""
    num_kv_heads: int
    """Key and value heads; fewer than num_heads share them in groups."""
    head_dim: int
    """Width of one head, even; it need not be hidden_size / num_heads."""
    captured_layers: list[int]
    """Target layers whose hidden states it reads, from 0, rising, without the last: early, middle and late ones."""
    block_size: int
    """Slots of a block: the anchor, a known token, and the block_size - 1 tokens after it that one pass drafts."""
    mask_token_id: int
    """The token that stands for what is not drafted yet: a row of the embedding no text uses, neither eos nor pad."""
    rope_theta: float
    """Base of the rotary position embedding; the target's own is usual."""
    max_position_embeddings: int
    """Longest position in tokens that the exported drafter says it can serve; training does not read it."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in each RMS norm, against a division by zero."""
    layer_types: list[Literal["full", "sliding"]] = field(default_factory=list)
    """How far each layer sees: `full` the whole document before the anchor, `sliding` its last sliding_window tokens; empty: full, or as window_rule says."""
    sliding_window: int | None = None
    """Context tokens a sliding layer sees, at least block_size; shorter is quicker on long rows and blind further back."""
    window_rule: Literal["specforge", "automodel", "modelopt", "speculators"] = "specforge"
    """Whose meaning of a window: whether its edge moves with the slot and a slot sees later ones; specforge is what servers do."""
    attention: Literal["auto", "sdpa", "flex", "triton", "eager"] = "auto"
    """Which code computes attention, with the same result: auto takes triton (draftyard's own kernels) or flex on a GPU and sdpa elsewhere, eager is the slow check."""
    attention_workspace_bytes: int = 2 * 1024**3
    """What gathered keys, values and scores of sdpa may take at once; less memory means more and smaller pieces."""
    init_from: str | None = None
    """An exported drafter's folder on the host, whose weights training goes on from; null starts from random ones."""


@dataclass(frozen=True)
class NoiseSpec:
    """Noise added to the captured hidden states of every training step, so that the drafter learns not to trust them to the last digit."""

    kind: Literal["none", "gaussian", "uniform"] = "none"
    """Its distribution, around zero; none adds nothing."""
    scale: float = 0.0
    """Its size, in the units of the hidden states: the standard deviation of gaussian, half the width of uniform."""


@dataclass(frozen=True)
class DataSpec:
    """What is trained on, packed several documents a row. Files are JSONL chat rows in `data/` beside the recipe, or absolute paths on the host."""

    prompts: str
    """Chat rows without answers; `prepare` lets the target answer them."""
    answers: str
    """Chat rows with the target's own answers, which are what is learnt; made by `prepare` where there are none."""
    held_out: str
    """Prompts never trained on; evaluation decodes them."""
    row_tokens: int
    """Length of a packed row in context tokens: documents are put one after the other until it is full."""
    max_anchors: int
    """Most blocks drafted a step in each row, or in each document (see anchors_per); the block tokens are this x block_size."""
    anchors_per: Literal["row", "document"]
    """What max_anchors counts for: a packed row (one fixed cost) or each document in it (short ones are not left out)."""
    hidden_states: Literal["cached", "online"] = "cached"
    """Whether the target's hidden states are computed once and kept on disk, or anew each step with the target on the card."""
    noise: NoiseSpec = field(default_factory=NoiseSpec)
    num_workers: int = 0
    """Processes that read rows ahead; 0 reads them in the trainer itself, which online hidden states need."""
    answer_tokens: int = 56
    """Where `prepare` cuts an answer, in tokens."""
    answer_temperature: float = 0.0
    """Of the target when it answers: 0 always takes the likeliest token, 0.7 samples more varied texts."""
    answer_batch: int = 32
    """Prompts that `prepare` answers at a time; more is faster and takes more memory."""


@dataclass(frozen=True)
class LossSpec:
    """What is minimised: the sum of terms x coefficients of every supervised slot, times its weight, over a denominator."""

    terms: dict[str, float] = field(default_factory=lambda: {"ce": 1.0})
    """Coefficient of each term of the loss by name (ce, kl, soft_ce, cap), not negative; 0, null or left out: not used."""
    label: Literal["data", "teacher_argmax"] = "data"
    """What counts as right: the token of the text, or the target's likeliest one (they differ in sampled answers)."""
    decay: Literal["exponential", "dpace", "none"] = "exponential"
    """Weight of slot k: falling by gamma, the accepted tokens expected from slot k on (dpace; needs ce), or 1 everywhere."""
    gamma: float = 7.0
    """Decay length of the exponential weight in slots, w_k = exp(-(k-1)/gamma): 4, 7, 10 are usual for blocks of 8, 16, 32."""
    dpace_alpha: float = 0.5
    """How far dpace believes the drafter: likelihood q counts as (1 - alpha) q + alpha, so that 1 weighs by position alone."""
    streak_beta: float = 0.0
    """Extra weight of a slot whose earlier slots are all right, w_k x (1 + beta): it pays to lengthen a streak; 0: off."""
    normalization: Literal["weights", "supervised", "rows"] = "weights"
    """What the sum is divided by: its weights, the supervised slots or the rows; the fitting learning rate depends on it."""
    chunk_tokens: int = 2048
    """Block tokens whose logits over the vocabulary are alive at once; fewer take less memory and more passes."""
    hidden_gradient: Literal["full", "fp8", "auto"] = "full"
    """How the hidden states' gradient is made: full; fp8 (a faster step, the head once more in 8 bits); auto: fp8 where it can."""


@dataclass(frozen=True)
class OptimSpec:
    """How the drafter's weights move."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw for everything, or muon for matrices (GPU only) and adamw for the rest."""
    lr: float = 6e-4
    """AdamW's full learning rate, reached after the warm-up."""
    beta1: float = 0.9
    """AdamW's memory of the gradient: the share kept at each step."""
    beta2: float = 0.95
    """AdamW's memory of the squared gradient: the share kept at each step."""
    eps: float = 1e-8
    """Added to AdamW's denominator, against a division by zero."""
    weight_decay: float = 0.0
    """Share of each matrix taken off at a step, times the learning rate; norms have none."""
    muon_lr: float = 6e-3
    """Muon's full learning rate, about ten times AdamW's."""
    muon_momentum: float = 0.95
    """Muon's memory of the gradient: the share kept at each step."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """How the rate falls from the warm-up to the last step: wsd stays full and falls in the last fifth."""
    warmup_steps: int = 0
    """Steps over which the rate rises evenly to full; 4 % of all is usual."""
    min_lr_ratio: float = 0.0
    """The rate at the last step, as a share of the full one."""
    clip_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it before an update; 0: never."""
    master_dtype: Literal["float32", "none"] = "float32"
    """Whether bfloat16 weights have a float32 copy that is updated; without it small updates round away (norms stand still)."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of AdamW's two memories; bfloat16 saves 4 bytes a parameter."""


@dataclass(frozen=True)
class TrainSpec:
    """The training loop: how long, how much a step, what is kept."""

    num_steps: int
    """Optimizer steps in all; the learning rate's schedule ends there."""
    rows_per_step: int = 1
    """Packed rows that go through the drafter at once; memory grows with them."""
    accumulation: int = 1
    """Batches of rows_per_step rows whose gradients are summed before one update; time grows, memory does not."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations; auto is bfloat16 on a GPU and float32 on a processor."""
    activation_checkpointing: Literal["none", "non_reentrant", "reentrant"] = "none"
    """Whether layers are computed again in the backward pass instead of kept: less memory, about a fifth more time."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Which code computes norms, rotary embedding, SwiGLU and the loss's rows, with the same result: torch's operations, or fused ones (triton); auto takes these where a GPU passes their check."""
    log_every: int = 1
    """Steps between two reports of loss, accuracy and speed; a report is the mean of the steps since the last."""
    checkpoint_every: int = 500
    """Steps between two checkpoints, from which a resume goes on; the last step always makes one."""
    keep_last: int = 2
    """Newest checkpoints that are kept; the best is kept beside them."""
    seed: int = 0
    """Of first weights, order of rows, anchors and noise: the same seed and recipe repeat a run."""
    num_threads: int | None = None
    """CPU threads of the trainer; null leaves torch's choice."""
    record_allocations: bool = False
    """Whether a training on a GPU keeps who allocated what in every step, not in its first ten alone: some 5 % of a short step's time."""


@dataclass(frozen=True)
class EvaluateSpec:
    """Acceptance measured by really decoding held-out prompts, the drafter drafting and the target verifying."""

    at_end: bool = True
    """Whether a training ends with it; `draftyard evaluate` does it at any time."""
    num_prompts: int = 8
    """Held-out prompts decoded; more narrow the interval of the result."""
    max_new_tokens: int = 32
    """Tokens decoded for each prompt."""
    temperature: float = 0.0
    """Of the target while decoding; 0 always takes the likeliest token."""
    tree_budgets: list[int] = field(default_factory=lambda: [16, 32, 64, 128])
    """Sizes in tokens of the trees of alternatives (DDTree) that are also verified at once (a processor takes the smallest); empty: blocks only."""
    compare_untrained: bool = False
    """Also tells the acceptance of the drafter as it was before its first step, replayed along the plain texts, to show what training gave."""


@dataclass(frozen=True)
class SmokeSpec:
    """The smoke ladder: short tests at the worst batch. A launch wants every rung passed with the same fingerprint."""

    rungs: list[str] = field(default_factory=lambda: list(BUNDLED_RUNGS))
    """Tests that a launch wants passed: bundled ones, `real` (on the recipe's own rows) or names of scripts; the bundled trainer's floor is always among them."""
    timed_steps: int = 3
    """Steps that fwd_bwd times after its warm-up, 3 or more; the median is told."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Rungs of your own: name -> Python file in the shipped tree; exit status 0 passes."""


@dataclass(frozen=True)
class LifeSpec:
    """How the run lives and ends."""

    grace_s: float = 60.0
    """Time a stopped job has to save a checkpoint, between the polite signal and the kill."""
    max_duration_s: float | None = None
    """The job is stopped after this time; null: never."""
    start_timeout_s: float = 600.0
    """An attempt that has said nothing by then is called failed."""
    stall_factor: float = 20.0
    """A run is called stalled after this many median steps without a new one, and at least 120 s."""
    retries: int = 0
    """New attempts that are made by themselves, each from the newest checkpoint, when a run fails for one of retry_on."""
    retry_on: list[str] = field(default_factory=list)
    """Failures worth another attempt, by kind: reboot, gpu_fault, ..."""
    on_end: list[str] = field(default_factory=list)
    """A program with its arguments, run on the host after each attempt of a training has ended: [shutdown, -h, '+10']."""
    num_gpus: int = 1
    """GPUs the job asks for where the host has any."""
    memory_limit_bytes: int | None = None
    """What each process of the job may allocate, on hosts without a GPU; null: no limit."""


@dataclass(frozen=True)
class RolesSpec:
    """Who does what where several GPUs share a training, one process on each; life.num_gpus is then target + drafter."""

    target: int = 0
    """Processes that only run the target and send its hidden states to the drafters; 0: each drafter has its hidden states itself."""
    drafter: int = 1
    """Processes that train, each on its share of a step's batches, so train.accumulation is a multiple of it."""
    queue: int = 2
    """Batches of hidden states that a drafter may have waiting or on their way, on its GPU; more evens out uneven rows."""


@dataclass(frozen=True)
class DFlashSpec:
    """A job of the bundled trainer."""

    recipe: str
    """The recipe's name; filled in."""
    branch: str
    """The branch's name; filled in."""
    entry: Literal["dflash"]
    """Who trains: dflash is the bundled trainer, script a program of your own."""
    target: TargetSpec
    drafter: DrafterSpec
    data: DataSpec
    train: TrainSpec
    loss: LossSpec = field(default_factory=LossSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    roles: RolesSpec = field(default_factory=RolesSpec)
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    smoke: SmokeSpec = field(default_factory=SmokeSpec)
    life: LifeSpec = field(default_factory=LifeSpec)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job, by name; no secrets: a recipe is kept with its runs."""
    why: str = ""
    """One sentence on what this branch is for; shown with its runs."""
    tags: list[str] = field(default_factory=list)
    """Words that `ls tag:WORD` finds its runs by."""


@dataclass(frozen=True)
class ScriptSpec:
    """A job of the user's own: a folder that is shipped and a command run inside it."""

    recipe: str
    """The recipe's name; filled in."""
    branch: str
    """The branch's name; filled in."""
    entry: Literal["script"]
    """Who trains: script is a program of your own, dflash the bundled trainer."""
    folder: str
    """What is shipped, relative to the recipe's file."""
    command: list[str]
    """The program and its arguments, run inside the folder; {python} is the host's interpreter."""
    smoke: SmokeSpec = field(default_factory=lambda: SmokeSpec(rungs=[]))
    life: LifeSpec = field(default_factory=LifeSpec)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job, by name; no secrets: a recipe is kept with its runs."""
    settings: dict[str, str] = field(default_factory=dict)
    """Values for your script, by names of your own; it reads them from spec.json in the run's folder."""
    why: str = ""
    """One sentence on what this branch is for; shown with its runs."""
    tags: list[str] = field(default_factory=list)
    """Words that `ls tag:WORD` finds its runs by."""


Spec = DFlashSpec | ScriptSpec
ENTRIES: dict[str, type[DFlashSpec] | type[ScriptSpec]] = {"dflash": DFlashSpec, "script": ScriptSpec}

# Fields that change what a person reads, never what runs: the gate's fingerprint leaves them out.
COSMETIC = ("why", "tags")

# Fields and sections that no rung of the bundled ladder reads: a rung takes its own few steps on rows made from shapes
# alone, decodes nothing and is not resumed. The fingerprint leaves them out (docs/decisions.md).
UNTESTED = """
    train.num_steps train.log_every train.checkpoint_every train.keep_last evaluate smoke.rungs
    train.record_allocations data.num_workers data.answer_tokens data.answer_temperature data.answer_batch
    life.grace_s life.max_duration_s life.start_timeout_s life.stall_factor life.retries life.retry_on life.on_end
"""

READ_BY_REAL = "data.answer_tokens data.answer_temperature"  # of these: they count where a recipe wants the rung `real`

LOSS_TERMS = {
    "ce": "Cross-entropy of the label, in nats: how surprised the drafter is by the right token; 1 is usual.",
    "kl": "Divergence from the target's whole distribution to the drafter's, in nats: it teaches second choices too; 0.15 is usual beside ce.",
    "soft_ce": "Cross-entropy against the target's whole distribution, in nats: the gradient of kl, another value.",
    "cap": "Mean entropy of the slots that are already right, in nats: it makes the drafter surer where it is right, at the cost of second choices.",
}


def num_drafter_parameters(target: TargetSpec, drafter: DrafterSpec) -> int:
    """Trainable parameters: L·(2·H·nq·d + 2·H·nkv·d + 3·H·I + 2H + 2d) + K·H² + 2H."""
    hidden, heads = target.hidden_size, (drafter.num_heads + drafter.num_kv_heads) * drafter.head_dim
    layer = 2 * hidden * heads + 3 * hidden * drafter.intermediate_size + 2 * hidden + 2 * drafter.head_dim
    return drafter.num_layers * layer + len(drafter.captured_layers) * hidden**2 + 2 * hidden


def dump(spec: Spec) -> str:
    """The spec as JSON text, with its version."""
    return json.dumps({"spec_version": SPEC_VERSION} | asdict(spec), indent=1, sort_keys=True, allow_nan=False)


def load(path: Path) -> Spec:
    """Reads what `dump` wrote; a spec of another version or with unknown keys is a ValueError."""
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, where: str) -> Spec:
    """The same from text; `where` is named in errors."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{where}: holds a {type(tree).__name__}; it must be an object")
    version = tree.pop("spec_version", None)
    if version != SPEC_VERSION:
        raise ValueError(f"{where}: spec version {version!r}, this code reads {SPEC_VERSION}; update the older side")
    entry = tree.get("entry")
    kind = ENTRIES.get(entry) if isinstance(entry, str) else None
    if kind is None:
        raise ValueError(f"{where}: entry is {entry!r}; it must be one of {', '.join(ENTRIES)}")
    built: Spec = build(kind, tree, where)
    return built
