"""Which tokens of which requests each step computes, and in which blocks. Knows no torch: integers, and times in seconds.

a step            scheduler plans it; scheduled_batch: what it computes, and its results; outcomes applies these;
                  in_flight_batch, of a step launched ahead, and row_diff; token_events: what is sent
a request         request; lifecycle books each change of its state; waiting: its queue, deadline, or fork of a prompt
who goes next     policy: the protocol, and first come, first served; fair_policy, from accounts (what each tenant has had),
                  backlog (who is entitled), lead_tracking (who is ahead), preemption, prefill_order, urgency;
                  tenant_rotation: turns within a tenant
what fits         admission: a seat, blocks, the predicted peak (kv_forecast); limits; step_budget: how long a step may last
blocks            kv_blocks: block tables over block_pool, prefix_cache and host_tier
decoding          decode_set: who decodes, and when each needs a block or ends; drafting
what tokens cost  costs; step_time: the formula that they come from
invariants        checks
"""
