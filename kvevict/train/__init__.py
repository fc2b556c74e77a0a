"""Trains LookaheadKV's rows and KVzap's gates, and measures the statistics of a model's queries."""
