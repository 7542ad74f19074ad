"""Admission control: token buckets, windows and wait queues in memory, checked all or nothing. Knows no engine and no HTTP.

    Admission.admit(request)
      rules_for         which limits apply to the request, and their owners
      AllowanceLoader   for owners not seen since the start: their past usage, from the ledger
      needs_of          what the request needs from each owner: its prompt, and the expected output
      Allowance         one owner's buckets and windows: does any of them refuse?
        no  ─► take ─► Reservation ─► record_progress … ─► settle or void ─► wakes requests that wait for what is released
        yes ─► AdmissionQueue.wait, if its tier allows a wait that long, else the error made by refusals.py

Read them in this order. Each module imports only from lines above its own, or from its own:

    owners, admission_request, rules: owners of limits, a request as admission sees it, and which limits apply to it
    decisions, refusals, limit_waits: a limit's decision on a request, the error for the client, and how long a request waited
    windows, token_bucket: usage of a day and a month, and tokens per minute in exact arithmetic
    output_estimates, sums: expected answer lengths, and the past usage of an owner
    allowances, needs: what one owner has left: check, take, hold; and what a request needs from each owner
    reservations, running_requests: what a request holds until it ends, and when running requests will probably end
    waiter_queue, queue: requests that wait for room instead of being refused, in order
    owner_sums, saved_levels, ledger_sums: the database: daily sums, bucket levels that survive a restart, recent events
    allowance_loader: loads new owners in a few batched reads
    rate_limits, admission: what is left, for headers; and the whole put together
"""
