"""verl's worker groups (Ray, FSDP2 or Megatron, vLLM or SGLang) under our loop, schedule, advantages and loss.

verl runs the forward, the backward, the optimizer and the rollout servers; its own trainer is not used. All that
touches its unstable parts is in `cluster` (the driver's side) and `worker` (the workers' side).
"""
