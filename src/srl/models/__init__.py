"""Models: Hugging Face directories with safetensors.

`hub` names and fetches them, `load` reads them, `weights` has adapters, merging, saving and digests, `check`
compares what a model computes in different ways, and `new` makes small ones.
"""
