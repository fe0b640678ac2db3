"""Models: Hugging Face directories with safetensors.

`hub` names and fetches them, `load` reads them, `weights` has adapters, merging, saving and digests, and
`check` compares what a model computes in different ways.
"""
