"""The entry point `verl.plugins`, which verl loads in every process that imports it, whoever runs it.

In a process that belongs to no run of ours it does nothing.
"""

import os

from srl.train.verl.job import RUN_VARIABLE

if os.environ.get(RUN_VARIABLE):
    from srl.train.verl.register import register

    register()
