"""Prints the objects that a cluster needs: `python -m penstock_sandbox.backends.kubernetes | kubectl apply -f -`."""

from __future__ import annotations

import argparse
import json
import sys

from penstock_sandbox.backends.kubernetes.cluster import missing
from penstock_sandbox.backends.kubernetes.manifests import Choices, manifests


def main() -> int:
    """Prints them as JSON; they hold new keys each time."""
    given = _parser().parse_args()
    if lacking := missing():
        sys.stderr.write(f"{lacking} is not installed: pip install 'penstock-sandbox[kubernetes]'\n")
        return 1
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    if "service_labels" in chosen:
        chosen["service_labels"] = tuple(chosen["service_labels"])
    json.dump(manifests(Choices(**chosen)), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock_sandbox.backends.kubernetes", description=__doc__)
    parser.add_argument("--name", help="of the template and the warm pool (penstock)")
    parser.add_argument("--namespace", help="of the sandboxes (default)")
    parser.add_argument("--image", help="with bash, and Python 3.8 or newer as python3 (python:3.13-slim-bookworm)")
    parser.add_argument("--warm", type=int, help="pods that wait for a claim (2); 0 = each claim waits for its pod")
    parser.add_argument("--cpu", help="of a pod, as a Kubernetes quantity (1)")
    parser.add_argument("--memory", help="of a pod (2Gi)")
    parser.add_argument("--runtime-class", help="such as gvisor or kata; unset = the cluster's")
    parser.add_argument("--user-namespaces", action="store_true", help="root in a pod is not root of its node")
    parser.add_argument("--service-account", help="of the sandbox service (penstock-sandbox)")
    parser.add_argument("--service-namespace", help="where that is; unset = the sandboxes'")
    parser.add_argument(
        "--service-label",
        dest="service_labels",
        action="append",
        type=_label,
        help="a label of the sandbox service's pods, which alone reach the sandboxes, as KEY=VALUE; may be repeated "
        "(app.kubernetes.io/component=sandbox)",
    )
    return parser


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value


if __name__ == "__main__":
    sys.exit(main())
