"""The offline entry: text or token ids in, finished answers out, in this process and without a gateway.

Option names are those of vLLM's `LLM`. An option that this version cannot honour is an error that names it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.chat_template import ChatTemplate
from engine.completion import Completion
from engine.cpu_environment import prepare_cpu
from engine.encoder_config import is_encoder
from engine.errors import EngineConfigError, EngineError, PromptError
from engine.options import EngineOptions
from engine.outputs import RequestOutput
from engine.pooling_config import MODES, PoolingConfig, load_pooling_config
from engine.protocol import GenerationRequest, SamplingParams, TokenEvent, UnsupportedOption
from engine.text import Tokenizer

prepare_cpu()

from engine.build import build_encoder, build_engine  # noqa: E402 - torch must see the environment set above
from engine.embedder import Embedder  # noqa: E402
from engine.model_runner import ModelRunner  # noqa: E402

Prompt = str | Sequence[int] | Mapping[str, Any]

TENANT = "offline"
PROGRESS_INTERVAL_S = 0.5


class LLM:
    """One model, loaded into this process."""

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 0,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        speculative_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        seed: int = 0,
        kv_cache_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        """`num_gpu_blocks_override` and `kv_cache_bytes` size the cache on any device; `enforce_eager` changes nothing here,
        because no step is compiled or captured. Raises `ModelError` or `EngineConfigError`."""
        _refuse("swap_space", swap_space, swap_space == 0)
        _refuse("enable_chunked_prefill", enable_chunked_prefill, enable_chunked_prefill)
        _refuse("quantization", quantization, quantization is None)
        _refuse("kv_cache_dtype", kv_cache_dtype, kv_cache_dtype == "auto")
        _refuse("speculative_config", speculative_config, speculative_config is None)
        _refuse("tensor_parallel_size", tensor_parallel_size, tensor_parallel_size == 1)
        if not isinstance(enforce_eager, bool):
            raise EngineConfigError("enforce_eager", f"must be True or False, not {enforce_eager!r}")
        directory = Path(model)
        options = EngineOptions(
            model=directory,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_kv_blocks=num_gpu_blocks_override,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            threads=threads,
        )
        self._encoder = build_encoder(options) if is_encoder(directory) else None
        self._engine = None if self._encoder else build_engine(options)
        self._directory = directory
        self._tokenizer: Tokenizer | None = None
        self._seeds = random.Random(seed)  # noqa: S311 - reproducible sampling, not a secret
        self._num_submitted = 0
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read at first use: prompts of token ids need none. Raises `NotAModelDirectory`."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._directory)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of `prompts`. Raises `PromptError` when a prompt cannot be run; then none is."""
        listed = _listed(prompts)
        params = _one_each(sampling_params, len(listed))
        completions = [self._completion(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        return self._run(completions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One conversation or several, through the model's chat template. Raises `ChatTemplateError` and `PromptError`."""
        template = ChatTemplate.load(self._directory)
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = template.render(conversation)
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[list[float]]:
        """One vector per text, in their order, of an encoder or of a decoder.

        Pooling and normalisation are those that sentence-transformers wrote beside the model; without its files an encoder
        takes the mean of the tokens, a decoder the last one, and vectors have length one. `pooling` (mean, cls or last) and
        `normalize` say otherwise. Raises `PromptError` when a text cannot be computed; then none is.
        """
        embedder = self._embedder(pooling, normalize)
        listed = _listed(texts)
        token_ids = [self._text_ids(text, embedder.pooling) for text in listed]
        progress = _Progress(len(listed), enabled=use_tqdm)
        vectors = embedder.embed(token_ids, progress=progress.show)
        progress.end()
        return vectors

    def close(self) -> None:
        """Drop weights and cache. A closed `LLM` refuses further work."""
        self._closed = True
        del self._engine, self._encoder

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._closed:
            self.close()

    def _completion(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        text, token_ids = self._prompt_ids(prompt)
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        self._num_submitted += 1
        wanted = GenerationRequest(
            request_id=str(self._num_submitted - 1), tenant_id=TENANT, prompt_token_ids=token_ids, sampling=sampling
        )
        needs_text = bool(sampling.stop) or (self._directory / "tokenizer.json").is_file()
        return Completion(wanted, text, self.tokenizer if needs_text else None)

    def _embedder(self, pooling: str | None, normalize: bool | None) -> Embedder:
        if self._closed:
            raise EngineError("this LLM is closed")
        if pooling not in (None, *MODES):
            raise UnsupportedOption("pooling", f"pooling must be one of {', '.join(MODES)}, not {pooling!r}")
        config = load_pooling_config(self._directory, default_mode="mean" if self._encoder else "last")
        config = replace(
            config,
            mode=pooling or config.mode,
            normalised=config.normalised if normalize is None else normalize,
        )
        if self._encoder is not None:
            return Embedder(self._encoder, config)
        assert self._engine is not None
        assert isinstance(self._engine.runner, ModelRunner)
        return Embedder(self._engine.runner.text_model, config)

    def _text_ids(self, text: Prompt, pooling: PoolingConfig) -> list[int]:
        if isinstance(text, str):
            text = pooling.prompt + (text.lower() if pooling.lowercase else text)
        return self._prompt_ids(text)[1]

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, list(prompt)
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise PromptError(f"a prompt has unknown fields: {', '.join(sorted(unknown))}")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])

    def _run(self, completions: list[Completion], use_tqdm: bool) -> list[RequestOutput]:
        if self._closed:
            raise EngineError("this LLM is closed")
        if self._engine is None:
            raise EngineError("this model is an encoder: it gives embeddings (embed) and generates no text")
        by_id = {completion.request_id: completion for completion in completions}
        try:
            for completion in completions:
                refused = self._engine.submit(completion.wanted)
                if refused is not None:
                    raise PromptError(f"prompt {completions.index(completion)}: {refused.error}")
            self._step_until_done(by_id, _Progress(len(completions), enabled=use_tqdm))
        except BaseException:
            self._engine.abort_all()
            raise
        return [completion.result() for completion in completions]

    def _step_until_done(self, by_id: Mapping[str, Completion], progress: _Progress) -> None:
        assert self._engine is not None
        while self._engine.has_requests:
            for event in self._engine.step():
                self._take(by_id[event.request_id], event)
            progress.show(sum(1 for completion in by_id.values() if completion.is_finished) if progress.is_due else 0)
        progress.end()

    def _take(self, completion: Completion, event: TokenEvent) -> None:
        completion.take(event)
        if completion.is_finished and event.finish_reason is None:
            assert self._engine is not None
            self._engine.abort(completion.request_id)


class _Progress:
    """One line on a terminal, rewritten twice a second; silent elsewhere."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        return self._enabled and time.monotonic() >= self._due_s

    def show(self, done: int) -> None:
        if self.is_due:
            self._due_s = time.monotonic() + PROGRESS_INTERVAL_S
            sys.stderr.write(f"\r{done} of {self._total} prompts finished")
            sys.stderr.flush()

    def end(self) -> None:
        if self._enabled:
            sys.stderr.write(f"\r{self._total} of {self._total} prompts finished\n")


def _refuse(option: str, value: object, honoured: bool) -> None:
    if not honoured:
        raise EngineConfigError(option, f"= {value!r} is not supported by this version of the engine")


def _listed(prompts: Any) -> list[Any]:
    """A single prompt as a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise PromptError(f"{len(params)} sampling_params were given for {count} prompts")
    return list(params)
