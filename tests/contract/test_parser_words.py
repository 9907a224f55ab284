"""What belayer.parser_words says of vLLM's parsers, against vLLM: names, and what each must find in a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from belayer import parser_words

# Nothing is said about these: words with a suffix that the tokenizer names (hy_*), its response template (hf), another
# kind of tokenizer (mistral).
UNTOLD = {"hy_v3", "hy_v4", "hf", "mistral"}


class Words:
    """A tokenizer that has these tokens and no other."""

    def __init__(self, *words: str) -> None:
        self._vocab = {word: at for at, word in enumerate(words)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._vocab.get(text, 0)]


def test_all_names_are_vllms_own() -> None:
    assert parser_words.names("tool_parser") == set(ToolParserManager.list_registered())
    assert parser_words.names("reasoning_parser") == set(ReasoningParserManager.list_registered())
    assert {*parser_words.NEEDS, *parser_words.WANTS} <= parser_words.names("reasoning_parser")


def made(name: str, *words: str) -> Any:
    return ReasoningParserManager.get_reasoning_parser(name)(Words(*words))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(parser_words.NEEDS))
def test_each_of_these_words_must_be_there(name: str) -> None:
    words = parser_words.NEEDS[name]
    made(name, *words)
    for left_out in words:
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)token"):
            made(name, *(word for word in words if word != left_out))


@pytest.mark.parametrize("name", sorted(parser_words.WANTS))
def test_these_words_are_looked_for_and_may_be_missing(name: str) -> None:
    words = parser_words.WANTS[name]
    parser = made(name)
    assert (parser.reasoning_start_str, parser.reasoning_end_str) == words


def refuses(name: str) -> bool:
    try:
        made(name)
    except (RuntimeError, ValueError) as why:
        return "token" in str(why).lower()
    except Exception:  # noqa: BLE001 it wants a whole tokenizer, of which nothing is said
        return False
    return False


def test_no_parser_that_refuses_a_vocabulary_is_forgotten() -> None:
    found = {name for name in ReasoningParserManager.list_registered() if refuses(name)}
    assert found - UNTOLD == set(parser_words.NEEDS)
