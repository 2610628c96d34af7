"""Timelines served by TraceService and exported to OpenTelemetry."""
