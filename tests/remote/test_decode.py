"""Drafting changes how a text is decoded and never what it says."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from statistics import mean

import pytest
import torch

from orchestrator.recipe import load_recipe
from remote.drafter.attention import choose_backend
from remote.drafter.decode import Setting, decode_chain, decode_plain, decode_tree, replay_chain
from remote.drafter.model import DFlashDrafter
from remote.drafter.target import load_target
from remote.drafter.workbench import choose, fresh_drafter

pytestmark = pytest.mark.slow  # real decoding

MESSAGES = [{"role": "user", "content": "Say something."}]
LENGTH = 40


class ScriptedDrafter:
    """Drafts a known text with mistakes: each slot's first guess is right with probability `skill`, else its second is."""

    def __init__(self, target, spec, script: list[int], *, skill: float) -> None:
        self.target, self.spec, self.script, self.skill = target, spec, script, skill
        self.rng = random.Random(0)
        self.seen: list[torch.Tensor] = []  # features of every position, as they were handed over

    def again(self) -> ScriptedDrafter:
        """The same drafter before its first draft."""
        return ScriptedDrafter(self.target, self.spec, self.script, skill=self.skill)

    def draft(self, features_MC, cache, block_embeddings_BH):
        self.seen.append(features_MC)
        anchor = sum(len(features) for features in self.seen)
        following = [*self.script, *[5] * 99][anchor + 1 : anchor + len(block_embeddings_BH)]
        head = self.target.head_VH
        hidden = [head[0]]
        for token in following:
            first, second = (token, (token + 9) % 260) if self.rng.random() < self.skill else ((token + 9) % 260, token)
            hidden.append(14.0 * head[first] / head[first].norm() + 11.0 * head[second] / head[second].norm())
        return torch.stack(hidden)


@pytest.fixture(scope="module")
def prompt(tiny_target):
    return tiny_target.prompt_ids(MESSAGES)


@pytest.fixture(scope="module")
def plain(tiny_target, prompt):
    return decode_plain(tiny_target, prompt, Setting(LENGTH))


@pytest.fixture(params=[0.0, 0.6, 1.0])
def scripted(request, tiny_target, tiny_drafter_spec, prompt, plain):
    return ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=request.param)


def test_plain_decoding_is_the_librarys_greedy_generation(tiny_target, tiny_folder, prompt, plain):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    generated = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=LENGTH, do_sample=False
    )

    assert list(plain.ids) == generated[0, len(prompt) :].tolist()
    assert set(plain.accepted) == {1}


def test_a_chain_says_what_plain_decoding_says(tiny_target, prompt, plain, scripted):
    chain = decode_chain(tiny_target, scripted, prompt, Setting(LENGTH))

    assert chain.ids == plain.ids
    assert all(1 <= accepted <= 4 for accepted in chain.accepted)


def test_a_tree_says_what_plain_decoding_says(tiny_target, prompt, plain, scripted):
    tree = decode_tree(tiny_target, scripted, prompt, Setting(LENGTH), budget=16)

    assert tree.ids == plain.ids


def test_a_perfect_chain_commits_whole_blocks_and_a_tree_finds_the_second_guesses(
    tiny_target, tiny_drafter_spec, prompt, plain
):
    script = [*prompt, *plain.ids]
    perfect = ScriptedDrafter(tiny_target, tiny_drafter_spec, script, skill=1.0)
    second = ScriptedDrafter(tiny_target, tiny_drafter_spec, script, skill=0.0)

    chain = decode_chain(tiny_target, perfect, prompt, Setting(LENGTH))
    tree = decode_tree(tiny_target, second, prompt, Setting(LENGTH), budget=64)
    second_in_a_chain = decode_chain(tiny_target, second.again(), prompt, Setting(LENGTH))

    assert set(chain.accepted[:-1]) == {4}
    assert mean(second_in_a_chain.accepted) < 2
    assert mean(tree.accepted) > 3


def test_a_tree_of_width_one_accepts_exactly_what_the_chain_accepts(tiny_target, tiny_drafter_spec, prompt, plain):
    def fresh():
        return ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=0.7)

    chain = decode_chain(tiny_target, fresh(), prompt, Setting(LENGTH))
    tree = decode_tree(tiny_target, fresh(), prompt, Setting(LENGTH), budget=3, width=1)
    wider_budget = decode_tree(tiny_target, fresh(), prompt, Setting(LENGTH), budget=50, width=1)

    assert tree.accepted == chain.accepted
    assert tree.ids == chain.ids
    assert wider_budget.accepted == chain.accepted


class NearTieDrafter(ScriptedDrafter):
    """Drafts a known text by hidden states whose logits are a tie once they are rounded to bfloat16."""

    def draft(self, features_MC, cache, block_embeddings_BH):
        self.seen.append(features_MC)
        anchor = sum(len(features) for features in self.seen)
        following = [*self.script, *[250] * 99][anchor + 1 : anchor + len(block_embeddings_BH)]
        return torch.stack([self.target.head_VH[0], *(self._tied(token) for token in following)])

    def _tied(self, token: int):
        """A mixture of the token's row and that of a token before it, best by exact logits and not by rounded ones."""
        head = self.target.head_VH.float()
        unit = head / head.norm(dim=1, keepdim=True)
        for other in range(4, token):
            shares = torch.linspace(0.8, 1.25, 400)[:, None]
            mixed = (14.0 * unit[token] + 14.0 * shares * unit[other]).bfloat16()
            exact, rounded = (mixed.float() @ head.T).argmax(-1), self.target.logits(mixed).argmax(-1)
            found = ((exact == token) & (rounded != token)).nonzero()
            if len(found):
                return mixed[found[0, 0]]
        return self.target.head_VH[token]


def test_in_bfloat16_too_a_tree_of_width_one_accepts_what_the_chain_accepts(
    tiny_target_spec, tiny_drafter_spec, prompt, tmp_path
):
    """Rounded logits tie, and the first of equals is another token: chain and tree must read the same ones."""
    target = load_target(tiny_target_spec, cache=tmp_path, device="cpu", dtype=torch.bfloat16)
    plain = decode_plain(target, prompt, Setting(LENGTH))
    script = [*prompt, *plain.ids]

    drafters = [NearTieDrafter(target, tiny_drafter_spec, script, skill=1.0) for _ in range(2)]
    chain = decode_chain(target, drafters[0], prompt, Setting(LENGTH))
    tree = decode_tree(target, drafters[1], prompt, Setting(LENGTH), budget=3, width=1)

    assert (tree.ids, tree.accepted) == (chain.ids, chain.accepted)
    assert mean(chain.accepted) > 2


@pytest.mark.parametrize("budget", [None, 16])
def test_the_drafter_is_given_the_features_of_every_position_once_and_in_order(
    tiny_target, tiny_drafter_spec, prompt, plain, budget
):
    drafter = ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=0.6)

    if budget is None:
        decode_chain(tiny_target, drafter, prompt, Setting(LENGTH))
    else:
        decode_tree(tiny_target, drafter, prompt, Setting(LENGTH), budget=budget)

    seen = torch.cat(drafter.seen)
    ids = torch.tensor([*prompt, *plain.ids])[: len(seen)]
    layers = tiny_drafter_spec.captured_layers
    expected, _ = tiny_target.capture(ids, torch.zeros_like(ids), torch.arange(len(ids)), layers=layers)
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-4)


def test_an_untrained_drafter_changes_nothing_either(tiny_target, tiny_target_spec, tiny_drafter_spec, prompt, plain):
    backend = choose_backend(tiny_drafter_spec, device=torch.device("cpu"), dtype=torch.float32)
    drafter = DFlashDrafter(tiny_target_spec, tiny_drafter_spec, backend=backend)
    drafter.init_weights(torch.Generator().manual_seed(0))

    assert decode_chain(tiny_target, drafter, prompt, Setting(LENGTH)).ids == plain.ids
    assert decode_tree(tiny_target, drafter, prompt, Setting(LENGTH), budget=8).ids == plain.ids


@pytest.mark.parametrize("skill", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize(("limit", "temperature"), [(LENGTH, 0.0), (10, 0.0), (11, 0.0), (10, 0.7), (12, 0.7)])
def test_the_rounds_of_a_chain_are_told_from_the_plain_text_alone(
    tiny_target, tiny_drafter_spec, prompt, skill, limit, temperature
):
    """To the last round, which is drafted past the end of the text."""
    setting = Setting(limit, temperature, seed=4)
    plain = decode_plain(tiny_target, prompt, setting)
    longer = decode_plain(tiny_target, prompt, Setting(limit + 8, temperature, seed=4))
    drafter = ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *longer.ids], skill=skill)
    decoded = decode_chain(tiny_target, drafter, prompt, setting)

    accepted = replay_chain(tiny_target, drafter.again(), prompt, plain, setting)

    assert decoded.ids == plain.ids
    assert accepted == decoded.accepted


def test_following_a_text_gives_the_drafter_what_decoding_gives_it(
    tiny_target, tiny_target_spec, tiny_drafter_spec, prompt, plain
):
    backend = choose_backend(tiny_drafter_spec, device=torch.device("cpu"), dtype=torch.float32)
    drafter = DFlashDrafter(tiny_target_spec, tiny_drafter_spec, backend=backend)
    drafter.init_weights(torch.Generator().manual_seed(0))
    scripted = ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=0.6)
    decoding = scripted.again()

    decode_chain(tiny_target, decoding, prompt, Setting(LENGTH))
    replay_chain(tiny_target, scripted, prompt, plain, Setting(LENGTH))

    assert [len(features) for features in scripted.seen] == [len(features) for features in decoding.seen]
    torch.testing.assert_close(torch.cat(scripted.seen), torch.cat(decoding.seen), rtol=1e-3, atol=1e-4)
    own = decode_chain(tiny_target, drafter, prompt, Setting(LENGTH)).accepted
    assert replay_chain(tiny_target, drafter, prompt, plain, Setting(LENGTH)) == own


def test_a_text_that_has_stopped_is_followed_past_its_stop_token(tiny_target, tiny_drafter_spec, prompt, plain):
    stopping = replace(tiny_target, stop_ids=frozenset({plain.ids[6]}))
    stopped = decode_plain(stopping, prompt, Setting(LENGTH))
    drafter = ScriptedDrafter(stopping, tiny_drafter_spec, [*prompt, *plain.ids], skill=1.0)
    decoded = decode_chain(stopping, drafter, prompt, Setting(LENGTH))

    assert replay_chain(stopping, drafter.again(), prompt, stopped, Setting(LENGTH)) == decoded.accepted
    assert sum(decoded.accepted) > len(stopped.ids) - 1


def test_the_text_ends_with_its_stop_token_and_drops_what_was_drafted_after_it(
    tiny_target, tiny_drafter_spec, prompt, plain
):
    stopping = replace(tiny_target, stop_ids=frozenset({plain.ids[6]}))
    expected = plain.ids[: plain.ids.index(plain.ids[6]) + 1]
    drafter = ScriptedDrafter(stopping, tiny_drafter_spec, [*prompt, *plain.ids], skill=1.0)

    assert decode_plain(stopping, prompt, Setting(LENGTH)).ids == expected
    assert decode_chain(stopping, drafter, prompt, Setting(LENGTH)).ids == expected


@pytest.mark.parametrize("skill", [0.4, 1.0])
def test_what_was_drafted_past_the_end_of_the_text_makes_no_way_of_decoding_faster(
    tiny_target, tiny_drafter_spec, prompt, plain, skill
):
    """The reference divides by the tokens of the text; the first one is the prompt's pass, which is not timed."""
    limit = 6  # no multiple of the block: the last round reaches past it
    drafter = ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=skill)

    alone = decode_plain(tiny_target, prompt, Setting(limit))
    chain = decode_chain(tiny_target, drafter, prompt, Setting(limit))
    tree = decode_tree(tiny_target, drafter, prompt, Setting(limit), budget=6)

    assert alone.num_timed_tokens == chain.num_timed_tokens == tree.num_timed_tokens == limit - 1
    assert sum(chain.accepted) >= chain.num_timed_tokens  # whole rounds still count as accepted


@pytest.mark.slow
def test_sampled_texts_are_the_same_draws_with_and_without_a_drafter(tiny_target, tiny_drafter_spec, prompt):
    for seed in range(2):
        setting = Setting(LENGTH, temperature=0.7, seed=seed)
        plain = decode_plain(tiny_target, prompt, setting)
        for skill in (0.3, 0.9):
            drafter = ScriptedDrafter(tiny_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=skill)
            chain = decode_chain(tiny_target, drafter, prompt, setting)
            tree = decode_tree(tiny_target, drafter, prompt, setting, budget=12)
            assert chain.ids == plain.ids
            assert tree.ids == plain.ids


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 8])
def test_sampled_drafting_keeps_the_targets_distribution(tiny_target, tiny_drafter_spec, prompt, budget):
    """Frequencies of the third token, reached by drafting, against its exact probability (chi-square, p > 0.001)."""
    draws, temperature = 800, 0.25
    script = [*prompt, *decode_plain(tiny_target, prompt, Setting(8)).ids]
    counts = Counter()
    for seed in range(draws):
        setting = Setting(3, temperature=temperature, seed=seed)
        drafter = ScriptedDrafter(tiny_target, tiny_drafter_spec, script, skill=0.8)
        if budget is None:
            decoded = decode_chain(tiny_target, drafter, prompt, setting)
        else:
            decoded = decode_tree(tiny_target, drafter, prompt, setting, budget=budget)
        counts[(decoded.ids * 3)[:2]] += 1

    exact = exact_pairs(tiny_target, prompt, temperature, keep=list(counts))
    likely = [pair for pair, chance in exact.items() if chance * draws >= 5]
    rest = 1 - sum(exact[pair] for pair in likely)
    chi2 = sum((counts[pair] - draws * exact[pair]) ** 2 / (draws * exact[pair]) for pair in likely)
    others = draws - sum(counts[pair] for pair in likely)
    if rest * draws >= 5:
        chi2 += (others - draws * rest) ** 2 / (draws * rest)
    degrees = len(likely)
    assert degrees >= 5
    assert chi2 < degrees + 3.1 * (2 * degrees) ** 0.5 + 6  # beyond the 99.9 % quantile for 5 or more degrees


def exact_pairs(target, prompt, temperature, *, keep) -> dict[tuple[int, ...], float]:
    """P(first, second) under the target, straight from its logits, for the pairs of `keep`."""
    chances = {}
    first_logits = _next_logits(target, prompt)
    first = torch.softmax(first_logits / temperature, -1)
    for token in {pair[0] for pair in keep}:
        second = torch.softmax(_next_logits(target, [*prompt, token]) / temperature, -1)
        for pair in keep:
            if pair[0] == token:
                chances[pair] = float(first[token] * second[pair[1]])
    return chances


def _next_logits(target, ids):
    states = target.decoder.run(torch.tensor([ids]), torch.arange(len(ids))[None])
    return target.logits(states.last_hidden_BQH[0, -1])


@pytest.mark.xdist_group("smollm2")  # what they share costs some seconds to make
def test_on_smollm2_the_untrained_drafter_is_replayed_as_it_is_decoded(smollm2):
    """What an evaluation says of it without decoding: round by round the same, and its texts are the plain ones."""
    spec = load_recipe("smollm2").resolve("ce").spec
    untrained = fresh_drafter(spec, choose(spec, torch.device("cpu")), device=torch.device("cpu"))
    setting = Setting(16)
    for question in ("What is the capital of France?", "Count from one to ten."):
        prompt = smollm2.prompt_ids([{"role": "user", "content": question}])
        plain = decode_plain(smollm2, prompt, setting)

        decoded = decode_chain(smollm2, untrained, prompt, setting)

        assert decoded.ids == plain.ids
        assert replay_chain(smollm2, untrained, prompt, plain, setting) == decoded.accepted
    # It accepts next to nothing; one that is right half the time shows that longer rounds are told from short ones.
    half_right = ScriptedDrafter(smollm2, spec.drafter, [*prompt, *plain.ids], skill=0.6)
    decoded = decode_chain(smollm2, half_right, prompt, setting)
    assert max(decoded.accepted) > 1
    assert replay_chain(smollm2, half_right.again(), prompt, plain, setting) == decoded.accepted
