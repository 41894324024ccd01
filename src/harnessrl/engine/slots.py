"""Which tokens lie in which slot of the cache, and whose prompt can start from them.

A slot is live (a request owns it) or free; a free one keeps its tokens until it is the one least lately used,
so that the next turn of a rollout finds the last one's.
"""

import itertools

import numpy as np


class Slots:
    """`known[s]` tokens of slot s are given, `filled[s]` of them have their keys and values computed."""

    def __init__(self, count: int, max_len: int):
        self.ids = np.zeros((count, max_len), dtype=np.int64)
        self.known = np.zeros(count, dtype=np.int64)
        self.filled = np.zeros(count, dtype=np.int64)
        self.live = np.zeros(count, dtype=bool)
        self._used = np.zeros(count, dtype=np.int64)
        self._clock = itertools.count(1)

    def common(self, prompt: np.ndarray) -> np.ndarray:
        """Per slot, the length of the prefix that its known tokens share with the prompt."""
        same = self.ids[:, : len(prompt)] == prompt
        same &= np.arange(len(prompt)) < self.known[:, None]
        return np.where(same.all(axis=1), len(prompt), same.argmin(axis=1))

    def take(self, prompt: np.ndarray, source: int, length: int) -> int:
        """A slot for the prompt, given that its best match is the first `length` tokens of `source`.

        The match itself if nothing is lost by it, else the free slot least lately used.
        """
        free = np.flatnonzero(~self.live)
        target = int(free[np.argmin(self._used[free])])
        if not self.live[source] and length == self.filled[source]:
            target = source
        self.live[target] = True
        self.ids[target, : len(prompt)] = prompt
        self.known[target] = len(prompt)
        self.filled[target] = length
        self.touch(source)
        self.touch(target)
        return target

    def touch(self, slot: int) -> None:
        self._used[slot] = next(self._clock)

    def append(self, slot: int, token: int) -> None:
        self.ids[slot, self.known[slot]] = token
        self.known[slot] += 1

    def release(self, slot: int) -> None:
        self.live[slot] = False
        self.known[slot] = self.filled[slot]
        self.touch(slot)

    def forget(self) -> None:
        """Of the free slots, everything."""
        self.known[~self.live] = 0
        self.filled[~self.live] = 0
