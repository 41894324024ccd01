"""Rows as verl's batch: sequences without padding, and what is known of each token beside them (invariant 7).

Weights carry all averaging, so that nothing depends on how rows are dealt to ranks and micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils

from harnessrl.trainer.rows import CONTEXT, Row

__all__ = ["deal", "to_batch"]


def deal(rows: Sequence[Row], ranks: int) -> list[Row]:
    """The rows in the order in which consecutive parts of equal size go to the ranks: each gets long and short
    ones alike, and rows that train nothing fill up the last places."""
    ordered = sorted(rows, key=len, reverse=True)
    ordered += [_filler(rows[0])] * (-len(ordered) % ranks)
    return [row for rank in range(ranks) for row in ordered[rank::ranks]]


def to_batch(rows: Sequence[Row], version: int, known: Mapping[str, Mapping[int, np.ndarray]]) -> TensorDict:
    """`known`: further fields by name and the row's `id`, by token: log-probabilities (`proximal`, `reference`) and
    the critic's `old_values` and `returns`.

    Every field is nested, by row and token; `temperature` is one number if it can be.
    """
    offsets = torch.from_numpy(np.cumsum([0] + [len(row) for row in rows]))

    def nested(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(np.concatenate(arrays)), offsets)

    # A call is in one row only, so row and index name it among all rollouts.
    calls_R = [(np.int64(r) << 32) + row.calls_T.astype(np.int64) for r, row in enumerate(rows)]
    fields: dict[str, Any] = {
        "input_ids": nested([row.ids_T.astype(np.int64) for row in rows]),
        "position_ids": nested([np.arange(len(row)) for row in rows]),
        "loss_mask": nested([row.mask_T for row in rows]),
        "sampled": nested([row.logprobs_T for row in rows]),
        "advantages": nested([row.advantages_T for row in rows]),
        "weights": nested([row.weights_T for row in rows]),
        "fresh": nested([row.versions_T == version for row in rows]),
        "calls": nested(calls_R),
    }
    for name, of_row in known.items():
        fields[name] = nested([of_row[id(row)] if row.mask_T.any() else row.logprobs_T for row in rows])
    temperatures_R = [_temperature(row) for row in rows]
    one = len(set(temperatures_R)) == 1
    if not one:
        fields["temperature"] = torch.tensor(temperatures_R)
    batch = tensordict_utils.get_tensordict(fields)
    return tensordict_utils.assign_non_tensor(batch, temperature=temperatures_R[0]) if one else batch


def _temperature(row: Row) -> float:
    """verl knows one a row."""
    found = np.unique(row.temperatures_T[row.mask_T] if row.mask_T.any() else row.temperatures_T)
    if len(found) > 1:
        raise ValueError(f"backend: verl: a row of rollout {row.rollout_id} was sampled at temperatures {found}")
    return float(found[0])


def _filler(row: Row) -> Row:
    """Two tokens, neither of them trained, at the temperature of `row`."""
    nothing = np.zeros(2, dtype=np.float32)
    return replace(
        row,
        ids_T=row.ids_T[:2],
        mask_T=np.zeros(2, dtype=bool),
        logprobs_T=nothing,
        versions_T=np.full(2, CONTEXT, dtype=np.int32),
        temperatures_T=np.full(2, _temperature(row), dtype=np.float32),
        calls_T=np.full(2, CONTEXT, dtype=np.int32),
        rewards_T=nothing,
        advantages_T=nothing,
        weights_T=nothing,
    )
