"""The offline entry: text or token ids in, finished answers out, in this process and without a gateway.

Option names are those of vLLM's `LLM`. An option that this version cannot honour is an error that names it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.pooling import MODES, PoolingConfig, load_pooling_config
from engine.environment import prepare_environment
from engine.errors import EngineBroken, EngineConfigError, EngineError, PromptError
from engine.number_checks import is_integer
from engine.offline.completion import Completion, engine_params
from engine.offline.gc_thresholds import rare_full_collections
from engine.offline.interrupts import between_steps
from engine.offline.outputs import GenerationFailed, RequestOutput
from engine.offline.progress import Progress
from engine.offline.prompts import Prompt, as_list, conversations, params_for, read_prompt
from engine.option_limits import COUNT
from engine.options import LIMITS, EngineOptions
from engine.protocol import EngineStatus, GenerationRequest, InvalidOption, SamplingParams, TokenEvent, UnsupportedOption
from engine.submission import PROMPT_PARAM
from engine.text.bad_words import bad_words_token_ids
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

prepare_environment()

from engine.build import build_engine  # noqa: E402 - torch must see the environment set above
from engine.loop import Engine  # noqa: E402
from engine.memory.device import release_dropped_engines  # noqa: E402
from engine.runner.embedder import Embedder, Embedding  # noqa: E402
from engine.runner.model_runner import ModelRunner  # noqa: E402
from engine.runner.paged_decoder import PagedDecoder  # noqa: E402
from engine.runner.slot_runner import SlotRunner  # noqa: E402
from engine.runner.text_models import is_embedding_model, load_text_model  # noqa: E402

TENANT = "offline"


class LLM:
    """One model, loaded into this process."""

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 0,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        head_quantization: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        seed: int = 0,
        kv_cache_bytes: int | None = None,
        threads: int | None = None,
        batch_invariant: bool = False,
        scheduling_policy: str = "fair",
        inter_token_target_ms: float | None = None,
        shared_prefixes: Sequence[str | Path] = (),
        **unknown: Any,
    ) -> None:
        """`max_num_seqs` of None leaves the number to the engine, as the appliance does. `num_gpu_blocks_override` and
        `kv_cache_bytes` size the cache on any device, the former if both are given; `enforce_eager` chooses the plain
        runner. `engine.options` describes `batch_invariant`, `scheduling_policy`, `inter_token_target_ms` and
        `shared_prefixes`, `speculation.options` what `speculative_config` may hold. Raises `ModelError` or
        `EngineConfigError`."""
        arguments = {option: value for option, value in locals().items() if option in LIMITS}
        for option in unknown:
            raise EngineConfigError(option, "is not an option of this engine")
        if not is_integer(seed):
            raise EngineConfigError("seed", f"must be an integer, not {seed!r}")
        _refuse("enable_chunked_prefill", enable_chunked_prefill, enable_chunked_prefill)
        _refuse("tensor_parallel_size", tensor_parallel_size, tensor_parallel_size == 1)
        if num_gpu_blocks_override is not None and not COUNT.allows(num_gpu_blocks_override):
            raise EngineConfigError("num_gpu_blocks_override", COUNT.refusal(num_gpu_blocks_override))
        options = EngineOptions.of({**arguments, "num_kv_blocks": num_gpu_blocks_override})
        self._text_model = load_text_model(options) if is_embedding_model(options.model) else None
        self._engine = None if self._text_model else build_engine(options, has_one_caller=True)
        self._directory = options.model
        self._tokenizer: Tokenizer | None = None
        self._seeds = random.Random(seed)  # noqa: S311 - reproducible sampling, not a secret
        self._num_submitted = 0
        self._closed = False
        self._broken: str | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read at first use: prompts of token ids need none. Raises `NotAModelDirectory`."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._directory)
        return self._tokenizer

    @rare_full_collections()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of `prompts`.

        Raises `PromptError` for a prompt and `InvalidOption` for a parameter that cannot be run; then nothing is run. Raises
        `GenerationFailed`, which holds all outputs, if a request turns out later to be impossible to serve.
        """
        engine = self._generating_engine()
        prompt_list = as_list(prompts)
        pairs = zip(prompt_list, params_for(sampling_params, len(prompt_list)), strict=True)
        completions = [self._completion(engine, index, *pair) for index, pair in enumerate(pairs)]
        try:
            outputs = _run(engine, completions, Progress(len(completions), enabled=use_tqdm))
        except BaseException as error:
            self._broken = _abort_all(engine, error)
            raise
        _raise_for_request_errors(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """One conversation or several, through the model's chat template. Raises `ChatTemplateError`, and as `generate`."""
        template = ChatTemplate.load(self._directory)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations(messages)):
            text = template.render(conversation, add_generation_prompt=add_generation_prompt)
            max_model_len = self._generating_engine().info.max_model_len
            with _naming("conversation", index):
                token_ids = self.tokenizer.encode_prompt(text, max_model_len=max_model_len, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """One vector per text, a list of floats, in the order of the texts, from an encoder or a decoder.

        Pooling and normalisation are those of the model's sentence-transformers files; without these an encoder takes the mean
        of the tokens, a decoder the last one, and vectors have length one. `pooling` (mean, cls or last) and `normalize`
        override them. Raises `PromptError` when a text cannot be computed; then none is.
        """
        embedder = self._embedder(pooling, normalize)
        token_ids = [self._text_ids(index, text, embedder.pooling) for index, text in enumerate(as_list(texts))]
        progress = Progress(len(token_ids), enabled=use_tqdm)
        vectors = embedder.embed(token_ids, progress=progress.show)
        progress.end()
        return vectors

    def close(self) -> None:
        """Give back the memory of weights and cache, end helper processes, refuse further work. Closing again does nothing."""
        if self._closed:
            return
        engine, self._closed = self._engine, True
        self._engine = self._text_model = None
        if engine is not None:
            engine.close()
            del engine
        if self._broken is None:  # on a lost device freeing fails as well, which torch's destructors do not survive
            release_dropped_engines()

    def status(self) -> EngineStatus:
        """Gauges and running totals of the engine since it was loaded."""
        return self._generating_engine().status()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generating_engine(self) -> Engine:
        if self._closed:
            raise EngineError("this LLM is closed")
        if self._broken is not None:
            raise EngineBroken(f"this LLM cannot go on and must be created anew: {self._broken}")
        if self._engine is None:
            raise EngineError("this model gives embeddings (embed) and generates no text")
        return self._engine

    def _completion(self, engine: Engine, index: int, prompt: Prompt, sampling: SamplingParams) -> Completion:
        with _naming("prompt", index):
            text, token_ids = read_prompt(
                prompt, lambda text: self.tokenizer.encode_prompt(text, max_model_len=engine.info.max_model_len)
            )
        request = GenerationRequest(
            request_id=str(self._num_submitted),
            tenant_id=TENANT,
            prompt_token_ids=token_ids,
            sampling=self._engine_params(sampling),
        )
        self._num_submitted += 1
        needs_text = bool(sampling.stop or sampling.bad_words) or (self._directory / "tokenizer.json").is_file()
        return Completion(
            request,
            sampling=sampling,
            prompt=text,
            tokenizer=self.tokenizer if needs_text else None,
            eos_token_ids=engine.info.eos_token_ids,
        )

    def _engine_params(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` completed by what the engine needs and the caller may leave out: a seed, and bad words as ids."""
        sampling = engine_params(sampling)
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        if sampling.bad_words:
            token_ids = bad_words_token_ids(sampling.bad_words, partial(self.tokenizer.encode, add_special_tokens=False))
            sampling = replace(sampling, bad_words_token_ids=token_ids + (sampling.bad_words_token_ids or []))
        return sampling

    def _embedder(self, pooling: str | None, normalize: bool | None) -> Embedder:
        if self._closed:
            raise EngineError("this LLM is closed")
        if pooling not in (None, *MODES):
            raise UnsupportedOption("pooling", f"pooling must be one of {', '.join(MODES)}, not {pooling!r}")
        model = self._text_model or self._served_decoder().text_model
        config = load_pooling_config(self._directory, default_mode=model.default_pooling)
        normalised = config.normalised if normalize is None else normalize
        return Embedder(model, replace(config, mode=pooling or config.mode, normalised=normalised))

    def _served_decoder(self) -> PagedDecoder:
        assert self._engine is not None
        assert isinstance(self._engine.runner, ModelRunner | SlotRunner)
        return self._engine.runner.target

    def _text_ids(self, index: int, text: Prompt, pooling: PoolingConfig) -> list[int]:
        def encode(text: str) -> list[int]:
            text = pooling.prompt + text
            return self.tokenizer.encode(text.lower() if pooling.lowercase else text)

        with _naming("text", index):
            return read_prompt(text, encode)[1]


@contextmanager
def _naming(what: str, index: int) -> Iterator[None]:
    """Have a `PromptError` of the block name its prompt, text or conversation."""
    try:
        yield
    except PromptError as error:
        raise PromptError(f"{what} {index}: {error}") from error


def _run(engine: Engine, completions: Sequence[Completion], progress: Progress) -> list[RequestOutput]:
    """Submit all and step until none is live."""
    with between_steps() as deliver_interrupt:
        for index, completion in enumerate(completions):
            refused = engine.submit(completion.request)
            if refused:
                raise _refusal(index, refused[0])
        by_id = {completion.request_id: completion for completion in completions}
        while engine.has_requests:
            _step(engine, by_id, progress)
            deliver_interrupt()
        engine.check_when_idle()
    progress.end(**_num_tokens(completions))
    return [completion.result() for completion in completions]


def _step(engine: Engine, by_id: Mapping[str, Completion], progress: Progress) -> None:
    step_events = engine.step_in_columns()
    for event in step_events.others:
        if by_id[event.request_id].add_event(event):
            engine.abort_answer(event.request_id, event.index)
    for request_id, index, token_id in step_events.decoded:
        if by_id[request_id].add_token(index, token_id):
            engine.abort_answer(request_id, index)
    if progress.is_due:
        progress.show(sum(completion.is_finished for completion in by_id.values()), **_num_tokens(by_id.values()))


def _abort_all(engine: Engine, error: BaseException) -> str | None:
    """Abort the requests that `error` left unfinished. Returns why the engine cannot serve further requests, None if it can."""
    if isinstance(error, EngineBroken):
        return str(error)
    try:
        engine.abort_all()
        engine.check_when_idle()
    except (AssertionError, LookupError, ValueError, EngineBroken) as fault:
        return f"{type(error).__name__} came within a step, and it is not in order: {fault}"
    return None


def _num_tokens(completions: Collection[Completion]) -> dict[str, int]:
    return {
        "tokens_in": sum(completion.num_prompt_tokens_computed for completion in completions),
        "tokens_out": sum(completion.num_output_tokens for completion in completions),
    }


def _refusal(index: int, event: TokenEvent) -> Exception:
    """A request that the engine refused to queue, as an error that names the prompt and the field."""
    message = f"prompt {index}: {event.error}"
    if event.error_param is None or event.error_param == PROMPT_PARAM:
        return PromptError(message)
    return InvalidOption(event.error_param, message)


def _raise_for_request_errors(outputs: list[RequestOutput]) -> None:
    for index, output in enumerate(outputs):
        for answer in output.outputs:
            if answer.error_param is not None:
                raise GenerationFailed(answer.error_param, f"prompt {index}: {answer.error}", outputs)


def _refuse(option: str, value: object, honoured: bool) -> None:
    if not honoured:
        raise EngineConfigError(option, f"= {value!r} is not supported by this version of the engine")
