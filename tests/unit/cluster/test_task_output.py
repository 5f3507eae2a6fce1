"""Answers of tasks that print at the same time, through srun."""

from __future__ import annotations

import random

from kempner.cluster.slurm.node_step import in_lines, whole_answers


def test_answers_arrive_whole_whatever_comes_between() -> None:
    noise = random.Random(0)
    said = {f"n{k}": noise.randbytes(5000 * k) for k in range(4)}
    lines = [in_lines(node, answer).splitlines() for node, answer in said.items()]
    assert all(len(line) < 1024 for one in lines for line in one)
    assert [len(one) > 1 for one in lines] == [False, True, True, True]
    mixed = [line for one in lines for line in one]
    noise.shuffle(mixed)
    cut_off = in_lines("n7", noise.randbytes(5000)).splitlines()[:-1]
    told = ["srun: a word", *mixed, *cut_off, "n8 1/1 eJw=", "n9 1/1 abc", "", "{}"]
    assert sorted(whole_answers(told)) == sorted(said.values())
