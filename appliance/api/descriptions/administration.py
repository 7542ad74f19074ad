"""Descriptions of the fields of `/admin/v1`: tenants, keys, limits, members, the audit log, requests and webhooks.

A bare name describes the field wherever it occurs; `Noun.name` describes it in one noun only.
"""

from __future__ import annotations

FIELDS = {
    # everywhere
    "id": "The id of the object.",
    "created_at": "When the object was created (RFC 3339, UTC).",
    "updated_at": "When the object was last changed (RFC 3339, UTC).",
    "data": "The rows of this page.",
    "has_more": "Whether another page follows.",
    "next_cursor": "Pass this as `cursor` to get the next page; null on the last page.",
    "tenant_id": "The id of the tenant.",
    "key_id": "The id of the API key.",
    "member_id": "The id of the member.",
    "model": "The name of the model.",
    "email": "The e-mail address with which the member signs in.",
    # tenants and keys
    "Tenant.name": "The tenant's name: 1 to 200 characters, unique among tenants regardless of case.",
    "tier": "`interactive`, `standard` or `batch`, from most to least urgent.",
    "weight": "The tenant's share relative to other tenants of its tier, 1 to 1,000: twice the weight, twice the share.",
    "limits": "Limits across all models. Null or omitted on creation: no limits.",
    "model_limits": (
        'Limits for individual models, `{"MODEL": {…}}`: at most 100 models. An update replaces all of them; null removes them.'
    ),
    "limit_mode": "`enforce`, or `shadow`: requests over a limit are counted but still served.",
    "cut_at_budget": "Whether running requests are stopped when a monthly budget is used up. If false, they run to completion.",
    "Tenant.currency": (
        "The currency in which the tenant is billed, as three capital letters; null: the appliance's currency. After the "
        "tenant's first request it can only be changed from null to a currency in which the tenant has usage."
    ),
    "billing": "The buyer named on the tenant's invoices; null: only the tenant's name. An update replaces the whole object.",
    "alert_percents": (
        "Percentages of the monthly budget and of the tokens per day at which an alert is sent: at most 10, each 1 to 1,000. "
        "Null: 80 and 100. An empty list: no alerts."
    ),
    "allowed_models": "The names of the models that may be used; null: all models.",
    "suspended": "Whether the tenant is suspended: new requests are refused and running ones are stopped.",
    "archived": "Whether the tenant is archived, which cannot be undone.",
    "Billing.name": "The name of the buyer; null: the tenant's name.",
    "Billing.address": "The postal address; may contain line breaks.",
    "Billing.country": "The country as a two-letter code, such as `DE`.",
    "Billing.email": "The e-mail address of the buyer.",
    "Billing.tax_id": "The buyer's tax id.",
    "reference": "The buyer's reference, such as an order number.",
    "Key.name": "What the key is for, 1 to 200 characters.",
    "prefix": "The public part of the secret, which identifies the key.",
    "scopes": (
        "What the key may do. `inference`: send requests to models and list models. `usage`: read the tenant's usage and costs "
        "under `/v1/organization`. Default: `inference`."
    ),
    "Key.expires_at": "When the key stops working (RFC 3339, UTC); null: never.",
    "allowed_networks": "The networks (CIDR) from which the key may be used; null: any.",
    "revoked_at": "When the key was revoked (RFC 3339, UTC); null if it was not.",
    "replaced_by": "The id of the key that replaced this one; null unless it was rotated with a grace period.",
    "Key.last_used_at": "When the key was last used (RFC 3339, UTC), updated every ten seconds; null: never.",
    "NewKey.key": "The secret of the key. Returned only in this response.",
    "Rotation.grace_s": "How long the old secret keeps working, in seconds: at most 90 days. Default: 0.",
    # limits
    "tokens_per_minute": "Maximum prompt and output tokens per minute; null: no limit.",
    "requests_per_minute": "Maximum requests per minute; null: no limit.",
    "concurrent_requests": "Maximum requests running at the same time; null: no limit.",
    "tokens_per_day": "Maximum prompt and output tokens per day in the billing time zone; null: no limit.",
    "monthly_budget": "Maximum cost per calendar month, in micro-units of the currency (5000000 is 5.00); null: no limit.",
    "Tier.name": "`interactive`, `standard` or `batch`.",
    "admission_wait_ms": (
        "How long a request over a limit waits for the limit to have room before it fails with 429, in milliseconds: 0 to "
        "60,000. Default: 0."
    ),
    "ModelLimits.limits": "The limits for all tenants together.",
    "LimitCheck.key_id": (
        "The id of the API key that would send the request; null: only limits of the tenant and the model apply."
    ),
    "LimitCheck.prompt_tokens": "The length of the prompt in tokens.",
    "LimitCheck.max_tokens": "The maximum number of output tokens of each choice; null: as in a request without `max_tokens`.",
    "LimitCheck.n": "The number of choices to generate, 1 to 128.",
    "LimitCheck.service_tier": "`auto` or `default`, or `flex` for batch work, which uses budgets at the batch price.",
    "LimitCheck.allowed": "Whether the request would be admitted immediately.",
    "would_wait": "Whether the request would wait for room and then probably be admitted.",
    "LimitCheck.wait_s": "Seconds until the limits have room; null if waiting cannot help.",
    "LimitCheck.admission_wait_ms": "How long requests of the tenant's tier wait for room, in milliseconds.",
    "reserved_tokens": "The tokens that the request would reserve: its prompt and its expected output.",
    "LimitCheck.error": "The error that the client would receive; null if the request would be admitted or wait.",
    "decisions": "The decision of each limit that applies.",
    "scope": "What the limit belongs to: `tenant`, `key` or `model` (shared by all tenants).",
    "LimitDecision.model": "The model to which the limit applies; null: all models.",
    "LimitDecision.kind": "`tokens` or `requests` (per minute), `concurrency`, `tokens_per_day` or `budget`.",
    "LimitDecision.mode": "`enforce`, or `shadow`: the limit refuses nothing.",
    "LimitDecision.allowed": "Whether the limit has room for the request.",
    "need": "How much of the limit the request needs.",
    "LimitDecision.limit": "The size of the limit.",
    "level": "How much of the limit is left; negative if it is overdrawn or running requests may overdraw it.",
    "LimitDecision.wait_s": "Seconds until the limit has room; 0 if it has room now, null if waiting cannot help.",
    "held": "Whether the limit refuses only because of what running requests have reserved of a day's tokens or a budget.",
    "LimitDecision.estimated": "Whether `wait_s` is an estimate, because it depends on when running requests end.",
    "ahead": "The number of requests ahead of this one that are waiting for the same limit.",
    "LimitError.status": "The HTTP status.",
    "LimitError.type": "The kind of error, such as `tokens` or `insufficient_quota`.",
    "LimitError.message": "A human-readable description of the error.",
    "retry_after_s": "Seconds to wait before retrying; null if waiting cannot help.",
    # members
    "Member.role": "The role on the appliance: `owner`, `admin`, `billing`, `viewer`, or `member` for none.",
    "Member.disabled": "Whether the member is barred from signing in.",
    "memberships": "The roles in individual tenants.",
    "NewMember.password": (
        "The temporary password, which must be changed at the first sign-in. Returned only in this response."
    ),
    "NewMembership.password": "The temporary password if this call created the member; null for an existing member.",
    "TenantRole.role": "The role in the tenant: `manager`, `developer` or `viewer`.",
    "Membership.role": "The role in the tenant: `manager`, `developer` or `viewer`.",
    "Membership.disabled": "Whether the member is barred from signing in.",
    "Me.kind": "`member`, `token` (an administrator token) or `cli` (the command line).",
    "Me.id": "The id of the member or token; null for the command line.",
    "Me.name": "The e-mail address of the member, the name of the token, or the user of the command line.",
    "Me.role": "The role on the appliance: `owner`, `admin`, `billing`, `viewer`, or `member` for none.",
    "method": "How the member signed in: `password` or `oidc`, with `+totp` or `+recovery` if a code was needed.",
    "Session.device": "The browser and operating system, derived from `user_agent`.",
    "user_agent": "The `User-Agent` header of the browser.",
    "Session.address": "The IP address from which the member signed in.",
    "current": "Whether this is the session that makes the call.",
    "last_seen_at": "When the session was last used (RFC 3339, UTC), accurate to about a minute.",
    "Session.expires_at": "When the session expires at the latest (RFC 3339, UTC); an idle session expires earlier.",
    "ended": "The number of sessions that were ended.",
    "SecondFactor.enabled": "Whether the member needs a code to sign in.",
    "enabled_at": "When the second factor was set up (RFC 3339, UTC); null if there is none.",
    "recovery_codes_left": "The number of unused recovery codes.",
    "issuer": "The issuer of the linked identity; null if none is linked.",
    # audit log
    "AuditEntry.id": "The number of the entry: 1, 2, 3 … without gaps.",
    "AuditEntry.at": "When the change was made (RFC 3339, UTC, with microseconds).",
    "actor": "Who made the change.",
    "action": "What was done, as noun and verb, such as `key.rotate` or `invoice.close`.",
    "AuditEntry.target": "The object that was changed.",
    "AuditEntry.tenant_id": "The id of the tenant that the change concerns; null if it concerns none.",
    "before": "The old values of the fields that changed; null if there are none. Secrets are shown as `(hidden)`.",
    "after": "The new values of the fields that changed; null if there are none. Secrets are shown as `(hidden)`.",
    "AuditEntry.request_id": "The `x-request-id` of the HTTP request that made the change; null if none did.",
    "AuditEntry.address": "The IP address of the caller; null if there is none.",
    "previous_hash": "The hash of the entry before this one; 64 zeros for the first.",
    "hash": "SHA-256 over `previous_hash` and the other fields of the entry.",
    "AuditActor.kind": "`member`, `token`, `cli` (the command line), `key` or `system` (the appliance itself).",
    "AuditActor.id": "The id of the member, token or key; null for the others.",
    "AuditActor.name": "The e-mail address, name or key prefix of the actor.",
    "AuditTarget.kind": "The kind of object, such as `tenant` or `key`.",
    # requests
    "Request.id": "The id of the request, the same as `x-request-id`.",
    "endpoint": "The path that was called, such as `/v1/chat/completions`.",
    "Request.stream": "Whether the response is streamed.",
    "batch": "Whether it is batch work (`service_tier` `flex`).",
    "Request.state": (
        "`queued` (in the engine, or before admission for room in its limits), `prefill`, `decode` or `finished`. With several "
        "choices, the state of the furthest one."
    ),
    "queue_position": "The position in the engine's queue, 0 for the next request; null when not queued.",
    "Request.admitted_at": ("When the request was admitted (RFC 3339, UTC); null while it waits for room in its limits."),
    "Request.kv_blocks": "KV-cache blocks that the request holds; for a past request, the most it held.",
    "preemptions": "How often the request was preempted: paused so that others could use its memory.",
    "admitted_at": "When the request was admitted (RFC 3339, UTC).",
    "first_token_at": "When the first output token was produced (RFC 3339, UTC); null until then.",
    "finished_at": "When the request ended (RFC 3339, UTC); null until then.",
    "admission_wait_s": (
        "Time that the request waited for room in its limits before its admission, in seconds; so far, while it waits. No "
        "other time includes it. Null if unknown."
    ),
    "awaited_limit": (
        "The limit that the request waited for longest before its admission, such as `tenant_tokens` or `model_concurrency`; "
        "while it waits, the limit that holds it up; null if it did not wait."
    ),
    "queue_s": "Time from admission until the engine began to process the request, in seconds.",
    "ttft_s": "Time from admission to the first output token, in seconds.",
    "Request.tokens_per_second": "Output tokens per second after the first token; null until the second.",
    "inter_token_p50_s": "Median time between consecutive output tokens, in seconds; null until the second.",
    "batch_size_mean": (
        "Mean number of answers in the engine's batch from the first output token to the end of the request, its own included. "
        "Each of a request's `n` answers counts as one, also while its prompt is computed, and as none while it is preempted. "
        "Null if unknown."
    ),
    "finish_reason": (
        "Why the request ended: `stop`, `length`, `aborted`, `disconnected`, `deadline`, `error` or `refused`; null while it "
        "runs."
    ),
    "Request.error": "Why the request failed; null if it did not.",
    "explanation": "How the time of the request was spent, in one sentence.",
    # webhooks
    "Webhook.kind": "`webhook` (`target` is a URL) or `email` (`target` is an e-mail address).",
    "Webhook.target": (
        "The URL, of at most 2,000 characters, or the e-mail address. Callers who may not manage the webhook see a URL without "
        "its path, which is often a secret."
    ),
    "Webhook.tenant_id": "The id of the tenant whose alerts are sent; null: alerts of the whole appliance.",
    "events": (
        "The events to send: `budget.threshold`, `tokens_per_day.threshold`, `invoice.closed`, `key.expiring` and, for the "
        "whole appliance, `engine.down`, `engine.gpu_unused` and `engine.kernels_refused`. Null on creation: all of them."
    ),
    "Webhook.disabled": "Whether delivery is paused; pending messages are kept.",
    "previous_secret_until": (
        "Until when messages are signed with the previous secret as well (RFC 3339, UTC); null if there is only one secret."
    ),
    "secret": "The secret with which messages are signed. Returned only in this response; null for e-mail.",
    "WebhookRotation.grace_s": (
        "How long messages are signed with the previous secret as well, in seconds: 0 to 604,800. Default: 86,400."
    ),
    "Delivery.id": "The id of the message, the same as its `webhook-id` header.",
    "webhook_id": "The id of the webhook.",
    "Delivery.event": "The event that is reported.",
    "Delivery.state": "`pending`, `delivered` or `failed` (given up).",
    "attempts": "The number of delivery attempts.",
    "next_attempt_at": "When the next attempt is due (RFC 3339, UTC); null if there is none.",
    "delivered_at": "When the receiver accepted the message (RFC 3339, UTC); null until then.",
    "last_error": "Why the most recent failed attempt failed; null if none has failed.",
    "payload": "The content of the message.",
}
