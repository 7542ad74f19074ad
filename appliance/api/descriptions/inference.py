"""What the fields of a chat completion and of the list of models mean."""

from __future__ import annotations

FIELDS = {
    # the request
    "ChatCompletionRequest.model": "The name of a model, as `GET /v1/models` lists it.",
    "messages": "The conversation so far: 1 to 4,096 messages.",
    "ChatCompletionRequest.stream": "Send the answer as server-sent events, token by token. Default: false.",
    "stream_options": "Options of a stream. Only with `stream` true.",
    "include_usage": "Send a last chunk with the `usage` of the whole request. Default: false.",
    "continuous_usage_stats": "Send the `usage` so far with every chunk. Default: false.",
    "include_obfuscation": "Accepted for compatibility; has no effect.",
    "ChatCompletionRequest.max_tokens": (
        "The maximum number of tokens of each answer. Default: what is left of the model's context. Older name of "
        "`max_completion_tokens`; if both are set, they must be equal."
    ),
    "max_completion_tokens": "The maximum number of tokens of each answer. Default: what is left of the model's context.",
    "min_tokens": "The minimum number of tokens before an answer may end. Default: 0.",
    "temperature": (
        "How random the choice of tokens is: 0 (always the likeliest) to 2. Default: the model's, else 1. As with all sampling "
        "fields, the model's default is the one in its `generation_config.json`."
    ),
    "top_p": (
        "Choose only among the likeliest tokens whose probabilities add up to this share: above 0, to 1. Default: the model's, "
        "else 1."
    ),
    "top_k": "Choose only among this many of the likeliest tokens. 0 or -1: among all. Default: the model's, else 0.",
    "min_p": (
        "Drop tokens with less than this share of the likeliest token's probability: 0 to 1. Default: the model's, else 0."
    ),
    "typical_p": (
        "Locally typical sampling: keep the most typical tokens up to this probability: above 0, to 1 (off, the default)."
    ),
    "seed": (
        "A signed 64-bit integer. The same request with the same seed gets the same answer, whatever else is running. Default: "
        "a random seed."
    ),
    "stop": (
        "A string, or up to 16 strings of at most 1,000 characters each, that end an answer when it contains one. The answer "
        "ends before the string."
    ),
    "stop_token_ids": "At most 256 token ids that end an answer.",
    "ignore_eos": "Go on after the model's end token, until `max_tokens` or a stop string. Default: false.",
    "presence_penalty": "Lower the chance of tokens that the answer already contains: -2 to 2. Default: 0.",
    "frequency_penalty": "Lower the chance of tokens by how often the answer already contains them: -2 to 2. Default: 0.",
    "repetition_penalty": (
        "Divide the scores of tokens that the prompt or the answer already contains: 0.01 to 10; above 1 discourages "
        "repetition. Default: the model's, else 1."
    ),
    "logit_bias": "A number from -100 to 100 for each token id, added to its score. At most 1,024 tokens.",
    "ChatCompletionRequest.logprobs": "Return the log-probability of each token of the answer. Default: false.",
    "top_logprobs": "How many of the likeliest tokens to return at each position, 0 to 20. Needs `logprobs` true. Default: 0.",
    "ChatCompletionRequest.n": "The number of answers, 1 to 128. The prompt is computed and billed once. Default: 1.",
    "response_format": "The format of the answer. At most one of this, a `guided_…` field and `structured_outputs` may be set.",
    "ResponseFormat.type": "`text`, `json_object` (a JSON object with any fields) or `json_schema`.",
    "json_schema": "The schema of the answer. Required with the type `json_schema`, refused with the others.",
    "JsonSchema.name": "A name of 1 to 64 letters, digits, underscores and dashes. It does not affect the answer.",
    "JsonSchema.description": "A description of the format. It does not affect the answer.",
    "JsonSchema.schema": "The JSON schema. Default: any JSON object.",
    "JsonSchema.strict": "Accepted for compatibility; schemas are always enforced exactly.",
    "guided_json": "A JSON schema, as an object or as JSON text, that the answer must satisfy.",
    "guided_regex": "A regular expression that the whole answer must match.",
    "guided_choice": "A list of strings, one of which the answer must be.",
    "guided_grammar": "A grammar (GBNF or Lark) that the answer must follow.",
    "structured_outputs": "The format of the answer, under the names that vLLM uses now.",
    "StructuredOutputs.json": "A JSON schema, as an object or as JSON text, that the answer must satisfy.",
    "StructuredOutputs.regex": "A regular expression that the whole answer must match.",
    "StructuredOutputs.choice": "A list of strings, one of which the answer must be.",
    "StructuredOutputs.grammar": "A grammar (GBNF or Lark) that the answer must follow.",
    "StructuredOutputs.json_object": "True: the answer must be a JSON object, with any fields.",
    "structural_tag": "Not supported: anything but null is refused.",
    "disable_any_whitespace": "Not supported: anything but null or false is refused.",
    "disable_additional_properties": "Not supported: anything but null or false is refused.",
    "whitespace_pattern": "Not supported: anything but null is refused.",
    "bad_words": "Texts that an answer must not contain: at most 1,024, with 16,384 characters together.",
    "ChatCompletionRequest.service_tier": (
        "`auto` or `default`: served with the tenant's tier. `flex`: batch work, which is served after everything more urgent, "
        "at the batch price. Default: `auto`."
    ),
    "tools": "Not supported: anything but null or an empty list is refused.",
    "tool_choice": "`none` or `auto`; anything else is refused, because tools are not supported.",
    "functions": "Not supported: anything but null or an empty list is refused.",
    "ChatCompletionRequest.function_call": "`none` or `auto`; anything else is refused, because functions are not supported.",
    "modalities": 'Only `["text"]`.',
    "reasoning_effort": "Only `none`.",
    "audio": "Not supported: anything but null is refused.",
    "prediction": "Not supported: anything but null is refused.",
    "web_search_options": "Not supported: anything but null is refused.",
    "moderation": "Not supported: anything but null is refused.",
    "best_of": "Only 1.",
    "prompt_logprobs": "Not supported: anything but null is refused.",
    "store": "Accepted for compatibility; has no effect. Answers are not stored.",
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
    "Message.type": "Only `text`; may be left out.",
    "Message.content": (
        "The text of the message, or a list of parts of type `text` or `refusal`, whose texts are joined by line feeds. At "
        "most 16,384 parts in all messages. Null only for `assistant`."
    ),
    "Message.name": "The name of the participant, for models whose chat template uses it.",
    "Message.refusal": "The text of an assistant's refusal, used if `content` is null.",
    "annotations": "Accepted for compatibility; has no effect.",
    "tool_calls": "Not supported: anything but null or an empty list is refused.",
    "tool_call_id": "Not supported: anything but null is refused.",
    "Message.function_call": "Not supported: anything but null is refused.",
    # the answer
    "ChatCompletion.id": "The id of the request, the same as `x-request-id`.",
    "ChatCompletion.created": "When the request was admitted, in Unix seconds.",
    "ChatCompletion.model": "The name of the model, as in the request.",
    "choices": "The answers, `n` of them.",
    "usage": "The tokens that are billed.",
    "system_fingerprint": "Always null.",
    "ChatCompletion.service_tier": "How the request was served, `default` or `flex`. Only if the request set `service_tier`.",
    "Choice.index": "The number of the answer, from 0.",
    "message": "The generated message.",
    "Choice.logprobs": "Log-probabilities of the tokens in `content`; null if they were not requested.",
    "Choice.finish_reason": (
        "`stop`: the model ended, or a stop string was found. `length`: the maximum number of tokens was reached."
    ),
    "AnswerMessage.role": "Always `assistant`.",
    "AnswerMessage.content": "The text of the answer.",
    "AnswerMessage.refusal": "Always null.",
    "Usage.prompt_tokens": "Tokens of the prompt.",
    "Usage.completion_tokens": "Tokens of all answers together.",
    "total_tokens": "`prompt_tokens` and `completion_tokens` together.",
    "prompt_tokens_details": "Details of the prompt's tokens.",
    "TokenDetails.cached_tokens": "Tokens of the prompt that were found in the prefix cache, billed at their own price.",
    # models
    "Model.id": "The name of the model, as requests must give it.",
    "Model.created": "When the appliance began to serve the model, in Unix seconds.",
    "owned_by": "Always `gatehouse`.",
    "ModelList.data": "The models that the key may use.",
    # errors and health
    "ErrorAnswer.error": "What went wrong.",
    "ErrorFields.message": "The error in words.",
    "ErrorFields.type": "The kind of error, such as `invalid_request_error` or `insufficient_quota`.",
    "param": "The field or parameter at fault; null if there is none.",
    "code": "The error for programs, such as `invalid_value` or `rate_limit_exceeded`.",
    "Live.status": "Always `ok`.",
    "Health.status": "`ok` or `not ready`.",
    "parts": "Each part of the appliance, with `ok` or the reason why it is not ready.",
    "version": "The version of Gatehouse.",
}
