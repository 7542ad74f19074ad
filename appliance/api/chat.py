"""`POST /v1/chat/completions`: authenticate, decode, build the prompt, admit, then respond as a whole or as a stream."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from litestar import Response, post

from appliance.api.auth import authenticate_tenant, client_address
from appliance.api.bodies import decode_body, read_in_turn
from appliance.api.chat_responses import ChatCompletion, ChunkFramer, CompletionBuilder
from appliance.api.connection_services import services_of
from appliance.api.error_responses import MEDIA_TYPE
from appliance.api.exchange import CheckedRequest, Exchange, exchange_of
from appliance.api.pieces import PIECE_BYTES, long_json_response
from appliance.api.sampling import field_names, requested_max_tokens, sampling_params, with_bad_words
from appliance.api.schemas import ChatCompletionRequest, check_messages, check_supported, service_tier_of
from appliance.api.sse import EVENT_STREAM, PING_AFTER_S, EventStream, chat_frames
from appliance.base.errors import GatehouseError
from appliance.serving.generation import Generation
from appliance.serving.prepared_requests import PreparedRequest
from appliance.serving.services import Services
from appliance.tenancy.principals import Principal

ENDPOINT = "/v1/chat/completions"


@post(
    [ENDPOINT, "/chat/completions"],
    status_code=200,
    summary="Create a chat completion",
    opt={
        "body": ChatCompletionRequest,
        "response": ChatCompletion,
        "text": EVENT_STREAM,
        "errors": (404, 429, 503),
    },
)
async def create_chat_completion(request: CheckedRequest) -> Response[Any]:
    """Generate the next message of a conversation.

    With `stream` true the response is a stream of server-sent events. The last one is `data: [DONE]`, or an error object if the
    stream fails.
    """
    services, exchange = services_of(request), exchange_of(request)
    try:
        principal = await authenticate_tenant(request)
        content = await request.unchecked_body()
        exchange.cancel_on_disconnect(request.receive)
        read = partial(_decode_and_check, exchange)
        checked = await read_in_turn(content, read, semaphore=services.body_semaphore, tenant_id=principal.tenant.id)
        prepared = await _prepare(exchange.request_id, checked, principal, client_address(request), services)
        generation = await services.generations.start(prepared)
    except GatehouseError as refusal:
        services.metrics.rejected(refusal.code)
        raise
    exchange.on_end.append(lambda: generation.end_early("disconnected"))
    if prepared.stream:
        if prepared.sampling.is_guided:
            await _wait_for_first_text(generation)
        return EventStream(chat_frames(generation, _framer(generation, checked)))
    return await _whole_response(generation, checked)


class _CheckedBody(NamedTuple):
    """A decoded body with its checked messages and service tier."""

    body: ChatCompletionRequest
    messages: list[dict[str, Any]]
    service_tier: str | None


def _decode_and_check(exchange: Exchange, content: bytes) -> _CheckedBody:
    body = decode_body(content, ChatCompletionRequest)
    exchange.model = body.model
    check_supported(body)
    return _CheckedBody(body, service_tier=service_tier_of(body), messages=check_messages(body.messages))


async def _prepare(
    request_id: str, checked: _CheckedBody, principal: Principal, address: str, services: Services
) -> PreparedRequest:
    """Return the request with its model, prompt tokens and sampling parameters, all checked. Nothing is reserved yet."""
    body, messages, service_tier = checked
    max_output_tokens, _ = requested_max_tokens(body)
    model = services.models.get(body.model)
    principal.check_model(model.name)
    services.generations.check_can_accept(model, principal.tenant.id)
    info = model.engine.info  # read once: the engine may end while the prompt is tokenised
    assert info is not None, "the engine is ready"
    prompt_token_ids = await model.tokenizer.chat_prompt(
        messages,
        max_model_len=info.max_model_len,
        tenant_id=principal.tenant.id,
        enable_thinking=False if body.reasoning_effort == "none" else None,
    )
    sampling = sampling_params(
        body,
        info,
        model.sampling_defaults,
        default_max_tokens=model.default_max_tokens,
        prompt_tokens=len(prompt_token_ids),
    )
    sampling = await with_bad_words(sampling, model, tenant_id=principal.tenant.id)
    return PreparedRequest(
        request_id=request_id,
        principal=principal,
        address=address,
        model=model,
        endpoint=ENDPOINT,
        stream=bool(body.stream),
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        max_output_tokens=max_output_tokens,
        field_names=field_names(body),
        batch=service_tier == "flex",
    )


def _framer(generation: Generation, checked: _CheckedBody) -> ChunkFramer:
    options = checked.body.stream_options
    return ChunkFramer(
        request_id=generation.request_id,
        created=generation.created,
        model=generation.live.model,
        prompt_tokens=generation.live.prompt_tokens,
        num_answers=generation.live.num_answers,
        logprobs=bool(checked.body.logprobs),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        service_tier=checked.service_tier,
    )


async def _wait_for_first_text(generation: Generation) -> None:
    """Wait for the first text, which follows the compilation of the schema. Raises the error of a request that has failed.

    Until the stream begins, an error can still set the HTTP status; afterwards it could only be an error frame. After
    PING_AFTER_S the stream begins in any case.
    """
    await generation.chunks.wait(PING_AFTER_S)
    if generation.chunks.ended and (outcome := await generation.outcome).error is not None:
        raise outcome.error


async def _whole_response(generation: Generation, checked: _CheckedBody) -> Response[Any]:
    completion = CompletionBuilder(generation.live.num_answers, logprobs=bool(checked.body.logprobs))
    while not generation.chunks.ended:
        for chunk in await generation.chunks.take():
            completion.add(chunk)
    outcome = await generation.outcome
    if outcome.error is not None:
        raise outcome.error
    parts, length = completion.body(
        request_id=generation.request_id,
        created=generation.created,
        model=generation.live.model,
        outcome=outcome,
        service_tier=checked.service_tier,
    )
    if length > PIECE_BYTES:
        return long_json_response(parts, length)
    return Response(b"".join(parts), media_type=MEDIA_TYPE)
