"""Which replica probably holds which beginnings of prompts, in bounded memory."""

from __future__ import annotations

import collections
import random
from typing import NamedTuple

from jaxllm.routing.prompt_keys import PromptKeys, segment_tokens


class Holder(NamedTuple):
    """A replica, and how many of a prompt's first tokens it probably holds."""

    replica: str
    num_tokens: int


class PrefixIndex:
    """For each replica the keys of prompts sent to it, the least recently used forgotten first.

    A replica's keys name at most as many tokens as its cache has room for, so that what is forgotten here is
    about what it has evicted itself: both keep what was used last, and of one prompt its front.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[str, ...]] = {}
        self._kept: dict[str, collections.OrderedDict[int, int]] = {}  # key -> tokens, least recent first
        self._alone: dict[str, tuple[str]] = {}  # shared by all keys that one replica holds alone
        self._num_tokens: dict[str, int] = {}
        self._room: dict[str, int] = {}

    def add(self, replica: str, room: int) -> None:
        """Know of a replica whose cache has room for so many tokens; again to change that."""
        if replica not in self._kept:
            self._kept[replica] = collections.OrderedDict()
            self._alone[replica] = (replica,)
            self._num_tokens[replica] = 0
        self._room[replica] = max(1, room)
        self._forget_oldest(replica)

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        for key in self._kept.pop(replica):
            self._drop(key, replica)
        del self._alone[replica], self._num_tokens[replica], self._room[replica]

    def share_filled(self, replica: str) -> float:
        """How full a replica's cache probably is, from 0 to 1."""
        return self._num_tokens[replica] / self._room[replica]

    def note(self, replica: str, prompt: PromptKeys) -> None:
        """A prompt has been sent to a replica, which holds it from now on."""
        kept, holders = self._kept[replica], self._holders
        for place in range(len(prompt.keys) - 1, -1, -1):  # the front last, to be forgotten last
            key = prompt.keys[place]
            if key in kept:
                kept.move_to_end(key)
                continue
            kept[key] = tokens = segment_tokens(place)
            self._num_tokens[replica] += tokens
            others = holders.get(key)
            holders[key] = self._alone[replica] if others is None else (*others, replica)
        self._forget_oldest(replica)

    def holders(self, prompt: PromptKeys, most: int, rng: random.Random) -> list[Holder]:
        """At most so many replicas that hold the longest beginnings of a prompt, the longest first.

        Of more that hold the same, some at random.
        """
        found: dict[str, int] = {}
        for place in range(len(prompt.keys) - 1, -1, -1):
            replicas = self._holders.get(prompt.keys[place])
            if replicas is None or len(replicas) <= len(found):  # whoever holds more holds this, too
                continue
            if len(replicas) > most:  # of a thousand, look at a few; enough that some are not found yet
                replicas = tuple(replicas[one] for one in rng.sample(range(len(replicas)), most))
            others = [replica for replica in replicas if replica not in found][: most - len(found)]
            found.update(dict.fromkeys(others, prompt.tokens_at(place)))
            if len(found) >= most:
                break
        return [Holder(replica, num_tokens) for replica, num_tokens in found.items()]

    def _forget_oldest(self, replica: str) -> None:
        kept = self._kept[replica]
        while self._num_tokens[replica] > self._room[replica]:
            key, tokens = kept.popitem(last=False)
            self._num_tokens[replica] -= tokens
            self._drop(key, replica)

    def _drop(self, key: int, replica: str) -> None:
        left = tuple(other for other in self._holders[key] if other != replica)
        if not left:
            del self._holders[key]
        else:
            self._holders[key] = self._alone[left[0]] if len(left) == 1 else left
