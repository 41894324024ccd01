"""What the engine's tests compare with: plain forwards of the same model."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from harnessrl.engine.embedded import Answer, Delta, EmbeddedEngine, join
from harnessrl.engine.sampling import Sampling

TINY = Path(__file__).parents[1] / "assets" / "tiny"


def full_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by one plain forward over everything."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    return (logits_TV / temperature).log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


def check(model: torch.nn.Module, prompt: Sequence[int], answer: Answer, temperature: float = 1.0) -> None:
    expected = full_logprobs(model, prompt, answer.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-3, rtol=0)


class Request:
    """A request under way: `on_token` is called in the engine's thread with the number of tokens so far."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        prompt: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], object] = lambda count: None,
    ):
        self.deltas: list[Delta] = []
        self._on_token = on_token
        self._done = threading.Event()
        self.id = engine.submit(prompt, sampling, self._emit)

    def _emit(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason:
            self._done.set()
        else:
            self._on_token(sum(len(d.token_ids) for d in self.deltas))

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def answer(self) -> Answer:
        assert self._done.wait(20)
        return join(self.deltas)
