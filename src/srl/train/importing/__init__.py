"""Configurations of verl's and Search-R1's, made ours."""

from srl.train.importing.convert import Imported, import_file

__all__ = ["Imported", "import_file"]
