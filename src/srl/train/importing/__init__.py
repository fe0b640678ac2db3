"""Configurations of verl's and Search-R1's, made ours."""
