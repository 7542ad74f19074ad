"""Messages to prompt token ids: the model's own chat template, then its own tokenizer. Exact, because it is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from appliance.base.errors import ContextLengthExceeded, InvalidValue
from appliance.serving.model_folder import NotAModel
from appliance.serving.turns import Turns
from appliance.serving.vocabulary import Vocabulary
from engine.text.bad_words import bad_words_token_ids
from engine.text.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplate
from engine.text.detokenizer import AnswerText
from engine.text.length import fewest_tokens

T = TypeVar("T")

# Longer ones are rendered, and tokenised, in a thread, so that nobody's stream stutters.
RENDERED_INLINE_CHARS_MAX = 20_000
RENDERED_INLINE_MESSAGES_MAX = 64  # a template may look at every pair of them
TOKENISED_INLINE_CHARS_MAX = 4_000  # one millisecond; 20,000 characters take up to 25
BAD_WORDS_INLINE_MAX, BAD_WORDS_INLINE_CHARS_MAX = 16, 1_000  # some 15 µs each, twice
LONG_AT_A_TIME = 2  # threads
LONG_WAITING_MAX = 1024  # for a thread, of all tenants
RETRY_AFTER_S = 1.0


class Prompting:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(LONG_AT_A_TIME, thread_name_prefix="tokenise")
        self._turns = Turns(
            LONG_AT_A_TIME,
            LONG_WAITING_MAX,
            refusal="too many long prompts are waiting to be tokenised",
            retry_after_s=RETRY_AFTER_S,
        )
        self.vocabulary = Vocabulary(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> Prompting:
        """Read the tokenizer and the chat template of a model folder. Raises NotAModel, naming the file that is wrong."""
        try:
            template = ChatTemplate.load(folder)
        except NoChatTemplate:
            template = None
        except ChatTemplateError as error:
            raise NotAModel(str(error)) from error
        return cls(_read_tokenizer(folder / "tokenizer.json"), template)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, max_model_len: int, tenant_id: str) -> list[int]:
        """Return the prompt's token ids; their number is left to the caller to check. Tenants take turns with long ones.

        Raises InvalidValue when the model's template does not take the messages, ContextLengthExceeded when the text is so
        long that it need not be tokenised to know that it does not fit, and Overloaded when too many long ones wait.
        """
        size = sum(len(str(value or "")) for message in messages for value in message.values())
        if size > RENDERED_INLINE_CHARS_MAX or len(messages) > RENDERED_INLINE_MESSAGES_MAX:
            text = await self._in_thread(tenant_id, self._render, messages)
        else:
            text = self._render(messages)
        if len(text) <= TOKENISED_INLINE_CHARS_MAX:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        self._check_could_fit(text, max_model_len)
        return await self._in_thread(tenant_id, self._encode_long, text)

    def answer_text(self, *, stop: Sequence[str], stop_token_ids: Sequence[int], min_tokens: int) -> AnswerText:
        """Return what makes the text of one answer from its tokens."""
        return AnswerText(self._decode, stop=stop, stop_token_ids=stop_token_ids, min_tokens=min_tokens)

    async def bad_words_token_ids(self, words: Sequence[str], *, tenant_id: str) -> list[list[int]]:
        """Return the tokens of words that an answer must not contain. Tenants take turns with many. Raises Overloaded."""
        if len(words) <= BAD_WORDS_INLINE_MAX and sum(map(len, words)) <= BAD_WORDS_INLINE_CHARS_MAX:
            return self._encode_words(words)
        return await self._in_thread(tenant_id, self._encode_words, words)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _in_thread(self, tenant_id: str, work: Callable[[Any], T], what: object) -> T:
        """Return what `work` returns. Where the caller is cancelled, its turn ends no sooner than the thread is free."""
        await self._turns.take(tenant_id)
        done = asyncio.get_running_loop().run_in_executor(self._threads, work, what)
        done.add_done_callback(lambda _done: self._turns.give_back())
        return await asyncio.shield(done)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self._template is None:
            raise InvalidValue("this model has no chat template, so it cannot answer chat messages", param="model")
        try:
            return self._template.render(messages)
        except ChatTemplateError as error:
            raise InvalidValue(str(error), param="messages") from error

    def _encode_long(self, text: str) -> list[int]:
        """Return the token ids. `encode` keeps the interpreter to itself while it runs; `encode_batch_fast` lets it go."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return bad_words_token_ids(words, self._encode_long)

    def _check_could_fit(self, text: str, max_model_len: int) -> None:
        """Raise ContextLengthExceeded when even the longest tokens could not cover `text`."""
        fewest = fewest_tokens(text, longest_token_chars=self.vocabulary.longest_token_chars)
        if fewest >= max_model_len:
            raise ContextLengthExceeded(
                f"the prompt is too long: it has at least {fewest} tokens, and {_longest(max_model_len)}",
                param="messages",
            )


def output_room(*, prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens may be generated: `max_tokens`, or the rest of the context when it is None.

    Raises ContextLengthExceeded, with the numbers, when prompt and output do not fit.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {prompt_tokens} tokens, which leaves no room for an answer, and"
            f" {_longest(max_model_len)}",
            param="messages",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and {max_tokens} were asked for, {prompt_tokens + max_tokens} in total, and"
            f" {_longest(max_model_len)}",
            param="max_tokens",
        )
    return room if max_tokens is None else max_tokens


def _longest(max_model_len: int) -> str:
    """Return the context in the words of OpenAI's: client libraries tell such a refusal from others by them."""
    return f"this model's maximum context length is {max_model_len} tokens"


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise NotAModel(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # whatever the library finds wrong in the text
        raise NotAModel(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
