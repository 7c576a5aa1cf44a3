"""Orchestration: Dagster assets over pf_core. Each one resolves its inputs, calls one function, shows what it did."""
