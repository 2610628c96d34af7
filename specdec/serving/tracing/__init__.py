"""What is recorded of requests, told: by TraceService, and to OpenTelemetry."""
