"""The trace of a job, sent to an OpenTelemetry collector."""
