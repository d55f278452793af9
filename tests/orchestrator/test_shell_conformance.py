"""The same nasty cases on every way to a machine. `tests/transports.py` opens the ways, for real.

On `tty` a terminal carries both streams as one, so what went to stderr is looked for in stdout there. Cases that one command
can carry together travel together: on eight ways a command each would be most of the suite's time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import itertools
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import HostError
from orchestrator.shell.hops import ROWS
from orchestrator.shell.stream import Source, StreamShell
from tests import container, transports

SLOW = tuple(name for name in transports.NAMES if name != "local")
NO_CONTAINER = container.why_not()


@dataclass(frozen=True)
class Way:
    name: str
    shell: StreamShell
    folder: str  # empty, on the host

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


def _mark(name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.xdist_group(f"way-{name}")]
    if name in SLOW:
        marks.append(pytest.mark.slow)
    if name == "pct" and NO_CONTAINER:
        marks.append(pytest.mark.skip(reason=NO_CONTAINER))
    return marks


@pytest.fixture(scope="session", params=[pytest.param(name, marks=_mark(name)) for name in transports.NAMES])
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    name = request.param
    with transports.opened(name, tmp_path_factory.mktemp(name)) as shell:
        folder = f"/var/tmp/draftyard-test-{uuid.uuid4().hex}"
        assert shell.run(["mkdir", folder]).exit_code == 0
        yield Way(name, shell, folder)
        shell.run(["rm", "-rf", folder])


class Bundle(list[Any]):
    """Cases that travel together."""


def bundles(cases: list[Any], size: int) -> list[Bundle]:
    return [Bundle(cases[start : start + size]) for start in range(0, len(cases), size)]


ACCENT = "e\u0301"  # two code points; é as one is another name
EVERY_BYTE = bytes(range(256))
UNDECODABLE = os.fsdecode(b"\xff\xfe-latin-\xe9")

WORDS = [
    *(
        "",
        " ",
        "  two  ",
        "\t",
        "\n",
        "\n\n",
        "a\nb",
        "ends in newline\n",
        "\r",
        "\r\n",
        "a\rb",
        "\x01",
        "\x03",
        "\x04",
    ),
    *("\x07", "\x08", "\x0b", "\x0c", "\x1a", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x7f", "\x11\x13", "\x1c"),
    *(
        "'",
        "''",
        "'''",
        '"',
        '""',
        "`",
        "``",
        "`id`",
        "$",
        "$$",
        "$HOME",
        "${HOME}",
        "$(id)",
        "$((1+1))",
        "$'a\\n'",
        '$"x"',
    ),
    *("\\", "\\\\", "\\n", "\\0", "\\0101", "\\x41", "\\c", "a\\", "\\'", '\\"', "%", "%%", "%s", "%b", "%n", "100%"),
    *(
        "!",
        "!!",
        "!x",
        "#",
        "# no comment",
        "a#b",
        "&",
        "&&",
        "|",
        "||",
        ";",
        ";;",
        "; exit 3",
        "(",
        ")",
        "()",
        "{",
        "}",
    ),
    *(
        "{a,b}",
        "{1..3}",
        "[",
        "]",
        "[a-z]*",
        "[[",
        "*",
        "**",
        "?",
        "~",
        "~root",
        "~/x",
        "a~b",
        "<",
        ">",
        ">>",
        "<<EOF",
        "2>&1",
    ),
    *(
        "<(id)",
        "=",
        "a=b",
        "PATH=x",
        "-",
        "--",
        "-n",
        "-e",
        "-c",
        "--help",
        "-- -x",
        "+x",
        "@",
        "a@b",
        ":",
        ",",
        ".",
        "..",
    ),
    *("/", "//", "/a b", "^", "^a^b", "a^", "-rf /", "null", "true", "if", "then fi", "case x in", "function f { :; }"),
    *(
        "é",
        ACCENT,
        "日本語",
        "🙂",
        "👩‍👩‍👧‍👦",
        "\u200b",
        "\u202e",
        "\u2028",
        "\ufeff",
        "ß",
        "İ",
        UNDECODABLE,
        os.fsdecode(b"\x80"),
    ),
    *("a" * 4096, "'" * 2000, "\\" * 2000, "\n" * 2000, "é" * 2000),
]


@pytest.mark.parametrize("words", bundles(WORDS, 8), ids=itertools.count())
def test_an_argument_arrives_byte_for_byte(way: Way, words: list[str]) -> None:
    done = way.shell.run(["printf", "<%s>\\0", *words])

    assert done.stdout.split(b"\0") == [*(b"<" + os.fsencode(word) + b">" for word in words), b""]
    assert done.exit_code == 0


def test_all_arguments_together_keep_their_order_and_count(way: Way) -> None:
    words = [word for word in WORDS if len(word) < 100]

    done = way.shell.run(["printf", "%s\\0", *words])

    assert done.stdout == b"".join(os.fsencode(word) + b"\0" for word in words)


def test_a_command_longer_than_one_argument_may_be_arrives(way: Way) -> None:
    words = [f"{number}'{'x' * 90}" for number in range(1500)]

    done = way.shell.run(["printf", "%s,", *words])

    assert done.stdout == "".join(f"{word}," for word in words).encode()


def test_the_program_itself_may_have_a_name_full_of_quotes(way: Way) -> None:
    name = way.path('it\'s a "prog" $HOME\n;é')
    way.shell.run(["cp", "/bin/echo", name])

    assert way.shell.run([name, "ran"]).stdout == b"ran\n"


@pytest.mark.slow
def test_every_exit_code_is_the_commands_own(way: Way) -> None:
    """All of them where a command is cheap, and where every other way begins; what a hop or a terminal could mistake elsewhere."""
    is_cheap = way.name in ("local", "ssh")
    wanted = range(256) if is_cheap else [0, 1, 2, 9, 10, 31, 99, 100, *range(124, 132), 137, 199, 200, 254, 255]
    with ThreadPoolExecutor(4) as several:
        codes = list(several.map(lambda code: way.shell.run(["sh", "-c", f"exit {code}"]).exit_code, wanted))

    assert codes == list(wanted)


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "KILL", "SEGV", "PIPE", "TERM", "USR1"])
def test_a_command_ended_by_a_signal_has_128_plus_its_number(way: Way, name: str) -> None:
    numbers = {"HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "SEGV": 11, "PIPE": 13, "TERM": 15, "USR1": 10}

    done = way.shell.run(["sh", "-c", f"ulimit -c 0; kill -s {name} $$; sleep 5"])

    assert done.exit_code == 128 + numbers[name]


def test_a_program_that_does_not_exist_is_127_and_named(way: Way) -> None:
    done = way.shell.run(["no-such-program", "x"])

    assert done.exit_code == 127
    assert b"no-such-program" in done.stderr + done.stdout


def test_a_file_that_is_no_program_is_126(way: Way) -> None:
    way.shell.run(["touch", way.path("plain")])

    assert way.shell.run([way.path("plain")]).exit_code == 126


@pytest.mark.parametrize("argv", [[], [""], ["-x"], ["echo", "a\0b"], ["a\0b"]])
def test_what_no_exec_can_carry_is_refused_before_anything_is_sent(way: Way, argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"empty|dash|NUL"):
        way.shell.run(argv)


def test_echo_is_the_program_and_not_a_shells_own(way: Way) -> None:
    """dash's built-in echo would read the backslash."""
    assert way.shell.run(["echo", "\\0101"]).stdout == b"\\0101\n"


@pytest.mark.parametrize("word", ["exit", "exec", "set", "cd", "eval", "export", "if", "a=b", "PATH=x"])
def test_a_word_of_the_shell_language_is_no_program(way: Way, word: str) -> None:
    assert way.shell.run([word, "0"]).exit_code == 127


STDIN = {
    "one byte": b"x",
    "no newline at the end": b"a\nb",
    "every byte": EVERY_BYTE * 4,
    "controls": b"\x03\x04\x04\x1a\x11\x13\x7f\x15\x17\x16\x0f\r\n\r\n",
    "marks": b"<00 start>\n<00 end 0>\n",
    "a shell script": b"exit 9\necho '$(id)'\n",
    "a line of 100,000": b"y" * 100_000,
    "just under 32 KiB": b"a" * (32 * 1024 - 1),
    "32 KiB": b"b" * (32 * 1024),
    "just above 32 KiB": b"c" * (32 * 1024 + 1),
    "3 MiB and a bit": EVERY_BYTE * 12_288 + b"end",
}


@pytest.mark.parametrize("name", STDIN)
def test_stdin_arrives_byte_for_byte_and_ends(way: Way, name: str) -> None:
    done = way.shell.run(["cat"], stdin=STDIN[name])

    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(STDIN[name]).digest()


def test_without_stdin_a_reader_sees_the_end_at_once(way: Way) -> None:
    done = way.shell.run(["sh", "-c", "cat; echo after"], timeout_s=60)

    assert done.stdout == b"after\n"


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_stdin_that_nobody_reads_is_no_error(way: Way, size: int) -> None:
    done = way.shell.run(["sh", "-c", "exec <&-; exit 5"], stdin=b"z" * size)

    assert done.exit_code == 5


@pytest.mark.parametrize("num_filler", [0, 130_000])
def test_a_command_is_answered_as_much_as_it_asked_for(way: Way, num_filler: int) -> None:
    """It reads what was there from the start, asks, and is given the rest; no end of its input is needed."""
    asks = 'printf "%s?\\n" "$(dd bs=1 count=4 2>/dev/null)"; head -c "$1" | sha256sum; exit 7'
    answer, said, asked = EVERY_BYTE * 1200, [], threading.Event()

    def hear(piece: bytes) -> None:
        said.append(piece)
        if b"head?\n" in b"".join(said):
            asked.set()

    words = ["sh", "-c", asks, "sh", str(len(answer)), "x" * num_filler]  # the long one does not fit into one argument
    source = Source(io.BytesIO(answer), None, head=b"head", after=asked)
    ended = way.shell.stream(words, source=source, sink=hear, timeout_s=60)

    assert ended.exit_code == 7
    assert b"".join(said).split() == [b"head?", hashlib.sha256(answer).hexdigest().encode(), b"-"]


def test_a_command_that_ends_without_asking_is_given_nothing(way: Way) -> None:
    class Untouched:
        def read(self, size: int) -> bytes:
            raise AssertionError("nobody asked")

    source = Source(Untouched(), None, after=threading.Event())  # type: ignore[arg-type]
    ended = way.shell.stream(["sh", "-c", "exit 3"], source=source, sink=lambda _: None, timeout_s=60)

    assert ended.exit_code == 3


OUTPUT = {
    "nothing": ("true", b""),
    "no newline": ("printf abc", b"abc"),
    "only newlines": ("printf '\\n\\n'", b"\n\n"),
    "CRLF": ("printf 'a\\r\\nb\\r\\n'", b"a\r\nb\r\n"),
    "a bar": ("printf '10%%\\r20%%\\r'", b"10%\r20%\r"),
    "NUL": ("printf 'a\\0b'", b"a\0b"),
    "bell and escape": ("printf '\\007\\033[2J\\033]0;x\\007'", b"\x07\x1b[2J\x1b]0;x\x07"),
    "form feed": ("printf 'a\\fb\\vc'", b"a\fb\vc"),
    "invalid UTF-8": ("printf '\\377\\376\\200'", b"\xff\xfe\x80"),
    "something like a mark": ("printf '<start>\\n<end 0>\\n<'", b"<start>\n<end 0>\n<"),
    "brackets only": ("printf '<<<<<<<<>>>>>>>>'", b"<<<<<<<<>>>>>>>>"),
    "ends half a mark": ("printf '<0123456789abcdef'", b"<0123456789abcdef"),
}


@pytest.mark.parametrize("name", OUTPUT)
def test_output_comes_back_byte_for_byte(way: Way, name: str) -> None:
    script, expected = OUTPUT[name]

    assert way.shell.run(["sh", "-c", script]).stdout == expected


def test_every_byte_comes_back(way: Way) -> None:
    way.shell.run(["sh", "-c", f"cat > {way.path('bytes')}"], stdin=EVERY_BYTE)

    assert way.shell.run(["cat", way.path("bytes")]).stdout == EVERY_BYTE


def test_twice_a_window_on_both_streams_at_once_comes_whole(way: Way) -> None:
    """A channel of paramiko holds 2 MiB of each stream that nobody has read. Five times that where bytes are cheap."""
    size = (10 if way.name in ("local", "ssh") else 4) * 1024**2
    script = f"head -c {size} /dev/zero & head -c {size} /dev/zero | tr '\\0' e >&2; wait"

    done = way.shell.run(["sh", "-c", script], timeout_s=60)

    if way.name == "tty":
        assert (done.stdout.count(b"\0"), done.stdout.count(b"e")) == (size, size)
    else:
        assert (len(done.stdout), done.stdout.strip(b"\0")) == (size, b"")
        assert (len(done.stderr), done.stderr.strip(b"e")) == (size, b"")


def test_output_while_much_input_is_still_coming_does_not_lock(way: Way) -> None:
    content = os.urandom(1024) * 3000

    done = way.shell.run(["sh", "-c", "tee /dev/stderr"], stdin=content, timeout_s=60)

    assert len(done.stdout) + len(done.stderr) == 2 * len(content)


def test_a_grandchild_that_holds_the_streams_does_not_hold_us(way: Way) -> None:
    began = time.monotonic()

    done = way.shell.run(["sh", "-c", "sleep 60 & echo started; exit 4"])

    assert (done.stdout, done.exit_code) == (b"started\n", 4)
    assert time.monotonic() - began < 50


def test_a_command_starts_in_the_home_folder_without_a_terminal_of_ours(way: Way) -> None:
    done = way.shell.run(["sh", "-c", 'cd; [ -n "$HOME" ] && [ "$(pwd -P)" = "$(cd "$HOME" && pwd -P)" ] && echo home'])

    assert done.stdout == b"home\n"


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_an_error_and_is_ended(way: Way) -> None:
    mark = f"4{uuid.uuid4().int % 10**6}.25"
    began = time.monotonic()

    with pytest.raises(HostError, match="no answer within 1 s"):
        way.shell.run(["sleep", mark], timeout_s=1)

    assert time.monotonic() - began < 35  # its own time is over 40 s
    for _ in range(600):
        listed = way.shell.run(["sh", "-c", "ps -eo args"]).stdout.decode(errors="replace")
        if f"sleep {mark}" not in listed.splitlines():
            break
        time.sleep(0.1)
    assert f"sleep {mark}" not in listed.splitlines()


def test_thirty_commands_at_once_all_come_back_right(way: Way) -> None:
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = way.shell.run(["sh", "-c", f"sleep 0.1; echo {number}"], timeout_s=60).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == {number: f"{number}\n".encode() for number in range(30)}


NAMES = [
    *(
        "plain",
        "two words",
        " leading",
        "trailing ",
        "new\nline",
        "tab\there",
        "-dash",
        "--",
        "*",
        "?",
        "[a]",
        "$HOME",
        "`id`",
    ),
    *(
        "it's",
        'say "hi"',
        "back\\slash",
        "a;b",
        "a&b",
        "a|b",
        "(a)",
        "{a}",
        "#a",
        "~",
        "!a",
        "%s",
        "é",
        f"caf{ACCENT}",
        "日本",
        "🙂",
    ),
    *("\x01\x02", "a\rb", UNDECODABLE, "x" * 200, "é" * 100),
]


@pytest.mark.parametrize("names", bundles(NAMES, 3), ids=itertools.count())
def test_a_file_of_any_name_goes_there_and_back(way: Way, names: list[str], tmp_path: Path) -> None:
    """In a folder of any name in one of any name."""
    content, remote = os.urandom(999) + os.fsencode(names[-1]), way.path("/".join(["named", *names]))
    (tmp_path / "here").write_bytes(content)

    way.shell.put(tmp_path / "here", remote)
    way.shell.get(remote, tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == content
    found = way.shell.stat(remote)
    assert found is not None
    assert (found.size_bytes, found.is_dir, found.is_link) == (len(content), False, False)
    assert way.shell.read_range(remote, 10, 20) == content[10:30]


def test_both_unicode_forms_of_a_name_are_two_files(way: Way, tmp_path: Path) -> None:
    for number, name in enumerate(("é-file", f"{ACCENT}-file")):
        (tmp_path / "here").write_text(str(number))
        way.shell.put(tmp_path / "here", way.path(name))

    assert [way.shell.read_range(way.path(name), 0, 9) for name in ("é-file", f"{ACCENT}-file")] == [b"0", b"1"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o400])
def test_a_file_has_the_mode_that_was_asked_for_and_keeps_it_on_the_way_back(
    way: Way, mode: int, tmp_path: Path
) -> None:
    (tmp_path / "here").write_text("#!/bin/sh\necho ran\n")

    way.shell.put(tmp_path / "here", way.path("moded"), mode=mode)
    way.shell.get(way.path("moded"), tmp_path / "back")

    found = way.shell.stat(way.path("moded"))
    assert found is not None
    assert found.mode == mode
    assert (tmp_path / "back").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("size", [0, 1, 4096, 262_144, 262_145, 3_000_001])
def test_a_file_of_any_size_arrives_whole(way: Way, size: int, tmp_path: Path) -> None:
    content = os.urandom(1000) * (size // 1000 + 1)
    (tmp_path / "here").write_bytes(content[:size])

    way.shell.put(tmp_path / "here", way.path("sized"))
    way.shell.get(way.path("sized"), tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == content[:size]
    assert b".put" not in way.shell.run(["ls", "-a", way.folder]).stdout


def test_put_makes_the_folders_it_needs_and_replaces_what_was_there(way: Way, tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "here").write_text(text)
        way.shell.put(tmp_path / "here", way.path("a b/c'd/file"))

    assert way.shell.read_range(way.path("a b/c'd/file"), 0, 99) == b"second"


RANGES = [(0, 0), (0, 1), (0, 10), (5, 10), (99, 1), (99, 10), (100, 1), (1000, 10), (0, 1000), (50, 50), (1, 99)]


@pytest.mark.parametrize("ranges", [Bundle(RANGES)], ids=["all"])
def test_a_range_is_what_a_slice_would_be(way: Way, ranges: list[tuple[int, int]]) -> None:
    content = bytes(range(100))
    way.shell.run(["sh", "-c", f"cat > {way.path('ranged')}"], stdin=content)

    read = [way.shell.read_range(way.path("ranged"), offset, size) for offset, size in ranges]

    assert read == [content[offset : offset + size] for offset, size in ranges]


def test_ranges_of_a_growing_file_join_without_a_gap(way: Way) -> None:
    grow, offset, seen = way.path("growing"), 0, b""
    for number in range(5):
        way.shell.run(["sh", "-c", f"printf 'line {number}\\n' >> {grow}"])
        seen += way.shell.read_range(grow, offset, 1000)
        offset = len(seen)

    assert seen == b"".join(b"line %d\n" % number for number in range(5))


@pytest.mark.parametrize("name", ["absent", "no/such/folder", "a\nb"])
def test_what_is_not_there_is_said_alike(way: Way, name: str, tmp_path: Path) -> None:
    assert way.shell.stat(way.path(name)) is None
    with pytest.raises(FileNotFoundError):
        way.shell.read_range(way.path(name), 0, 1)
    with pytest.raises(FileNotFoundError):
        way.shell.get(way.path(name), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_stat_tells_files_folders_and_links_apart(way: Way) -> None:
    way.shell.run(
        ["sh", "-c", 'cd "$1"; mkdir -p d; echo x > f; ln -sf f l; ln -sf nowhere dangling', "sh", way.folder]
    )

    kinds = {}
    for name in ("d", "f", "l", "dangling"):
        found = way.shell.stat(way.path(name))
        assert found is not None
        kinds[name] = (found.is_dir, found.is_link)
    assert kinds == {"d": (True, False), "f": (False, False), "l": (False, True), "dangling": (False, True)}
    assert way.shell.read_range(way.path("l"), 0, 9) == b"x\n"


def test_put_replaces_a_link_and_leaves_what_it_pointed_to(way: Way, tmp_path: Path) -> None:
    way.shell.run(["sh", "-c", 'cd "$1"; echo old > pointed; ln -sf pointed pointing', "sh", way.folder])
    (tmp_path / "here").write_text("new")

    way.shell.put(tmp_path / "here", way.path("pointing"))

    assert way.shell.read_range(way.path("pointed"), 0, 9) == b"old\n"
    assert way.shell.read_range(way.path("pointing"), 0, 9) == b"new"
    found = way.shell.stat(way.path("pointing"))
    assert found is not None
    assert not found.is_link


def test_stat_sees_a_file_replaced_by_another_inode_and_the_hosts_clock(way: Way) -> None:
    way.shell.run(["sh", "-c", 'echo 1 > "$1"; touch -d @1700000000 "$1"', "sh", way.path("s")])
    before = way.shell.stat(way.path("s"))
    way.shell.run(["sh", "-c", 'echo 22 > "$1.new"; mv "$1.new" "$1"', "sh", way.path("s")])
    after = way.shell.stat(way.path("s"))

    assert before is not None
    assert after is not None
    assert before.modified_s == 1_700_000_000
    assert (before.size_bytes, after.size_bytes) == (2, 3)
    assert before.inode != after.inode


def test_a_spawned_process_has_its_own_session_and_no_stream_of_ours(way: Way) -> None:
    out = way.path("spawned")
    script = 'cut -d" " -f1,6 /proc/$$/stat; pwd; printf "%s|" "$@"; [ -t 0 ] || echo no-tty; cat'

    way.shell.spawn(["sh", "-c", f"({script}) > {out}; mv {out} {out}.done", "sh", "a b", "it's"], cwd=way.folder)

    for _ in range(1200):
        if way.shell.stat(f"{out}.done"):
            break
        time.sleep(0.05)
    first, *rest = way.shell.read_range(f"{out}.done", 0, 1000).decode().splitlines()
    pid, session = first.split()
    assert pid == session
    assert rest == [way.folder, "a b|it's|no-tty"]


def test_spawn_into_a_folder_that_is_not_there_says_so(way: Way) -> None:
    with pytest.raises(Exception, match=r"cannot start in .*/nowhere"):
        way.shell.spawn(["true"], cwd=way.path("nowhere"))


def test_ranges_all_over_a_gigabyte_cost_constant_memory(way: Way) -> None:
    piece, apart, size = 4 * 1024**2, 64 * 1024**2, 1024**3
    way.shell.run(["truncate", "-s", str(size), way.path("huge")])
    way.shell.run(["sh", "-c", f"printf end | dd of={way.path('huge')} bs=1 seek={size - 3} conv=notrunc"])
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the tests before
    before, total = _resident_bytes(), 0

    for offset in range(apart - piece, size, apart):
        content = way.shell.read_range(way.path("huge"), offset, piece)
        total += len(content)

    assert total == 64 * 1024**2
    assert content.endswith(b"\0end")
    # A connection holds its windows, of 2 MiB a stream, and a piece; through a jump host there are two. Measured: 2 to 7 MiB.
    assert _resident_bytes() - before < total // 4
    assert (
        _peak_bytes() - before < size // 4
    )  # what reads from the file's beginning for each piece takes half of it or more


def test_a_large_file_goes_there_and_back_at_constant_memory(way: Way, tmp_path: Path) -> None:
    size = 48 * 1024**2
    with (tmp_path / "here").open("wb") as stream:
        stream.write(b"begin")
        stream.truncate(size)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the tests before
    before = _peak_bytes()

    way.shell.put(tmp_path / "here", way.path("large"))
    way.shell.get(way.path("large"), tmp_path / "back")

    # Held whole it would be more than its size; what the C library keeps of freed memory was up to 26 MiB.
    assert _peak_bytes() - before < size
    assert (tmp_path / "back").stat().st_size == size
    assert (tmp_path / "back").read_bytes()[:9] == b"begin\0\0\0\0"


def _resident_bytes() -> int:
    """What is in use. Of what was freed in many threads the C library keeps tens of MiB, the more the busier the machine."""
    with contextlib.suppress(AttributeError):  # of a C library that has no such call
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS:")


def _peak_bytes() -> int:
    return _status("VmHWM:")


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(name)[2].split()[0]) * 1024


def test_every_way_has_the_same_cases_and_more_than_200() -> None:
    """The way is a parameter of the fixture, so whatever takes it runs on each; how many that are is counted here."""
    taking = [test for test in globals().values() if "way" in getattr(test, "__annotations__", {})]
    marks = [[mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"] for test in taking]
    cases = [math.prod(sum(map(_count, mark.args[1])) for mark in several) for several in marks]

    assert sum(cases) > 250
    assert set(transports.NAMES) == {
        "local",
        "ssh",
        "jump",
        "tty",
        "inner",
        *(set(ROWS) - {"ssh"}),
    }  # inner: the ssh row


def _count(case: object) -> int:
    return len(case) if isinstance(case, Bundle) else 1
