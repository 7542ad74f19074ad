"""Descriptions of the fields of `/admin/v1` about money: usage, ledger, prices, invoices and the appliance's economics.

A micro-unit is 10⁻⁶ and a pico-unit 10⁻¹² of a unit of the currency. A bare name describes the field wherever it occurs;
`Noun.name` describes it in one noun only.
"""

from __future__ import annotations

FIELDS = {
    "currency": "The currency, three capital letters such as `EUR`.",
    "prompt_tokens": "Prompt tokens, including cached ones.",
    "cached_tokens": "Prompt tokens that were found in the prefix cache.",
    "completion_tokens": "Output tokens of all choices together.",
    "rejected_tokens": "Tokens of speculative decoding that were computed and discarded.",
    "cost_picos": "The exact cost in pico-units of `currency` (10¹² are 1.00).",
    "month": "The calendar month in the billing time zone, such as `2026-10`.",
    # usage
    "UsageRow.start": "The start of the period (RFC 3339, UTC), inclusive.",
    "UsageRow.end": "The end of the period (RFC 3339, UTC), exclusive.",
    "UsageRow.tenant_id": "The id of the tenant. Present only if the rows are grouped by tenant.",
    "UsageRow.key_id": "The id of the API key. Present only if the rows are grouped by key.",
    "UsageRow.model": "The name of the model. Present only if the rows are grouped by model.",
    "UsageRow.requests": "The number of requests.",
    # ledger
    "LedgerEvent.id": "The id of the event. Ids increase in the order of the ledger.",
    "LedgerEvent.request_id": "The id of the request, the same as `x-request-id`.",
    "LedgerEvent.kind": "`usage` (a request) or `adjustment` (a correction of one).",
    "LedgerEvent.status": (
        "`pending` (still running), `posted`, `voided` (costs nothing) or `recovered` (settled after the gateway crashed)."
    ),
    "LedgerEvent.estimated": "Whether the counts are estimates, from the last checkpoint before the gateway crashed.",
    "price_id": "The id of the price in force at admission; null if the model had none.",
    "price_basis_points": "The share of the price charged after tier and batch discounts: 10000 is the full price.",
    "cause": "Why the request ended early, such as `client` or `budget_exceeded`; null if it did not.",
    "billing_day": "The day of admission in the billing time zone, such as `2026-10-31`.",
    "posting": "The event's sequence number in the order of settlement; null while pending.",
    "corrects_id": "The id of the event that this adjustment corrects; null for a request.",
    "LedgerEvent.note": "The reason for the correction; null for a request.",
    "settled_at": "When the event was settled (RFC 3339, UTC); null while pending.",
    "Correction.note": "The reason for the correction, shown on the tenant's invoice.",
    "Correction.prompt_tokens": "Prompt tokens to add; negative to subtract.",
    "Correction.cached_tokens": "How many of the added prompt tokens are cached; negative to subtract.",
    "Correction.completion_tokens": "Output tokens to add; negative to subtract.",
    "Correction.rejected_tokens": "Rejected draft tokens to add; negative to subtract.",
    "Correction.cost_picos": "The cost to add in pico-units, instead of tokens; negative to credit.",
    "confirm": "Must be true to add more than 1,000 times the event's tokens or cost, or more than 10 million tokens.",
    # prices
    "Price.id": "The id of the price.",
    "NewPrice.effective_from": (
        "When the price takes effect (RFC 3339 with a UTC offset): it applies to requests admitted from then on. Default: now."
    ),
    "effective_from": "When the price takes effect (RFC 3339, UTC): it applies to requests admitted from then on.",
    "NewPrice.currency": "The currency, three capital letters such as `EUR`. Default: the appliance's.",
    "Price.prompt": "Micro-units per million prompt tokens that are not cached.",
    "NewPrice.cached_prompt": "Micro-units per million cached prompt tokens. Default: the same as `prompt`.",
    "Price.cached_prompt": "Micro-units per million cached prompt tokens.",
    "Price.completion": "Micro-units per million output tokens.",
    "rejected_draft": "Micro-units per million rejected tokens of speculative decoding. Default: 0.",
    "batch_percent": "The percentage of the price that batch work (`service_tier` `flex`) pays. Default: 100.",
    "tier_percents": 'The percentage of the price that each tier pays, such as `{"batch": 80}`. Tiers left out pay 100.',
    # invoices
    "Invoice.id": "The id of the invoice.",
    "number": "The number of a closed invoice, such as `2026-0001`; null for a draft.",
    "Invoice.state": "`draft` or `closed`.",
    "InvoiceHead.state": "`draft` or `closed`.",
    "lines": "The lines of the invoice.",
    "subtotal_micros": "The sum of the lines, in micro-units.",
    "tax_micros": "The tax, in micro-units.",
    "total_micros": "The sum of `subtotal_micros` and `tax_micros`.",
    "rounding_micros": (
        "The change made by rounding the subtotal to the currency's smallest coin, in micro-units; negative if rounded down."
    ),
    "due_micros": "The amount to pay, in micro-units: the subtotal rounded to the smallest coin, plus the tax.",
    "usage_picos": "The exact cost of the events behind the lines, in pico-units. May exceed 64 bits.",
    "Invoice.seller": "The seller; null if none is set.",
    "buyer": "The buyer.",
    "time_zone": "The time zone that days and months are in.",
    "through_posting": "The last `posting` that the invoice covers; null for a draft.",
    "closed_at": "When the invoice was closed (RFC 3339, UTC); null for a draft.",
    "issued_on": "The day on which the invoice was closed; null for a draft.",
    "due_on": "The day by which the invoice must be paid; null for a draft, and if nothing is to be paid.",
    "abort_policy": "How aborted requests are billed, as stated on the PDF.",
    "problem": (
        "In a list, why this draft cannot be computed; `lines` is then empty and all sums are 0. Null for all other invoices."
    ),
    "InvoiceHead.currency": "The currency of the sums; null for a draft.",
    "InvoiceHead.total_micros": "The total with tax, in micro-units; null for a draft.",
    "InvoiceHead.tax_micros": "The tax, in micro-units; null for a draft.",
    "InvoiceLine.model": "The name of the model; null for a free allowance.",
    "InvoiceLine.kind": "`prompt`, `cached_prompt`, `completion`, `rejected_draft`, `adjustment` or `free_allowance`.",
    "InvoiceLine.batch": "Whether the tokens are those of batch work.",
    "InvoiceLine.month": "The month in which the requests were admitted, such as `2026-10`.",
    "unit_price": "Micro-units per million tokens; null if the line sums events with different prices.",
    "InvoiceLine.tokens": "The number of tokens.",
    "InvoiceLine.requests": "The number of events with tokens on this line. An event may count on several lines.",
    "exact_picos": "The exact amount in pico-units. May exceed 64 bits.",
    "rounded_micros": "The amount in micro-units, rounded half up.",
    "reasons": "Of an adjustment: the reasons of its corrections, each once, at most ten.",
    "reasons_left_out": "The number of further reasons.",
    "Draft.month": "The month to draft, such as `2026-10`. It must have begun.",
    "only": (
        "When to create the draft. `billable`: only if the invoice has lines. `closable`: only if, in addition, the month is "
        "over and no earlier one must be closed before. If the condition is not met, the call fails with 409 and creates "
        "nothing. Null: also without lines."
    ),
    "tenant_ids": (
        "The tenants, at most 200, in the order in which their invoices are numbered. Null: all tenants, archived ones too, in "
        "the order of their creation; refused if there are more than 200."
    ),
    "Month.data": "The result of each tenant, in the order of the tenants.",
    "num_done": "The number of tenants whose invoice was drafted or closed.",
    "num_skipped": "The number of skipped tenants.",
    "num_failed": "The number of tenants that failed.",
    "TenantResult.result": (
        "`drafted` or `closed`; `skipped` if there is nothing to bill, or if the month or a later one is closed; or `failed`."
    ),
    "TenantResult.invoice": "The invoice; null if the tenant was skipped or failed.",
    "TenantResult.error": "Why the tenant was skipped or failed; null for all others.",
    "expected_total_micros": (
        "The `total_micros` that the draft had when it was checked. If it is another one by now, the call fails with 409 "
        "`total_changed` and closes nothing. Null: any total."
    ),
    "expected_currency": "The `currency` that the draft had when it was checked, compared like the total. Null: any currency.",
    "first_month": "The first month that the allowance applies to, such as `2026-10`.",
    "monthly_micros": "The amount that is free each month, in micro-units; 0 ends an earlier allowance.",
    "Seller.name": "The name of the seller.",
    "Seller.address": "The lines of the address, at most 8.",
    "Seller.email": "The e-mail address of the seller.",
    "phone": "The telephone number.",
    "website": "The website.",
    "Seller.tax_id": "The seller's tax id.",
    "registration": "The entry in a commercial register.",
    "bank": "The lines of the bank details, at most 8.",
    "payment_terms_days": "The number of days from closing an invoice to its due date, 0 to 365. Default: 30.",
    "payment_note": "A note about payment.",
    "tax_basis_points": "The tax rate in hundredths of a percent: 1900 is 19 %. Default: 0.",
    "tax_label": "The name of the tax, such as `VAT`.",
    "tax_note": "Why no tax is charged, such as reverse charge.",
    # economics
    "hardware": "The cost of the hardware and power, as entered.",
    "figures": "The figures, each after those from which it is computed.",
    "break_even": "The comparison with each hosted price.",
    "cost_micros": "The price of the hardware, in micro-units.",
    "months": "The number of months over which the hardware is written off, 1 to 240.",
    "kwh_price_micros": "The price of a kilowatt-hour, in micro-units.",
    "Hardware.power_w": "The power that the whole machine draws, in watts; null: what the GPUs report, plus `other_power_w`.",
    "other_power_w": "The power that the rest of the machine draws, in watts. Used if `power_w` is null. Default: 0.",
    "other_monthly_micros": "Other costs per month, in micro-units. Default: 0.",
    "Hardware.currency": "The currency, three capital letters such as `EUR`. Default: the appliance's.",
    "hosted": "Prices of hosted models to compare with, at most 20.",
    "HostedPrice.name": "A name for the hosted model.",
    "HostedPrice.prompt": "Micro-units per million prompt tokens.",
    "HostedPrice.completion": "Micro-units per million output tokens.",
    "HostedPrice.cached_prompt": "Micro-units per million cached prompt tokens; null: the same as `prompt`.",
    "Figure.name": "The name of the figure, such as `total_month`.",
    "Figure.value": "The value; null if it is not known, for the reason given in `source`.",
    "unit": "The unit of the value.",
    "source": "Where the value comes from: entered, read from the GPUs, measured, or computed from other figures by a formula.",
    "BreakEven.name": "The name of the hosted model.",
    "hosted_per_million_micros": (
        "The hosted price of a million tokens in the measured mix of prompt, cached and output tokens, in micro-units; null "
        "without usage."
    ),
    "break_even_tokens_month": "The tokens per month from which this appliance is cheaper; null if it is not known.",
    "share_basis_points": (
        "`break_even_tokens_month` as a share of what a month would process if every hour were as busy as the busiest one, in "
        "basis points (10000 is all of it); null if it is not known."
    ),
    "hosted_month_micros": "What a month of the measured usage costs at the hosted price, in micro-units; null without usage.",
    "saved_month_micros": (
        "What this appliance saves on a month of the measured usage, in micro-units; negative if the hosted model is cheaper."
    ),
}
