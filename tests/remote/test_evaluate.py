"""Acceptance, intervals, text equality and estimates of an evaluation."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote.drafter import evaluate as evaluation_room
from remote.drafter import workbench
from remote.drafter.attention import Backend, choose_backend
from remote.drafter.data import Chat
from remote.drafter.decode import Decoded, Setting, decode_chain, decode_plain, replay_chain
from remote.drafter.estimate import estimate
from remote.drafter.evaluate import evaluate, is_degenerate
from remote.drafter.export import export_drafter
from remote.drafter.interval import bootstrap, bootstrap_sums, difference
from remote.drafter.model import DFlashDrafter
from remote.drafter.target import Target
from tests.remote.specs import tiny_spec

QUESTIONS = ["Why is it so?", "Who?", "When did they come?", "2 + 2", "A poem about rain.", "No"]


@pytest.fixture(scope="module")
def spec(tiny_target_spec, tiny_drafter_spec):
    made = tiny_spec(
        evaluate={"num_prompts": 5, "max_new_tokens": 16, "compare_untrained": True, "tree_budgets": [4, 8]}
    )
    return replace(made, target=tiny_target_spec, drafter=tiny_drafter_spec)


@pytest.fixture(scope="module")
def drafter(spec):
    backend = choose_backend(spec.drafter, device=torch.device("cpu"), dtype=torch.float32)
    made = DFlashDrafter(spec.target, spec.drafter, backend=backend)
    made.init_weights(torch.Generator().manual_seed(7))
    return made


@pytest.fixture(scope="module")
def chats():
    return [Chat(({"role": "user", "content": text},), where=f"line {i}") for i, text in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def evaluation(drafter, tiny_target, spec, chats):
    return evaluate(drafter, tiny_target, spec, prompts=chats)


def row(evaluation, **wanted):
    found = [r for r in evaluation.rows if all(r.protocol.get(name) == value for name, value in wanted.items())]
    assert len(found) == 1, wanted
    return found[0]


@pytest.mark.slow
def test_every_way_of_decoding_has_a_row_with_its_protocol(evaluation):
    ways = [(r.protocol["method"], r.protocol.get("drafter"), r.protocol.get("budget")) for r in evaluation.rows]

    assert ways == [
        ("plain", None, None),
        ("chain", "untrained", None),
        ("chain", "trained", None),
        ("tree", "trained", 4),
        ("offline", "trained", None),
    ]
    for found in evaluation.rows:
        assert {"target", "temperature", "thinking", "template", "max_tokens", "prompts", "dtype"} <= set(
            found.protocol
        )


@pytest.mark.slow
def test_drafted_texts_are_the_plain_ones(evaluation):
    for method in ("chain", "tree"):
        values = row(evaluation, method=method, drafter="trained").values
        assert values["mismatches"] == 0
        assert values["texts_equal"] + values["near_ties"] == row(evaluation, method="plain").protocol["num_prompts"]


@pytest.mark.slow
def test_acceptance_is_the_mean_over_prompts_of_the_mean_over_rounds(evaluation):
    values = row(evaluation, method="chain", drafter="trained").values

    assert values["acceptance_length_low"] <= values["acceptance_length"] <= values["acceptance_length_high"]
    assert 1 <= values["acceptance_length"] <= 4
    assert values["acceptance_at"] == sorted(values["acceptance_at"], reverse=True)
    assert len(values["acceptance_at"]) == 3


@pytest.mark.slow
def test_trained_and_untrained_and_tree_and_chain_are_compared_by_prompt(evaluation):
    chain = row(evaluation, method="chain", drafter="trained").values
    untrained = row(evaluation, method="chain", drafter="untrained").values
    tree = row(evaluation, method="tree").values

    assert chain["over_untrained"] == pytest.approx(chain["acceptance_length"] - untrained["acceptance_length"])
    assert tree["over_chain"] == pytest.approx(tree["acceptance_length"] - chain["acceptance_length"])
    assert tree["over_chain_low"] <= tree["over_chain"] <= tree["over_chain_high"]


@pytest.mark.slow
def test_the_untrained_drafter_is_replayed_along_the_plain_text_and_not_decoded_with(
    evaluation, drafter, tiny_target, spec, chats
):
    """Its acceptance is what decoding would measure; it reads each text in one pass, and has no clock and no text."""
    found = row(evaluation, method="chain", drafter="untrained")
    num_prompts = row(evaluation, method="plain").protocol["num_prompts"]
    untrained = evaluation_room.before_training(drafter, spec)
    cases = [(tiny_target.prompt_ids(chat.messages), Setting(16)) for chat in chats[:5]]
    decoded = [decode_chain(tiny_target, untrained, *case).accepted for case in cases]

    assert found.protocol["rounds"] == "replayed along the plain text"
    assert num_prompts == 5, "every text counts, or the means below are of others"
    assert found.values["num_rounds"] == sum(map(len, decoded))
    assert found.values["acceptance_length"] == pytest.approx(sum(sum(a) / len(a) for a in decoded) / 5)
    assert not {"tokens_per_s", "speed_up", "texts_equal", "near_ties", "mismatches"} & set(found.values)
    assert "untrained chain, replayed: " in evaluation.summary


@pytest.mark.slow
def test_a_row_that_is_compared_with_the_untrained_drafter_says_how_that_was_measured(evaluation):
    for found in evaluation.rows:
        told = found.protocol.get("untrained_rounds")
        assert told == ("replayed along the plain text" if "over_untrained" in found.values else None)


@pytest.mark.slow
def test_comparing_with_the_untrained_drafter_costs_one_pass_of_the_target_a_text(drafter, tiny_target, spec, chats):
    passes = []

    class Noting:
        def __getattr__(self, name):
            return getattr(tiny_target.decoder, name)

        def run(self, ids_BQ, position_BQ, **options):
            passes.append(ids_BQ.shape[1])
            return tiny_target.decoder.run(ids_BQ, position_BQ, **options)

    def num_passes(compare_untrained):
        passes.clear()
        made = replace(spec, evaluate=replace(spec.evaluate, compare_untrained=compare_untrained))
        found = evaluate(drafter, replace(tiny_target, decoder=Noting()), made, prompts=chats)
        return len(passes), row(found, method="plain").protocol["num_prompts"]

    (alone, _), (compared, num_prompts) = num_passes(False), num_passes(True)

    assert compared - alone == num_prompts


def test_the_drafter_before_its_first_step_is_the_one_training_went_on_from(drafter, spec, tmp_path):
    """With init_from nothing was ever drawn at random: the gain over the start is that of the training."""
    made = replace(spec, drafter=replace(spec.drafter, init_from=str(tmp_path / "export")))
    export_drafter(drafter, spec, tmp_path / "export", step=1)
    moved = copy.deepcopy(drafter)
    with torch.no_grad():
        moved.fc.weight.mul_(-1)

    start = evaluation_room.before_training(moved, made)

    assert torch.equal(start.fc.weight, drafter.fc.weight.bfloat16().float())  # as an export holds it
    assert not torch.equal(evaluation_room.before_training(moved, spec).fc.weight, start.fc.weight)
    assert torch.equal(moved.fc.weight, -drafter.fc.weight)


def test_the_drafter_before_its_first_step_is_the_one_that_training_draws(spec):
    choices = workbench.choose(spec, torch.device("cpu"))
    drawn = workbench.fresh_drafter(spec, choices, device=torch.device("cpu"))
    trained = copy.deepcopy(drawn)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(1)

    start = evaluation_room.before_training(trained, spec)

    assert all(torch.equal(*pair) for pair in zip(start.parameters(), drawn.parameters(), strict=True))


@pytest.mark.slow
def test_a_row_is_told_when_it_is_known(drafter, tiny_target, spec, chats):
    """An evaluation of hours that ends in the middle keeps what it had measured."""
    told = []

    class PowerCut(Exception):
        pass

    def progress(what, *, done, total, unit):
        if what == "decoding: trained tree of 4 nodes" and done == 1:
            raise PowerCut

    with pytest.raises(PowerCut):
        evaluate(drafter, tiny_target, spec, prompts=chats, progress=progress, on_row=told.append)

    assert [(r.protocol["method"], r.protocol.get("drafter")) for r in told] == [
        ("plain", None),
        ("chain", "untrained"),
        ("chain", "trained"),
    ]
    assert "over_untrained" in told[-1].values


class Counting(DFlashDrafter):
    """Counts the texts that are begun with it."""

    num_begun = 0

    def draft(self, features_MC, cache, block_embeddings_BH):
        self.num_begun += cache.num_tokens == 0
        return super().draft(features_MC, cache, block_embeddings_BH)


@pytest.mark.slow
def test_every_way_of_decoding_is_begun_once_before_its_clock_runs(drafter, tiny_target, spec, chats):
    """The first text pays for what is loaded and made once, on a card some tenths of a second; no way has that alone."""
    counting = copy.deepcopy(drafter)
    counting.__class__ = Counting
    alone = replace(spec, evaluate=replace(spec.evaluate, compare_untrained=False))

    found = evaluate(counting, tiny_target, alone, prompts=chats)

    num_cases = row(found, method="plain").protocol["num_prompts"]
    assert counting.num_begun == 2 * (num_cases + 1)  # chain, and the smallest tree


@pytest.mark.slow
def test_texts_that_run_in_circles_are_counted_and_left_out(drafter, tiny_target, spec, chats):
    speechless = replace(tiny_target, head_VH=torch.zeros_like(tiny_target.head_VH))  # says token 0 for ever
    ticks = []

    def progress(what, *, done, total, unit):
        ticks.append((done, total))

    evaluation = evaluate(drafter, speechless, spec, prompts=chats, progress=progress)

    protocol = row(evaluation, method="plain").protocol
    assert (protocol["num_degenerate"], protocol["num_prompts"]) == (5, 0)
    assert sum("repeats itself" in note for note in evaluation.notes) == 5
    assert math.isnan(row(evaluation, method="tree").values["acceptance_length"])
    assert "5 prompts left out" in evaluation.summary
    assert ticks[-1] == (5, 5)


def test_a_difference_that_is_no_near_tie_is_a_mismatch_and_says_so(drafter, tiny_target, spec, chats):
    bench = evaluation_room._Bench(tiny_target, spec, lambda *a, **k: None)
    prompt = tiny_target.prompt_ids(chats[0].messages)
    plain = decode_plain(tiny_target, prompt, Setting(8))
    wrong = Decoded((*plain.ids[:3], (plain.ids[3] + 1) % 260, *plain.ids[4:]), plain.accepted, 1.0, 7)
    case = evaluation_room._Case(1, prompt, Setting(8), plain)

    counts = evaluation_room._texts_against_plain(
        bench, [case], evaluation_room._Run("trained", "chain", None, [wrong.accepted], [wrong])
    )

    assert counts == {"texts_equal": 0, "near_ties": 0, "mismatches": 1}
    assert "prompt 1, trained chain: from token 4 on" in bench.notes[0]
    assert "NOT a near tie" in bench.notes[0]


@dataclass(frozen=True)
class Tied:
    """A target of which two tokens have as good as one row of the head, and a text that took the other one of them."""

    target: Target
    case: evaluation_room._Case
    place: int  # where the texts part
    text: Decoded  # behind that place what the target says after it

    def counts(self, ids, *, method="chain", budget=None):
        bench = evaluation_room._Bench(self.target, tiny_spec(), lambda *a, **k: None)
        text = replace(self.text, ids=tuple(ids))
        run = evaluation_room._Run("trained", method, budget, [text.accepted], [text])
        return evaluation_room._texts_against_plain(bench, [self.case], run), bench.notes[0]


@pytest.fixture(scope="module")
def tied(tiny_target, chats):
    prompt = tiny_target.prompt_ids(chats[0].messages)
    first = decode_plain(tiny_target, prompt, Setting(8)).ids[3]
    head = tiny_target.head_VH.clone()
    other = (first + 1) % head.shape[0]
    head[other] = head[first] * (1 - 1e-7)
    target = replace(tiny_target, head_VH=head)
    plain = decode_plain(target, prompt, Setting(8))
    place = next(i for i, token in enumerate(plain.ids) if token in (first, other))
    begun = [*plain.ids[:place], {first: other, other: first}[plain.ids[place]]]
    behind = decode_plain(target, [*prompt, *begun], Setting(8 - len(begun))).ids
    assert place < 6
    return Tied(
        target, evaluation_room._Case(1, prompt, Setting(8), plain), place, replace(plain, ids=(*begun, *behind))
    )


@pytest.mark.parametrize(("method", "budget", "name"), [("chain", None, "chain"), ("tree", 4, "tree of 4 nodes")])
def test_a_difference_at_a_near_tie_is_counted_and_explained(tied, method, budget, name):
    counts, note = tied.counts(tied.text.ids, method=method, budget=budget)

    assert counts == {"texts_equal": 0, "near_ties": 1, "mismatches": 0}
    assert note.startswith(f"prompt 1, trained {name}: from token {tied.place + 1} on the text differs")
    assert " logits apart, " in note
    assert note.endswith(
        "near ties: the wider pass rounds differently"
        if "first of" in note
        else "a near tie: the wider pass rounds differently"
    )


@pytest.mark.parametrize("behind", ["the last token", "every token"])
def test_a_near_tie_hides_nothing_that_comes_after_it(tied, behind):
    """From there on the plain text says nothing of it: the target is asked again."""
    ids = list(tied.text.ids)
    wrong = len(ids) - 1 if behind == "the last token" else tied.place + 1
    ids[wrong:] = [(token + 7) % 260 for token in ids[wrong:]]

    counts, note = tied.counts(ids)

    assert counts == {"texts_equal": 0, "near_ties": 0, "mismatches": 1}
    assert f"from token {tied.place + 1} on the text differs" in note
    assert f"; its token {wrong + 1}, " in note
    assert note.endswith("NOT a near tie: decoding is not lossless")


def test_a_plain_text_that_is_not_the_targets_own_explains_no_difference(tied):
    """The two tokens must both be as good as the best: not near one another far below it."""
    plain = tied.case.plain
    broken = (*plain.ids[: tied.place], (plain.ids[tied.place] + 9) % 260, *plain.ids[tied.place + 1 :])
    case = replace(tied.case, plain=replace(plain, ids=broken))

    counts, _ = replace(tied, case=case).counts(tied.text.ids)

    assert counts == {"texts_equal": 0, "near_ties": 0, "mismatches": 1}


def test_a_text_that_differs_and_goes_on_after_its_stop_token_is_a_mismatch(tied):
    stopping = replace(tied.target, stop_ids=frozenset({tied.text.ids[tied.place]}))

    counts, note = replace(tied, target=stopping).counts(tied.text.ids)

    assert counts == {"texts_equal": 0, "near_ties": 0, "mismatches": 1}
    assert f"it goes on after token {tied.place + 1}, which ends it" in note


def test_a_text_that_differs_and_breaks_off_below_the_limit_is_a_mismatch(tied):
    """Each of its tokens is right, and it is no whole text: nothing ended it. One that a token ends may be shorter."""
    cut = tied.text.ids[:-1]

    counts, note = tied.counts(cut)

    assert counts == {"texts_equal": 0, "near_ties": 0, "mismatches": 1}
    assert f"it ends after {len(cut)} tokens, below the limit of 8 and with none that ends a text" in note
    stopping = replace(tied.target, stop_ids=frozenset({cut[-1]} - set(cut[:-1])))
    assert stopping.stop_ids, "the text of this target says its last token but one once"
    assert replace(tied, target=stopping).counts(cut)[0] == {"texts_equal": 0, "near_ties": 1, "mismatches": 0}


def test_a_text_that_differs_costs_one_pass_of_the_target(tied):
    passes = []

    class Noting:
        def run(self, ids_BQ, position_BQ, **options):
            passes.append(ids_BQ.shape)
            return tied.target.decoder.run(ids_BQ, position_BQ, **options)

    noting = replace(tied, target=replace(tied.target, decoder=Noting()))

    noting.counts(tied.text.ids)

    assert passes == [(1, len(tied.case.prompt) + len(tied.text.ids) - 1)]


@pytest.mark.parametrize(("kept", "limit"), [(3, 8), (7, 8), (3, 4)])
def test_a_drafted_text_that_only_begins_like_the_plain_one_is_a_mismatch(
    drafter, tiny_target, spec, chats, kept, limit
):
    """No two tokens part there, so no rounding explains it; and the other way round, a text that goes on too long."""
    bench = evaluation_room._Bench(tiny_target, spec, lambda *a, **k: None)
    prompt = tiny_target.prompt_ids(chats[0].messages)
    plain = decode_plain(tiny_target, prompt, Setting(8))
    short = replace(plain, ids=plain.ids[:kept])

    for ours, theirs in ((plain, short), (short, plain)):
        case = evaluation_room._Case(1, prompt, Setting(limit), ours)
        run = evaluation_room._Run("trained", "chain", None, [theirs.accepted], [theirs])
        counts = evaluation_room._texts_against_plain(bench, [case], run)

        assert counts == {"texts_equal": 0, "near_ties": 0, "mismatches": 1}
    assert f"ends after {kept} tokens" in bench.notes[0]


def test_a_text_cut_by_the_token_limit_is_the_plain_one(drafter, tiny_target, spec, chats):
    bench = evaluation_room._Bench(tiny_target, spec, lambda *a, **k: None)
    prompt = tiny_target.prompt_ids(chats[0].messages)
    plain = decode_plain(tiny_target, prompt, Setting(8))
    case = evaluation_room._Case(1, prompt, Setting(3), plain)
    run = evaluation_room._Run("trained", "chain", None, [plain.accepted], [replace(plain, ids=plain.ids[:3])])

    counts = evaluation_room._texts_against_plain(bench, [case], run)

    assert counts == {"texts_equal": 1, "near_ties": 0, "mismatches": 0}


@pytest.mark.slow
def test_a_text_without_a_round_is_left_out_and_counted(drafter, tiny_target, spec, chats):
    """Answers that end with their first token: there is nothing to draft, and nothing that a mean should hold."""
    first = decode_plain(tiny_target, tiny_target.prompt_ids(chats[1].messages), Setting(1)).ids[0]
    brief = replace(tiny_target, stop_ids=tiny_target.stop_ids | {first})

    evaluation = evaluate(drafter, brief, spec, prompts=chats)

    plain = row(evaluation, method="plain").protocol
    chain = row(evaluation, method="chain", drafter="trained").values
    assert plain["num_undrafted"] >= 1
    assert plain["num_undrafted"] + plain["num_degenerate"] + plain["num_prompts"] == 5
    assert chain["texts_equal"] + chain["near_ties"] == plain["num_prompts"]
    assert any("prompt 2 (line 1) is left out: its text is one token" in note for note in evaluation.notes)


@pytest.mark.slow
def test_a_prompt_is_decoded_once_however_often_it_is_in_the_file(drafter, tiny_target, spec, chats):
    again = [replace(chats[0], where="line 9", family="other")]

    doubled = evaluate(drafter, tiny_target, spec, prompts=[chats[0], *again, chats[1], chats[0], *chats[2:]])

    single = evaluate(drafter, tiny_target, spec, prompts=chats)
    assert row(doubled, method="plain").protocol["num_duplicates"] == 2
    assert row(single, method="plain").protocol["num_duplicates"] == 0
    assert "2 prompts dropped: they were there before" in doubled.summary
    for method in ("chain", "tree"):
        values = [row(each, method=method, drafter="trained").values for each in (doubled, single)]
        names = ("acceptance_length", "acceptance_length_low", "acceptance_length_high", "num_rounds")
        assert [values[0][name] for name in names] == [values[1][name] for name in names]


@pytest.mark.slow
def test_duplicates_are_counted_up_to_the_last_prompt_used(drafter, tiny_target, spec, chats):
    """What stands behind it in the file was not looked at, and says nothing about the number of prompts."""
    two = replace(spec, evaluate=replace(spec.evaluate, num_prompts=2, compare_untrained=False))

    found = evaluate(drafter, tiny_target, two, prompts=[chats[0], chats[0], *chats[1:], *chats[1:]])

    assert row(found, method="plain").protocol["num_duplicates"] == 1


def test_the_speed_of_every_way_has_an_interval(evaluation):
    for way in ({"method": "chain", "drafter": "trained"}, {"method": "tree"}, {"method": "plain"}):
        values = row(evaluation, **way).values
        names = ["tokens_per_s"] if way == {"method": "plain"} else ["tokens_per_s", "speed_up"]
        for name in names:
            assert values[f"{name}_low"] <= values[name] <= values[f"{name}_high"]
    chain = row(evaluation, method="chain", drafter="trained").values
    plain = row(evaluation, method="plain").values
    assert chain["speed_up"] == pytest.approx(chain["tokens_per_s"] / plain["tokens_per_s"])
    assert f"[{chain['speed_up_low']:.2f}, {chain['speed_up_high']:.2f}] times the speed" in evaluation.summary


@pytest.mark.slow
def test_an_evaluation_says_how_far_it_is_before_the_first_text_and_after_the_last(drafter, tiny_target, spec, chats):
    """The first text can take a minute on a busy machine, and the estimates another."""
    said = []

    def progress(what, *, done, total, unit):
        said.append((what, done, total, unit))

    num_said = []

    def counting(way):
        return lambda *given, **options: num_said.append(len(said)) or way(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        for way in (decode_plain, replay_chain, decode_chain):
            patch.setattr(evaluation_room, way.__name__, counting(way))
        evaluate(drafter, tiny_target, spec, prompts=chats, progress=progress)

    assert said[0] == ("decoding: plain", 0, 5, "texts")
    assert num_said[0] == 1, "said before the two rounds that warm it up"
    assert num_said[6] == 7, "and so of the next way"
    estimates = [(done, unit) for what, done, total, unit in said if what == "estimating acceptance"]
    assert estimates == [(done, "texts") for done in range(len(estimates))]
    assert said[-1][1] == said[-1][2]


@pytest.mark.slow
def test_every_way_of_decoding_tells_its_own_count_of_texts(drafter, tiny_target, spec, chats):
    """A text costs one way three times what it costs another: one count over all would have no pace."""
    said: dict[str, list[tuple[int, int]]] = {}
    circling = tiny_target.prompt_ids(chats[2].messages)

    def decoded(target, prompt, setting):
        text = decode_plain(target, prompt, setting)
        return replace(text, ids=[7] * 32) if prompt == circling else text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation_room, "decode_plain", decoded)
        evaluate(
            drafter,
            tiny_target,
            spec,
            prompts=chats[:3],
            progress=lambda what, *, done, total, unit: said.setdefault(what, []).append((done, total)),
        )

    assert said.pop("estimating acceptance")
    assert said == {
        "decoding: plain": [(0, 3), (1, 3), (2, 3), (3, 3)],
        "decoding: trained chain": [(0, 2), (1, 2), (2, 2)],
        "decoding: trained tree of 4 nodes": [(0, 2), (1, 2), (2, 2)],
        "decoding: untrained chain, replayed": [(0, 2), (1, 2), (2, 2)],
    }


@pytest.mark.parametrize(
    ("ids", "degenerate"),
    [
        ([1] * 32, True),
        ([*range(20), *[7, 8, 9] * 8], True),
        ([*range(30), 7, 8, 7, 8], False),
        (list(range(32)), False),
        ([1] * 6, False),  # too short to say
        ([], False),
    ],
)
def test_degenerate_texts_are_told_by_their_repeating_end(ids, degenerate):
    assert is_degenerate(ids) is degenerate


def test_estimates_are_a_slow_loop_over_anchors(drafter, tiny_target, spec, chats):
    prompt = tiny_target.prompt_ids(chats[2].messages)
    text = decode_plain(tiny_target, prompt, Setting(16))

    found = estimate(drafter, tiny_target, [(prompt, text)], budgets=[8])

    ids = torch.tensor([*prompt, *text.ids])
    features, _ = tiny_target.capture(
        ids, torch.zeros_like(ids), torch.arange(len(ids)), layers=spec.drafter.captured_layers
    )
    lengths = []
    for anchor in range(len(prompt), len(ids) - 3):
        from remote.drafter.model import DraftCache

        block = torch.tensor([int(ids[anchor]), 3, 3, 3])
        hidden = drafter.draft(features[:anchor], DraftCache(2), tiny_target.embed(block))
        draft = tiny_target.logits(hidden[1:]).argmax(-1).tolist()
        right = 0
        while right < 3 and draft[right] == int(ids[anchor + 1 + right]):
            right += 1
        lengths.append(right + 1)
    assert found.chain_tau == (pytest.approx(sum(lengths) / len(lengths)),)
    assert found.tree_tau[8][0] >= found.chain_tau[0]
    assert len(found.coverage[4]) == 3


@pytest.mark.slow
def test_estimates_never_compile_for_the_length_of_a_text(drafter, tiny_target, spec, chats):
    """Flex is compiled for static shapes and gives up at the ninth; every text here has another length."""
    named = []

    @dataclass(frozen=True)
    class Noting(Backend):
        def plan(self, visibility):
            named.append(self.name)
            return Backend("sdpa", "test").plan(visibility)

    training = DFlashDrafter(spec.target, spec.drafter, backend=Noting("flex", "test"))
    training.load_state_dict(drafter.state_dict())
    prompts = [tiny_target.prompt_ids(chat.messages) for chat in chats]
    texts = [(prompt, decode_plain(tiny_target, prompt, Setting(8))) for prompt in prompts]

    found = estimate(training, tiny_target, texts, budgets=[4])

    assert set(named) == {"sdpa"}
    assert training.backend.name == "flex"
    plain = estimate(drafter, tiny_target, texts, budgets=[4])
    assert (found.chain_tau, found.tree_tau) == (plain.chain_tau, plain.tree_tau)


def test_a_text_too_short_for_one_block_is_not_estimated(drafter, tiny_target, chats):
    prompt = tiny_target.prompt_ids(chats[0].messages)

    found = estimate(drafter, tiny_target, [(prompt, decode_plain(tiny_target, prompt, Setting(3)))], budgets=[8])

    assert found.chain_tau == ()


@given(st.lists(st.floats(1, 8), min_size=1, max_size=12))
def test_an_interval_holds_its_mean_and_lies_within_the_values(values):
    interval = bootstrap(values)

    assert min(values) - 1e-9 <= interval.low <= interval.mean + 1e-9
    assert interval.mean - 1e-9 <= interval.high <= max(values) + 1e-9


def test_an_interval_agrees_with_the_normal_one_where_there_are_many_values():
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()

    interval = bootstrap(values)

    half = 1.96 * torch.tensor(values).std().item() / 20
    assert interval.low == pytest.approx(interval.mean - half, abs=0.012)
    assert interval.high == pytest.approx(interval.mean + half, abs=0.012)


def test_a_ratio_of_sums_is_resampled_by_prompt_as_a_slow_loop_does():
    tops, bottoms = [4.0, 9.0, 1.0], [2.0, 3.0, 1.0]

    interval = bootstrap_sums([tops, bottoms], lambda sums: sums[0] / sums[1])

    draws = torch.randint(3, (10_000, 3), generator=torch.Generator().manual_seed(0)).tolist()
    ratios = sorted(sum(tops[i] for i in draw) / sum(bottoms[i] for i in draw) for draw in draws)
    assert interval.mean == pytest.approx(14 / 6)
    assert (interval.low, interval.high) == pytest.approx((ratios[250], ratios[9749]), abs=0.02)


def test_a_ratio_over_one_prompt_has_no_width_and_over_none_is_not_a_number():
    one = bootstrap_sums([[3.0], [2.0]], lambda sums: sums[0] / sums[1])

    assert (one.low, one.mean, one.high) == (1.5, 1.5, 1.5)
    assert math.isnan(bootstrap_sums([[], []], lambda sums: sums[0] / sums[1]).mean)


def test_a_paired_difference_is_surer_than_its_parts():
    left = [1.0, 2.0, 3.0, 4.0]

    assert difference([value + 0.5 for value in left], left).low == pytest.approx(0.5)


def test_nothing_to_average_is_not_a_number():
    assert str(bootstrap([])) == "nan [nan, nan]"
