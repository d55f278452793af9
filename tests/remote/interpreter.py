"""Triton's interpreter as the tests run it: for tensors of this processor, without what it does for a card's.

It copies every argument to the processor and back, in closures that keep the tensors until the collector comes, and
looks for what to replace in Triton's language again at every call of a kernel's inner function. Here the arguments are
where they should be, and what has been replaced for a launch is not looked for again. Results are the same bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def hasten() -> None:
    """Call it before the first launch; nothing happens where kernels are compiled or the interpreter is another one."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    executor = getattr(interpreter, "GridExecutor", None)
    named = [(interpreter, "tl"), (interpreter, "_LangPatchScope"), (interpreter, "_patch_lang")]
    named += [(executor, "_init_args_hst"), (executor, "_restore_args_dev")]
    if all(hasattr(owner, name) for owner, name in named):
        interpreter.GridExecutor._init_args_hst = _as_they_are
        interpreter.GridExecutor._restore_args_dev = _leave
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang, interpreter)


@contextmanager
def idle() -> Iterator[None]:
    """Launches do nothing in here: what is allocated, kept and freed around them is as ever, what they would write is not.

    For tests of memory, which read no value that a kernel has made: a step takes a fraction of a second in place of ten.
    """
    with _launching(lambda launch: _leave):
        yield


@contextmanager
def launched() -> Iterator[list[str]]:
    """The names of the kernels that are launched in here, launch by launch."""
    names: list[str] = []

    def noting(launch: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Any, *arguments: object, **named: object) -> None:
            names.append(self.fn.__name__)
            launch(self, *arguments, **named)

        return noted

    with _launching(noting):
        yield names


@contextmanager
def _launching(otherwise: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = otherwise(launch)
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch


def _as_they_are(self: Any, arguments: Any, named: Any) -> tuple[Any, Any]:
    return arguments, named


def _leave(self: Any, *_: object, **__: object) -> None:
    """Nothing is left to do: they have been written where they are, or shall not be."""


def _once_a_launch(patch: Callable[[Any], Any], interpreter: Any) -> Callable[[Any], Any]:
    language = interpreter.tl

    def patched(function: Any) -> Any:
        is_done = not any(language.core.is_builtin(module.load) for module in (language, language.core))
        return interpreter._LangPatchScope() if is_done else patch(function)

    return patched
