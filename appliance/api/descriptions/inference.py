"""Descriptions of the fields of chat completions, models, errors and health."""

from __future__ import annotations

FIELDS = {
    # the request
    "ChatCompletionRequest.model": "The name of a model, as `GET /v1/models` lists it.",
    "messages": "The conversation so far: 1 to 4,096 messages.",
    "ChatCompletionRequest.stream": "Stream the response as server-sent events, token by token. Default: false.",
    "stream_options": "Options for streaming. Only with `stream` true.",
    "include_usage": "Send a final chunk with the `usage` of the whole request. Default: false.",
    "continuous_usage_stats": "Include the `usage` so far in every chunk. Default: false.",
    "include_obfuscation": "Accepted for compatibility; has no effect.",
    "ChatCompletionRequest.max_tokens": (
        "The maximum number of output tokens of each choice, reasoning included. Default: `default_max_tokens` of the model "
        "within the rest of its context, else that rest. Older name of `max_completion_tokens`; if both are set, they must be "
        "equal."
    ),
    "max_completion_tokens": (
        "The maximum number of output tokens of each choice, reasoning included. Default: `default_max_tokens` of the model "
        "within the rest of its context, else that rest."
    ),
    "min_tokens": "The number of tokens to generate before a choice may end. Default: 0.",
    "temperature": (
        "Sampling temperature: 0 (always the most likely token) to 2. Default: the model's, else 1. As with all sampling "
        "fields, the model's default is the one in its `generation_config.json`."
    ),
    "top_p": (
        "Nucleus sampling: sample only from the most likely tokens whose probabilities add up to this value: above 0, to 1. "
        "Default: the model's, else 1."
    ),
    "top_k": "Sample only from this many of the most likely tokens. 0 or -1: from all. Default: the model's, else 0.",
    "min_p": (
        "Exclude tokens whose probability is below this fraction of the most likely token's: 0 to 1. Default: the model's, "
        "else 0."
    ),
    "typical_p": (
        "Locally typical sampling: keep the most typical tokens up to this cumulative probability: above 0, to 1 (off, the "
        "default)."
    ),
    "seed": (
        "A signed 64-bit integer. The same request with the same seed gets the same output, whatever else is running. Default: "
        "a random seed."
    ),
    "stop": (
        "A string, or up to 16 strings of at most 1,000 characters each, at which generation of a choice stops. The string "
        "itself is not returned."
    ),
    "stop_token_ids": "At most 256 token ids at which generation of a choice stops.",
    "ignore_eos": "Continue after the model's end-of-sequence token, until `max_tokens` or a stop string. Default: false.",
    "presence_penalty": "Penalty for tokens that are already in the output, -2 to 2; negative: a bonus. Default: 0.",
    "frequency_penalty": "Penalty for each time that a token is already in the output, -2 to 2; negative: a bonus. Default: 0.",
    "repetition_penalty": (
        "Penalty factor for tokens that the prompt or the output already contains: 0.01 to 10; above 1 discourages repetition. "
        "Default: the model's, else 1."
    ),
    "logit_bias": "A bias from -100 to 100 for each token id, added to the token's logit. At most 1,024 tokens.",
    "ChatCompletionRequest.logprobs": "Return the log-probability of each output token. Default: false.",
    "top_logprobs": "How many of the most likely tokens to return at each position, 0 to 20. Needs `logprobs`. Default: 0.",
    "ChatCompletionRequest.n": (
        "The number of choices to generate, 1 to 128. The prompt is computed and billed once. Default: 1."
    ),
    "response_format": (
        "The required format of the output. At most one of `response_format`, the `guided_…` fields and `structured_outputs` "
        "may be set."
    ),
    "ResponseFormat.type": "`text`, `json_object` (a JSON object with any fields) or `json_schema`.",
    "json_schema": "The schema of the output. Required with the type `json_schema`, refused with the others.",
    "JsonSchema.name": "A name of 1 to 64 letters, digits, underscores and dashes. It does not affect the output.",
    "JsonSchema.description": "A description of the format. It does not affect the output.",
    "JsonSchema.schema": "The JSON schema. Default: any JSON object.",
    "JsonSchema.strict": "Accepted for compatibility; schemas are always enforced exactly.",
    "guided_json": "A JSON schema, as an object or as JSON text, that the output must satisfy.",
    "guided_regex": "A regular expression that the whole output must match.",
    "guided_choice": "A list of strings, one of which the output must be.",
    "guided_grammar": "A grammar (GBNF or Lark) that the output must follow.",
    "structured_outputs": "The required format of the output, under the names that vLLM uses now.",
    "StructuredOutputs.json": "A JSON schema, as an object or as JSON text, that the output must satisfy.",
    "StructuredOutputs.regex": "A regular expression that the whole output must match.",
    "StructuredOutputs.choice": "A list of strings, one of which the output must be.",
    "StructuredOutputs.grammar": "A grammar (GBNF or Lark) that the output must follow.",
    "StructuredOutputs.json_object": "If true, the output must be a JSON object, with any fields.",
    "structural_tag": "Not supported: anything but null is refused.",
    "disable_any_whitespace": "Not supported: anything but null or false is refused.",
    "disable_additional_properties": "Not supported: anything but null or false is refused.",
    "whitespace_pattern": "Not supported: anything but null is refused.",
    "bad_words": "Strings that the output must not contain: at most 1,024, with at most 16,384 characters in total.",
    "ChatCompletionRequest.service_tier": (
        "`auto` or `default`: served at the priority of the tenant's tier. `flex`: batch work, served at the lowest priority "
        "and the batch price. Default: `auto`."
    ),
    "tools": "Not supported: anything but null or an empty list is refused.",
    "tool_choice": "`none` or `auto`; anything else is refused, because tools are not supported.",
    "functions": "Not supported: anything but null or an empty list is refused.",
    "ChatCompletionRequest.function_call": "`none` or `auto`; anything else is refused, because functions are not supported.",
    "modalities": 'Only `["text"]` is supported.',
    "reasoning_effort": (
        "Only `none` is supported: the chat template gets `enable_thinking` false, by which templates such as Qwen3's turn "
        "reasoning off."
    ),
    "audio": "Not supported: anything but null is refused.",
    "prediction": "Not supported: anything but null is refused.",
    "web_search_options": "Not supported: anything but null is refused.",
    "moderation": "Not supported: anything but null is refused.",
    "best_of": "Only 1 is supported.",
    "prompt_logprobs": "Not supported: anything but null is refused.",
    "store": "Accepted for compatibility; has no effect. Completions are not stored.",
    "metadata": "Accepted for compatibility; has no effect.",
    "user": "Accepted for compatibility; has no effect.",
    "safety_identifier": "Accepted for compatibility; has no effect.",
    "prompt_cache_key": "Accepted for compatibility; has no effect. Prompts are cached automatically.",
    "prompt_cache_retention": "Accepted for compatibility; has no effect.",
    "prompt_cache_options": "Accepted for compatibility; has no effect.",
    "verbosity": "Accepted for compatibility; has no effect.",
    "parallel_tool_calls": "Accepted for compatibility; has no effect.",
    # a message
    "Message.role": "`system`, `developer` (the same as `system`), `user` or `assistant`.",
    "Message.type": "Only `text` is supported; may be omitted.",
    "Message.content": (
        "The text of the message, or a list of parts of type `text` or `refusal`, whose texts are joined by line feeds. At "
        "most 16,384 parts in all messages together. Null is allowed only for `assistant`."
    ),
    "Message.name": "The name of the participant, for models whose chat template uses it.",
    "Message.refusal": "The text of an assistant's refusal, used if `content` is null.",
    "annotations": "Accepted for compatibility; has no effect.",
    "parsed": "Accepted for compatibility; has no effect. The official clients add it to an answer that they parse.",
    "provider_specific_fields": "Accepted for compatibility; has no effect. LiteLLM adds it to an answer.",
    "reasoning_content": "Not supported: anything but null or an empty string is refused.",
    "tool_calls": "Not supported: anything but null or an empty list is refused.",
    "tool_call_id": "Not supported: anything but null is refused.",
    "Message.function_call": "Not supported: anything but null is refused.",
    # the response
    "ChatCompletion.id": "The id of the request, the same as `x-request-id`.",
    "ChatCompletion.created": "When the request was admitted, in Unix seconds.",
    "ChatCompletion.model": "The name of the model, as in the request.",
    "choices": "The generated choices, `n` of them.",
    "usage": "The billed tokens.",
    "system_fingerprint": "Always null.",
    "ChatCompletion.service_tier": (
        "How the request was served, `default` or `flex`. Present only if the request set `service_tier`."
    ),
    "Choice.index": "The index of the choice, from 0.",
    "message": "The generated message.",
    "Choice.logprobs": "Log-probabilities of the tokens in `content`; null if they were not requested.",
    "Choice.finish_reason": (
        "`stop`: the model finished, or a stop string was found. `length`: the maximum number of tokens was reached."
    ),
    "AnswerMessage.role": "Always `assistant`.",
    "AnswerMessage.content": "The generated text.",
    "AnswerMessage.refusal": "Always null.",
    "Usage.prompt_tokens": "Prompt tokens, including cached ones.",
    "Usage.completion_tokens": "Output tokens of all choices together.",
    "total_tokens": "The sum of `prompt_tokens` and `completion_tokens`.",
    "prompt_tokens_details": "Details of the prompt tokens.",
    "TokenDetails.cached_tokens": "Prompt tokens that were found in the prefix cache, billed at their own price.",
    # models
    "Model.id": "The name of the model, for the `model` field of requests.",
    "Model.created": "When the appliance began to serve the model, in Unix seconds.",
    "Model.default_max_tokens": (
        "The maximum number of output tokens of a request that sets none, within the rest of the context; null: that rest."
    ),
    "owned_by": "Always `gatehouse`.",
    "ModelList.data": "The models that the key may use.",
    # errors and health
    "ErrorAnswer.error": "What went wrong.",
    "ErrorFields.message": "A human-readable description of the error.",
    "ErrorFields.type": "The kind of error, such as `invalid_request_error` or `insufficient_quota`.",
    "param": "The field or parameter at fault; null if there is none.",
    "code": "A machine-readable error code, such as `invalid_value` or `rate_limit_exceeded`.",
    "Live.status": "Always `ok`.",
    "Health.status": "`ok` or `not ready`.",
    "parts": "Each part of the appliance: `ok`, or the reason why it is not ready.",
    "notes": "Parts that are ready but slower than they should be, each with the reason.",
    "version": "The version of Gatehouse.",
}
