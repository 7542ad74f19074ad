"""Sends one alert by e-mail through the operator's mail server, in a thread of its own pool.

The Message-ID derives from the id of the message in the outbox, so that a message sent twice is recognised as the same. Decides
nothing about retries.
"""

from __future__ import annotations

import asyncio
import smtplib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from urllib.parse import unquote, urlsplit

from appliance.metering.alerts.outbox import Delivery
from appliance.metering.alerts.webhooks import Endpoint
from appliance.serving.alerting.delivery import SendFailed, one_line
from appliance.serving.alerting.texts import text_of

THREADS_MAX = 4
STEP_TIMEOUT_S = 10.0  # of each SMTP command and its reply
TIMEOUT_S = 60.0  # of the whole attempt
PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}


class MailSender:
    """Sends from `sender` through the server of `smtp_url`. `address` is the appliance's, for the footer; `tls` replaces the
    default context with the machine's certificates."""

    def __init__(
        self,
        smtp_url: str,
        sender: str,
        *,
        address: str | None = None,
        tls: ssl.SSLContext | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        parts = urlsplit(smtp_url)
        self._scheme = parts.scheme
        self._host = parts.hostname or ""
        self._port = parts.port or PORTS[parts.scheme]
        self._login = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
        self._sender = sender
        self._address = address
        self._tls = tls or ssl.create_default_context()
        self._step_timeout_s = step_timeout_s
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="alert mail")

    async def close(self) -> None:
        """End the threads without waiting for messages that are being sent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def send(self, endpoint: Endpoint, delivery: Delivery, now: datetime) -> None:
        """Return when the mail server has accepted the message. Raises SendFailed."""
        message = self.message(endpoint.target, delivery, now)
        attempt = asyncio.timeout(self._timeout_s)
        try:
            async with attempt:
                await asyncio.get_running_loop().run_in_executor(self._threads, self._send, message)
        except (smtplib.SMTPException, OSError) as error:
            if attempt.expired():
                reason = f"the mail server did not accept the message within {self._timeout_s:g} s"
                raise SendFailed("timeout", reason) from error
            raise SendFailed("mail", f"the mail server did not accept the message: {one_line(error, 300)}") from error

    def message(self, mailbox: str, delivery: Delivery, now: datetime) -> EmailMessage:
        """Return the e-mail of an alert, as plain text and HTML."""
        text = text_of(delivery.event, delivery.payload["data"])
        message = EmailMessage(policy=SMTP)
        message["From"] = self._sender
        message["To"] = mailbox
        message["Subject"] = text.subject
        message["Date"] = format_datetime(now)
        message["Message-ID"] = f"<{delivery.id}@{self._sender.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"  # RFC 3834: suppresses out-of-office replies
        message.set_content(text.plain(self._address))
        message.add_alternative(text.html(self._address), subtype="html")
        return message

    def _send(self, message: EmailMessage) -> None:
        with self._connection() as connection:
            if self._scheme == "smtp+starttls":
                connection.starttls(context=self._tls)
            if self._login is not None:
                connection.login(*self._login)
            connection.send_message(message)

    def _connection(self) -> smtplib.SMTP:
        name = socket.gethostname()  # without it, smtplib looks up the fully qualified name, which may block
        if self._scheme == "smtps":
            return smtplib.SMTP_SSL(self._host, self._port, name, timeout=self._step_timeout_s, context=self._tls)
        return smtplib.SMTP(self._host, self._port, name, timeout=self._step_timeout_s)
