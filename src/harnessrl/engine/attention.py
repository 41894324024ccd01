"""Keys and values of many sequences in slots, and attention over them: one forward for tokens of any of them.

A step packs the new tokens of all its segments into one row, so that no matrix product is done on padding.
Attention alone tells the segments apart: it writes the new keys and values to their slots, then lets each
token see its own slot up to itself. So a sequence's numbers don't depend on who else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMPLEMENTATION = "harnessrl_slots"
GROW_FROM = 256


@dataclass(frozen=True)
class Segment:
    """`length` consecutive new tokens of the sequence in `slot`, the first at position `start`."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class SlotCache:
    """Per layer, keys and values of shape (slots, capacity, heads, head size); capacity doubles on demand."""

    def __init__(self, slots: int, max_len: int):
        self.slots = slots
        self.max_len = max_len
        self.capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key_NHD: Tensor, value_NHD: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self._layers:
            self._layers[index] = self._zeros(key_NHD), self._zeros(value_NHD)
        return self._layers[index]

    def reserve(self, length: int) -> None:
        """Make room for sequences of this length."""
        if length <= self.capacity:
            return
        used, self.capacity = self.capacity, min(max(2 * self.capacity, length, GROW_FROM), self.max_len)
        for index, pair in self._layers.items():
            grown = self._zeros(pair[0]), self._zeros(pair[1])
            for new, old in zip(grown, pair, strict=True):
                new[:, :used] = old
            self._layers[index] = grown

    def copy(self, source: int, target: int, length: int) -> None:
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :length] = tensor[source, :length]

    def drop(self) -> None:
        self._layers.clear()
        self.capacity = 0

    def _zeros(self, like: Tensor) -> Tensor:
        # Zeros, since what is masked is still multiplied by 0, and 0 · NaN is NaN.
        return like.new_zeros(self.slots, self.capacity, *like.shape[-2:])


class Step:
    """The layout of one forward: segments of one token first, to be attended together, then the longer ones."""

    def __init__(self, cache: SlotCache, segments: Sequence[Segment], device: torch.device):
        self.cache = cache
        self.ones = [s for s in segments if s.length == 1]
        self.long = [s for s in segments if s.length > 1]
        assert list(segments) == self.ones + self.long
        cache.reserve(max(s.end for s in segments))
        slots = [s.slot for s in segments for _ in range(s.length)]
        positions = [p for s in segments for p in range(s.start, s.end)]
        self.slots_N = torch.tensor(slots, device=device)
        self.positions_N = torch.tensor(positions, device=device)
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        self._lay_out_ones()

    def _lay_out_ones(self) -> None:
        """Attend over a view of neighbouring slots where few of them idle, else over copies of those in use."""
        slots = [s.slot for s in self.ones]
        low, high = min(slots, default=0), max(slots, default=0) + 1
        self._view = slice(low, high) if high - low <= 2 * len(slots) else None
        offsets = [s - low for s in slots] if self._view else range(len(slots))
        self._rows = torch.tensor(list(offsets), dtype=torch.long, device=self.slots_N.device)
        self._row_count = high - low if self._view else len(slots)
        self._ones_length = max((s.end for s in self.ones), default=0)

    def write(self, layer: int, key_NHD: Tensor, value_NHD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.layer(layer, key_NHD, value_NHD)
        keys[self.slots_N, self.positions_N] = key_NHD
        values[self.slots_N, self.positions_N] = value_NHD
        return keys, values

    def attend(self, query_NHD: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
        """Of the new tokens; shapes (tokens, heads, head size) and (slots, capacity, heads, head size)."""
        masks = self._masks_for(window, query_NHD.dtype)
        out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], values.shape[-1])
        done = len(self.ones)
        if self.ones:
            where = self._view if self._view is not None else self.slots_N[:done]
            query_RHD = query_NHD.new_zeros(self._row_count, *query_NHD.shape[1:])
            query_RHD[self._rows] = query_NHD[:done]
            past = keys[where, : self._ones_length], values[where, : self._ones_length]
            out_NHD[:done] = _attention(query_RHD[:, None], *past, masks[0], scale)[self._rows, 0]
        for segment, mask in zip(self.long, masks[1:], strict=True):
            past = keys[segment.slot, None, : segment.end], values[segment.slot, None, : segment.end]
            new = slice(done, done + segment.length)
            out_NHD[new] = _attention(query_NHD[None, new], *past, mask, scale)[0]
            done += segment.length
        return out_NHD

    def _masks_for(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Additive masks (rows, 1, queries, keys): that of the ones, then one for each longer segment."""
        if (window, dtype) not in self._masks:
            positions_R = self._rows.new_zeros(self._row_count)
            positions_R[self._rows] = self.positions_N[: len(self.ones)]
            masks = [_mask(positions_R[:, None], self._ones_length, window, dtype)]
            done = len(self.ones)
            for segment in self.long:
                positions_T = self.positions_N[done : done + segment.length]
                masks.append(_mask(positions_T[None], segment.end, window, dtype))
                done += segment.length
            self._masks[window, dtype] = masks
        return self._masks[window, dtype]


def _mask(positions_RT: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    at_S = torch.arange(keys, device=positions_RT.device)
    hidden_RTS = at_S > positions_RT[..., None]
    if window is not None:
        hidden_RTS |= at_S <= positions_RT[..., None] - window
    return torch.zeros_like(hidden_RTS, dtype=dtype).masked_fill(hidden_RTS, -torch.inf)[:, None]


def _attention(query_RTHD: Tensor, keys_RSHD: Tensor, values_RSHD: Tensor, mask: Tensor, scale: float) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (query_RTHD, keys_RSHD, values_RSHD))
    out = scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_step: Step,
    **other: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface; query, key and value have the shape (1, heads, tokens, head size)."""
    for name in ("softcap", "s_aux"):
        if other.get(name) is not None:
            raise ValueError(f"The embedded engine doesn't support this model: its attention uses {name}.")
    query_NHD, key_NHD, value_NHD = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    keys, values = slot_step.write(layer, key_NHD, value_NHD)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_step.attend(query_NHD, keys, values, scale, sliding_window)[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
