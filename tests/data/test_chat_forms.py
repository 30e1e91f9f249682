"""Forms in which data sets of the Hub hold conversations and preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argosy.data.chat.chat_records import conversation_of
from argosy.data.chat.chat_template import ChatFormat, ChatTemplate, chat_format
from argosy.data.chat.preference_records import preference_of
from argosy.data.corpus.corpus import open_corpus
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.records import Fault
from argosy.data.text.tokenizer import ByteTokenizer
from chat_files import CHATML, messages

ASKED = [{"role": "user", "content": "q"}]
# As most templates begin: an empty list has no first message.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}" + CHATML
)


def said(record: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation_of(record).messages]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("record", "before"),
    [
        ({"question": "q", "chosen": "good", "rejected": "bad"}, ASKED),
        (
            {"system": "Be kind.", "question": "q", "chosen": "good", "rejected": "bad"},
            [{"role": "system", "content": "Be kind."}, *ASKED],
        ),
        ({"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"}, ASKED),
        ({"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " good", "rejected": " bad"}, ASKED),
        (
            {
                "chosen": "\n\nHuman: a\n\nb\n\nAssistant: c\n\nHuman: q\n\nAssistant: good",
                "rejected": "\n\nHuman: a\n\nb\n\nAssistant: c\n\nHuman: q\n\nAssistant: bad",
            },
            [{"role": "user", "content": "a\n\nb"}, answer("c"), *ASKED],
        ),
        ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, ASKED),
        ({"input": "q", "prompt": None, "chosen": "good", "rejected": "bad"}, ASKED),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            ASKED,
        ),
        (
            {"chosen": json.dumps([*ASKED, answer("good")]), "rejected": json.dumps([*ASKED, answer("bad")])},
            ASKED,
        ),
        (
            {
                "prompt": "q",
                "chosen": [{"role": "system", "content": "s"}, *ASKED, answer("good")],
                "rejected": [{"role": "system", "content": "s"}, *ASKED, answer("bad")],
            },
            [{"role": "system", "content": "s"}, *ASKED],
        ),
    ],
)
def test_the_question_of_a_preference_is_found(record: dict[str, Any], before: list[dict[str, str]]) -> None:
    found = preference_of(record)
    assert [one.messages for one in found] == [[*before, answer("good")], [*before, answer("bad")]]


@pytest.mark.parametrize(
    ("record", "kind", "why"),
    [
        ({"chosen": "good", "rejected": "bad"}, "no-prompt", "none of prompt, question"),
        ({"query": "q", "system": "s", "chosen": "good", "rejected": "bad"}, "no-prompt", "among query, system"),
        ({"chosen": [answer("good")], "rejected": [answer("bad")]}, "no-prompt", "nothing comes before"),
        ({"prompt": [], "chosen": "good", "rejected": "bad"}, "no-prompt", "without a question"),
        (
            {"chosen": "Human: q\n\nHuman: r\n\nAssistant: good", "rejected": "Human: q\n\nAssistant: bad"},
            "transcript",
            "Human again",
        ),
        (
            {"chosen": "Human: q\n\nAssistant: good", "rejected": "Human: r\n\nAssistant: bad"},
            "other-prompt",
            "differ before",
        ),
        (
            {"chosen": "Human: q\n\nAssistant: a\n\nHuman: b", "rejected": "Human: q\n\nAssistant: bad"},
            "no-answer",
            "does not end",
        ),
        (
            {"conversations": [*ASKED, answer("good")], "chosen": "good", "rejected": "bad"},
            "no-prompt",
            "ends with a turn of the assistant",
        ),
    ],
)
def test_a_preference_without_a_question_is_quarantined(record: Any, kind: str, why: str) -> None:
    with pytest.raises(Fault, match=why) as fault:
        preference_of(record)
    assert fault.value.args[0] == kind


def test_an_answer_to_a_prompt_may_be_a_transcript() -> None:
    record = {"prompt": "Write a talk.", "chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nHuman: b"}
    assert [one.messages[1:] for one in preference_of(record)] == [
        [answer(record["chosen"])],
        [answer(record["rejected"])],
    ]


def test_alpacas_history_is_earlier_turns() -> None:
    record: dict[str, Any] = {"instruction": "q", "input": " ", "output": "r", "history": [["a", "b"], ["c", "d"]]}
    expected = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "q"), ("assistant", "r")]
    assert said(record) == expected
    assert said(record | {"history": json.dumps(record["history"])}) == expected
    assert said(record | {"history": None}) == said(record | {"history": []}) == expected[-2:]
    for wrong in (["a"], [["a"]], [["a", 1]], "a", {"a": "b"}):
        with pytest.raises(Fault):
            conversation_of(record | {"history": wrong})
    with pytest.raises(Fault, match="input is a list"):
        conversation_of(record | {"input": ["x"]})


def test_messages_win_over_an_instruction() -> None:
    for key in ("messages", "conversations"):
        for instruction in ("", "meta"):
            record = {"instruction": instruction, "output": "no", key: [*ASKED, answer("yes")]}
            assert said(record) == [("user", "q"), ("assistant", "yes")]
    assert said({"instruction": "q", "output": "yes", "messages": []}) == [("user", "q"), ("assistant", "yes")]


def test_a_conversation_may_begin_with_the_assistant() -> None:
    conversation = conversation_of({"conversations": [{"from": "gpt", "value": "Hi."}, *messages(0, 1)]})
    for template, before in ((DEFAULT_SYSTEM, "<|im_start|>system\nHelp.<|im_end|>\n"), (CHATML, "")):
        rendered = ChatTemplate(ChatFormat(template)).render(conversation)
        assert rendered.text.startswith(f"{before}<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user")
        learnt = [rendered.text[first:last] for first, last in rendered.learnt]
        assert learnt == ["Hi.<|im_end|>\n", "Paris.<|im_end|>\n"]


def test_a_prefix_that_a_template_refuses_is_told_from_the_answer() -> None:
    """As templates that look for the last question do: there is none before the assistant's first turn."""
    refuses = "{% if not messages | selectattr('role', 'equalto', 'user') | list and messages | length < 2 %}{{ raise_exception('no question') }}{% endif %}"
    system = [{"role": "system", "content": "s"}]
    conversation = conversation_of({"messages": [*system, answer("Hi."), *messages(0, 1)]})
    rendered = ChatTemplate(ChatFormat(refuses + CHATML)).render(conversation)
    assert next(rendered.text[first:last] for first, last in rendered.learnt) == "Hi.<|im_end|>\n"


def test_tables_hold_messages_as_json_and_as_lists_of_fields(tmp_path: Path) -> None:
    turns = [messages(n, 2) for n in range(4)]
    lists = [{"role": [m["role"] for m in said], "content": [m["content"] for m in said]} for said in turns]
    named = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"from": [named[role] for role in one["role"]], "value": one["content"]} for one in lists]
    tables = {
        "plain": pa.table({"messages": turns}),
        "json": pa.table({"messages": [json.dumps(said) for said in turns]}),
        "lists": pa.table({"messages": lists}),
        "sharegpt": pa.table({"conversations": sharegpt}),
    }
    (tmp_path / "chat.jinja").write_text(CHATML)
    options = PrepareOptions(chat=chat_format("bytes", tmp_path / "chat.jinja"), workers=1)
    found = {}
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
        prepare([str(tmp_path / f"{name}.parquet")], ByteTokenizer(), tmp_path / name, options)
        assert open_corpus(tmp_path / name).documents == 4
        found[name] = [(tmp_path / name / f"shard-00000.{kind}").read_bytes() for kind in ("bin", "idx")]
    assert all(one == found["plain"] for one in found.values())


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("hello", "messages is a text where a list of messages belongs: not JSON"),
        ('{"role": "user"}', "an object where a list"),
        ({"role": ["user", "assistant"], "content": ["q"]}, "lists of different lengths: role 2, content 1"),
        ({"role": ["user"], "content": "q"}, "content no list"),
    ],
)
def test_messages_that_cannot_be_read_say_what_is_wrong(value: Any, why: str) -> None:
    with pytest.raises(Fault, match=why) as fault:
        conversation_of({"messages": value})
    assert fault.value.args[0] == "not-messages"


def test_roles_in_capitals_are_the_same_roles() -> None:
    turns = [{"from": "System", "value": "s"}, {"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]
    found = conversation_of({"conversations": turns})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]


def test_a_prompt_that_quotes_speakers_is_a_question_and_one_that_ends_with_an_answer_is_none() -> None:
    chosen, _ = preference_of({"prompt": "Human: a\n\nHuman: b", "chosen": "x", "rejected": "y"})
    assert chosen.messages[0] == {"role": "user", "content": "Human: a\n\nHuman: b"}
    with pytest.raises(Fault, match="ends with a turn of the assistant"):
        preference_of({"prompt": "Human: a\n\nAssistant: b", "chosen": "x", "rejected": "y"})
