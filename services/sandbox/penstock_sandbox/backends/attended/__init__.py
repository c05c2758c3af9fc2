"""What every backend shares whose sandboxes are served by an attendant (``penstock_sandbox.attendant``)."""
