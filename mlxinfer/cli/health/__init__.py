"""Diagnosis of an installation and the report that `mlxinfer doctor` writes."""
