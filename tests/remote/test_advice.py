"""Whatever is offered instead of what did not fit: it fits, may be typed, and is a spec that no check refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote.coherence import cross_field_errors
from remote.plan import plan
from remote.plan.advice import nearest_fits, uses
from remote.ranges import range_errors
from remote.spec import DFlashSpec, NoiseSpec, OptimSpec, dump, parse
from tests.remote.specs import tiny_spec

specs = st.builds(
    lambda anchors, block, rows, hidden, terms, train, optim, attention: tiny_spec(
        target={"hidden_size": hidden, "vocab_size": 50_000},
        drafter={"block_size": block, "attention": attention, "max_position_embeddings": 4096},
        data={"row_tokens": rows, "max_anchors": anchors, "noise": NoiseSpec()},
        loss={"terms": terms, "chunk_tokens": 1024},
        train=train,
        optim=vars(OptimSpec()) | optim,
    ),
    anchors=st.integers(1, 600),
    block=st.integers(2, 32),
    rows=st.integers(128, 2048),
    hidden=st.sampled_from([64, 512, 2048]),
    terms=st.sampled_from([{"ce": 1.0}, {"ce": 1.0, "kl": 0.1}]),
    train=st.fixed_dictionaries(
        {
            "activation_checkpointing": st.sampled_from(["none", "non_reentrant"]),
            "rows_per_step": st.sampled_from([1, 2, 4]),
            "accumulation": st.sampled_from([1, 2]),
        }
    ),
    optim=st.fixed_dictionaries(
        {
            "moment_dtype": st.sampled_from(["float32", "bfloat16"]),
            "master_dtype": st.sampled_from(["float32", "none"]),
        }
    ),
    attention=st.sampled_from(["auto", "sdpa"]),
)


@pytest.mark.slow
@given(specs, st.floats(0.2, 0.999), st.sampled_from(["cpu", "cuda"]))
@settings(max_examples=40, deadline=None)
def test_each_of_the_nearest_changes_fits_can_be_typed_and_passes_every_check(
    spec: DFlashSpec, share: float, device: str
) -> None:
    capacity_bytes = round(plan(spec, device=device).driver_bytes * share)
    known = {*cross_field_errors(spec), *range_errors(spec)}

    found = nearest_fits(spec, partial(plan, capacity_bytes=capacity_bytes, device=device))
    assert len({offered.plan.step_verdict for offered in found}) <= 1, "tight ones only where nothing fits with room"
    for offered in found:
        then = plan(offered.spec, capacity_bytes=capacity_bytes, device=device)
        assert then.step_verdict == offered.plan.step_verdict in ("fits", "tight")
        assert then.driver_bytes == offered.plan.driver_bytes <= capacity_bytes
        assert typed(spec, offered.overrides) == offered.spec
        assert parse(dump(offered.spec), "here") == offered.spec
        assert {*cross_field_errors(offered.spec), *range_errors(offered.spec)} <= known


def typed(spec: DFlashSpec, overrides: tuple[str, ...]) -> DFlashSpec:
    """The spec with section.key=value set, each key once, as a person would type them."""
    assert len({text.partition("=")[0] for text in overrides}) == len(overrides)
    for text in overrides:
        path, _, value = text.partition("=")
        section, _, name = path.partition(".")
        old = getattr(spec, section)
        kind = type(getattr(old, name))
        spec = replace(spec, **{section: replace(old, **{name: kind(value)})})
    return spec


@pytest.mark.parametrize(("most", "doubled"), [(95, None), (96, 96), (4096, 96)])
def test_longer_rows_are_offered_once_doubled_and_no_longer_than_the_drafter_serves(
    most: int, doubled: int | None
) -> None:
    """Memory would have rows of 768: it knows nothing of how long documents are, which alone gain by it."""
    spec = tiny_spec(drafter={"max_position_embeddings": most}, evaluate={"at_end": False})
    found = uses(spec, partial(plan, capacity_bytes=64 * 2**30))

    longer = [use for use in found if "data.row_tokens" in use.overrides[0]]
    assert [use.overrides for use in longer] == ([] if doubled is None else [(f"data.row_tokens={doubled}",)])
    assert all("documents longer than 48 tokens" in use.caution for use in longer)
    assert not any(error for use in found for error in cross_field_errors(use.spec))


@pytest.mark.parametrize(
    ("refused", "sections"),
    [
        ("train.rows_per_step=2", {"roles": {"drafter": 2}, "life": {"num_gpus": 2}, "train": {"accumulation": 2}}),
        ("train.rows_per_step=8", {"data": {"row_tokens": 65_536}, "drafter": {"max_position_embeddings": 65_536}}),
    ],
)
def test_what_the_recipe_would_refuse_is_not_offered_where_there_is_room(refused: str, sections: dict) -> None:
    spec = tiny_spec(**sections)
    assert not cross_field_errors(spec)

    offered = uses(spec, partial(plan, capacity_bytes=2**50))

    assert offered
    assert not any(cross_field_errors(use.spec) for use in offered)
    assert not any(refused in text for use in offered for text in use.overrides)
