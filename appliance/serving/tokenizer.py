"""Turns messages into token ids with the model's own chat template and tokenizer, so that prompts are counted exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from appliance.base.errors import ContextLengthExceeded, InvalidValue
from appliance.base.texts import counted
from appliance.serving.fair_semaphore import FairSemaphore
from appliance.serving.model_folder import NotAModel
from appliance.serving.vocabulary import Vocabulary
from engine.text.bad_words import bad_words_token_ids
from engine.text.chat_template import ChatTemplate, ChatTemplateError, NoChatTemplate
from engine.text.detokenizer import AnswerText, TokenText
from engine.text.length import fewest_tokens

T = TypeVar("T")

# Longer prompts are rendered and tokenised in a thread, so that other requests' streams do not stall.
RENDERED_INLINE_CHARS_MAX = 20_000
RENDERED_INLINE_MESSAGES_MAX = 64  # a template may compare every pair of messages
TOKENISED_INLINE_CHARS_MAX = 4_000  # takes 1 ms; 20,000 characters take up to 25 ms
BAD_WORDS_INLINE_MAX, BAD_WORDS_INLINE_CHARS_MAX = 16, 1_000  # about 15 µs per word, twice
THREADS_MAX = 2
WAITING_MAX = 1024  # requests of all tenants that wait for a thread
RETRY_AFTER_S = 1.0


class ModelTokenizer:
    """Tokenizer and chat template of one model: messages to token ids, and the token ids of answers to text."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="tokenise")
        self._free_threads = FairSemaphore(
            THREADS_MAX,
            WAITING_MAX,
            refusal="too many long prompts are waiting to be tokenised",
            retry_after_s=RETRY_AFTER_S,
        )
        self.vocabulary = Vocabulary(tokenizer)
        self._token_text: TokenText | None = None
        if isinstance(tokenizer.decoder, ByteLevel):
            self._token_text = cache(lambda token_id: self._decode([token_id]))

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read the tokenizer and the chat template of a model folder. Raises NotAModel, naming the faulty file."""
        try:
            template = ChatTemplate.load(folder)
        except NoChatTemplate:
            template = None
        except ChatTemplateError as error:
            raise NotAModel(str(error)) from error
        return cls(_read_tokenizer(folder / "tokenizer.json"), template)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_model_len: int,
        tenant_id: str,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the prompt's token ids. The caller checks their number. Tenants take turns with long prompts.

        `enable_thinking` is passed to the chat template unless it is None.

        Raises InvalidValue when the template rejects the messages, ContextLengthExceeded when the text is certainly too long
        even before it is tokenised, and Overloaded when too many long prompts wait.
        """
        render = partial(self._render, enable_thinking=enable_thinking)
        size = sum(len(str(value or "")) for message in messages for value in message.values())
        if size > RENDERED_INLINE_CHARS_MAX or len(messages) > RENDERED_INLINE_MESSAGES_MAX:
            text = await self._in_thread(tenant_id, render, messages)
        else:
            text = render(messages)
        if len(text) <= TOKENISED_INLINE_CHARS_MAX:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        self._check_could_fit(text, max_model_len)
        return await self._in_thread(tenant_id, self._encode_long, text)

    def answer_text(self, *, stop: Sequence[str], stop_token_ids: Sequence[int], min_tokens: int) -> AnswerText:
        """Return the incremental detokeniser of one answer, which also finds stop strings."""
        return AnswerText(
            self._decode, token_text=self._token_text, stop=stop, stop_token_ids=stop_token_ids, min_tokens=min_tokens
        )

    async def bad_words_token_ids(self, words: Sequence[str], *, tenant_id: str) -> list[list[int]]:
        """Return the token ids of words that an answer must not contain. Tenants take turns with long lists.

        Raises Overloaded.
        """
        if len(words) <= BAD_WORDS_INLINE_MAX and sum(map(len, words)) <= BAD_WORDS_INLINE_CHARS_MAX:
            return self._encode_words(words)
        return await self._in_thread(tenant_id, self._encode_words, words)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _in_thread(self, tenant_id: str, function: Callable[[Any], T], argument: object) -> T:
        """Return `function(argument)`, run in a thread. If the caller is cancelled, the thread still counts as busy until it is
        free."""
        await self._free_threads.acquire(tenant_id)
        done = asyncio.get_running_loop().run_in_executor(self._threads, function, argument)
        done.add_done_callback(lambda _done: self._free_threads.release())
        return await asyncio.shield(done)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool | None) -> str:
        if self._template is None:
            raise InvalidValue("this model has no chat template, so it cannot answer chat messages", param="model")
        try:
            return self._template.render(messages, enable_thinking=enable_thinking)
        except ChatTemplateError as error:
            raise InvalidValue(str(error), param="messages") from error

    def _encode_long(self, text: str) -> list[int]:
        """Return the token ids. `encode` holds the GIL while it runs; `encode_batch_fast` releases it."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return bad_words_token_ids(words, self._encode_long)

    def _check_could_fit(self, text: str, max_model_len: int) -> None:
        """Raise ContextLengthExceeded when `text` would not fit even if all its tokens were the longest in the vocabulary."""
        fewest = fewest_tokens(text, longest_token_chars=self.vocabulary.longest_token_chars)
        if fewest >= max_model_len:
            raise ContextLengthExceeded(
                f"the prompt is too long: it has at least {counted(fewest, 'token')}, and {_context_limit(max_model_len)}",
                param="messages",
            )


def output_room(*, prompt_tokens: int, max_tokens: int | None, default_max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens may be generated: `max_tokens`, else the default within the rest of the context, else that rest.

    Raises ContextLengthExceeded, with the numbers, when prompt and `max_tokens` together do not fit.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {counted(prompt_tokens, 'token')}, which leaves no room for an answer, and"
            f" {_context_limit(max_model_len)}",
            param="messages",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {counted(prompt_tokens, 'token')} and {max_tokens} more were requested,"
            f" {prompt_tokens + max_tokens} in total, and {_context_limit(max_model_len)}",
            param="max_tokens",
        )
    if max_tokens is not None:
        return max_tokens
    return room if default_max_tokens is None else min(room, default_max_tokens)


def _context_limit(max_model_len: int) -> str:
    """Return the context length in OpenAI's wording, by which client libraries recognise this error."""
    return f"this model's maximum context length is {max_model_len} tokens"


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise NotAModel(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # raised by the library for any invalid content
        raise NotAModel(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
