"""How things read on a screen: durations, sizes, counts, states, and text in ASCII.

One home for every wording, so that a duration or a state looks the same on each screen. Sizes are
GiB everywhere. Colours are named by meaning (`live`, `good`, `bad`, `warn`, `odd`, `muted`); the
theme gives them values. Nothing here reads a clock or the store.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

from orchestrator.actions.history import MEMORY_REASONS
from orchestrator.store.rows import RunRow, card_of
from tui.outside import to_type

GIB = 1024**3
_REPAIR = re.compile(r"\s*;?\s*(?=\b(?:repair|or let draftyard do it): )")
MOST_SHOWN = 120  # letters of a word; more fill a screen and say nothing
_LONG_WORD = re.compile(rf"[^\s=:'\"]{{{MOST_SHOWN + 1},}}")

# State -> letter and meaning. The letter alone must do: colour only helps.
STATES: dict[str, tuple[str, str]] = {
    "pending": ("P", "muted"),
    "setting_up": ("S", "live"),
    "running": ("R", "live"),
    "stopping": ("x", "warn"),
    "succeeded": ("D", "good"),
    "failed": ("F", "bad"),
    "stopped": ("X", "muted"),
    "lost": ("L", "odd"),
}
OUT_OF_MEMORY = {"gpu_oom": "GPU OOM", "host_oom": "host OOM", "cgroup_oom": "cgroup OOM"}
LIVE_STATES = ("pending", "setting_up", "running", "stopping")


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Exactly `width` cells: padded, or cut with an ellipsis; wide characters count two."""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    padding = " " * (width - size)
    return padding + text if right else text + padding


def short(text: str, most: int) -> str:
    """The text, or its beginning and how long it is."""
    return text if len(text) <= most else f"{text[: most // 2]}… ({len(text):,} letters)"


def long_words_cut(text: str) -> str:
    """The text with every word that would fill a screen told by its beginning and its length; what `=` joins are words."""
    return _LONG_WORD.sub(lambda word: short(word[0], MOST_SHOWN), text)


def plain(text: str) -> str:
    """The text in ASCII: marks lose their accents, our own signs get a likeness, the rest a question mark."""
    spelled = text.translate(_ASCII)
    if spelled.isascii():
        return spelled
    spelled = "".join(_drawn(char) for char in spelled)
    return unicodedata.normalize("NFKD", spelled).encode("ascii", "replace").decode("ascii")


def _drawn(char: str) -> str:
    """Lines of boxes and blocks that no table names."""
    if "\N{BOX DRAWINGS LIGHT HORIZONTAL}" <= char <= "\N{BOX DRAWINGS HEAVY LEFT AND LIGHT RIGHT}":
        return "+"
    return "|" if "\N{UPPER HALF BLOCK}" <= char <= "\N{RIGHT ONE EIGHTH BLOCK}" else char


_ASCII = str.maketrans(
    {
        "…": "~", "·": ".", "×": "x", "→": ">", "▸": ">", "▌": ">", "●": "*", "◉": "@", "Ⓑ": "b", "✓": "+", "✗": "x", "—": "-", "–": "-", "−": "-",
        "│": "|", "─": "-", "━": "=", "╸": "=", "╺": "-", "┄": "-", "└": "`", "├": "|", "↑": "^", "↓": "v", "←": "<",
        "▁": "_", "▂": "_", "▃": ".", "▄": "-", "▅": "-", "▆": "=", "▇": "#", "█": "#", "≥": ">", "≤": "<", "±": "~", "∞": "i",
        "\N{REPLACEMENT CHARACTER}": "?", "›": ">", "⏎": "<", "┼": "+", "╎": ":", "γ": "g", "Δ": "d", "▏": "|", "┊": ":", "▲": "^", "■": "#", "◆": "%", "○": "o",
    }
)  # fmt: skip


def state_letter(state: str, reason: str | None = None, *, unreachable: bool = False) -> tuple[str, str]:
    """Letter and meaning of a state; out of memory has its own letter, unreachable is a mark beside a live one."""
    letter, meaning = STATES.get(state, ("?", "odd"))
    if state == "failed" and reason in MEMORY_REASONS:
        letter = "O"
    if unreachable and state in LIVE_STATES:
        return letter + "?", "warn"
    return letter, meaning


def reason_words(reason: str) -> str:
    """Why a run ended, beside its state: which memory it was that ran out in the same words everywhere."""
    return OUT_OF_MEMORY.get(reason, reason.replace("_", " "))


def told_and_repairs(text: str) -> list[str]:
    """What is told, then each repair that it names: a command to be copied stands on a line of its own. The repairs alone are
    spelled to be typed: the rest may be what a person or a job has written."""
    told, *repairs = [" ".join(part.split()) for part in _REPAIR.split(text)]
    return [told, *(to_type(repair) for repair in repairs if repair)]


def state_word(name: str) -> str:
    """A state's name, or a stage's, as it is read."""
    return name.replace("_", " ")


def duration(seconds: float | None) -> str:
    """At most two units, at most six characters: 45s, 12m, 3h20m, 5d12h."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes}m{whole % 60:02d}s" if minutes < 10 else f"{minutes}m"
    hours = minutes // 60
    if hours < 24:
        return f"{hours}h{minutes % 60:02d}m"
    days = hours // 24
    return f"{days}d{hours % 24:02d}h" if days < 100 else f"{days}d"


def age(seconds: float | None) -> str:
    """One unit, at most four characters: how long ago."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def gib(num_bytes: float | None, *, unit: bool = True) -> str:
    """Bytes in GiB; three significant digits below 10."""
    if num_bytes is None:
        return "–"
    size = num_bytes / GIB
    text = f"{size:.0f}" if abs(size) >= 100 else f"{size:.1f}" if abs(size) >= 10 else f"{size:.2f}"
    return f"{text} GiB" if unit else text


def count(number: float | None) -> str:
    """130,000 stays whole; from a million on it is rounded to M or G."""
    if number is None or not math.isfinite(number):
        return "–"
    if abs(number) < 1_000_000:
        return f"{number:,.0f}"
    return f"{number / 1e6:.3g}M" if abs(number) < 1e9 else f"{number / 1e9:.3g}G"


def short_count(number: float | None) -> str:
    """At most five characters: 1,240 whole, from 10,000 on 12.4k, 130k, 1.25M."""
    if number is None or not math.isfinite(number) or abs(number) < 10_000:
        return count(number)
    if abs(number) < 999_500:
        return f"{number / 1000:.3g}k"
    return f"{number / 1e6:.3g}M"


def rate(per_s: float | None) -> str:
    """Tokens per second in five characters: 480, 6.5k, 26.1k, 1.2M."""
    if per_s is None or not math.isfinite(per_s):
        return "–"
    if per_s < 1000:
        return f"{per_s:.0f}"
    return f"{per_s / 1000:.1f}k" if per_s < 999_950 else f"{per_s / 1e6:.1f}M"


def value(number: float | None, *, unit: str = "") -> str:
    """A metric's value: four significant digits, bytes as GiB, NaN and infinity by name."""
    if number is None:
        return "–"
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Inf" if number > 0 else "-Inf"
    if unit == "bytes":
        return gib(number)
    if number == 0:
        return "0"
    size = abs(number)
    if size >= 100_000:
        return count(number)
    if size >= 1000:
        return f"{number:,.0f}"
    if size < 0.001:
        return f"{number:.2e}"
    return f"{number:.4g}"


def short_value(number: float | None, width: int) -> str:
    """A value in at most `width` cells, 6 at least: with fewer digits, never a number that is cut."""
    text = value(number)
    for digits in (3, 2, 1):
        if number is None or len(text) <= width:
            break
        text = f"{number:.{digits}g}" if 0.001 <= abs(number) < 1e5 else f"{number:.{digits - 1}e}"
    return text


def percent(fraction: float | None) -> str:
    return "–" if fraction is None or not math.isfinite(fraction) else f"{fraction * 100:.0f}%"


HOST_CELLS = 16  # of a host's name before its GPU


def gpu_name(run: RunRow, gpu: int) -> str:
    """`GPU 3`; of a run over several hosts with the host that it is in: `box2 GPU 3`."""
    host, index = card_of(run.hosts, gpu)
    return f"{short_host(host)} GPU {index}" if run.more_hosts else f"GPU {index}"


def short_host(host: str) -> str:
    """A host's name where something must stand behind it."""
    return host if cell_len(host) <= HOST_CELLS else fit(host, HOST_CELLS)


def hosts_told(run: RunRow, gpus: Iterable[int]) -> str:
    """Where it runs, with its GPUs: `box, GPU 0 1`; over several hosts `box GPU 0 1 and box2 GPU 3`."""
    cards = [card_of(run.hosts, gpu) for gpu in gpus]
    of_host = {host: " ".join(str(index) for on, index in cards if on == host) for host in run.hosts}
    gap = " " if run.more_hosts else ", "
    return " and ".join(f"{host}{gap}GPU {told}" if told else host for host, told in of_host.items())


def seconds(number: float) -> str:
    """How long a step takes: 340 ms, 1.26 s, 2m05s."""
    return f"{number * 1000:.0f} ms" if number < 1 else f"{number:.2f} s" if number < 60 else duration(number)
