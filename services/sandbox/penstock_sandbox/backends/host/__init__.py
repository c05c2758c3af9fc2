"""Access to this machine that several backends share."""
