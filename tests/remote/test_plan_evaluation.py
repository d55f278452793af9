"""The plan of the evaluation at the end, against torch's own books of a real one on a CPU."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from benchmarks.books import Books
from remote.drafter import decode, lossless, tree, workbench
from remote.drafter.data import Chat
from remote.drafter.evaluate import evaluate
from remote.drafter.target import Target
from remote.plan import EVALUATION, plan, verdict_of
from remote.plan.evaluation import CACHE_ROOM_TOKENS, COMPARED_ROWS, MARGINAL_ROWS, evaluation_components
from remote.plan.sizes import sizes
from remote.spec import DFlashSpec, DrafterSpec, TargetSpec
from tests.remote.specs import tiny_spec

GIB = 2**30
ALWAYS = {"Python and torch", "transformers and the tokenizer", "library workspace", "target model", "drafter weights"}
QUESTION = "Why is it so that nobody has ever seen one of them from the other side of the river? "


def _spec(**sections: dict[str, object]) -> DFlashSpec:
    return tiny_spec(**sections)


def test_it_is_planned_with_the_whole_target_and_without_what_only_steps_need() -> None:
    made = plan(_spec(), device="cuda")

    assert made.evaluation is not None
    assert made.evaluation.name == EVALUATION
    names = {line.name: line.size_bytes for line in made.evaluation.components}
    assert names["target model"] == 2 * 40_000
    assert not {"fp32 masters", "optimizer moments", "gradients"} & set(names)
    assert made.evaluation_bytes > made.evaluation.allocated_bytes, "the allocator's slack and the context must fit too"
    assert not any("evaluation at the end" in text for text in made.not_modelled), "it is in the plan"


def test_it_counts_in_the_verdict_and_not_where_it_is_left_out() -> None:
    made = plan(_spec(), device="cuda")
    assert made.evaluation_bytes > made.target_pass_bytes

    small = plan(_spec(), device="cuda", capacity_bytes=made.evaluation_bytes - 1)
    words = (small.step_verdict, small.pass_verdict, small.evaluation_verdict)
    assert (small.verdict, words[2]) == ("does not fit", "does not fit")
    left_out = plan(_spec(evaluate={"at_end": False}), device="cuda", capacity_bytes=made.evaluation_bytes - 1)
    assert (left_out.evaluation, left_out.evaluation_bytes, left_out.evaluation_verdict) == (None, 0, None)
    assert left_out.verdict == verdict_of(max(made.driver_bytes, made.target_pass_bytes), made.evaluation_bytes - 1)
    assert plan(_spec(), rung="fwd_bwd").evaluation is None, "a rung evaluates nothing"


def test_what_a_target_without_a_cache_takes_beyond_it_is_told_with_its_size() -> None:
    def told(budgets: list[int]) -> list[str]:
        made = plan(_spec(evaluate={"tree_budgets": budgets}), device="cuda")
        return [text for text in made.not_modelled if "each path of a tree" in text]

    assert len(told([16, 128])) == 1
    assert told([]) == []


def test_the_plan_of_it_knows_the_trainers_own_constants() -> None:
    rows = inspect.signature(tree.top_marginals).parameters["chunk_tokens"].default

    assert (rows, lossless._LOGIT_ROWS) == (MARGINAL_ROWS, COMPARED_ROWS)
    assert f"setting.max_new_tokens + {CACHE_ROOM_TOKENS})" in inspect.getsource(decode._Text)


@pytest.mark.slow
@pytest.mark.parametrize(("compares", "block_size", "max_new_tokens"), [(False, 4, 24), (True, 4, 24), (False, 16, 40)])
def test_a_real_one_takes_no_more_than_its_plan_and_more_than_half(
    compares: bool,
    block_size: int,
    max_new_tokens: int,
    tiny_target: Target,
    tiny_target_spec: TargetSpec,
    tiny_drafter_spec: DrafterSpec,
) -> None:
    """Beside the weights, with a prompt as long as a row; the copy that logsumexp makes inside stands in no books."""
    chats = [Chat(({"role": "user", "content": QUESTION * 3},), where="line 1")]
    num_tokens = len(tiny_target.prompt_ids(chats[0].messages))
    choices = {"num_prompts": 1, "max_new_tokens": max_new_tokens, "tree_budgets": [16], "compare_untrained": compares}
    spec = tiny_spec(evaluate=choices, data={"row_tokens": num_tokens})
    spec = replace(spec, target=tiny_target_spec, drafter=replace(tiny_drafter_spec, block_size=block_size))
    made = workbench.choose(spec, torch.device("cpu"))
    drafter = workbench.fresh_drafter(spec, made, device=torch.device("cpu"))
    books = Books()
    weights = [weight for layer in tiny_target.decoder.layers for weight in layer.parameters()]
    weights += [*tiny_target.decoder.norm.parameters(), tiny_target.head_VH, *drafter.parameters()]
    books.alive = {weight.untyped_storage()._cdata: 0 for weight in weights}  # there before, whatever views them

    with books:
        evaluate(drafter, tiny_target, spec, prompts=chats)

    lines = evaluation_components(spec, sizes(spec, device="cpu"))
    planned = sum(line.size_bytes for line in lines if line.name not in ALWAYS)
    assert planned / 2 < books.peak_bytes <= 1.05 * planned
