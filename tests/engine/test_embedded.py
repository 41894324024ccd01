"""What the engine samples and reports is what a plain forward of the current weights says, in any company."""

import random
import threading

import peft
import pytest
import torch
from engine_checks import Request, check, full_logprobs
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from harnessrl.engine.embedded import EmbeddedEngine, PromptTooLong
from harnessrl.engine.sampling import Sampling

LONG = Sampling(max_tokens=40)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 512), k=length)


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def test_mixed_batch(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    prompts = [prompt(i, length) for i, length in enumerate((1, 2, 17, 64, 255, 256, 300, 471, 33, 50))]
    for one, answer in zip(prompts, engine.generate(prompts, LONG), strict=True):
        assert (len(answer.token_ids), answer.finish_reason) == (40, "length")
        check(model, one, answer)


def test_temperature_is_in_the_logprobs(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    one = prompt(0, 30)
    (answer,) = engine.generate([one], Sampling(max_tokens=20, temperature=0.5))
    check(model, one, answer, temperature=0.5)


def test_a_group_computes_its_prompt_once(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    one = prompt(0, 300)
    for answer in engine.generate([one] * 8, LONG):
        check(model, one, answer)
    stats = engine.stats()
    assert stats.prefilled_tokens == 300 + 7
    assert stats.shared_tokens == 7 * 299


def test_prompts_wait_for_a_common_beginning(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    system = prompt(0, 100)
    prompts = [system + prompt(i, 20 + i) for i in range(1, 7)]
    for one, answer in zip(prompts, engine.generate(prompts, LONG), strict=True):
        check(model, one, answer)
    assert engine.stats().shared_tokens >= 5 * 100


def test_turns_continue_on_their_slot(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    contexts = [prompt(i, 60) for i in range(4)]
    for turn in range(3):
        before = engine.stats().prefilled_tokens
        answers = engine.generate(contexts, Sampling(max_tokens=15))
        computed = engine.stats().prefilled_tokens - before
        assert computed == (4 * 60 if turn == 0 else 4 * (1 + 9))  # the last sampled token and the new ones
        for i, answer in enumerate(answers):
            check(model, contexts[i], answer)
            contexts[i] = contexts[i] + answer.token_ids + prompt(100 * turn + i, 9)


def test_a_branch_leaves_the_first_path_intact(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    trunk = prompt(0, 80)
    engine.generate([trunk + prompt(1, 20)], LONG)
    for seed in (2, 1, 2, 1):
        branch = trunk + prompt(seed, 20)
        (answer,) = engine.generate([branch], LONG)
        check(model, branch, answer)


def test_many_more_requests_than_slots(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    rng = random.Random(0)
    trunks = [prompt(i, 50) for i in range(5)]
    prompts = [rng.choice(trunks)[: rng.randint(1, 50)] + prompt(100 + i, rng.randint(0, 40)) for i in range(60)]
    for one, answer in zip(prompts, engine.generate(prompts, Sampling(max_tokens=12)), strict=True):
        check(model, one, answer)


def test_joining_in_flight(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    """A request that joins while another decodes changes neither's numbers."""
    (alone,) = engine.generate([prompt(0, 40)], Sampling(max_tokens=60, seed=5))
    joined: list[Request] = []

    def join_at(count: int) -> None:
        if count in (10, 20, 21):
            joined.append(Request(engine, prompt(count, 40 * (count % 10 + 1)), LONG))

    first = Request(engine, prompt(0, 40), Sampling(max_tokens=60, seed=5), join_at)
    assert first.answer().token_ids == alone.token_ids
    check(model, prompt(0, 40), first.answer())
    for request, count in zip(joined, (10, 20, 21), strict=True):
        check(model, prompt(count, 40 * (count % 10 + 1)), request.answer())


def test_seeds(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    one = prompt(0, 30)
    seeded = [a.token_ids for a in engine.generate([one] * 3, Sampling(max_tokens=30, seed=1))]
    assert seeded[0] == seeded[1] == seeded[2]
    assert engine.generate([one], Sampling(max_tokens=30, seed=2))[0].token_ids != seeded[0]
    unseeded = [a.token_ids for a in engine.generate([one] * 3, LONG)]
    assert unseeded[0] != unseeded[1] != unseeded[2]
    twin = EmbeddedEngine(model, max_batch=2)
    twin.start()
    again = EmbeddedEngine(model, max_batch=8)
    again.start()
    prompts = [prompt(i, 20) for i in range(6)]
    answers = zip(twin.generate(prompts, LONG), again.generate(prompts, LONG), strict=True)
    assert all(a.token_ids == b.token_ids for a, b in answers)  # however they were batched
    twin.stop()
    again.stop()


def test_stop_token_is_returned(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    one = prompt(0, 30)
    (free,) = engine.generate([one], Sampling(max_tokens=30, temperature=0))
    stop = free.token_ids[7]
    (answer,) = engine.generate([one], Sampling(max_tokens=30, temperature=0, stop_token_ids=frozenset({stop})))
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert answer.finish_reason == "stop"


def test_context_is_bounded(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    with pytest.raises(PromptTooLong, match=r"512 tokens.*context holds 512"):
        engine.generate([prompt(0, 512)], LONG)
    (answer,) = engine.generate([prompt(0, 500)], LONG)
    assert (len(answer.token_ids), answer.finish_reason) == (12, "length")
    check(model, prompt(0, 500), answer)
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[]], LONG)
    with pytest.raises(ValueError, match="vocabulary of 512"):
        engine.generate([[5, 512]], LONG)


def test_publish_leaves_nothing_of_the_old_weights(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    one = prompt(0, 100)
    engine.generate([one], LONG)
    with engine.updating():
        change(model)
        engine.publish(1)
    before = engine.stats().shared_tokens
    (answer,) = engine.generate([one], LONG)
    assert engine.stats().shared_tokens == before
    assert (answer.version, engine.version) == (1, 1)
    check(model, one, answer)


def test_an_update_cuts_holds_and_goes_on(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    cut_at = threading.Event()
    cut = Request(engine, prompt(0, 30), Sampling(max_tokens=400), lambda n: n >= 5 and cut_at.set())
    assert cut_at.wait(20)
    with engine.updating():
        answer = cut.answer()
        assert answer.finish_reason == "abort"
        assert 5 <= len(answer.token_ids) < 400
        check(model, prompt(0, 30), answer)
        held = Request(engine, prompt(0, 30), LONG)
        with pytest.raises(RuntimeError, match="published"):
            engine.resume()
        change(model)
    assert not held.done
    engine.publish(1)
    check(model, prompt(0, 30), held.answer())


def test_pause_and_resume(engine: EmbeddedEngine) -> None:
    running = Request(engine, prompt(0, 30), Sampling(max_tokens=400))
    engine.pause()
    assert running.done
    assert running.answer().finish_reason == "abort"
    held = Request(engine, prompt(1, 30), LONG)
    engine.pause()
    assert not held.done
    engine.resume()
    assert held.answer().finish_reason == "length"


def test_forgetting_finished_prompts(engine: EmbeddedEngine) -> None:
    engine.generate([prompt(0, 30)], LONG)
    busy = Request(
        engine, prompt(1, 30), Sampling(max_tokens=100), lambda n: n == 5 and engine.reset_prefix_cache()
    )
    assert busy.answer().finish_reason == "length"
    before = engine.stats().shared_tokens
    engine.generate([prompt(0, 30)], LONG)
    assert engine.stats().shared_tokens == before


def test_abort(engine: EmbeddedEngine) -> None:
    other = Request(engine, prompt(1, 30), Sampling(max_tokens=100))
    long = Sampling(max_tokens=400)
    aborted = Request(engine, prompt(0, 30), long, lambda n: n == 5 and engine.abort(aborted.id))
    assert aborted.answer().finish_reason == "abort"
    assert len(aborted.answer().token_ids) == 5
    assert other.answer().finish_reason == "length"


def test_stopping_ends_every_request(model: PreTrainedModel) -> None:
    engine = EmbeddedEngine(model, max_batch=1)
    requests = [Request(engine, prompt(i, 30), Sampling(max_tokens=400)) for i in range(3)]
    engine.start()
    engine.stop()
    assert [r.answer().finish_reason for r in requests] == ["abort"] * 3
    with pytest.raises(RuntimeError, match="stopped"):
        Request(engine, prompt(0, 30), LONG)


def test_training_goes_on_with_the_shared_parameters(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    one = prompt(0, 30)
    (before,) = engine.generate([one], LONG)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.tensor([one + before.token_ids])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with engine.updating():
        optimizer.step()
        engine.publish(1)
    assert model.training
    (after,) = engine.generate([one], LONG)
    check(model.eval(), one, after)


def test_dropout_of_the_trainer_does_not_leak_in(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    model.config.attention_dropout = 0.9
    for module in model.modules():
        module.attention_dropout = 0.9  # type: ignore[assignment]
    model.train()
    (answer,) = engine.generate([prompt(0, 30)], LONG)
    check(model.eval(), prompt(0, 30), answer)


def test_lora_is_merged_at_publish(model: PreTrainedModel) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    trained = peft.get_peft_model(model, config)
    engine = EmbeddedEngine(trained, max_batch=4, max_len=128)
    engine.start()
    one = prompt(0, 30)
    (first,) = engine.generate([one], LONG)
    check(trained, one, first)
    old = full_logprobs(trained, one, first.token_ids)
    with engine.updating():
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.publish(1)
    assert (full_logprobs(trained, one, first.token_ids) - old).abs().max() > 0.05
    (second,) = engine.generate([one], LONG)
    check(trained, one, second)
    trained(input_ids=torch.tensor([one])).logits.sum().backward()
    engine.stop()


def test_sliding_window() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config)
    engine = EmbeddedEngine(model, max_batch=4, max_len=128)
    engine.start()
    prompts = [prompt(0, 60), prompt(1, 5), prompt(0, 60)]
    for one, answer in zip(prompts, engine.generate(prompts, LONG), strict=True):
        check(model, one, answer)
    engine.stop()


def test_diverged_weights_are_said_so(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with engine.updating():
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        engine.publish(1)
    (answer,) = engine.generate([prompt(0, 30)], LONG)
    assert answer.finish_reason == "error"
    assert "not finite" in (answer.error or "")
    with engine.updating():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        engine.publish(2)
    (answer,) = engine.generate([prompt(0, 30)], LONG)
    check(model, prompt(0, 30), answer)
