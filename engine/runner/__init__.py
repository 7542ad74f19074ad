"""One loaded model on one device: caches, inputs of a step, forward passes in several ways, sampling, the draft model.

a model                  paged_decoder: passes over spans of tokens (token_spans) and blocks of its cache (kv_cache)
rows of a step           scheduled_rows
plain steps              model_runner, draft_model
steps over slots         slot_runner, from the parts that slot_steps makes: slots, the state of requests on the device;
                         decode_input_buffers, decode_step; chunk_step; draft_steps
  ways to run them       cuda_graphs, graph_eviction; on a CPU recorded_step
  to the device          staging, row_masks
  to the host            token_return, launched_step; device_waits, the limit for all waits
before the first step    runner_choice; warm_up, slot_warm_up; kernel_choices, kernel_timing, kernel_trials;
                         calibration, slot_timing
whole texts              embedder, text_models
"""
