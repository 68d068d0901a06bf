"""The lab: measurements of Bytescheduler beside its peers. ``python -m benchmarks --help``."""
