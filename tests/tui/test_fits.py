"""What the screens say of a plan that does not fit: which part of it, and what helps."""

from tui.fits import fit_lines
from tui.ordering import Planned
from tui.pieces import text_of

GIB = 2**30


def told(**body: object) -> str:
    return " ".join(text_of(fit_lines(Planned({"capacity_bytes": 48 * GIB, **body}), 60)).split())


def test_a_target_whose_pass_does_not_fit_is_named_and_the_step_is_not_blamed() -> None:
    """The verdict counts both; of the step, which fits, the page lists what would make room."""
    pass_alone = told(
        verdict="does not fit", step_verdict="fits", pass_verdict="does not fit", target_pass_bytes=int(54.79 * GIB)
    )

    assert "What would make room" in pass_alone
    assert "The target's pass before training needs 54.8 GiB: no change of the recipe makes it fit" in pass_alone
    assert "No single change fits" not in pass_alone


def test_a_step_that_does_not_fit_says_nothing_of_a_pass_that_does() -> None:
    step_alone = told(verdict="does not fit", step_verdict="does not fit", pass_verdict="fits", target_pass_bytes=1)

    assert "What would fit" in step_alone
    assert "target's pass" not in step_alone
