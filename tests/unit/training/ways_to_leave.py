"""Loops that are left in every way, for the Python that runs this: prints those that are mistaken.

    python ways_to_leave.py .../kempner/training/leaving.py

What is called `left_*` leaves its loop by `break`, by `return` or at the end of what bounds it;
`failed_*` by an exception; `kept_*` keeps the iterator, and leaves the loop before it is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import runpy
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

Steps = runpy.run_path(sys.argv[1])["Steps"]
Loop = Callable[[], Iterable[int]]
left_by_hand: list[bool] = []
remembered: list[BaseException] = []


def count(leaving: Any) -> Generator[int, None, None]:
    try:
        yield from range(1, 6)
    except GeneratorExit:
        left_by_hand.append(leaving.by_hand)
        raise


class Survivor:
    def __iter__(self) -> Iterator[int]:
        return Steps(count)


def bar(steps: Iterable[int]) -> Iterator[int]:
    for step in steps:  # noqa: UP028  (what a loop drops is the subject)
        yield step


def careful_bar(steps: Iterable[int]) -> Iterator[int]:
    with contextlib.ExitStack():
        try:
            for step in steps:  # noqa: UP028
                yield step
        finally:
            pass


def delegating(steps: Iterable[int]) -> Iterator[int]:
    yield from steps


class Bar:
    """As tqdm: a progress bar that is kept."""

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        yield from bar(self.steps)


class Wrapped:
    """An iterator around the steps that is no generator."""

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = iter(steps)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self.steps)


AROUND: dict[str, Callable[[Iterable[int]], Iterable[int]]] = {
    "nothing": lambda steps: steps,
    "a generator": bar,
    "a careful generator": careful_bar,
    "two generators": lambda steps: bar(bar(steps)),
    "yield from": delegating,
    "a bar": Bar,
    "an iterator": Wrapped,
    "enumerate": lambda steps: (step for _, step in enumerate(steps)),
    "map": lambda steps: map(int, steps),
    "zip": lambda steps: itertools.chain.from_iterable(zip(steps)),
}


def left_by_break(loop: Loop) -> None:
    for step in loop():
        if step == 2:
            break


def left_by_return(loop: Loop) -> int | None:
    for step in loop():
        if step == 2:
            return step * 3
    return None


def left_by_return_of_a_constant(loop: Loop) -> int | None:
    for step in loop():
        if step == 2:
            return 7
    return None


def left_out_of_with(loop: Loop) -> int | None:
    for step in loop():
        with contextlib.nullcontext():
            if step == 2:
                return step
    return None


def left_out_of_try(loop: Loop) -> None:
    for step in loop():
        try:
            if step == 2:
                break
        finally:
            pass


def left_out_of_an_inner_loop(loop: Loop) -> int | None:
    for step in loop():
        for other in range(step):
            if other == 1:
                return other
    return None


def left_within_an_outer_loop(loop: Loop) -> None:
    for _ in range(2):
        for step in loop():
            if step == 2:
                break
        return


def left_by_match(loop: Loop) -> None:
    for step in loop():
        match step:
            case 2:
                break


def left_in_a_coroutine(loop: Loop) -> None:
    async def main() -> None:
        for step in loop():
            await asyncio.sleep(0)
            if step == 2:
                break

    asyncio.run(main())


def left_in_a_generator(loop: Loop) -> None:
    def losses() -> Iterator[int]:
        for step in loop():
            if step == 2:
                return
            yield step

    list(losses())


def left_within_except(loop: Loop) -> None:
    try:
        raise ValueError
    except ValueError:
        for step in loop():
            if step == 2:
                break


def left_after_an_error_that_is_remembered(loop: Loop) -> None:
    for step in loop():
        try:
            raise ValueError
        except ValueError as error:
            remembered.append(error)
        if step == 3:
            break


def left_at_the_end_of_a_slice(loop: Loop) -> None:
    for _ in itertools.islice(loop(), 2):
        pass


def left_at_the_end_of_a_range(loop: Loop) -> None:
    for _ in zip(range(2), loop(), strict=False):
        pass


def left_at_the_end_of_what_follows(loop: Loop) -> None:
    for _ in zip(loop(), range(2), strict=False):
        pass


def failed(loop: Loop) -> None:
    for step in loop():
        if step == 2:
            raise ValueError


def failed_in_an_expression(loop: Loop) -> None:
    for step in loop():
        1 / (2 - step)


def failed_in_a_call(loop: Loop) -> None:
    for step in loop():
        fails_in_two(step)


def failed_in_with(loop: Loop) -> None:
    for step in loop():
        with contextlib.nullcontext():
            fails_in_two(step)


def failed_in_try(loop: Loop) -> None:
    for step in loop():
        try:
            fails_in_two(step)
        finally:
            pass


def failed_again(loop: Loop) -> None:
    for step in loop():
        try:
            fails_in_two(step)
        except ZeroDivisionError:
            raise


def failed_after_an_error_that_is_remembered(loop: Loop) -> None:
    for step in loop():
        try:
            raise ValueError
        except ValueError as error:
            remembered.append(error)
        if step == 3:
            raise ValueError


def failed_in_del(loop: Loop) -> None:
    for step in loop():
        if step == 2:
            del {}["nothing"]


def failed_in_a_store(loop: Loop) -> None:
    for step in loop():
        [0][step - 1] = 1


def failed_by_exit(loop: Loop) -> None:
    for step in loop():
        if step == 2:
            sys.exit(3)


def failed_by_interrupt(loop: Loop) -> None:
    for step in loop():
        if step == 2:
            raise KeyboardInterrupt


def failed_in_map(loop: Loop) -> None:
    for _ in map(fails_in_two, loop()):
        pass


def failed_in_a_list(loop: Loop) -> None:
    list(map(fails_in_two, loop()))


def failed_in_what_is_beside(loop: Loop) -> None:
    for _ in zip(loop(), (fails_in_two(step) for step in range(1, 6)), strict=False):
        pass


def failed_in_a_generator(loop: Loop) -> None:
    def losses() -> Iterator[float]:
        for step in loop():
            yield fails_in_two(step)

    list(losses())


def failed_with_its_iterator_kept(loop: Loop) -> None:
    steps = iter(loop())
    for step in steps:
        fails_in_two(step)


def kept_after_break(loop: Loop) -> int:
    steps = iter(loop())
    for step in steps:
        if step == 2:
            break
    return 0


def kept_after_next(loop: Loop) -> None:
    steps = iter(loop())
    while True:
        if next(steps) == 2:
            return


def fails_in_two(step: int) -> float:
    return 1 / (2 - step)


def steps_in(wrap: Callable[[Iterable[int]], Iterable[int]]) -> Iterable[int]:
    return wrap(Survivor())


def play(way: Callable[[Loop], object], loop: Loop) -> None:
    with contextlib.suppress(BaseException):
        way(loop)


def mistaken() -> Iterator[str]:
    ways = [(n, w) for n, w in globals().items() if n.split("_")[0] in ("left", "failed", "kept")]
    for (name, way), (around, wrap) in itertools.product(ways, AROUND.items()):
        if not callable(way):
            continue
        left_by_hand.clear()
        remembered.clear()
        play(way, partial(steps_in, wrap))
        gc.collect()
        if left_by_hand != [name.startswith("left")]:
            yield f"{name} with {around} around the steps: {left_by_hand}"


if __name__ == "__main__":
    found = list(mistaken())
    sys.exit("\n".join(found) or None)
