"""Sandboxes on Hugging Face Jobs, through ``huggingface_hub`` (the default) or ``hf-sandbox``.

``backend`` is what the service uses; ``client`` is the interface of an SDK, which ``hub_sdk`` and ``legacy_sdk``
implement; ``threads`` limits the threads for two synchronous SDKs; ``pipes`` makes pipes to the guest agent from their
calls.
"""
