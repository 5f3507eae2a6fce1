"""Why a process died, by the end of what it has printed."""

from __future__ import annotations

import signal

import pytest

from kempner.supervisor.policy.outcome import PRINTED_LAST, RankExit, find_last_words

PLAIN = """step 3
Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    main()
  File "/home/u/train.py", line 5, in main
    json.loads("{")
  File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode
    obj, end = self.scan_once(s, idx)
json.decoder.JSONDecodeError: Expecting property name: line 1
"""
TWO = """Traceback (most recent call last):
  File "/u/load.py", line 2, in read
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: 'x'

{link}

Traceback (most recent call last):
  File "/u/load.py", line 4, in read
    raise RuntimeError("no data") from error
RuntimeError: no data
the process group was not destroyed
"""
CAUSED = TWO.format(link="The above exception was the direct cause of the following exception:")
HANDLED = TWO.format(link="During handling of the above exception, another exception occurred:")
SEGV = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/u/train.py", line 3 in crash
  File "/home/u/train.py", line 5 in <module>
"""
CPP = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no disk\n"
SYNTAX = '  File "/u/train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
THREAD = "Exception in thread Thread-1 (f):\n" + PLAIN.partition("\n")[2] + "going on\n"
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/u/g.py", line 3, in <module>
  |     step()
  |   File "/u/g.py", line 2, in step
  |     raise ExceptionGroup("two readers", found)
  | ExceptionGroup: two readers (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/u/g.py", line 1, in read
    | ValueError: shard 3 is torn
    +---------------- 2 ----------------
    | OSError: gone
    +------------------------------------
"""
RETRIED = PLAIN + "".join(f"trying again, step {n}\n" for n in range(50))


@pytest.mark.parametrize(
    ("printed", "status", "said"),
    [
        (PLAIN, 1, "json.decoder.JSONDecodeError: Expecting property name: line 1 (train.py:5 in"),
        (CAUSED, 1, "FileNotFoundError: [Errno 2] No such file or directory: 'x' (load.py:2 in"),
        (HANDLED, 1, "RuntimeError: no data (load.py:4 in read)"),
        (SYNTAX, 1, "SyntaxError: invalid syntax (train.py:1)"),
        (SEGV, -signal.SIGSEGV, "Fatal Python error: Segmentation fault (train.py:3 in crash)"),
        (CPP, -signal.SIGABRT, "terminate called after throwing an instance of 'std::runtime_error'"
         ": no disk"),
        ("a.out: m.c:3: main: Assertion `x > 0' failed.\n", -6, "a.out: m.c:3: main: Assertion `x"),
        ("run.sh: line 1: trane: command not found\n", 127, "run.sh: line 1: trane: command not"),
        ("epoch 3\ncannot open data.bin\n", 4, "cannot open data.bin"),
        ("\x1b[2Kthe shard list is empty\n\n", 1, f"{PRINTED_LAST}the shard list is empty"),
        (GROUP, 1, "ExceptionGroup: two readers (2 sub-exceptions) (g.py:2 in step), "
         "the first is ValueError: shard 3 is torn (g.py:1 in read)"),
        (PLAIN, -signal.SIGKILL, ""),  # the kernel, or a person
        (PLAIN, -signal.SIGTERM, ""),
        (PLAIN, 75, ""),
        (PLAIN, 0, ""),
        (THREAD, 1, "a thread had ended: json.decoder.JSONDecodeError: Expecting"),
        (THREAD, -signal.SIGSEGV, ""),
        (RETRIED, 3, f"{PRINTED_LAST}trying again, step 49"),  # it left by itself, long after
        ("", 1, ""),
    ],
)  # fmt: skip
def test_the_cause_in_what_was_printed(printed: str, status: int, said: str) -> None:
    found = find_last_words(printed, status)
    assert found.startswith(said), found
    assert bool(found) == bool(said), found


def test_what_was_printed_last_is_no_failure_to_recognise() -> None:
    said = find_last_words("step 17 loss 0.3\n", 3)
    assert said == f"{PRINTED_LAST}step 17 loss 0.3"  # how far it was, perhaps
    assert RankExit(0, 3, sentence=said).raised == ""
