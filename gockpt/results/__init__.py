"""Results of bench and crash-test, kept in SQLite."""

from gockpt.results.documents import DOCUMENT_SCHEMA
from gockpt.results.models import (
    SCHEMA_VERSION,
    Baseline,
    Checkpoint,
    CheckpointRecord,
    Result,
    Run,
    Sample,
    SpanRow,
    Step,
    Trial,
)
from gockpt.results.store import Store, Trace

__all__ = [
    "DOCUMENT_SCHEMA",
    "SCHEMA_VERSION",
    "Baseline",
    "Checkpoint",
    "CheckpointRecord",
    "Result",
    "Run",
    "Sample",
    "SpanRow",
    "Step",
    "Store",
    "Trace",
    "Trial",
]
