"""Compiles grammars in a forked process each, so that a crash fails one call, within limits of the kernel.

The library can overflow its stack, and some schemas take it minutes or gigabytes. So a grammar is compiled here first.
Only one that passes is compiled in the server, whose threads have more stack than the trial had; the library does the
same for the same grammar. A compiled grammar cannot be passed between processes.

The server starts this file as a program, which has the library loaded and forks for every grammar: a trial takes 3 ms.
As a program it imports nothing of the server's. It reads frames (4 bytes of length, the grammar) and answers each with
one byte, which encodes how much memory the grammar took.
"""

from __future__ import annotations

import atexit
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_LIMIT_S = 1.0
"""Processor time of a trial."""
MEMORY_LIMIT_BYTES = 32 * 2**20
"""Maximum address space that a trial may add to its process."""
STACK_LIMIT_BYTES = 2**20
"""Stack of a trial; half of the smallest stack of a server's thread (2 MiB, by glibc)."""
WALL_LIMIT_S = 5.0
"""Time of a trial; on a busy machine it may get little of the processor."""
_NICENESS = 10
"""Niceness of trials: on a busy core they get a tenth of a server thread's time."""
_ANSWER_LIMIT_S = WALL_LIMIT_S + 5

LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # about 300 bytes each
    step_lexer_fuel=1_000_000,  # up to about 30 ms a step; five times the library's own, which ends plain expressions
    verbose_errors=False,
)
"""Beside the library's own limits on the work to build a grammar and on its size."""

_FAILED, _BUSY = 0, 1
_PASSED: Final = 2
"""Answer to a grammar that took no memory; one more for every unit."""
_UNIT_BYTES: Final = 256 * 2**10


class BusyError(Exception):
    """A trial got too little processor time for a result."""


def try_grammar(grammar: str) -> int | None:
    """Compiles a grammar in a separate process. Thread-safe: each caller gets a process.

    Returns:
        Bytes that it takes, in steps of 256 KiB, if that stayed within the limits, whether the grammar is right or not;
        else None.

    Raises:
        BusyError: The process got too little processor time for a result.
    """
    frame = grammar.encode(errors="surrogatepass")
    for make in (_TRIALS.take, _Program):  # a new one in case that the first was killed, by lack of memory for one
        program = make()
        answer = program.ask(frame)
        if answer:
            _TRIALS.give_back(program)
            if answer[0] == _BUSY:
                raise BusyError
            return None if answer[0] == _FAILED else (answer[0] - _PASSED) * _UNIT_BYTES
        program.close()
    raise BusyError


class _Program:
    """This file as a running program."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 -- this interpreter and this file
            [sys.executable, "-P", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the server; forked processes are killed with it
        )

    def ask(self, grammar: bytes) -> bytes:
        """Has a grammar tried; returns the answer, or nothing if the program has ended or hangs."""
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        try:
            _write(pipes.stdin.fileno(), len(grammar).to_bytes(4) + grammar)
        except OSError:
            return b""
        answers = select.poll()  # a server has more open files than `select` can wait for
        answers.register(pipes.stdout, select.POLLIN)
        return os.read(pipes.stdout.fileno(), 1) if answers.poll(_ANSWER_LIMIT_S * 1000) else b""

    def close(self) -> None:
        """Ends the program and its forked processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class _Trials:
    """Pool of idle programs; it grows to the maximum ever needed at once."""

    def __init__(self) -> None:
        self._idle: list[_Program] = []
        self._lock = Lock()

    def take(self) -> _Program:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Program()

    def give_back(self, program: _Program) -> None:
        with self._lock:
            self._idle.append(program)

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()


_TRIALS = _Trials()


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _serve(requests: BinaryIO) -> None:
    """Answers the server's grammars until it closes the pipe, as it does when it ends, however it ends."""
    tokenizer = LLTokenizer("byte")
    LLMatcher(
        tokenizer, "start: /a/", log_level=0, limits=LIMITS
    ).compute_bitmask()  # one-time initialization, before forking
    while header := requests.read(4):
        grammar = requests.read(int.from_bytes(header)).decode(errors="surrogatepass")
        child = os.fork()
        if not child:
            _try(tokenizer, grammar)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            answer = os.WEXITSTATUS(status)
        else:
            answer = _BUSY if os.WTERMSIG(status) == signal.SIGALRM else _FAILED
        _write(1, bytes([answer]))


def _try(tokenizer: LLTokenizer, grammar: str) -> None:
    """Compiles a grammar and ends the process, with the answer as its exit code."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF and SIGALRM end it
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    answer = _FAILED  # a panic is no Exception
    try:
        had_bytes = _resident_bytes()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        num_units = -(-max(_resident_bytes() - had_bytes, 1) // _UNIT_BYTES)
        del matcher  # deep nesting may overflow the stack here
        answer = min(_PASSED + num_units, 255)
    finally:
        os._exit(answer)


def _resident_bytes() -> int:
    """Returns the memory of this process without that of files; 0 where the system does not report it."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        return 0
    _, resident, of_files, *_ = statistics.read_text().split()
    return (int(resident) - int(of_files)) * resource.getpagesize()


def _limit() -> None:
    """Limits this process and all that it forks."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_LIMIT_BYTES, STACK_LIMIT_BYTES))
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # Linux only: other systems do not enforce the limit
        size = int(statistics.read_text().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    _limit()
    _serve(sys.stdin.buffer)
else:
    atexit.register(_TRIALS.close)
