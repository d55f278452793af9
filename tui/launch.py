"""Launch: choose a branch, a host, GPUs and overrides; the plan and the gate are shown before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.timer import Timer
from textual.widgets import Input, Label

from orchestrator.errors import UsageError
from orchestrator.store.rows import RunRow
from tui.editor import Finding, recipe_file
from tui.field import Field, typed, words_of
from tui.home import HomeScreen
from tui.launch_lines import choice_lines, nothing_lines, refused
from tui.ordering import Aim, Offer, Planned, Standing, Wish, aimed, launch, offers, planned, smoke, standing
from tui.pieces import Line, Piece, wrapped
from tui.sheet import Sheet
from tui.snapshot import Ask, Snapshot
from tui.table import Column, Table

# name -> what stands in it at first, and what may stand in it
FIELDS = {
    "host": ("local", "a host of hosts.yaml or ~/.ssh/config"),
    "gpus": ("", "the gate chooses; or indexes: 4 5"),
    "overrides": ("", "none; or section.key=value ..., with blanks 'section.key=a b'"),
}
PAUSE_S = 0.25  # typing settles before the values are checked


class LaunchScreen(HomeScreen):
    NAME = "launch"
    DEFAULT_CSS = """
    LaunchScreen #offers { width: 34%; min-width: 23; max-width: 47; }
    LaunchScreen #chosen { border-left: solid $yard-line; }
    LaunchScreen .row { height: 1; }
    LaunchScreen #form { height: auto; padding: 1 1 0 1; }
    LaunchScreen Label { width: 11; color: $yard-muted; }
    LaunchScreen Field { height: 1; border: none; background: $yard-raised; padding: 0 1; width: 1fr; }
    LaunchScreen Field:focus { background: $yard-cursor; }
    LaunchScreen #choice { padding: 1 1 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "gate", "ask the gate", show=False, id="launch.gate"),  # where no row is chosen yet
        Binding("m", "climb", "smoke missing", id="launch.smoke"),
        Binding("ctrl+l", "launch", "launch", key_display="^l", id="launch.launch"),
        Binding("escape", "back", "back", id="launch.back"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._offers: list[Offer] = []
        self._plan: Planned | None = None
        self._standing: Standing | None = None
        self._asked: Wish | None = None  # what the standing is about
        self._is_asking = False
        self._planned: Wish | None = None  # what a plan was asked for last
        self._soon: Timer | None = None  # until typing has settled
        self._run: RunRow | None = None  # the one that `4` was pressed on last
        self._is_turning = False  # its recipe is being looked for
        self._asks_then = False  # the gate, once that is known
        self._why_none = ""  # why its branch is not offered, until another is chosen
        self._table = Table((Column("branch", 0),), empty="Reading the recipes.", opens="ask the gate", id="offers")
        self._boxes = {
            name: Field(value=shown, placeholder=hint, compact=True, id=name) for name, (shown, hint) in FIELDS.items()
        }
        self._choice = Sheet(id="choice", classes="scrolls", can_focus=True)

    def body(self) -> ComposeResult:
        with Horizontal():
            yield self._table
            with Vertical(id="chosen"):
                with Vertical(id="form"):
                    for name, box in self._boxes.items():
                        with Horizontal(classes="row"):
                            yield Label(name)
                            yield box
                yield self._choice

    def on_mount(self) -> None:
        self._table.focus()
        if self.app.places is None:
            self._draw()
        elif not self.is_current:
            self._read()  # made before anybody asks for it: what takes long the first time is done by then

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        self._read()

    def reread(self) -> None:
        """The recipes may be others by now; so the gate's word no longer counts, and a branch may have come."""
        self._standing = self._asked = None
        self._is_turning |= bool(self._why_none)
        self._read()

    def ask(self) -> Ask:
        return Ask(wants_list=False)

    def present(self, snapshot: Snapshot) -> None:
        self._draw()

    def turn_to(self, run: RunRow) -> None:
        """What this run was told: its branch, host, GPUs and overrides, whatever was chosen or typed here before. Nothing is
        chosen until its recipe has been found."""
        self._run, self._is_turning, self._why_none = run, True, ""
        self._table.go_nowhere()

    def told(self) -> Sequence[Piece]:
        return [("  looking at the host", "live")] if self._is_asking else ()

    def file_to_edit(self) -> Finding | None:
        offer = self._chosen()
        return recipe_file(self.app.places, offer.recipe) if offer and self.app.places else None

    def document(self) -> Mapping[str, object]:
        return {"offers": self._offers, "wish": self._wish(), "plan": self._plan}

    # ------------------------------------------------------------- actions

    def action_gate(self) -> None:
        """Looks at the host and asks the gate; starts nothing."""
        wish, self._asks_then = self._wish(), self._is_turning
        if wish is not None and self.app.places is not None:
            self._is_asking = True
            self.show_top()
            self.app.do_beside(lambda: self._ask_gate(wish), group="gate")

    def action_climb(self) -> None:
        wish = self._due()
        if wish is not None and self.app.may_act():
            self._begin(wish, is_smoke=True)

    def action_launch(self) -> None:
        """Works when the gate has allowed exactly what is chosen now."""
        wish = self._due()
        if wish is None or not self.app.may_act():
            return
        if self._standing is not None and self._asked == wish and not self._standing.is_allowed:
            self.app.notify(f"Launch is refused: {refused(self._standing)}", severity="warning", timeout=8)
            return
        if self._standing is None or self._asked != wish:
            self.app.notify("Ask the gate first (enter); it must allow exactly what is chosen.", severity="warning")
            return
        self._begin(wish, is_smoke=False)

    def action_back(self) -> None:
        """From a field back to the branches, from there to the runs."""
        if self._table.has_focus:
            super().action_back()
        else:
            self._table.focus()

    @on(Table.Moved)
    def moved(self, event: Table.Moved) -> None:
        if event.key is not None:
            self._is_turning, self._asks_then, self._why_none = False, False, ""
        self.changed()

    @on(Input.Changed)
    def changed(self) -> None:
        """One look at the values, once typing has settled."""
        if self._wish() == self._planned:
            self._draw()
            return
        self._plan = None
        self._draw()
        if self._soon is not None:
            self._soon.stop()
        self._soon = self.set_timer(PAUSE_S, self._plan_again)

    @on(Table.Opened)
    @on(Input.Submitted)
    def submitted(self) -> None:
        self.action_gate()

    # -------------------------------------------------------------- threads

    def _read(self) -> None:
        """The recipes as they lie there now, and which of them is the run's that was turned to."""
        run = self._run if self._is_turning else None
        if self.app.places is not None:
            self.app.do_beside(lambda: self._read_offers(run), group="offers")

    def _read_offers(self, run: RunRow | None) -> None:
        assert self.app.places is not None
        found = offers(self.app.places)
        aim = None if run is None else aimed(self.app.places, run, found)
        self.app.call_from_thread(self._take_offers, found, aim)

    def _take_offers(self, found: list[Offer], aim: Aim | None) -> None:
        self._offers = found

        def draw(index: int) -> list[list[Piece]]:
            offer = found[index]
            fault: list[Piece] = [("  cannot be read", "bad")] if offer.fault else []
            return [[(offer.recipe, "strong"), ("/" if offer.branch else "", "faint"), (offer.branch, "text"), *fault]]

        self._table.set_rows([offer.key for offer in found], draw, empty="No recipe was found.")
        self.show_keys()
        if aim is not None and self._is_turning:  # nobody has chosen another meanwhile
            self._turn(aim)
        self._plan_again()

    def _turn(self, aim: Aim) -> None:
        self._is_turning, self._why_none = False, aim.why_none
        self._boxes["overrides"].value = typed(aim.overrides)  # none is left of another run's
        if aim.key:
            self._boxes["host"].value, self._boxes["gpus"].value = aim.host, " ".join(aim.gpus)
            self._table.go_to(aim.key)
        if self._asks_then:
            self.action_gate()

    def _plan_again(self) -> None:
        if self._soon is not None:
            self._soon.stop()
        self._soon, self._planned = None, self._wish()
        wish = self._planned
        if wish is not None and self.app.places is not None:
            self.app.do_beside(lambda: self._make_plan(wish), group="plan")
        self._draw()

    def _make_plan(self, wish: Wish) -> None:
        assert self.app.places is not None
        made = planned(self.app.places, wish)
        self.app.call_from_thread(self._take_plan, wish, made)

    def _take_plan(self, wish: Wish, made: Planned) -> None:
        if wish == self._wish():
            self._plan = made
            self._draw()

    def _ask_gate(self, wish: Wish) -> None:
        assert self.app.places is not None
        found = standing(self.app.places, wish)
        self.app.call_from_thread(self._take_standing, wish, found)

    def _take_standing(self, wish: Wish, found: Standing) -> None:
        self._is_asking = False
        self._standing, self._asked = found, wish
        self._draw()
        self.show_top()

    def _begin(self, wish: Wish, *, is_smoke: bool) -> None:
        if self.app.is_at_work("start"):
            self.app.notify("One is being started already.", severity="warning")
        else:
            self.app.do_beside(lambda: self._start(wish, is_smoke=is_smoke), group="start")

    def _start(self, wish: Wish, *, is_smoke: bool) -> None:
        assert self.app.places is not None
        start = smoke if is_smoke else launch
        run_id = start(self.app.places, wish, self.app.tell_from_thread)
        if run_id is None:
            self.app.tell_from_thread("nothing is missing: the gate will pass")
        else:
            self.app.call_from_thread(self._show_started, run_id)

    def _show_started(self, run_id: str) -> None:
        """Who reads something else by then is told, and goes on reading."""
        if self.app.screen is self:
            self.app.open_run(run_id)
        else:
            self.app.notify(f"{run_id} has started.", timeout=6)

    # --------------------------------------------------------------- inner

    def _chosen(self) -> Offer | None:
        return None if self._table.cursor_key is None else self._offers[self._table.cursor]

    def _wish(self) -> Wish | None:
        offer = self._chosen()
        if offer is None or offer.fault:
            return None
        if self._typing_fault:
            return None
        gpus = tuple(self._boxes["gpus"].value.replace(",", " ").split())  # commas, as --gpus has them, or blanks
        host = " ".join(self._boxes["host"].value.split()) or "local"
        return Wish(offer.recipe, offer.branch, host, gpus, words_of(self._boxes["overrides"].value))

    @property
    def _typing_fault(self) -> str:
        """Why the overrides cannot be read as words; empty where they can."""
        try:
            words_of(self._boxes["overrides"].value)
        except UsageError as error:
            return f"overrides: {error}"
        return ""

    def _due(self) -> Wish | None:
        """The wish, which somebody wants to come true; said where there is none."""
        wish = self._wish()
        if wish is None:
            told = self._typing_fault or "No branch is chosen that could be started."
            self.app.notify(told, severity="warning", timeout=4)
        return wish

    def _draw(self) -> None:
        wish, offer = self._wish(), self._chosen()
        told = self._standing if wish == self._asked else None
        name = f"{self._run.recipe}/{self._run.branch}" if self._run is not None and self._why_none else ""

        def lines(width: int, _height: int) -> list[Line]:
            if self._is_turning:
                return [[("Reading the recipes.", "muted")]]
            if offer is None:
                return nothing_lines(name, self._why_none, width)
            if wish is None and self._typing_fault:
                return wrapped(self._typing_fault, width, "bad")
            return choice_lines(wish, offer, (self._plan, told), width, ascii_only=self.app.ascii_only)

        self._choice.show(lines)
