"""Backends create the sandboxes: ``docker``, ``e2b``, ``hf``, ``kubernetes`` and ``local``. None imports another.

``domain.backend`` is their interface. Beside them is what several of them share: ``guest_client``, ``host``, ``images``
and ``remote_machine``.
"""
