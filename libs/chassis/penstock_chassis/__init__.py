"""What every Penstock service shares: server, authentication, errors, settings, journal and telemetry."""
