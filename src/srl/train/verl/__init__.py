"""The same run on verl: Ray for the cluster, FSDP or Megatron for the model, vLLM or SGLang for rollout."""
