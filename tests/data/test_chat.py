"""Conversations become documents that know which tokens the assistant wrote, whatever form and template they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argosy.data.chat.chat_records import conversation_of
from argosy.data.chat.chat_template import ChatFormat, ChatTemplate, chat_format
from argosy.data.chat.preference_records import preference_of
from argosy.data.corpus.corpus import Corpus, open_corpus
from argosy.data.corpus.merge import merge
from argosy.data.corpus.verify import verify
from argosy.data.prepare import part_runner
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.samples.conversations import read_conversation
from argosy.data.samples.preferences import PreferenceRows, pair_rows, read_reference, write_reference
from argosy.data.text.records import Fault
from argosy.data.text.tokenizer import ByteTokenizer, load_tokenizer
from argosy.errors import ArgosyError
from chat_files import CHATML, MARKED, REWRITES, messages, write_chats, write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


def prepared(source: Path, directory: Path, output: Path, *, pairs: bool = False, **options: Any) -> Path:
    tokenizer = load_tokenizer(str(directory), special_in_text=True)
    chat = chat_format(str(directory), pairs=pairs)
    assert prepare([str(source)], tokenizer, output, PrepareOptions(chat=chat, **options)) is not None
    return output


def learnt_texts(corpus: Corpus, directory: Path, document: int) -> list[str]:
    tokens, learnt = read_conversation(corpus, document, 1 << 20)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], learnt, [0]))))
    decode = load_tokenizer(str(directory)).decode
    return [decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_the_assistants_turns_are_learnt_in_every_form(directory: Path, tmp_path: Path) -> None:
    corpus = open_corpus(prepared(write_chats(tmp_path / "chats.jsonl"), directory, tmp_path / "corpus"))
    assert corpus.documents == 12
    for number in range(12):
        said = messages(number, 1 if number % 3 == 2 else 1 + number % 4)
        answers = [m["content"] + "<|im_end|>\n" for m in said if m["role"] == "assistant"]
        assert learnt_texts(corpus, directory, number) == answers
    assert corpus.manifest is not None
    assert corpus.manifest.chat is not None
    assert (corpus.path / corpus.manifest.chat.file).read_text() == CHATML
    assert corpus.manifest.tokenizer.eod_id == load_tokenizer(str(directory)).id_of("<|im_end|>")


def test_the_bytes_do_not_depend_on_workers_and_parquet_holds_the_same(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"messages": messages(n, 1 + n % 3)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "b.parquet")
    one = prepared(tmp_path / "a.jsonl", directory, tmp_path / "one", workers=1)
    table = prepared(tmp_path / "b.parquet", directory, tmp_path / "table", workers=1)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    two = prepared(tmp_path / "a.jsonl", directory, tmp_path / "two", workers=2)
    for name in ("shard-00000.bin", "shard-00000.idx"):
        assert (one / name).read_bytes() == (two / name).read_bytes() == (table / name).read_bytes()


def test_a_marked_template_and_a_plain_one_learn_the_same() -> None:
    for turns in (1, 3):
        conversation = conversation_of({"messages": messages(0, turns)})
        plain, marked = (ChatTemplate(ChatFormat(text)).render(conversation) for text in (CHATML, MARKED))
        assert plain == marked
        assert len(plain.learnt) == turns


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    said = [{**m, "content": f"<think>hm</think>{m['content']}"} for m in messages(0, 2)]
    with pytest.raises(ArgosyError, match="rewrites earlier turns") as refused:
        ChatTemplate(ChatFormat(REWRITES)).render(conversation_of({"messages": said}))
    assert refused.value.code == "data.bad-template"
    assert "generation" in (refused.value.fix or "")


def test_a_message_cannot_mark_itself_as_learnt() -> None:
    said = messages(0, 1)
    said[0]["content"] = "\U000ffff0learn this\U000ffff1"
    with pytest.raises(Fault, match="private use"):
        ChatTemplate(ChatFormat(MARKED)).render(conversation_of({"messages": said}))


def test_a_turn_of_weight_0_is_context() -> None:
    said = messages(0, 2)
    said[1]["weight"] = 0
    for text in (CHATML, MARKED):
        rendered = ChatTemplate(ChatFormat(text)).render(conversation_of({"messages": [dict(m) for m in said]}))
        assert [rendered.text[a:b] for a, b in rendered.learnt] == [said[3]["content"] + "<|im_end|>\n"]


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ strftime_now('%Y') }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.split('?')[9] + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_reaches_nothing_outside_of_its_sandbox(attack: str) -> None:
    with pytest.raises(Fault, match="chat template fails"):
        ChatTemplate(ChatFormat(attack)).render(conversation_of({"messages": messages(0, 1)}))


_DOUBLED = "{% set x = namespace(v='a') %}{% for i in range(60) %}DOUBLE{% endfor %}"


@pytest.mark.parametrize(
    "attack",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 65536 }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ ([0] * 100000000) | length }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.center(10000000000) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
        "{% set s = 'a' * 9999999 %}{% for x in s %}{% for y in s %}{% endfor %}{% endfor %}",
        "{% set s = ['aa'] * 999999 %}{% for x in s recursive %}{{ loop(s) }}{% endfor %}",
        "{{ ('a' * 100000) | join('b' * 100000) | length }}",
        "{{ ('\n' * 100000) | indent(100000) | length }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ '%*d' % (9999999999, 1) }}",
        *(
            _DOUBLED.replace("DOUBLE", doubling)
            for doubling in (
                "{% set x.v = x.v + x.v %}",
                "{% set x.v = x.v ~ x.v %}",
                "{% set x.v %}{{ x.v }}{{ x.v }}{% endset %}",
            )
        ),
    ],
)
def test_the_memory_and_the_time_of_a_template_have_limits(attack: str) -> None:
    with pytest.raises(Fault, match="more than 16,777,216 characters"):
        ChatTemplate(ChatFormat(attack)).render(conversation_of({"messages": messages(0, 1)}))


def test_ordinary_arithmetic_and_text_of_a_template_are_left_alone() -> None:
    template = "{{ 'ab' * 2 ~ 3 * 4 ~ 2 ** 8 }}{{ 'x%02d' % 7 }}{{ 'a'.ljust(3) ~ ([1] + [2]) }}{{ 'ab' | replace('a', 'c') | indent(2) }}"
    assert (
        ChatTemplate(ChatFormat(template))._text(conversation_of({"messages": messages(0, 1)}), 1)
        == "abab12256x07a  [1, 2]cb"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 1700000000 | string }}", "1700000000"),
        ("{{ '{}: {}'.format('user', 'a **bold** word of 12345678') }}", "user: a **bold** word of 12345678"),
        ("{{ '**%s**' % 'x' }}{{ '%s' | format('*') }}", "**x***"),
        ("{{ ('ab' * 5000).replace('ab' * 1000, '') }}", ""),
        ("{{ ('a\n' * 1000000) | replace('\n', '<br>') | length }}", "5000000"),
        ("{% for x in [1, 2] if x > 1 %}{{ loop.length }}{{ loop.last }}{% endfor %}", "1True"),
        ("{% for x in [1, [2]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
        ("{{ ['a', 'b'] | join('-') }}{{ '-'.join(['c', 'd']) }}", "a-bc-d"),
    ],
)
def test_what_templates_do_is_not_taken_for_an_attack(template: str, text: str) -> None:
    found = ChatTemplate(ChatFormat(template))._text(conversation_of({"messages": messages(0, 1)}), 1)
    assert found == text


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "no conversation"}, "missing-key"),
        ({"messages": "hello"}, "not-messages"),
        ({"messages": [{"content": "who?"}]}, "not-messages"),
        ({"messages": [{"role": "user", "content": "no answer"}]}, "no-answer"),
        ({"messages": [{"role": "assistant", "content": 7}]}, "not-text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "not-text"),
        ([1], "not-an-object"),
        ({"messages": messages(0, 1), "tools": "[{"}, "not-tools"),
        ({"messages": messages(0, 1), "tools": '"search"'}, "not-tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "not-tools"),
    ],
)
def test_what_is_no_conversation_is_quarantined(record: Any, kind: str) -> None:
    with pytest.raises(Fault) as fault:
        conversation_of(record)
    assert fault.value.args[0] == kind


def test_tools_and_arguments_in_json_are_what_the_text_says() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    written = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    both = [
        conversation_of({"messages": [{"role": "assistant", "content": None, "tool_calls": [one]}], "tools": tools})
        for one, tools in ((call, [{"name": "add"}]), (written, '[{"name": "add"}]'))
    ]
    assert both[0] == both[1]
    assert conversation_of({"messages": messages(0, 1), "tools": ""}).tools is None


def test_a_preference_is_two_conversations_that_end_with_their_answers(directory: Path, tmp_path: Path) -> None:
    prompt, good, bad = messages(0, 1)[:1], "Paris.", "Lyon."
    answers = [[{"role": "assistant", "content": text}] for text in (good, bad)]
    forms = [
        {"prompt": prompt[0]["content"], "chosen": good, "rejected": bad},
        {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]},
        {"chosen": prompt + answers[0], "rejected": prompt + answers[1]},
    ]
    assert len({repr(preference_of(form)) for form in forms}) == 1
    with pytest.raises(Fault, match="differ before"):
        preference_of({"chosen": prompt + answers[0], "rejected": [{"role": "user", "content": "?"}, *answers[1]]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(form) + "\n" for form in forms))
    output = prepared(tmp_path / "a.jsonl", directory, tmp_path / "out", pairs=True)
    corpus = open_corpus(output)
    answers_of = [f"{answer}<|im_end|>\n" for answer in (good, bad)]
    assert [learnt_texts(corpus, directory, n) for n in range(3)] == [answers_of] * 3
    batch = pair_rows(corpus, np.array([0]), 96)
    assert [len(corpus.sequence_lengths(n)) for n in range(3)] == [4] * 3
    starts = np.flatnonzero(batch.inputs["positions"][0] == 0)
    assert batch.inputs["documents"][0, starts].tolist() == [0, 1, 2]
    assert batch.tokens[0, starts[0]] == batch.tokens[0, starts[1]]


def test_a_pair_without_an_answer_is_quarantined(tmp_path: Path) -> None:
    """Others keep their four sequences: the loss reads the chosen and the rejected answer by their places."""
    # The template writes nothing around the answer.
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(bare)
    pairs = [("Why?", "yes", "no"), ("Why?", "yes", ""), ("Why?", "", "no"), ("", "a", "no"), ("Who?", "I", "you")]
    lines = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in pairs]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = chat_format("bytes", tmp_path / "chat.jinja", pairs=True)
    options = PrepareOptions(chat=chat, workers=1, max_bad=0.9)
    prepare([str(tmp_path / "a.jsonl")], ByteTokenizer(), tmp_path / "out", options)
    corpus = open_corpus(tmp_path / "out")
    assert [corpus.sequence_lengths(n).tolist() for n in range(corpus.documents)] == [[4, 3, 4, 2], [4, 1, 4, 3]]
    bad = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [one["kind"] for one in bad] == ["no-answer"] * 3


def test_a_reference_for_shorter_rows_is_refused_for_longer_ones(directory: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": "Why?", "chosen": "yes", "rejected": answer} for answer in ("no", "no " * 20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    corpus = open_corpus(prepared(tmp_path / "a.jsonl", directory, tmp_path / "out", pairs=True))
    first, second = (int(corpus.sequence_lengths(n).sum()) for n in range(2))
    assert first < second
    write_reference(corpus, "base", "hash", np.array([[-1, -2], [np.nan, np.nan]], np.float32))
    whole = corpus.split((1.0, 0.0, 0.0))["train"]
    reference = read_reference(corpus, "base")
    assert PreferenceRows(corpus, whole, first, 400, 0, beta=0.1, reference=reference).count == 1
    with pytest.raises(ArgosyError, match="leave out pairs"):
        PreferenceRows(corpus, whole, second, 400, 0, beta=0.1, reference=reference)
    (corpus.path / "reference.f32").write_bytes(bytes(16))
    with pytest.raises(ArgosyError, match="is not the file"):
        read_reference(corpus, "base")


def test_bytes_take_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(MARKED)
    write_chats(tmp_path / "chats.jsonl", 3)
    chat = chat_format("bytes", tmp_path / "chat.jinja")
    prepare([str(tmp_path / "chats.jsonl")], ByteTokenizer(), tmp_path / "out", PrepareOptions(chat=chat))
    corpus = open_corpus(tmp_path / "out")
    tokens, learnt = read_conversation(corpus, 1, 1 << 20)
    # No settings name an eos_token: the tokenizer's own id ends a text.
    assert corpus.manifest is not None
    assert corpus.manifest.tokenizer.eod_id == 256
    assert bytes(tokens[learnt].tolist()).decode() == "".join(
        m["content"] + "<|im_end|>\n" for m in messages(1, 2) if m["role"] == "assistant"
    )
    with pytest.raises(ArgosyError, match="has no chat template"):
        chat_format("bytes")


def test_plain_text_holds_no_conversations(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ArgosyError, match="has no conversations"):
        prepared(tmp_path / "a.txt", directory, tmp_path / "out")


def test_merging_keeps_the_masks_and_verify_finds_another_template(directory: Path, tmp_path: Path) -> None:
    one = prepared(write_chats(tmp_path / "chats.jsonl", 4), directory, tmp_path / "one")
    merge([one, one], tmp_path / "both")
    both = open_corpus(tmp_path / "both")
    assert both.manifest is not None
    assert both.manifest.chat is not None
    assert learnt_texts(both, directory, 5) == learnt_texts(open_corpus(one), directory, 1) != []
    assert verify(tmp_path / "both", workers=1).faults == []
    (tmp_path / "both" / both.manifest.chat.file).write_text(MARKED)
    [fault] = verify(tmp_path / "both", workers=1).faults
    assert "chat template" in fault.what
