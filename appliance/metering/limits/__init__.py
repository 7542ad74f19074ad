"""Whether a request may begin: buckets, windows and queues in memory, decided all or nothing. Knows no engine and no HTTP.

    Admission.admit(request)
      rules_for       which limits hold for the request, and whose they are
      first_reads     of owners that nobody has asked for since the start: what the ledger says they have used
      needs_of        what it asks of each owner: its prompt, and the output that is expected
      Allowance       one owner's buckets and windows: does any of them refuse?
        no  ─► take ─► Reservation ─► record_progress … ─► settle or void ─► whoever waits for what is given back tries again
        yes ─► queue.wait, where its tier lets it wait that long, else the error that refusals.py makes

Read them in this order. Each module imports only from lines above its own, or from its own:

    owners, admission_request, rules: whose limits, what a request is to them, and which hold for it
    decisions, refusals: what one limit says to a request, and how its client is told
    windows, token_bucket: a day and a month that are counted in, and tokens per minute as exact arithmetic
    output_estimates, sums: what is known beforehand, of answers to come and of an owner whom nobody has asked for yet
    allowances, needs: what one owner has left: check, take, hold; and what a request asks of each
    reservations, running: what a request holds until it ends, and when those that run will probably have ended
    line, queue: who waits for room instead of being refused, and in which order
    owner_sums, saved_levels, ledger_sums: the database: sums by day, buckets that a restart must not forget, events since
    first_reads: owners that are new, in a few reads for all who wait for one
    rate_limits, admission: what is left, for headers; and all of it put together
"""
