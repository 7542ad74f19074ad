"""Descriptions of the fields of `/admin/v1/system` and `/admin/v1/events`."""

from __future__ import annotations

FIELDS = {
    "System.at": "When the readings were taken (RFC 3339, UTC).",
    "processes": "The processes of the appliance.",
    "System.engine": "The engines, one for each model.",
    "gpus": "The GPUs of the machine.",
    "gpu_error": "Why the GPUs cannot be read; null if they can.",
    "host": "The host machine.",
    "database": "The database.",
    "Process.role": "`gateway` or `engine`.",
    "pid": "The process id; null if the process does not run.",
    "Process.model": "The model of an engine; null for the gateway.",
    "started_at": "When the process started (RFC 3339, UTC); null if it does not run.",
    "restarts": "How often the process was restarted.",
    "Engine.state": "`loading`, `ready`, `restarting`, `failed` or `stopped`.",
    "Engine.error": "Why the engine does not serve; null if it does.",
    "load_fraction": "How much of the model is loaded, 0 to 1; null when nothing is being loaded.",
    "Engine.device": "`cuda` or `cpu`; null until the model is loaded.",
    "device_name": "The name of the device; null until the model is loaded.",
    "max_model_len": "The context length: prompt and output tokens together; null until the model is loaded.",
    "quantization": (
        "The format of the weights: `none`, `int8`, `fp8` or the checkpoint's own format, followed by `(stored as …)` if the "
        "checkpoint's format was decoded during loading; null until the model is loaded."
    ),
    "requests_running": "Requests being processed.",
    "requests_waiting": "Requests in the engine's queue.",
    "Engine.kv_blocks": "The blocks of the KV cache.",
    "host_kv_blocks": "KV blocks in host memory, which hold blocks evicted from the device.",
    "memory": "The device memory of the engine, by part.",
    "memory_note": "Why the context length was reduced to fit into the memory or the KV cache; null if it was not.",
    "preemptions_total": "How often requests were preempted: paused so that others could use their memory.",
    "draft_tokens_total": "Tokens proposed by speculative decoding.",
    "accepted_draft_tokens_total": "Proposed tokens that became output.",
    "fallback_steps_total": "Steps that took the slow path because the fast one failed. 0 on a healthy machine.",
    "fallback_reason": "Why the last step fell back to the slow path; null if none did.",
    "plain_steps_total": (
        "Steps that took the slow path because a request in them uses an option that needs it, by option: `logit_bias` or "
        "`prompt_logprobs`."
    ),
    "switched_off": "The names of the settings that switch a part of the engine off.",
    "Engine.tenants": "The tenants with live requests, those that hold the most KV blocks first.",
    "Engine.tokens_per_second": "Output tokens generated per second, over the last two seconds.",
    "step_ms": "How long the last step took, in milliseconds.",
    "ttft_p50_s": "Median time to first token of the last 256 requests, in seconds; null before the first.",
    "ttft_p95_s": "95th percentile of the time to first token of the last 256 requests, in seconds; null before the first.",
    "KvBlocks.total": "The total number of blocks.",
    "KvBlocks.used": "Blocks that requests hold.",
    "KvBlocks.cached": "Blocks that no request holds, kept for prompts with the same prefix.",
    "KvBlocks.free": "Empty blocks.",
    "HostBlocks.total": "The total number of blocks; 0 if host memory is not used for KV blocks.",
    "HostBlocks.used": "Blocks in use.",
    "swapped_in_total": "Blocks that were copied back to the device.",
    "swapped_out_total": "Blocks that were copied to host memory.",
    "MemoryPart.name": (
        "`weights`, `activations`, `graphs` (CUDA graphs), `slots`, `rotary_tables`, `device_context`, `kv_cache` or "
        "`other_models` (memory left for other models on the same GPU)."
    ),
    "predicted_bytes": "The memory predicted before the model was loaded, in bytes.",
    "measured_bytes": "The measured memory, in bytes; null if the device does not report it.",
    "num_predicted": "The number of CUDA graphs that may be kept; null for other parts.",
    "num_measured": "The number of CUDA graphs that were captured when memory was measured; null for other parts.",
    "TenantLoad.name": "The name of the tenant.",
    "TenantLoad.kv_blocks": "KV-cache blocks that the tenant holds.",
    "service_s": "Predicted device time spent on the tenant since it last had no live request, in seconds.",
    "Gpu.index": "The index of the GPU, from 0.",
    "Gpu.name": "The name of the GPU.",
    "memory_total_bytes": "Total memory, in bytes.",
    "memory_used_bytes": "Memory in use, in bytes.",
    "utilization": "The share of time for which the GPU was busy, in percent; null if it does not report it.",
    "Gpu.power_w": "The power that the GPU draws, in watts; null if it does not report it.",
    "temperature_c": "The temperature in °C; null if the GPU does not report it.",
    "cpu_percent": "The load of all processor cores together, in percent (0 to 100).",
    "disk_free_bytes": "Free space on the disk of the data folder, in bytes.",
    "Database.kind": "`sqlite` or `postgresql`.",
    "Database.ok": "Whether the database accepts writes.",
}
