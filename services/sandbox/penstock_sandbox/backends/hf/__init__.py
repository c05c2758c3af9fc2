"""Sandboxes on Hugging Face Jobs, through ``huggingface_hub`` (the default) or ``hf-sandbox``.

``backend`` is what the service sees; ``client`` says what each SDK must be able to do, and ``hub`` and ``classic`` do
it; ``threads`` bounds the threads that two synchronous SDKs need; ``pipes`` makes pipes to the attendant out of their
calls.
"""
