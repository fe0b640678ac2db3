"""The backend verl: Ray runs the processes, FSDP or Megatron trains, vLLM or SGLang generates."""
