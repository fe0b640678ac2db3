"""The backend verl: Ray runs the processes, FSDP trains, vLLM or SGLang generates."""
