"""Sends one alert to a webhook: a signed POST to a permitted address, of whose response only the head is read.

Follows no redirects and uses no proxy from the environment. Connects to the very address that was checked, so that a host name
that resolves differently the second time (DNS rebinding) gains nothing. Decides nothing about retries.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial

import httpx

from appliance.metering.alerts.outbox import Delivery
from appliance.metering.alerts.signature import signature_headers
from appliance.metering.alerts.targets import Address, TargetPolicy
from appliance.metering.alerts.webhooks import Endpoint
from appliance.serving.alerting.delivery import FailureReason, SendFailed, one_line

TIMEOUT_S = 15.0  # of the whole attempt, so that a receiver that sends slowly occupies it no longer
CONNECT_TIMEOUT_S = 5.0
ADDRESSES_MAX = 4
RESOLVER_THREADS_MAX = 8
_GONE = 410
_RETRY_AFTER_STATUSES = (429, 503)

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


class Resolver:
    """Resolves names in its own threads, because tenants choose them and a slow lookup must not block other work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS_MAX, thread_name_prefix="alert names")

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        """Return the addresses of `host` in the resolver's order. Raises OSError."""
        lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        results = await asyncio.get_running_loop().run_in_executor(self._threads, lookup)
        return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in results]

    def close(self) -> None:
        """End the threads without waiting for running lookups."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class HttpSender:
    """Posts alerts. `tls` replaces the default context with the machine's certificates. Call `close` at the end."""

    def __init__(
        self,
        target_policy: TargetPolicy,
        *,
        version: str,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._target_policy = target_policy
        self._resolver = Resolver()
        self._resolve = resolve or self._resolver
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            verify=tls or ssl.create_default_context(),
            headers={"user-agent": f"gatehouse/{version}"},
            follow_redirects=False,
            trust_env=False,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            # No keep-alive: a connection opened for one host name must not be reused for another at the same address.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close the resolver and the client."""
        self._resolver.close()
        await self._client.aclose()

    async def send(self, endpoint: Endpoint, delivery: Delivery, now: datetime) -> None:
        """Return when the receiver has answered with a 2xx status. Raises SendFailed."""
        body = json.dumps(delivery.payload, ensure_ascii=False, separators=(",", ":")).encode()
        headers = signature_headers(endpoint.secrets, delivery.id, int(now.timestamp()), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._post(httpx.URL(endpoint.target), body, headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise SendFailed("timeout", f"no answer within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise SendFailed("connect", f"no connection: {one_line(error, 200)}") from error
        _check(response)

    async def _post(self, url: httpx.URL, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Post to the first address that accepts a connection, and return the response without its body."""
        failure: httpx.HTTPError | None = None
        for address in await self._addresses(url):
            request = self._client.build_request(
                "POST",
                url.copy_with(host=str(address)),
                content=body,
                headers={**headers, "host": url.netloc.decode("ascii"), "content-type": "application/json"},
                extensions={"sni_hostname": url.host},
            )
            try:
                response = await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
                continue
            await response.aclose()
            return response
        assert failure is not None, "there is at least one address"
        raise failure

    async def _addresses(self, url: httpx.URL) -> list[Address]:
        encrypted = url.scheme == "https"
        try:
            found = await self._resolve(url.host, url.port or (443 if encrypted else 80))
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            raise SendFailed("name", f"the name {url.host} cannot be resolved: {one_line(error, 200)}") from error
        allowed = [address for address in dict.fromkeys(found) if self._target_policy.allows(address, encrypted=encrypted)]
        if not allowed:
            raise SendFailed("address", f"alerts may not be sent to the address of {url.host} this way (webhook_networks)")
        return allowed[:ADDRESSES_MAX]


def _check(response: httpx.Response) -> None:
    """Raise SendFailed unless the status is 2xx."""
    status = response.status_code
    if response.is_success:
        return
    if status == _GONE:
        raise SendFailed("gone", "the receiver answered 410: it is gone permanently")
    if response.is_redirect:
        raise SendFailed("redirect", f"the receiver answered {status}: redirects are not followed")
    retry_after_s = _retry_after_s(response) if status in _RETRY_AFTER_STATUSES else 0.0
    reason: FailureReason = "refused" if response.is_client_error else "failed"
    raise SendFailed(reason, f"the receiver answered {status}", retry_after_s=retry_after_s)


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds of `retry-after`; 0 if the header is missing or a date."""
    text = response.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0.0
