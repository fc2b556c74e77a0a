"""Training of LookaheadKV's rows and of gates, and the statistics of queries."""
