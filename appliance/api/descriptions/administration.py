"""What the fields of `/admin/v1` mean, except those of money: tenants, keys, limits, people, requests, webhooks, the machine.

A name alone is a field that means the same everywhere; `Noun.name` is the field of one noun.
"""

from __future__ import annotations

FIELDS = {
    # everywhere
    "id": "The id of the object.",
    "created_at": "When the object was created (RFC 3339, UTC).",
    "updated_at": "When the object was last changed (RFC 3339, UTC).",
    "data": "The rows of this page.",
    "has_more": "Whether another page follows.",
    "next_cursor": "The `cursor` of the next page; null on the last page.",
    "tenant_id": "The id of the tenant.",
    "key_id": "The id of the API key.",
    "member_id": "The id of the member.",
    "model": "The name of the model.",
    "email": "The e-mail address with which the member signs in.",
    # tenants and keys
    "Tenant.name": "The name, 1 to 200 characters; unique among tenants, regardless of case.",
    "tier": "`interactive`, `standard` or `batch`, from most to least urgent.",
    "weight": "The tenant's share among the tenants of its tier, 1 to 1,000: twice the weight, twice the share.",
    "limits": "The limits over all models. Null or left out when creating: no limits.",
    "model_limits": (
        'Limits for single models, `{"MODEL": {…}}`, for at most 100 models. A change replaces all of them; null removes them.'
    ),
    "limit_mode": "`enforce`, or `shadow`: requests over a limit are counted and served.",
    "cut_at_budget": "Whether running answers end when a monthly budget is spent. If false, they finish.",
    "Tenant.currency": (
        "The currency that the tenant is billed in, three capital letters; null follows the appliance's currency. Cannot be "
        "changed after the first request."
    ),
    "billing": "The buyer named on the tenant's invoices; null: only the tenant's name. A change replaces all of it.",
    "alert_percents": (
        "Percentages of the monthly budget and of the tokens per day that raise an alert: at most 10, each 1 to 1,000. Null: "
        "80 and 100. An empty list: no alerts."
    ),
    "allowed_models": "The names of the models that may be used; null: all models.",
    "suspended": "Whether the tenant's requests are refused and its running requests end.",
    "archived": "Whether the tenant is archived, which cannot be undone.",
    "Billing.name": "The name of the buyer; null: the tenant's name.",
    "Billing.address": "The address, which may have several lines.",
    "Billing.country": "The country as a two-letter code, such as `DE`.",
    "Billing.email": "The e-mail address of the buyer.",
    "Billing.tax_id": "The buyer's tax id.",
    "reference": "The buyer's reference, such as an order number.",
    "Key.name": "What the key is for, 1 to 200 characters.",
    "prefix": "The public part of the secret, by which people recognise the key.",
    "scopes": (
        "`inference`: requests to models and the list of models. `usage`: the tenant's usage and costs under "
        "`/v1/organization`. Default: `inference`."
    ),
    "Key.expires_at": "When the key stops working (RFC 3339, UTC); null: never.",
    "allowed_networks": "The networks (CIDR) from which the key may be used; null: any.",
    "revoked_at": "When the key was revoked (RFC 3339, UTC); null if it was not.",
    "replaced_by": (
        "The id of the key that replaces this one since its rotation; null if it was not rotated with a grace period."
    ),
    "Key.last_used_at": "When the key was last used (RFC 3339, UTC), written every ten seconds; null: never.",
    "NewKey.key": "The secret of the key. It is shown only in this answer.",
    "Rotation.grace_s": "How long the old secret works beside the new one, in seconds: at most 90 days. Default: 0.",
    # limits
    "tokens_per_minute": "Prompt and output tokens per minute; null: no limit.",
    "requests_per_minute": "Requests per minute; null: no limit.",
    "concurrent_requests": "Requests that may run at the same time; null: no limit.",
    "tokens_per_day": "Prompt and output tokens per day of the billing time zone; null: no limit.",
    "monthly_budget": "Cost per calendar month, in micro-units of money (5000000 is 5.00); null: no limit.",
    "Tier.name": "`interactive`, `standard` or `batch`.",
    "admission_wait_ms": (
        "How long a request that a limit refuses waits for room before it gets a 429, in milliseconds: 0 to 60,000. Default: 0."
    ),
    "ModelLimits.limits": "The limits for all tenants together.",
    "LimitCheck.key_id": (
        "The id of the API key that would send the request; null: only limits of the tenant and the model apply."
    ),
    "LimitCheck.prompt_tokens": "The length of the prompt in tokens.",
    "LimitCheck.max_tokens": "The maximum number of tokens of each answer; null: what is left of the model's context.",
    "LimitCheck.n": "The number of answers, 1 to 128.",
    "LimitCheck.service_tier": "`auto` or `default`, or `flex` for batch work, which takes less of a budget.",
    "LimitCheck.allowed": "Whether the request would begin at once.",
    "would_wait": "Whether the request would wait for room and then probably begin.",
    "LimitCheck.wait_s": "In how many seconds the limits have room; null if waiting does not help.",
    "LimitCheck.admission_wait_ms": "How long requests of the tenant's tier wait for room, in milliseconds.",
    "reserved_tokens": "The tokens that the request would reserve: its prompt and its expected output.",
    "LimitCheck.error": "The error that the client would get; null if the request would begin or wait.",
    "decisions": "The decision of each limit.",
    "scope": "Whose limit it is: `tenant`, `key` or `model` (all tenants together).",
    "LimitDecision.model": "The model that the limit is for; null: all models.",
    "LimitDecision.kind": "`tokens` or `requests` (per minute), `concurrency`, `tokens_per_day` or `budget`.",
    "LimitDecision.mode": "`enforce`, or `shadow`: the limit refuses nothing.",
    "LimitDecision.allowed": "Whether the limit has room for the request.",
    "need": "How much of the limit the request needs.",
    "LimitDecision.limit": "The size of the limit.",
    "level": "How much of the limit is left; negative for a debt.",
    "LimitDecision.wait_s": "In how many seconds the limit has room; 0 if it has room now, null if waiting does not help.",
    "held": "Whether only what running requests have reserved of a day or a budget is in the way.",
    "LimitDecision.estimated": "Whether `wait_s` is an estimate, because only running requests are in the way.",
    "ahead": "How many requests are waiting for the same limit ahead of this one.",
    "LimitError.status": "The HTTP status.",
    "LimitError.type": "The kind of error, such as `tokens` or `insufficient_quota`.",
    "LimitError.message": "The error in words.",
    "retry_after_s": "When to try again, in seconds; null if waiting does not help.",
    # people
    "Member.role": "The role on the appliance: `owner`, `admin`, `billing`, `viewer`, or `member` for none.",
    "Member.disabled": "Whether the member can no longer sign in.",
    "memberships": "The roles in tenants.",
    "NewMember.password": (
        "The temporary password: whoever signs in with it must choose a new one. It is shown only in this answer."
    ),
    "NewMembership.password": "The temporary password of a member created for this tenant; null for one who existed before.",
    "TenantRole.role": "The role in the tenant: `manager`, `developer` or `viewer`.",
    "Membership.role": "The role in the tenant: `manager`, `developer` or `viewer`.",
    "Membership.disabled": "Whether the member can no longer sign in.",
    "Me.kind": "`member`, `token` or `cli`.",
    "Me.id": "The id of the member or token; null for the command line.",
    "Me.name": "The e-mail address of the member, the name of the token, or the user of the command line.",
    "Me.role": "The role on the appliance: `owner`, `admin`, `billing`, `viewer`, or `member` for none.",
    "method": "How the session was opened: `password` or `oidc`, with `+totp` or `+recovery` if a code was needed.",
    "Session.device": "The browser and system in words, from `user_agent`.",
    "user_agent": "The user agent that the browser sent.",
    "Session.address": "The network address from which the session was opened.",
    "current": "Whether this is the session that makes the call.",
    "last_seen_at": "When the session was last used (RFC 3339, UTC), to about a minute.",
    "Session.expires_at": "When the session ends at the latest (RFC 3339, UTC); an idle one ends earlier.",
    "ended": "The number of sessions that were ended.",
    "SecondFactor.enabled": "Whether the member needs a code to sign in.",
    "enabled_at": "When the second factor was set up (RFC 3339, UTC); null if there is none.",
    "recovery_codes_left": "The number of recovery codes that are not used yet.",
    "issuer": "The issuer of the linked identity; null if none is linked.",
    # audit log
    "AuditEntry.id": "The number of the entry: 1, 2, 3 … without gaps.",
    "AuditEntry.at": "When the change was made (RFC 3339, UTC, with microseconds).",
    "actor": "Who made the change.",
    "action": "The change as noun and verb, such as `key.rotate` or `invoice.close`.",
    "AuditEntry.target": "The object that was changed.",
    "AuditEntry.tenant_id": "The id of the tenant that the change concerns; null if it concerns none.",
    "before": "The fields that differ, before the change; null if there are none. Secrets read `(hidden)`.",
    "after": "The fields that differ, after the change; null if there are none. Secrets read `(hidden)`.",
    "AuditEntry.request_id": "The `x-request-id` of the call that made the change; null outside a call.",
    "AuditEntry.address": "The network address of the caller; null if there is none.",
    "previous_hash": "The hash of the entry before this one; 64 zeros for the first.",
    "hash": "SHA-256 over `previous_hash` and the other fields of the entry.",
    "AuditActor.kind": "`member`, `token`, `cli` (the command line), `key` or `system` (the appliance itself).",
    "AuditActor.id": "The id of the member, token or key; null for the others.",
    "AuditActor.name": "The e-mail address, name or key prefix of the actor.",
    "AuditTarget.kind": "The kind of object, such as `tenant` or `key`.",
    # requests
    "Request.id": "The id of the request, the same as `x-request-id`.",
    "endpoint": "The path that was called, such as `/v1/chat/completions`.",
    "Request.stream": "Whether the answer is streamed.",
    "batch": "Whether it is batch work (`service_tier` `flex`).",
    "Request.state": "`queued`, `prefill`, `decode` or `finished`. With several answers, the furthest of them.",
    "queue_position": "The place in the engine's queue; null when not queued.",
    "Request.kv_blocks": "KV-cache blocks that the request holds; of a past request, the most it held.",
    "preemptions": "How often the request was paused so that its memory could be used by others.",
    "admitted_at": "When the request was admitted (RFC 3339, UTC).",
    "first_token_at": "When the first output token was produced (RFC 3339, UTC); null before.",
    "finished_at": "When the request ended (RFC 3339, UTC); null before.",
    "queue_s": "Time from admission to the start of computing, in seconds.",
    "ttft_s": "Time from admission to the first output token, in seconds.",
    "Request.tokens_per_second": "Output tokens per second after the first token; null before the second.",
    "inter_token_p50_s": "Median time between two output tokens, in seconds; null before the second.",
    "finish_reason": (
        "Why the request ended: `stop`, `length`, `aborted`, `disconnected`, `deadline`, `error` or `refused`; null while it "
        "runs."
    ),
    "Request.error": "Why the request failed; null if it did not.",
    "explanation": "Where the time of the request went, in one sentence.",
    # webhooks
    "Webhook.kind": "`webhook` (`target` is a URL) or `email` (`target` is an e-mail address).",
    "Webhook.target": (
        "The URL, of at most 2,000 characters, or the e-mail address. Callers who may not manage the webhook see a URL without "
        "its path, which is often a secret."
    ),
    "Webhook.tenant_id": "The id of the tenant whose alerts are sent; null: alerts of the whole appliance.",
    "events": (
        "The events to send: `budget.threshold`, `tokens_per_day.threshold`, `invoice.closed`, `key.expiring` and, for the "
        "whole appliance, `engine.down`. Null when creating: all of them."
    ),
    "Webhook.disabled": "Whether nothing is sent for now; pending messages wait.",
    "previous_secret_until": "Until when the previous secret signs as well (RFC 3339, UTC); null if only one secret signs.",
    "secret": "The secret that signs messages, shown only in this answer; null for e-mail.",
    "WebhookRotation.grace_s": (
        "How long the previous secret signs beside the new one, in seconds: 0 to 604800. Default: 86400."
    ),
    "Delivery.id": "The id of the message, the same as its `webhook-id` header.",
    "webhook_id": "The id of the webhook.",
    "Delivery.event": "The event that is reported.",
    "Delivery.state": "`pending`, `delivered` or `failed` (given up).",
    "attempts": "How many times sending was tried.",
    "next_attempt_at": "When sending is tried next (RFC 3339, UTC); null if it is not.",
    "delivered_at": "When the receiver accepted the message (RFC 3339, UTC); null before.",
    "last_error": "Why the last failed attempt failed; null if none did.",
    "payload": "The content of the message.",
}
