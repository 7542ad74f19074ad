"""Frames over a socket: reassembled from any pieces, refused if malformed or too large; closed and stalled peers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest
import uvloop

from engine import transport
from engine.protocol import EngineFrame, FinishReason, GatewayFrame, GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from engine.transport import AsyncFrameSocket, FrameSocket, FrameTooLarge, MalformedFrame, PeerClosed, PeerStalled
from tests.support.open_files import use_up_low_descriptors

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
    ],
    decoded=[("b", 1, 5)],
)  # fmt: skip
NewLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: list[NewLoop] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), theirs


def run_in_loop(new_loop: NewLoop, run: Callable[[AsyncFrameSocket, socket.socket], Awaitable[None]]) -> None:
    """Run a test with both ends of a connection in a loop of that kind."""

    async def connected() -> None:
        connection, theirs = socket.socketpair()
        ours = AsyncFrameSocket(connection)
        with theirs:
            try:
                async with asyncio.timeout(60):
                    await run(ours, theirs)
            finally:
                ours.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(connected())


async def receive_all(ours: AsyncFrameSocket) -> list[bytes]:
    bodies = []
    with suppress(PeerClosed):
        while True:
            bodies.append(await ours.receive())
    return bodies


def test_frames_of_both_directions_survive_serialisation() -> None:
    assert transport.decode_gateway_frame(transport.encode_frame(SUBMIT)[4:]) == SUBMIT
    assert transport.decode_engine_frame(transport.encode_frame(ANSWER)[4:]) == ANSWER


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa6submit\x01"])
def test_a_malformed_frame_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        transport.decode_gateway_frame(body)


def test_parameters_outside_their_range_are_refused_in_frames() -> None:
    body = transport.encode_frame(SUBMIT)[4:].replace(b"\xa5top_p\xcb\x3f\xf0", b"\xa5top_p\xcb\x40\xf0")
    with pytest.raises(MalformedFrame, match="top_p"):
        transport.decode_gateway_frame(body)


def test_frames_are_reassembled_from_any_pieces(pair: tuple[FrameSocket, socket.socket]) -> None:
    receiver, sender = pair
    stream = transport.encode_frame(SUBMIT) * 3
    frames = []
    for byte in range(0, len(stream), 7):
        sender.sendall(stream[byte : byte + 7])
        frames += receiver.receive(0.0)
    assert [transport.decode_gateway_frame(frame) for frame in frames] == [SUBMIT] * 3


def test_a_socket_works_with_high_file_descriptors() -> None:
    with use_up_low_descriptors():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(transport.encode_frame(SUBMIT))
            assert [transport.decode_gateway_frame(frame) for frame in FrameSocket(ours).receive(1.0)] == [SUBMIT]


def test_a_closed_peer_is_detected(pair: tuple[FrameSocket, socket.socket]) -> None:
    receiver, sender = pair
    sender.close()
    with pytest.raises(PeerClosed):
        receiver.receive(1.0)


def test_a_frame_with_an_oversized_length_is_refused_before_it_is_read(pair: tuple[FrameSocket, socket.socket]) -> None:
    receiver, sender = pair
    sender.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FrameTooLarge):
        receiver.receive(1.0)


def test_a_frame_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FRAME_BYTES_MAX", 10)
    with pytest.raises(FrameTooLarge):
        transport.encode_frame(SUBMIT)


def test_a_stalled_peer_raises_without_blocking(
    pair: tuple[FrameSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "UNSENT_BYTES_MAX", 100_000)
    sender, _ = pair

    def send_much() -> None:
        for _ in range(1000):
            sender.send(EngineFrame(fatal="x" * 10_000))

    with pytest.raises(PeerStalled):
        send_much()


@pytest.mark.parametrize("new_loop", LOOPS, ids=str)
class TestAsyncFrameSocket:
    """The gateway's end, in asyncio's event loop and in uvloop's."""

    def test_frames_are_reassembled_before_the_end_of_the_stream(self, new_loop: NewLoop) -> None:
        async def run(ours: AsyncFrameSocket, theirs: socket.socket) -> None:
            data = transport.encode_frame(ANSWER) * 3
            reading = asyncio.create_task(receive_all(ours))
            for byte in range(0, len(data), 7):
                theirs.sendall(data[byte : byte + 7])
                await asyncio.sleep(0)
            theirs.close()
            assert [transport.decode_engine_frame(body) for body in await reading] == [ANSWER] * 3

        run_in_loop(new_loop, run)

    def test_frames_before_an_oversized_one_are_delivered(self, new_loop: NewLoop) -> None:
        async def run(ours: AsyncFrameSocket, theirs: socket.socket) -> None:
            theirs.sendall(transport.encode_frame(ANSWER) + b"\xff\xff\xff\xff")
            assert transport.decode_engine_frame(await ours.receive()) == ANSWER
            with pytest.raises(FrameTooLarge):
                await ours.receive()

        run_in_loop(new_loop, run)

    def test_unsent_bytes_leave_in_order_while_frames_arrive(self, new_loop: NewLoop) -> None:
        async def run(ours: AsyncFrameSocket, theirs: socket.socket) -> None:
            sent = [transport.encode_frame(GatewayFrame(abort=[f"{number}" * 100_000])) for number in range(10)]
            for frame in sent:
                ours.send(frame)
            peer = FrameSocket(theirs)
            received: list[bytes] = []
            while len(received) < len(sent):
                received += peer.receive(0.0)
                peer.send(ANSWER)
                assert transport.decode_engine_frame(await ours.receive()) == ANSWER
            assert [transport.LENGTH.pack(len(body)) + body for body in received] == sent

        run_in_loop(new_loop, run)

    @pytest.mark.parametrize("unsent_bytes", [0, 1, 10_000_000])
    def test_frames_of_a_closed_peer_are_delivered_although_ours_were_not_read(
        self, new_loop: NewLoop, unsent_bytes: int
    ) -> None:
        async def run(ours: AsyncFrameSocket, theirs: socket.socket) -> None:
            ours.send(bytes(1 + unsent_bytes))
            for _ in range(100):
                theirs.sendall(transport.encode_frame(ANSWER))
            theirs.close()
            ours.send(b"to nobody")
            assert len(await receive_all(ours)) == 100
            ours.send(b"to nobody")

        run_in_loop(new_loop, run)

    def test_a_busy_peer_does_not_block_the_event_loop(self, new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport, "READ_BYTES", 16)

        async def run(ours: AsyncFrameSocket, theirs: socket.socket) -> None:
            theirs.sendall(transport.encode_frame(ANSWER) * 200)
            theirs.close()
            reading = asyncio.create_task(receive_all(ours))
            turns = 0
            while not reading.done():
                await asyncio.sleep(0)
                turns += 1
            assert len(await reading) == 200
            assert turns > 30

        run_in_loop(new_loop, run)
