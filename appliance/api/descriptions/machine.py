"""What the fields of `/admin/v1/system` and its stream mean."""

from __future__ import annotations

FIELDS = {
    "System.at": "When the readings were taken (RFC 3339, UTC).",
    "processes": "The processes of the appliance.",
    "System.engine": "The engines, one for each model.",
    "gpus": "The GPUs of the machine.",
    "gpu_error": "Why no GPU can be read; null if they can.",
    "host": "The host machine.",
    "database": "The database.",
    "Process.role": "`gateway` or `engine`.",
    "pid": "The process id; null if the process does not run.",
    "Process.model": "The model of an engine; null for the gateway.",
    "started_at": "When the process started (RFC 3339, UTC); null if it does not run.",
    "restarts": "How often the process was started again.",
    "Engine.state": "`loading`, `ready`, `restarting`, `failed` or `stopped`.",
    "Engine.error": "Why the engine does not serve; null if it does.",
    "load_fraction": "How much of the model is loaded, 0 to 1; null when nothing is being loaded.",
    "Engine.device": "`cuda` or `cpu`; null until the model is loaded.",
    "device_name": "The name of the device; null until the model is loaded.",
    "max_model_len": "The maximum number of tokens of a prompt and its answer together; null until the model is loaded.",
    "quantization": (
        "How the weights are kept: `none`, `int8`, `fp8` or the checkpoint's own format, and how they were stored if they were "
        "decoded while they were read; null until the model is loaded."
    ),
    "requests_running": "Requests that are being computed.",
    "requests_waiting": "Requests in the engine's queue.",
    "Engine.kv_blocks": "The blocks of the KV cache.",
    "host_kv_blocks": "KV blocks in host memory, which take those evicted from the device.",
    "memory": "The device memory of the engine, part by part.",
    "memory_note": "Why the context was shortened to fit the memory; null if it was not.",
    "preemptions_total": "How often requests were paused so that their memory could be used by others.",
    "draft_tokens_total": "Tokens proposed by speculative decoding.",
    "accepted_draft_tokens_total": "Proposed tokens that became output.",
    "fallback_steps_total": "Steps that took the slow path because the fast one failed. 0 on a healthy machine.",
    "fallback_reason": "Why the last step fell back to the slow path; null if none did.",
    "plain_steps_total": (
        "Steps that took the slow path because of what a request in them asks for, by reason: `logit_bias` or "
        "`prompt_logprobs`."
    ),
    "switched_off": "The parts of the engine that a setting switches off.",
    "Engine.tenants": "The tenants with live requests, the largest holders of KV blocks first.",
    "Engine.tokens_per_second": "Output tokens generated in the last second.",
    "step_ms": "How long the last step took, in milliseconds.",
    "ttft_p50_s": "Median time to first token of the last 256 requests, in seconds; null before the first.",
    "ttft_p95_s": "95th percentile of the time to first token of the last 256 requests, in seconds; null before the first.",
    "KvBlocks.total": "All blocks.",
    "KvBlocks.used": "Blocks that requests hold.",
    "KvBlocks.cached": "Blocks that no request holds, kept for prompts that begin the same way.",
    "KvBlocks.free": "Blocks that hold nothing.",
    "HostBlocks.total": "All blocks; 0 if host memory is not used for this.",
    "HostBlocks.used": "Blocks in use.",
    "swapped_in_total": "Blocks that were copied back to the device.",
    "swapped_out_total": "Blocks that were copied to host memory.",
    "MemoryPart.name": (
        "`weights`, `activations`, `graphs` (CUDA graphs), `slots`, `rotary_tables`, `device_context`, `kv_cache` or "
        "`other_models` (what is left to them on the same GPU)."
    ),
    "predicted_bytes": "The memory that was predicted before the model was loaded, in bytes.",
    "measured_bytes": "The memory that was measured, in bytes; null if the device does not report it.",
    "num_predicted": "The number of CUDA graphs that may be kept; null for other parts.",
    "num_measured": "The number of CUDA graphs that were captured when memory was measured; null for other parts.",
    "TenantLoad.name": "The name of the tenant.",
    "TenantLoad.kv_blocks": "KV-cache blocks that the tenant holds.",
    "service_s": "Predicted device time spent on the tenant since it last had no live request, in seconds.",
    "Gpu.index": "The number of the GPU, from 0.",
    "Gpu.name": "The name of the GPU.",
    "memory_total_bytes": "All memory, in bytes.",
    "memory_used_bytes": "Memory in use, in bytes.",
    "utilization": "How much of the time the GPU was busy, in percent; null if it does not report it.",
    "Gpu.power_w": "The power that the GPU draws, in watts; null if it does not report it.",
    "temperature_c": "The temperature in °C; null if the GPU does not report it.",
    "cpu_percent": "The load of all processor cores together, in percent (0 to 100).",
    "disk_free_bytes": "Free space on the disk of the data folder, in bytes.",
    "Database.kind": "`sqlite` or `postgresql`.",
    "Database.ok": "Whether the database accepts writes.",
}
