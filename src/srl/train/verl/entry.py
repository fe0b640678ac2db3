"""The entry point `verl.plugins`, which verl imports in every process that imports verl.

Registers with verl in processes of our runs, and does nothing in all others.
"""

import os

from srl.train.verl.job import RUN_VARIABLE

if os.environ.get(RUN_VARIABLE):
    from srl.train.verl.workers import register

    register()
