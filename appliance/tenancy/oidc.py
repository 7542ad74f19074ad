"""Client of an OpenID Connect provider for sign-in: the authorization code flow with PKCE (S256) and a nonce.

Knows no members. `id_tokens` verifies every token before its claims are used. Sign-in by password works while the provider is
unavailable.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx
from authlib.oauth2.rfc7636 import create_s256_code_challenge

from appliance.base.clock import Clock
from appliance.base.settings import Settings
from appliance.tenancy.id_tokens import Identity, Jwk, TokenRefused, UnknownKey, read_id_token, verified_email

SCOPE = "openid email profile"
TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1024 * 1024
CACHE_S = 3600.0  # how long the provider's metadata and keys are cached
KEY_REFRESH_INTERVAL_S = 60.0  # minimum interval between fetches triggered by a token with an unknown key
PAUSE_AFTER_FAILURE_S = 5.0
CALLBACK_PATH = "/login/oidc/callback"
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class ProviderUnavailable(Exception):
    """The provider did not respond, or its response is invalid. The message is for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Our registration at the provider. A client without a `secret` is public: only PKCE protects it."""

    issuer: str
    client_id: str
    secret: str | None = field(default=None, repr=False)
    external_url: str
    name: str | None = None

    @property
    def label(self) -> str:
        """Return the provider's name for the sign-in page."""
        return self.name or urlsplit(self.issuer).hostname or self.issuer

    @property
    def redirect_uri(self) -> str:
        """Return the URL to which the provider redirects back."""
        return f"{self.external_url}{CALLBACK_PATH}"


class OidcProvider:
    """A provider. `transport` replaces the network in tests."""

    def __init__(self, client: Client, clock: Clock, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.client = client
        self._clock = clock
        self._transport = transport
        self._lock = asyncio.Lock()
        self._metadata: dict[str, Any] = {}
        self._metadata_at = self._keys_at = self._keys_refreshed_at = self._failed_at = float("-inf")
        self._keys: list[Jwk] = []

    async def authorization_url(self, *, state: str, nonce: str, verifier: str) -> str:
        """Return the provider's URL that starts a sign-in. Raises ProviderUnavailable."""
        endpoint = str((await self._discover())["authorization_endpoint"])
        query = {
            "response_type": "code",
            "client_id": self.client.client_id,
            "redirect_uri": self.client.redirect_uri,
            "scope": SCOPE,
            "state": state,
            "nonce": nonce,
            "code_challenge": create_s256_code_challenge(verifier),
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def identify(self, *, code: str, nonce: str, verifier: str, response_issuer: str | None = None) -> Identity:
        """Exchange the authorization `code` and return the identity that the provider has signed in.

        `response_issuer` is the `iss` of the redirect, if any (RFC 9207). Raises TokenRefused and ProviderUnavailable.
        """
        metadata = await self._discover()
        if response_issuer is not None and response_issuer != metadata["issuer"]:
            raise TokenRefused("the code is from another issuer")
        tokens = await self._exchange(metadata, code, verifier)
        subject, claims = await self._verified(tokens.get("id_token"), metadata, nonce)
        email = verified_email(claims)
        if "email" not in claims:
            email = await self._fetch_email(metadata, tokens.get("access_token"), subject)
        return Identity(issuer=metadata["issuer"], subject=subject, email=email)

    async def _verified(self, token: object, metadata: Mapping[str, Any], nonce: str) -> tuple[str, Mapping[str, Any]]:
        """Return (subject, claims) of a valid token. If its key is unknown, the provider's keys are fetched again once."""
        expected = {"issuer": metadata["issuer"], "client_id": self.client.client_id, "nonce": nonce}
        try:
            return read_id_token(token, await self._signing_keys(metadata), **expected, now=self._clock.now())
        except UnknownKey:
            keys = await self._refresh_keys(metadata)
            return read_id_token(token, keys, **expected, now=self._clock.now())

    async def _discover(self) -> dict[str, Any]:
        """Return the provider's metadata (OpenID Connect Discovery 1.0), cached."""
        async with self._lock:
            now = self._clock.monotonic_s()
            if now - self._metadata_at < CACHE_S:
                return self._metadata
            if now - self._failed_at < PAUSE_AFTER_FAILURE_S:
                raise ProviderUnavailable(f"the provider failed less than {PAUSE_AFTER_FAILURE_S:.0f} s ago")
            try:
                metadata = await self._call("GET", f"{self.client.issuer}/.well-known/openid-configuration")
                self._metadata = _check_metadata(metadata, self.client.issuer)
            except ProviderUnavailable:
                self._failed_at = now
                raise
            self._metadata_at = now
            return self._metadata

    async def _signing_keys(self, metadata: Mapping[str, Any]) -> list[Jwk]:
        async with self._lock:
            if self._clock.monotonic_s() - self._keys_at >= CACHE_S:
                await self._fetch_keys(metadata)
            return self._keys

    async def _refresh_keys(self, metadata: Mapping[str, Any]) -> list[Jwk]:
        """Return the provider's keys, fetched again unless that was done within KEY_REFRESH_INTERVAL_S."""
        async with self._lock:
            now = self._clock.monotonic_s()
            if now - self._keys_refreshed_at >= KEY_REFRESH_INTERVAL_S:
                self._keys_refreshed_at = now
                await self._fetch_keys(metadata)
            return self._keys

    async def _fetch_keys(self, metadata: Mapping[str, Any]) -> None:
        keys = (await self._call("GET", metadata["jwks_uri"])).get("keys")
        if not isinstance(keys, list):
            raise ProviderUnavailable("the provider's key set contains no keys")
        self._keys = [key for key in keys if isinstance(key, dict)]
        self._keys_at = self._clock.monotonic_s()

    async def _exchange(self, metadata: Mapping[str, Any], code: str, verifier: str) -> dict[str, Any]:
        client = self.client
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": client.redirect_uri,
            "code_verifier": verifier,
        }
        methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        options: dict[str, Any] = {}
        if client.secret is not None and "client_secret_basic" in methods:
            # RFC 6749, section 2.3.1: id and secret are form-encoded first.
            options["auth"] = (quote(client.client_id, safe=""), quote(client.secret, safe=""))
        else:
            form |= {"client_id": client.client_id} | ({"client_secret": client.secret} if client.secret else {})
        return await self._call("POST", metadata["token_endpoint"], data=form, **options)

    async def _fetch_email(self, metadata: Mapping[str, Any], access_token: object, subject: str) -> str | None:
        """Return the verified address from the UserInfo endpoint: some providers leave it out of the ID token."""
        endpoint = metadata.get("userinfo_endpoint")
        if not isinstance(endpoint, str) or not isinstance(access_token, str) or not _is_allowed(endpoint, self.client.issuer):
            return None
        claims = await self._call("GET", endpoint, headers={"authorization": f"Bearer {access_token}"})
        if claims.get("sub") != subject:
            raise TokenRefused("the user info belongs to another subject")
        return verified_email(claims)

    async def _call(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        """Send a request to the provider and return the JSON object of its response.

        Raises TokenRefused for a POST answered with 4xx, and ProviderUnavailable.
        """
        call = f"{method} {urlsplit(url).path}"
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(transport=self._transport, timeout=TIMEOUT_S) as http,
                http.stream(
                    method, url, headers={"accept": "application/json"} | options.pop("headers", {}), **options
                ) as response,
            ):
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        raise ProviderUnavailable(f"{call}: the response is too long")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise ProviderUnavailable(f"{call}: {type(error).__name__} {error}") from error
        if method == "POST" and 400 <= response.status_code < 500:
            raise TokenRefused(f"{call}: the provider refused the code with status {response.status_code}")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if response.status_code != 200 or not isinstance(answer, dict):
            raise ProviderUnavailable(f"{call}: expected status 200 and a JSON object; the status was {response.status_code}")
        return answer


def provider_from_settings(settings: Settings, clock: Clock) -> OidcProvider | None:
    """Return the provider configured in `settings`, or None."""
    if settings.oidc_issuer is None or settings.oidc_client_id is None or settings.external_url is None:
        return None
    client = Client(
        issuer=settings.oidc_issuer,
        client_id=settings.oidc_client_id,
        secret=settings.oidc_client_secret,
        external_url=settings.external_url,
        name=settings.oidc_name,
    )
    return OidcProvider(client, clock)


def _check_metadata(metadata: dict[str, Any], issuer: str) -> dict[str, Any]:
    """Return `metadata` if it names this issuer and its endpoints are allowed. Raises ProviderUnavailable."""
    stated = metadata.get("issuer")
    if not isinstance(stated, str) or stated.rstrip("/") != issuer.rstrip("/"):
        raise ProviderUnavailable("the provider metadata is of another issuer")
    for name in _ENDPOINTS:
        if not isinstance(metadata.get(name), str) or not _is_allowed(metadata[name], issuer):
            raise ProviderUnavailable(f"the provider metadata has no usable {name}")
    return metadata


def _is_allowed(address: str, issuer: str) -> bool:
    """Return whether `address` uses HTTPS, or HTTP if the operator configured an HTTP issuer."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return bool(parts.hostname) and parts.scheme in ("https", urlsplit(issuer).scheme)
