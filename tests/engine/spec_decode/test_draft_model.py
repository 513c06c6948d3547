"""Draft models: refused ones, and reuse and release of their own cache."""

from dataclasses import dataclass

import mlx.core as mx
import pytest
from support.engines.drafting import eager_engine, noisy_model
from support.engines.tiny_engine import request, run, tiny_engine, tiny_model

from mlxinfer.config import EngineConfig
from mlxinfer.engine.spec_decode.draft_model import Drafter, check_kind, check_vocabulary
from mlxinfer.errors import DraftError


@dataclass
class Vocabulary:
    """The examined part of a tokenizer."""

    pieces: list[bytes]
    eos_token_ids: frozenset[int] = frozenset({0})

    @property
    def vocab_size(self):
        return len(self.pieces)

    def token_bytes(self, token_id):
        return self.pieces[token_id]


OURS = Vocabulary([b"", b"a", b"b"])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Vocabulary([b"", b"a"]), "2 tokens, the model 3"),
        (Vocabulary([b"", b"a", b"c"]), "token 2 is b'c', the model's is b'b'"),
        (Vocabulary([b"", b"a", b"b"], frozenset({1})), "ends answers with other tokens: 1 instead of 0"),
        (Vocabulary([]), "one of them has none"),
    ],
)
def test_another_vocabulary_is_refused_with_the_first_difference(theirs, message):
    check_vocabulary(OURS, OURS)
    with pytest.raises(DraftError, match=message) as caught:
        check_vocabulary(OURS, theirs)
    assert "\n" not in str(caught.value)


def test_layers_that_keep_states_cannot_draft():
    check_kind(tiny_model("gemma3_text"))
    with pytest.raises(DraftError, match="cannot draft"):
        check_kind(tiny_model("qwen3_next"))
    with pytest.raises(DraftError, match="cannot draft"):
        Drafter(tiny_model("qwen3_next"), mx.float32, 0.1).start(EngineConfig(max_context=64, kv_cache_tokens=256), 96)


def test_what_the_draft_model_has_read_is_reused():
    engine = eager_engine(draft=tiny_model())
    prompt = [7 * i % 90 + 3 for i in range(150)]
    answer = run(engine, [request(prompt, 30)])[0]
    model = engine.proposer.draft
    read = []
    begin = model.cache.begin
    model.cache.begin = lambda segments: read.append(sum(s.count for s in segments)) or begin(segments)
    again = request(prompt, 30)
    assert run(engine, [again]) == [answer]
    assert again.accepted_tokens == again.drafted_tokens > 0
    assert sum(read) < 60


@pytest.mark.long
def test_drafts_while_pages_run_out():
    prompts = [[(i * k) % 89 + 3 for i in range(10)] for k in range(1, 7)]

    def requests():
        return [request(p, 200, temperature=0.7, seed=3, index=i) for i, p in enumerate(prompts)]

    expected = [run(tiny_engine(max_draft=0), [r])[0] for r in requests()]
    engine = eager_engine(draft=noisy_model(0.03), kv_cache_tokens=512)
    sequences = requests()
    assert run(engine, sequences) == expected
    assert sum(s.preemptions for s in sequences) > 0
    assert sum(s.accepted_tokens for s in sequences) > 0
    assert engine.cache.usage().used == engine.proposer.draft.cache.usage().used == 0


def test_an_interrupt_leaves_a_fresh_draft_model(monkeypatch):
    engine = eager_engine(draft=tiny_model())
    engine.add(request([5, 6, 7], 40))
    for _ in range(4):
        engine.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.proposer.draft, "propose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, [])
    assert engine.idle
    expected = run(tiny_engine(max_draft=0), [request([9, 8, 7], 20)])
    assert run(engine, [request([9, 8, 7], 20)]) == expected


def test_no_room_for_the_draft_model_means_no_drafts():
    engine = eager_engine(draft=tiny_model())
    engine.proposer.draft = engine.drafter.start(EngineConfig(max_context=256, kv_cache_tokens=64, prefix_cache=False), 96)
    prompts = [[(i * k) % 89 + 3 for i in range(70)] for k in range(1, 4)]
    expected = [run(tiny_engine(max_draft=0), [request(p, 100)])[0] for p in prompts]
    assert run(engine, [request(p, 100) for p in prompts]) == expected
