"""Frames: what is sent arrives, in any pieces; what is no frame is refused; a peer that is gone or stuck is noticed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from engine import transport
from engine.protocol import EngineFrame, FinishReason, GatewayFrame, GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from engine.transport import FrameSocket, FrameTooLarge, MalformedFrame, PeerClosed, PeerStalled

SUBMIT = GatewayFrame(
    submit=[
        GenerationRequest(
            request_id="a",
            tenant_id="alice",
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(seed=2**63 - 1, logit_bias={3: -1.5}, stop=["x"]),
        )
    ],
    abort=["b"],
)
ANSWER = EngineFrame(
    events=[
        TokenEvent(
            request_id="a", token_ids=[4], num_output_tokens=1, num_prompt_tokens_computed=2,
            logprobs=[TokenLogprob(logprob=-0.5, top_token_ids=[4], top_logprobs=[-0.5])], finish_reason=FinishReason.STOP,
        )
    ]
)  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), theirs


def test_frames_of_both_sides_survive_the_wire() -> None:
    assert transport.decode_gateway_frame(transport.encode_frame(SUBMIT)[4:]) == SUBMIT
    assert transport.decode_engine_frame(transport.encode_frame(ANSWER)[4:]) == ANSWER


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa6submit\x01"])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        transport.decode_gateway_frame(body)


def test_parameters_outside_their_range_are_refused_on_the_wire_too() -> None:
    body = transport.encode_frame(SUBMIT)[4:].replace(b"\xa5top_p\xcb\x3f\xf0", b"\xa5top_p\xcb\x40\xf0")
    with pytest.raises(MalformedFrame, match="top_p"):
        transport.decode_gateway_frame(body)


def test_frames_arrive_whole_however_the_bytes_were_cut(pair: tuple[FrameSocket, socket.socket]) -> None:
    receiver, sender = pair
    stream = transport.encode_frame(SUBMIT) * 3
    frames = []
    for byte in range(0, len(stream), 7):
        sender.sendall(stream[byte : byte + 7])
        frames += receiver.receive(0.0)
    assert [transport.decode_gateway_frame(frame) for frame in frames] == [SUBMIT] * 3


def test_the_end_of_the_stream_is_noticed(pair: tuple[FrameSocket, socket.socket]) -> None:
    receiver, sender = pair
    sender.close()
    with pytest.raises(PeerClosed):
        receiver.receive(1.0)


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_read(pair: tuple[FrameSocket, socket.socket]) -> None:
    receiver, sender = pair
    sender.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FrameTooLarge):
        receiver.receive(1.0)


def test_a_frame_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FRAME_BYTES_MAX", 10)
    with pytest.raises(FrameTooLarge):
        transport.encode_frame(SUBMIT)


def test_a_peer_that_does_not_read_is_given_up_and_never_waited_for(
    pair: tuple[FrameSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "UNSENT_BYTES_MAX", 100_000)
    sender, _ = pair

    def send_much() -> None:
        for _ in range(1000):
            sender.send(EngineFrame(fatal="x" * 10_000))

    with pytest.raises(PeerStalled):
        send_much()


async def test_asyncio_reads_the_same_frames_and_notices_the_end() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(transport.encode_frame(ANSWER))
    reader.feed_eof()
    assert transport.decode_engine_frame(await transport.read_frame(reader)) == ANSWER
    with pytest.raises(PeerClosed):
        await transport.read_frame(reader)
