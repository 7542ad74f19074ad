"""A fake OpenID Connect provider with real keys; a test can make it misbehave."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import parse_qs, parse_qsl, urlencode

import httpx
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from appliance.base.clock import Clock
from appliance.tenancy.oidc import Client, OidcProvider

ISSUER = "https://id.example.com"
CLIENT_ID = "gatehouse"
CLIENT_SECRET = "a client's secret: with / and %"
TOKEN_LIFE_S = 300
Forgery = Literal["unsigned", "shared_secret", "foreign_key"]


@lru_cache
def rsa_key(name: str) -> RSAKey:
    """A 2048-bit key, cached by name because generating one is slow."""
    return RSAKey.generate_key(2048, {"kid": name, "use": "sig"})


def ec_key(name: str) -> ECKey:
    """A P-256 key."""
    return ECKey.generate_key("P-256", {"kid": name, "use": "sig"})


class FakeProvider:
    """Serves discovery document, keys, authorization, tokens and user info. Every sign-in is `person`'s.

    `claims` replaces claims of the ID token, None removes one; `tokens` does the same with the token response. `forgery` signs
    ID tokens wrongly. `failure_status` is the status of every response; 0 is a failed connection, 200 HTML instead of JSON.
    """

    def __init__(self, clock: Clock, *, issuer: str = ISSUER, external_url: str = "http://gatehouse.test") -> None:
        self.clock = clock
        self.issuer = issuer
        self.external_url = external_url
        self.person: dict[str, Any] = {"sub": "alice-7", "email": "alice@example.com", "email_verified": True}
        self.claims: dict[str, Any] = {}
        self.tokens: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        self.forgery: Forgery | None = None
        self.failure_status: int | None = None
        self.includes_key_id = True
        self.email_in_token = True
        self.user_info: dict[str, Any] = {}
        self.broken_keys: list[Any] = []
        self.requests: list[str] = []
        self._signing_key: RSAKey | ECKey = rsa_key("first")
        self._published_keys: list[RSAKey | ECKey] = [self._signing_key]
        self._codes: dict[str, Mapping[str, str]] = {}

    def client(self, *, secret: str | None = CLIENT_SECRET, name: str | None = None) -> OidcProvider:
        """The appliance's client of this provider."""
        client = Client(issuer=self.issuer, client_id=CLIENT_ID, secret=secret, external_url=self.external_url, name=name)
        return OidcProvider(client, self.clock, transport=httpx.MockTransport(self.handle))

    def rotate(self, key: RSAKey | ECKey, *, keep_old: bool = False) -> None:
        """Sign with a new key from now on."""
        self._signing_key = key
        self._published_keys = [*self._published_keys, key] if keep_old else [key]

    def sign_in(self, address: str) -> str:
        """Return the address to which the provider redirects a browser that signs in at `address`."""
        answer = self.handle(httpx.Request("GET", address))
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        self.requests.append(f"{request.method} {request.url.path}")
        if self.failure_status is not None:
            if self.failure_status == 0:
                raise httpx.ConnectError("nobody is there", request=request)
            if self.failure_status == 200:
                return httpx.Response(200, text="<h1>Oops</h1>")
            return httpx.Response(self.failure_status, content=self._answer(request).content)
        return self._answer(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        pages = {
            "/.well-known/openid-configuration": self._discovery,
            "/keys": self._keys,
            "/authorize": self._authorize,
            "/token": self._token,
            "/userinfo": self._user_info,
        }
        return pages[request.url.path](request)

    def _discovery(self, _request: httpx.Request) -> httpx.Response:
        described = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
        }
        return httpx.Response(200, json={**described, **self.metadata})

    def _keys(self, _request: httpx.Request) -> httpx.Response:
        symmetric_key = {"kty": "oct", "kid": "first", "k": "c2VjcmV0"}  # a symmetric key that no client may trust
        keys = [symmetric_key, *self.broken_keys, *(key.as_dict(private=False) for key in self._published_keys)]
        return httpx.Response(200, json={"keys": keys})

    def _authorize(self, request: httpx.Request) -> httpx.Response:
        authorization = dict(parse_qsl(request.url.query.decode()))
        assert authorization["response_type"] == "code"
        assert authorization["client_id"] == CLIENT_ID
        assert authorization["code_challenge_method"] == "S256"
        assert "openid" in authorization["scope"].split()
        assert authorization["redirect_uri"] == f"{self.external_url}/login/oidc/callback"
        code = secrets.token_urlsafe(16)
        self._codes[code] = authorization
        back = urlencode({"code": code, "state": authorization["state"], "iss": self.issuer})
        return httpx.Response(302, headers={"location": f"{authorization['redirect_uri']}?{back}"})

    def _token(self, request: httpx.Request) -> httpx.Response:
        form = {name: values[0] for name, values in parse_qs(request.content.decode(), keep_blank_values=True).items()}
        assert form["grant_type"] == "authorization_code"
        authorization = self._codes.pop(form.get("code", ""), None)  # a code is valid once
        challenge = (
            base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest()).rstrip(b"=").decode()
        )
        good = (
            authorization is not None
            and challenge == authorization["code_challenge"]
            and form["redirect_uri"] == authorization["redirect_uri"]
        )
        if not good or not self._authenticates_client(request, form):
            return httpx.Response(400, json={"error": "invalid_grant"})
        assert authorization is not None
        tokens = {"id_token": self.id_token(authorization["nonce"]), "access_token": "an access token", **self.tokens}
        return httpx.Response(200, json={name: token for name, token in tokens.items() if token is not None})

    def _authenticates_client(self, request: httpx.Request, form: Mapping[str, str]) -> bool:
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        methods = self.metadata.get("token_endpoint_auth_methods_supported", ["client_secret_basic", "none"])
        if scheme == "Basic" and "client_secret_basic" in methods:
            name, _, secret = base64.b64decode(encoded).decode().partition(":")
            decoded = [parse_qs(f"x={part}")["x"][0] for part in (name, secret)]
            return decoded == [CLIENT_ID, CLIENT_SECRET]
        expected = CLIENT_SECRET if "client_secret_post" in methods else None
        return (form.get("client_id"), form.get("client_secret")) == (CLIENT_ID, expected)

    def _user_info(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer an access token"
        return httpx.Response(200, json={**self.person, **self.user_info})

    def id_token(self, nonce: str) -> str:
        """Return an ID token for `person` and `nonce`, with the configured faults."""
        now = int(self.clock.now().timestamp())
        person = self.person if self.email_in_token else {"sub": self.person["sub"]}
        claims = {"iss": self.issuer, "aud": CLIENT_ID, "iat": now, "exp": now + TOKEN_LIFE_S, "nonce": nonce, **person}
        claims = {name: value for name, value in {**claims, **self.claims}.items() if value is not None}
        if self.forgery == "unsigned":
            return f"{_encode_json({'alg': 'none'})}.{_encode_json(claims)}."
        if self.forgery == "shared_secret":  # signed with the public key as if it were a shared secret
            head = f"{_encode_json({'alg': 'HS256', 'kid': self._signing_key.kid})}.{_encode_json(claims)}"
            secret = self._signing_key.as_pem(private=False)
            return f"{head}.{_base64url(hmac.new(secret, head.encode(), hashlib.sha256).digest())}"
        key = rsa_key("foreign") if self.forgery == "foreign_key" else self._signing_key
        algorithm = "RS256" if isinstance(key, RSAKey) else "ES256"
        named = {"kid": self._signing_key.kid} if self.includes_key_id else {}
        return jwt.encode({"alg": algorithm, **named}, claims, key, algorithms=[algorithm])


def _encode_json(value: Mapping[str, Any]) -> str:
    return _base64url(json.dumps(value).encode())


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
