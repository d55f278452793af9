"""The receiving end of `ship`: makes a tree on this host out of what is here and what arrives.

    python3 - make WORK_DIR [MANIFEST]   the manifest in base64, else on stdin; answers on a line what content is missing,
                                         takes that from stdin, makes the tree, and answers again
    python3 - look WORK_DIR [MANIFEST]   how much of these contents another client has brought by now, and who sends

What is whole needs no content, and what another client sends just now is not taken: then the first answer is the last.

A tree is `<work_dir>/trees/<hash>/` and counts as whole only with its marker inside, which is there
from the moment the folder has its name: it is built aside, every file's sha256 is checked, and one
rename puts it in place. Content that arrived before a cut stays in `trees/.parts` and is not sent
again; a large file goes on where it stopped. After a reboot of the host a tree is checked again,
because files renamed shortly before a power cut may be empty.

Standard library only; it is sent as text together with manifest.py, trees.py and arriving.py, before anything of ours is on the
host. Paths that are absolute, climb out of the tree, or links that lead out of it are refused here too.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import io
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from remote.arriving import QUIET_S, Arriving, Content, Silence
from remote.manifest import PIECE_BYTES, Entry, Refused, check, hashed
from remote.trees import Lacking, NoRoom, Staging, Store, disk, holder


class Busy(Exception):
    """Another receiver is taking the same large content; its one argument says who."""


def receive_content(store: Store, staging: Staging, header: dict[str, Any], stream: BinaryIO) -> None:
    """Small contents in one zlib stream, in the order of `pack`, then the large ones as they are."""
    content = Content(stream)
    for sha, size in header["pack"]:
        staging.keep(sha, content.unpacked(size))
    content.end_pack()
    for sha, size, offset in header["large"]:
        receive_large(store, sha, size, offset, content.plain)
        staging.keep_part(sha)


def receive_large(store: Store, sha: str, size: int, offset: int, read: Any) -> None:
    """One large content from `offset` on; what is here before it is part of what is checked."""
    part = store.part(sha)
    with part.open("ab+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(holder(stream)) from error
        stream.truncate(offset)
        stream.seek(0)
        digest, left = hashed(stream), size - offset
        while left:
            piece = read(min(PIECE_BYTES, left))
            if not piece:
                raise EOFError
            stream.write(piece)
            digest.update(piece)
            left -= len(piece)
        stream.flush()
        if digest.hexdigest() != sha:
            part.unlink()
            raise Refused(sha)
        part.replace(store.parts / sha)


def want(store: Store, header: dict[str, Any]) -> dict[str, Any]:
    if store.is_whole(header["hash"]):
        return {"whole": True, "missing": []}
    missing = store.missing(header["entries"])
    busy = store.who_sends(missing)
    if not busy:  # of the other client's tree some is on the disk already, and more is on its way
        store.need_room(header["entries"])
    return {"whole": False, "missing": missing, "busy": busy} if missing else build(store, header, None)


def make(store: Store, header: dict[str, Any], stream: Any) -> dict[str, Any]:
    """As `want`, and then of what is missing and comes. The manifest that was checked is the one that counts."""
    answer = want(store, header)
    if not answer["missing"] or answer.get("busy"):
        return answer
    _say(answer)
    return build(store, _header(stream) | header, stream)


def look(store: Store, entries: list[Entry]) -> dict[str, Any]:
    """As `want`, of a few contents that somebody may be sending: no tree and no marker is read for it."""
    found = [(sha, store.part(sha)) for _path, _mode, _size, sha, link in entries if link is None]
    missing = [
        [sha, part.stat().st_size if part.is_file() else 0] for sha, part in found if not (store.parts / sha).is_file()
    ]
    return {"whole": False, "missing": missing, "busy": store.who_sends(missing)}


def build(store: Store, header: dict[str, Any], stream: BinaryIO | None) -> dict[str, Any]:
    """Makes the tree from what is here and what comes; what is missing afterwards, if anything."""
    entries, lacking, refused, busy = header["entries"], [], "", ""
    try:
        with Staging(store, header["hash"], entries) as staging:
            if stream is not None:
                receive_content(store, staging, header, stream)
            staging.finish()
            return {"whole": True, "missing": []}
    except Lacking as error:
        lacking = error.args[0]
    except Refused as error:
        refused = str(error)
    except Busy as error:
        busy = str(error)
    missing = dict.fromkeys(lacking, 0) | dict(store.missing(entries))
    return {"whole": False, "missing": [[sha, have] for sha, have in missing.items()], "refused": refused, "busy": busy}


def main(verb: str, work_dir: str, given: str = "", *, quiet_s: float = QUIET_S) -> int:
    os.umask(0o022)
    stdin = Arriving(0, quiet_s=quiet_s)
    header: dict[str, Any] = {"entries": []}
    try:
        header = _header(io.BytesIO(base64.b64decode(given)) if given else stdin)
        _check(header)
        store = Store(Path(work_dir))
        answer = look(store, header["entries"]) if verb == "look" else make(store, header, stdin)
    except Refused as refusal:
        answer = {"error": f"refused: {refusal}"}
    except Silence as silence:
        answer = {"error": f"nothing came for {silence.args[0]:g} s; the client is gone"}
    except EOFError:
        answer = {"error": "the bytes ended before the content did"}
    except NoRoom:
        answer = {"error": f"{work_dir}: too little room", "disk": disk(Path(work_dir), header["entries"])}
    except OSError as error:
        answer = _fault(error, work_dir, header["entries"])
    _say(answer)
    return 0


def _fault(error: OSError, work_dir: str, entries: list[Entry]) -> dict[str, Any]:
    """What the system says, and what is to be known for the way out."""
    said = f"{error.filename or work_dir}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return {"error": said, "disk": disk(Path(work_dir), entries)}
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
        said += "; set work_dir: in hosts.yaml, or XDG_DATA_HOME there, to another folder"
    return {"error": said}


def _header(stream: Any) -> Any:
    """JSON, packed, behind its length; EOFError when it is not whole."""
    size = int.from_bytes(stream.read(4), "big")
    packed = stream.read(size)
    if not size or len(packed) < size:
        raise EOFError
    try:
        return json.loads(zlib.decompress(packed))
    except (ValueError, zlib.error, RecursionError) as error:
        raise Refused(f"a header that is no JSON: {type(error).__name__}") from error


def _check(header: Any) -> None:
    """Refused where it names a tree that is none, or a path outside of it."""
    name = header.get("hash", "") if isinstance(header, dict) else None
    if not isinstance(name, str) or (name and not (name.isascii() and name.isalnum())):
        raise Refused(f"tree {name!a:.80}")
    check(header.get("entries"))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
